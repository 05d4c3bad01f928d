"""plan_epoch: plans the documents of each rank in each step of an epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice, check_flag, is_number
from tritonpack.packing.lengths import check_integer, fit_lengths
from tritonpack.packing.planning.cost import CostModel
from tritonpack.packing.planning.order import Order, given_order, shuffled
from tritonpack.packing.planning.tail import Limits, Tail, Takes, check_tail, is_full, spread, whole_steps
from tritonpack.packing.units import Units, fit_units

Objective = Literal["quadratic", "linear", "cost"]

MOST_TOKENS = 2**30  # tokens of a row: sums of a few squares stay within 64 bits
MOST_RANKS = 2**16  # a step has a row for each of them, also if there are fewer documents
MOST_TOGETHER = 2**10  # steps that are planned at once
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

    Raises:
        ValueError: offsets that don't ascend from 0 to the number of items, or don't make whole steps.
    """

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_ranks: int
    capacity: int
    filler_rows: int = 0
    steps_together: int = 1

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
    budgets: Mapping[str, int] | None = None,
    seed: int = 0,
    epoch: int = 0,
    objective: Objective = "quadratic",
    cost_model: CostModel | None = None,
    tail: Tail = "drop",
    lookahead: float = 0.01,
    steps_together: int | None = None,
    least_steps: int = 1,
    shuffle: bool = True,
    order: Order | None = None,
) -> Plan:
    """Plan every step of an epoch: the documents of each rank, at most `capacity` tokens.

    The documents are shuffled, and the steps take them nearly in that order: with a lookahead of up to 0.05 a document
    is deferred twice at most, so it moves by two steps, or by fewer than three times `steps_together`. The plan depends
    only on the arguments.

    Args:
        lengths: (documents,) integers, each from 1 to `capacity` (see `fit_lengths`); or `Units`, which are planned as
            documents are, by their tokens, their squares and their resources.
        capacity: tokens of a row, from 1 to 2**30.
        num_ranks: rows of a step, from 1 to 2**16.
        budgets: for each resource of the units what a row holds of it, from 0 to 2**30. No row holds more, whatever the
            objective.
        seed, epoch: at least 0; both decide the order.
        objective: what the ranks of a step get equal shares of: "quadratic" squared lengths (attention's load),
            "linear" tokens, "cost" the cost that `cost_model` computes. Under "cost" a row that has its share takes no
            more documents, even if it has room, because a step takes as long as its costliest row.
        cost_model: required for the objective "cost", and only for it.
        tail: what happens to documents that don't fill a last step. "drop" leaves them out of this epoch, unless they
            fill the step to 95%. "keep" makes a short last step. "spread" divides all documents over as few steps as it
            finds, which are about equally full (with budgets: of the scarcest resource, if such a plan is found). Every
            rank gets a document in the last step. It may be moved there from any step before. If there are too few
            documents, the last ranks get filler rows, each of which repeats one of the shortest documents, and
            `Plan.filler_rows` counts them.
        lookahead: the share of its tokens that a step is offered in addition, from 0 to 1. A larger share fills rows
            better and defers more documents.
        steps_together: the number of steps that are planned at once; their rows are then divided among them. More
            fill rows better if a step holds few documents. A document moves by fewer than three times as many steps.
            From 1 to 1,024; None takes as many as hold some hundred units, or a thousand if a row holds two (see
            `choose_steps_together`). With
            `shuffle=False` or an order of your own None is 1, which nearly keeps the order.
        least_steps: the least number of steps. How well rows fill depends on the order, so epochs may have different
            numbers of steps; with the largest of them each epoch has that number. "spread" fills these steps equally.
            Otherwise the latest rows give documents to the missing steps.
        shuffle: shuffle the documents.
        order: document numbers in place of all documents in the order of the seed and the epoch: an array, or a
            function of a seed and an epoch that returns one, such as `Mixture`. A document may come more than once, or
            not at all. What doesn't fill a step under "drop" then makes a plan without steps.

    Raises:
        ValueError: lengths or units that don't fit, budgets for other resources than those of the units, a wrong
            option, too little to fill one step to 95% under "drop", too few documents for `least_steps`.
        ImportError: numba can't be imported.
    """
    capacity = check_integer(capacity, "capacity", 1, MOST_TOKENS)
    num_ranks = check_integer(num_ranks, "num_ranks", 1, MOST_RANKS)
    if steps_together is not None:
        steps_together = check_integer(steps_together, "steps_together", 1, MOST_TOGETHER)
    least_steps = check_integer(least_steps, "least_steps")
    check_options(objective, cost_model, tail, lookahead)
    check_flag(shuffle, "shuffle")
    takes, squares, limits = demands(lengths, capacity, budgets)
    if order is not None:
        numbers = given_order(order, len(takes), seed, epoch)
    else:
        numbers = shuffled(len(takes), seed, epoch) if shuffle else np.arange(len(takes), dtype=np.int32)
        check_tail(takes, limits, num_ranks, tail)
    if steps_together is None:
        steps_together = choose_steps_together(takes, limits, num_ranks) if shuffle and order is None else 1
    per_token, per_square = {"quadratic": (0, 1), "linear": (1, 0)}.get(objective, (0, 0))
    if cost_model is not None:
        per_token, per_square = cost_model.whole_weights(capacity, num_ranks * steps_together)
    costs = (per_token * takes[:, 0] + per_square * squares)[numbers]
    if isinstance(lengths, Units) or budgets:
        # Larger units have smaller kinds, where the size of a unit is the largest share of a row that it takes.
        sizes = (-(-takes * capacity // limits)).max(axis=1, initial=0)
        columns = np.stack([-sizes, -takes[:, 0], squares, *takes.T[1:]])
        kinds = np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)[numbers]
    else:
        kinds = capacity - takes[numbers, 0]
    takes = takes[numbers]
    if not len(takes):
        return Plan(numbers, np.zeros(1, dtype=np.int64), num_ranks, capacity)
    from tritonpack.packing.heuristics import group_by_bin
    from tritonpack.packing.planning.optimiser import plan_steps  # imports numba, which is slow

    def steps(row_limits: Limits, last_step: int = len(numbers)) -> NDArray[np.int64]:
        try:
            return plan_steps(
                takes, costs, kinds, row_limits, limits, num_ranks, float(lookahead), steps_together,
                objective == "cost", last_step,
            )  # fmt: skip
        except SystemError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # it came while numba returned a result
                raise KeyboardInterrupt from error
            raise

    rows = spread(steps, takes, limits, num_ranks, least_steps) if tail == "spread" else steps(limits)
    if tail == "drop":
        kept_steps = int(rows.max()) // num_ranks
        kept_steps += is_full(takes[rows >= kept_steps * num_ranks], limits, num_ranks)
        if least_steps > max(kept_steps, 1):
            kept_steps = least_steps  # the documents that would be left out are needed
        kept = rows < kept_steps * num_ranks
        if not kept.all():
            numbers, rows, takes = numbers[kept], rows[kept], takes[kept]
        if not len(numbers):
            return Plan(numbers, np.zeros(1, dtype=np.int64), num_ranks, capacity)
    rows, num_steps, filler_rows = whole_steps(rows, takes, limits, num_ranks, least_steps)
    items, offsets = group_by_bin(rows, numbers, num_steps * num_ranks)
    if filler_rows:  # each repeats one of the shortest documents
        shortest = numbers[np.argsort(takes[:, 0], kind="stable")]
        items = np.append(items, np.resize(shortest, filler_rows))
        offsets[-filler_rows:] += np.arange(1, filler_rows + 1)
    return Plan(items, offsets, num_ranks, capacity, filler_rows, steps_together)


def demands(
    lengths: Sequence[int] | NDArray[Any] | Units, capacity: int, budgets: Mapping[str, int] | None = None
) -> tuple[Takes, NDArray[np.int64], Limits]:
    """What units take of tokens and of the resources that some unit takes, their squares, and what a row holds.

    Raises:
        ValueError: a unit or a document that doesn't fit (see `fit_units` and `fit_lengths`).
    """
    if not isinstance(lengths, Units) and not budgets:
        tokens = fit_lengths(lengths, capacity).lengths.astype(np.int64)
        return tokens[:, None], tokens * tokens, np.array([capacity])
    units = fit_units(lengths, capacity, budgets).units
    taken = [name for name, values in sorted(units.resources.items()) if values.any()]
    takes = np.stack([units.tokens, *(units.resources[name] for name in taken)], axis=1)
    return takes, units.squares, np.array([capacity, *((budgets or {})[name] for name in taken)], dtype=np.int64)


def choose_steps_together(takes: Takes, limits: Limits, num_ranks: int) -> int:
    """The fewest steps, of 1, 2, 4 to 64, that hold enough units to combine to full rows: 256, or about 1,000 in pairs.

    1 if no two units fit into a row together.
    """
    if (2 * takes.min(axis=0) > limits).any():
        return 1
    in_row = len(takes) * float((limits / takes.sum(axis=0)).min())
    units = max(_COMBINED, _OF_FEW / in_row**2)
    return next((steps for steps in (1, 2, 4, 8, 16, 32) if steps * num_ranks * in_row >= units), 64)


def check_options(objective: str, cost_model: CostModel | None, tail: str, lookahead: float) -> None:
    """ValueError for a wrong option of `plan_epoch`."""
    check_choice(objective, get_args(Objective), "objective")
    check_choice(tail, get_args(Tail), "tail")
    if (objective == "cost") != (cost_model is not None):
        raise ValueError(
            "objective='cost' and cost_model go together: pass CostModel.from_config(model.config) or .fit(...) "
            f"with this objective only; got objective={objective!r} and cost_model={cost_model!r}."
        )
    if cost_model is not None and not isinstance(cost_model, CostModel):
        raise ValueError(
            f"cost_model must be a CostModel; got {type(cost_model).__name__}. CostModel.from_config makes one from a "
            "model's configuration."
        )
    if not is_number(lookahead) or not 0 <= lookahead <= 1:
        raise ValueError(f"lookahead must be a number from 0 to 1; got {lookahead!r}.")
