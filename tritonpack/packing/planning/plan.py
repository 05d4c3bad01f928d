"""plan_epoch: plans the documents of each rank in each step of an epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice, check_flag
from tritonpack.packing.lengths import check_integer, fit_lengths
from tritonpack.packing.planning.tail import Tail, check_tail, is_full, spread, whole_steps
from tritonpack.packing.units import Units
from tritonpack.removed import OPTIONS, refuse_removed

Objective = Literal["quadratic", "linear"]
# Document numbers, or a function of a seed and an epoch that returns them. A document may come more than once. Lists
# are taken, too.
Order = NDArray[np.integer] | Callable[[int, int], NDArray[np.integer]]

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
        filler_rows: rows of the last ranks in the last step that repeat a document of another row, because the
            documents couldn't give every rank one.
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
        if not len(ends) or ends[0] or ends[-1] != len(self.items) or (np.diff(ends) < 0).any():
            raise ValueError(
                f"offsets must ascend from 0 to the number of items, {len(self.items)}; got {ends!r:.100}."
            )
        if (len(ends) - 1) % self.num_ranks:
            raise ValueError(f"{len(ends) - 1} rows don't make whole steps of {self.num_ranks} ranks.")

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
            raise IndexError(
                f"step {step}, rank {rank} of a plan with {self.num_steps} steps of {self.num_ranks} ranks"
            )
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
        filler = f", {self.filler_rows} filler rows" if self.filler_rows else ""
        together = f", {self.steps_together} steps planned together" if self.steps_together > 1 else ""
        return (
            f"Plan({self.num_steps} steps of {self.num_ranks} ranks with {self.capacity} tokens each, "
            f"{self.num_documents} documents{filler}{together})"
        )


def plan_epoch(
    lengths: Sequence[int] | NDArray[Any] | Units,
    capacity: int,
    num_ranks: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    objective: Objective = "quadratic",
    tail: Tail = "drop",
    least_steps: int = 1,
    shuffle: bool = True,
    order: Order | None = None,
    **removed: Any,
) -> Plan:
    """Plan every step of an epoch: the documents of each rank, at most `capacity` tokens.

    The documents are shuffled, and the steps take them nearly in that order. If a step holds few documents, several
    steps are planned together, which fills rows better (`Plan.steps_together`). A document is deferred twice at most,
    so it moves by fewer than three times as many steps. The plan depends only on the arguments.

    Args:
        lengths: (documents,) integers, each from 1 to `capacity` (see `fit_lengths`); or `Units`, which are planned as
            documents are, by their tokens and their squares.
        capacity: tokens of a row, from 1 to 2**30.
        num_ranks: rows of a step, from 1 to 2**16.
        seed, epoch: at least 0; both decide the order.
        objective: what the ranks of a step get equal shares of: "quadratic" squared lengths (attention's load),
            "linear" tokens.
        tail: what happens to documents that don't fill a last step. "drop" leaves them out of this epoch, unless they
            fill the step to 95%. "keep" makes a short last step. "spread" divides all documents over as few steps as it
            finds, which are about equally full. Every rank gets a document in the last step. It may be moved there from
            any step before. If there are too few documents, the last ranks get filler rows, each of which repeats one
            of the shortest documents, and `Plan.filler_rows` counts them.
        least_steps: the least number of steps. How well rows fill depends on the order, so epochs may have different
            numbers of steps; with the largest of them each epoch has that number. "spread" fills these steps equally.
            Otherwise the latest rows give documents to the missing steps.
        shuffle: shuffle the documents. False nearly keeps their order.
        order: document numbers in place of all documents in the order of the seed and the epoch: an array, or a
            function of a seed and an epoch that returns one. It is nearly kept. A document may come more than once, or
            not at all. What doesn't fill a step under "drop" then makes a plan without steps.

    Raises:
        ValueError: lengths that don't fit, a wrong option, too little to fill one step to 95% under "drop", too few
            documents for `least_steps`.
        ImportError: numba can't be imported.
    """
    if removed:
        refuse_removed(removed, "plan_epoch()")
    given: Any = lengths
    noun, squares = "document", None
    if isinstance(lengths, Units):
        given, noun, squares = lengths.tokens, lengths.noun, None if lengths.are_documents else lengths.squares
    remedy = (
        "leave such units out" if noun == "unit" else "pass the lengths that fit_lengths(..., overlong=...) returns"
    )
    tokens = fit_lengths(given, capacity, remedy=remedy, noun=noun).lengths.astype(np.int64)
    return plan_units(
        tokens, squares, None, seed, epoch, order, capacity=capacity,
        num_ranks=num_ranks, objective=objective, tail=tail, least_steps=least_steps, shuffle=shuffle,
    )  # fmt: skip


def plan_units(
    tokens: NDArray[np.int64],
    squares: NDArray[np.int64] | None,
    done: NDArray[np.int64] | None,
    seed: int,
    epoch: int,
    order: Order | None,
    *,
    capacity: int,
    num_ranks: int,
    objective: Objective,
    tail: Tail,
    least_steps: int,
    shuffle: bool,
) -> Plan:
    """Plan the units of an epoch that aren't done and fit into a row.

    Args:
        tokens, squares: (units,) int64, see `Units`; squares are None for units of one document.
        done: (units,) how often each was trained on in this epoch, None for a whole epoch. What is left stays in the
            order of the whole epoch.
        seed, epoch, order, capacity, num_ranks, objective, tail, least_steps, shuffle: see `plan_epoch`.
    """
    check_integer(capacity, "capacity", 1, MOST_TOKENS)
    check_integer(num_ranks, "num_ranks", 1, MOST_RANKS)
    check_integer(least_steps, "least_steps")
    check_options(objective, tail)
    check_flag(shuffle, "shuffle")
    together = 1
    if order is None:
        own = tokens if tokens.max() <= capacity else tokens[tokens <= capacity]
        numbers = epoch_order(len(own), seed, epoch, shuffle)
        if done is None:
            check_tail(own, capacity, num_ranks, tail)
        if shuffle and len(own):
            together = choose_steps_together(own, capacity, num_ranks)
        if len(own) < len(tokens):
            numbers = np.flatnonzero(tokens <= capacity).astype(np.int32)[numbers]
    else:
        numbers = epoch_order(len(tokens), seed, epoch, order=order)
        numbers = numbers[tokens[numbers] <= capacity]
    if done is not None:
        # Of a unit that comes several times the first are done.
        by_unit = np.argsort(numbers, kind="stable")
        turn = np.arange(len(numbers)) - np.searchsorted(numbers[by_unit], numbers[by_unit])
        numbers = numbers[np.sort(by_unit[turn >= done[numbers[by_unit]]])]
        least_steps = 1  # an epoch that changes its ranks can't have the number of steps of other epochs
    if not len(numbers):
        return Plan(numbers, np.zeros(1, dtype=np.int64), num_ranks, capacity)
    tokens = tokens[numbers]
    kinds = capacity - tokens
    if squares is None:
        squares = tokens * tokens
    else:
        squares = squares[numbers]
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


def epoch_order(
    count: int, seed: int, epoch: int, shuffle: bool = True, order: Order | None = None
) -> NDArray[np.int32]:
    """The document numbers of an epoch: 0 to `count` - 1, shuffled by the seed and the epoch, or the given `order`.

    Raises:
        ValueError: a wrong seed or epoch, an order that isn't numbers of `count` documents.
    """
    seeds = [check_integer(seed, "seed", 0, None), check_integer(epoch, "epoch", 0, None)]
    if order is None and not shuffle:
        return np.arange(count, dtype=np.int32)
    if order is None:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))
        return generator.permutation(count).astype(np.int32)
    numbers = order(seed, epoch) if callable(order) and not isinstance(order, type) else order
    return document_numbers(numbers, count, "order")


def document_numbers(numbers: Any, count: int, name: str) -> NDArray[np.int32]:
    """Numbers of `count` documents, a list or an array, as int32; ValueError for others, which has the name."""
    numbers = np.asarray(numbers) if isinstance(numbers, (list, tuple, range)) else numbers
    rule = f"{name} must give numbers of documents, 0 to {count - 1}, in a one-dimensional array"
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"{rule}; got {numbers!r:.100}.")
    outside = (numbers < 0) | (numbers >= count)
    if outside.any():
        raise ValueError(f"{rule}; got {numbers[np.argmax(outside)]}. Are these the lengths of the same dataset?")
    return numbers.astype(np.int32)


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
