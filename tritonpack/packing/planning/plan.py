"""plan_epoch: plans the documents of each rank in each step of an epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice, check_flag
from tritonpack.packing.lengths import check_integer, fit_lengths
from tritonpack.packing.planning.tail import Tail, check_tail, is_full, spread, whole_steps
from tritonpack.packing.units import Units, as_units
from tritonpack.removed import OPTIONS, refuse_removed

Objective = Literal["quadratic", "linear"]

MOST_TOKENS = 2**30  # tokens of a row: sums of a few squares stay within 64 bits
MOST_RANKS = 2**16  # a step has a row for each of them, also if there are fewer documents
_COMBINED = 256  # units that are planned at once
_OF_FEW = 4096  # divided by the square of the units of a row, if that is more: few units in a row combine worse


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps of an epoch, one row of documents per rank and step.

    Two steps of two ranks. Rank 1 takes documents 0 and 4 in the first step:

    >>> plan = Plan(np.array([2, 0, 4, 1, 3]), np.array([0, 1, 3, 4, 5]), num_ranks=2, capacity=8)
    >>> plan.num_steps, plan.row(0, 1).tolist()
    (2, [0, 4])
    >>> [row.tolist() for row in plan.rows_of_rank(0)]
    [[2], [1]]

    Attributes:
        items: (entries,) int32, document numbers.
        offsets: (num_steps * num_ranks + 1,) int64; row `step * num_ranks + rank` holds
            `items[offsets[row] : offsets[row + 1]]`.
        num_ranks: rows per step.
        capacity: tokens that fit into a row.
        filler_rows: the number of rows at the end, of the last ranks, that repeat a document of another row.
        steps_together: the number of steps that were planned at once.
        left_out: the number of documents that `tail="drop"` left out.

    Raises:
        ValueError: offsets that don't ascend from 0 to the number of items, or don't make whole steps.
    """

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_ranks: int
    capacity: int
    filler_rows: int = 0
    steps_together: int = 1
    left_out: int = 0

    def __post_init__(self) -> None:
        ends = self.offsets
        check_integer(self.num_ranks, "num_ranks")
        if (len(ends) - 1) % self.num_ranks:
            raise ValueError(f"{len(ends) - 1} rows don't make whole steps of {self.num_ranks} ranks.")
        if not len(ends) or ends[0] or ends[-1] != len(self.items) or (np.diff(ends) < 0).any():
            raise ValueError(f"offsets must ascend from 0 to {len(self.items)}, the number of items; got {ends!r:.60}.")

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // self.num_ranks

    @property
    def num_documents(self) -> int:
        """The number of documents in the rows, without those that filler rows repeat."""
        return int(self.offsets[len(self.offsets) - 1 - self.filler_rows])

    def __len__(self) -> int:
        return self.num_steps

    def row(self, step: int, rank: int) -> NDArray[np.int32]:
        """The documents of one rank in one step, a view; IndexError for a step or rank that doesn't exist."""
        step, rank = index(step), index(rank)
        if not 0 <= step < self.num_steps or not 0 <= rank < self.num_ranks:
            raise IndexError(f"step {step}, rank {rank} of a plan of {self.num_steps} steps and {self.num_ranks} ranks")
        row = step * self.num_ranks + rank
        return self.items[self.offsets[row] : self.offsets[row + 1]]

    def rows_of_rank(self, rank: int) -> Iterator[NDArray[np.int32]]:
        """The rows of one rank, step by step."""
        return (self.row(step, rank) for step in range(self.num_steps))

    def sums(self, values: NDArray[np.number]) -> NDArray[np.number]:
        """(num_steps, num_ranks): sums of `values` (documents,) over the documents of each row, in the same dtype."""
        totals = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values[self.items])])
        return np.diff(totals[self.offsets]).reshape(self.num_steps, self.num_ranks)

    def __repr__(self) -> str:
        rows = f"{self.num_steps} steps of {self.num_ranks} ranks with {self.capacity} tokens each"
        filler = f", {self.filler_rows} filler rows" if self.filler_rows else ""
        together = f", {self.steps_together} steps planned together" if self.steps_together > 1 else ""
        return f"Plan({rows}, {self.num_documents} documents{filler}{together})"


def plan_epoch(
    lengths: Sequence[int] | NDArray[Any] | Units, capacity: int, num_ranks: int, *, seed: int = 0, epoch: int = 0,
    objective: Objective = "quadratic", tail: Tail = "drop", least_steps: int = 1, shuffle: bool = True,
    done: NDArray[np.bool_] | None = None, **removed: Any,
) -> Plan:  # fmt: skip
    """Plan every step of an epoch: the documents of each rank, at most `capacity` tokens.

    The documents are shuffled, and the steps take them nearly in that order. If a step holds few documents, several
    steps are planned together, which fills rows better (`Plan.steps_together`). A document moves by fewer than three
    times as many steps. The plan depends only on the arguments.

    Args:
        lengths: (documents,) integers, each from 1 to `capacity` (see `fit_lengths`); or `Units`.
        capacity: tokens of a row, from 1 to 2**30.
        num_ranks: rows of a step, from 1 to 2**16.
        seed, epoch: at least 0; both decide the order.
        objective: what the ranks of a step get equal shares of: "quadratic" squared lengths (attention's load),
            "linear" tokens.
        tail: what happens to documents that don't fill a last step. "drop" leaves them out of this epoch, unless they
            fill the step to 95%. "keep" makes a short last step. "spread" divides all documents over as few steps as it
            finds, which are about equally full. Every rank gets a document in the last step, from any step before, or
            else a filler row, which repeats one of the shortest documents.
        least_steps: the least number of steps, with which epochs of other orders have the same number.
        shuffle: shuffle the documents. False nearly keeps their order.
        done: (documents,) bool, the documents that aren't planned; None for none. The others keep their order.

    Raises:
        ValueError: lengths that don't fit, a wrong option, too little to fill one step to 95% under "drop", too few
            documents for `least_steps`.
        ImportError: numba can't be imported.
    """
    if removed:
        refuse_removed(removed, "plan_epoch()")
    check_integer(capacity, "capacity", 1, MOST_TOKENS)
    check_integer(num_ranks, "num_ranks", 1, MOST_RANKS)
    check_integer(least_steps, "least_steps")
    check_options(objective, tail)
    units = as_units(lengths)
    numbers = epoch_order(len(units), seed, epoch, shuffle)
    if done is not None:
        if np.shape(done) != numbers.shape or np.asarray(done).dtype != np.bool_:
            raise ValueError(f"done must be {len(numbers)} bools, one for each document; got {done!r:.100}.")
        numbers = numbers[~np.asarray(done)[numbers]]
    if not len(numbers):
        return Plan(numbers, np.zeros(1, dtype=np.int64), num_ranks, capacity)
    tokens, squares = units.tokens[numbers], units.squares[numbers]
    if tokens.max() > capacity:
        remedy = "pass the lengths that fit_lengths(..., overlong=...) returns"
        fit_lengths(
            units.tokens, capacity, remedy=remedy if units.are_documents else "leave such units out", noun=units.noun
        )
    if done is None:
        check_tail(tokens, capacity, num_ranks, tail)
    together = choose_steps_together(tokens, capacity, num_ranks) if shuffle else 1
    kinds = capacity - tokens
    if not units.are_documents:
        kinds = np.unique(np.stack([kinds, squares]), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    costs = squares if objective == "quadratic" else tokens

    from tritonpack.packing.heuristics import group_by_bin
    from tritonpack.packing.planning.optimiser import plan_steps  # imports numba, which is slow

    def steps(row_capacity: int, last_step: int = len(numbers)) -> NDArray[np.int64]:
        return plan_steps(tokens, costs, kinds, row_capacity, capacity, num_ranks, together, last_step)

    rows = spread(steps, tokens, capacity, num_ranks, least_steps) if tail == "spread" else steps(capacity)
    count = len(numbers)
    if tail == "drop":
        kept_steps = int(rows.max()) // num_ranks
        kept_steps += is_full(tokens[rows >= kept_steps * num_ranks], capacity, num_ranks)
        if least_steps > max(kept_steps, 1):
            kept_steps = least_steps  # the documents that would be left out are needed
        kept = rows < kept_steps * num_ranks
        if not kept.any():
            return Plan(numbers[:0], np.zeros(1, dtype=np.int64), num_ranks, capacity, left_out=count)
        if not kept.all():
            numbers, rows, tokens = numbers[kept], rows[kept], tokens[kept]
    rows, num_steps, filler_rows = whole_steps(rows, tokens, capacity, num_ranks, least_steps)
    items, offsets = group_by_bin(rows, numbers, num_steps * num_ranks)
    if filler_rows:  # each repeats one of the shortest documents
        items = np.append(items, np.resize(numbers[np.argsort(tokens, kind="stable")], filler_rows))
        offsets[-filler_rows:] += np.arange(1, filler_rows + 1)
    return Plan(items, offsets, num_ranks, capacity, filler_rows, together, count - len(numbers))


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int32]:
    """The numbers from 0 to `count` - 1, shuffled by the seed and the epoch; ValueError for wrong options."""
    seeds = [check_integer(seed, "seed", 0, None), check_integer(epoch, "epoch", 0, None)]
    if not check_flag(shuffle, "shuffle"):
        return np.arange(count, dtype=np.int32)
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))
    return generator.permutation(count).astype(np.int32)


def choose_steps_together(tokens: NDArray[np.int64], capacity: int, num_ranks: int) -> int:
    """The fewest steps, of 1, 2, 4 to 64, that hold enough units to combine to full rows: 256, or about 1,000 in pairs.

    1 if no two units fit into a row together.
    """
    if 2 * tokens.min() > capacity:
        return 1
    in_row = len(tokens) * float(capacity / tokens.sum())
    units = max(_COMBINED, _OF_FEW / in_row**2)
    steps = 1
    while steps < 64 and steps * num_ranks * in_row < units:
        steps *= 2
    return steps


def check_options(objective: str, tail: str) -> None:
    """ValueError for a wrong option of `plan_epoch`."""
    if objective == "cost":
        raise ValueError(f"objective='cost' was removed: {OPTIONS['cost_model']}.")
    check_choice(objective, get_args(Objective), "objective")
    check_choice(tail, get_args(Tail), "tail")
