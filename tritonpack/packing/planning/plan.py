"""plan_epoch: plans the documents of each rank in each step of an epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice, check_flag, is_number
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.planning.cost import CostModel, unit_costs
from tritonpack.packing.planning.demands import Demands
from tritonpack.packing.planning.order import Order, given_order, shuffled
from tritonpack.packing.planning.tail import Tail, check_tail, drop_last_step, spread, whole_steps
from tritonpack.packing.units import Units

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
        ValueError: arrays or numbers that aren't as above.
    """

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_ranks: int
    capacity: int
    filler_rows: int = 0
    steps_together: int = 1

    def __post_init__(self) -> None:
        items, offsets = self.items, self.offsets
        for values, name in ((items, "items"), (offsets, "offsets")):
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iu":
                raise ValueError(f"{name} must be a one-dimensional array of integers; got {values!r:.100}.")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(items) or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(
                f"offsets must begin with 0, never decrease and end with the number of items, {len(items)}; got "
                f"{offsets!r:.100}."
            )
        if len(items) and items.min() < 0:
            raise ValueError(f"items must be document numbers of at least 0; got {items.min()}.")
        check_integer(self.num_ranks, "num_ranks")
        check_integer(self.capacity, "capacity")
        if (len(offsets) - 1) % self.num_ranks:
            raise ValueError(f"{len(offsets) - 1} rows don't make whole steps of {self.num_ranks} ranks.")
        check_integer(self.steps_together, "steps_together")
        most = min(self.num_ranks, len(offsets)) - 1
        check_integer(self.filler_rows, "filler_rows", 0, most, "because another rank of the last step has documents")

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
        """(num_steps, num_ranks): sums of `values` (documents,) over the documents of each row, in the same dtype.

        Raises:
            ValueError: values that aren't a one-dimensional array of numbers, or none for a document of the plan.
        """
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iuf":
            raise ValueError(f"values must be a one-dimensional array of numbers; got {values!r:.100}.")
        if len(self.items) and len(values) <= self.items.max():
            raise ValueError(f"got values of {len(values)} documents, but the plan has document {self.items.max()}.")
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
    demands = Demands.of(lengths, capacity, budgets)
    keeps_order = order is not None or not shuffle
    if order is None:
        order = shuffled(len(demands), seed, epoch) if shuffle else np.arange(len(demands), dtype=np.int32)
        check_tail(lengths, capacity, num_ranks, tail, budgets)
    else:
        order = given_order(order, len(demands), seed, epoch)
    if steps_together is None:
        steps_together = 1 if keeps_order else _steps_together(demands, num_ranks)
    costs = unit_costs(
        demands.takes[:, 0], demands.squares, capacity, num_ranks * steps_together, objective, cost_model
    )
    nothing = Plan(order[:0], np.zeros(1, dtype=np.int64), num_ranks, capacity)
    if not len(order):
        return nothing
    from tritonpack.packing.heuristics import group_by_bin
    from tritonpack.packing.planning.optimiser import plan_steps  # imports numba, which is slow

    stream, costs = demands.select(order), costs[order]

    def steps(limits: NDArray[np.int64], last_step: int = len(order)) -> NDArray[np.int64]:
        level = objective == "cost"
        try:
            return plan_steps(
                stream.takes, costs, stream.kinds, limits, demands.limits, num_ranks, float(lookahead), steps_together,
                level, last_step,
            )  # fmt: skip
        except SystemError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # it came while numba returned a result
                raise KeyboardInterrupt from error
            raise

    rows = spread(steps, stream, num_ranks, least_steps) if tail == "spread" else steps(stream.limits)
    if tail == "drop":
        kept_steps = drop_last_step(rows, stream, num_ranks)
        if least_steps > max(kept_steps, 1):
            kept_steps = least_steps  # the documents that would be left out are needed
        kept = np.flatnonzero(rows < kept_steps * num_ranks)
        if len(kept) < len(order):
            order, rows = order[kept], rows[kept]
        if not len(order):
            return nothing
    rows, num_steps, filler_rows = whole_steps(rows, order, demands, num_ranks, least_steps)
    items, offsets = group_by_bin(rows, order, num_steps * num_ranks)
    if filler_rows:  # each repeats one of the shortest documents
        shortest = order[np.argsort(demands.takes[order, 0], kind="stable")]
        items = np.append(items, np.resize(shortest, filler_rows))
        offsets[-filler_rows:] += np.arange(1, filler_rows + 1)
    return Plan(items, offsets, num_ranks, capacity, filler_rows, steps_together)


def choose_steps_together(
    lengths: NDArray[np.integer] | Units, capacity: int, num_ranks: int, budgets: Mapping[str, int] | None = None
) -> int:
    """The fewest steps, of 1, 2, 4 to 64, that hold enough units to combine to full rows: 256, or about 1,000 in pairs.

    1 if no two units fit into a row together.

    Args:
        lengths, capacity, num_ranks, budgets: see `plan_epoch`.

    Raises:
        ValueError: lengths or units that don't fit.
    """
    return _steps_together(Demands.of(lengths, capacity, budgets), num_ranks)


def _steps_together(demands: Demands, num_ranks: int) -> int:
    """`choose_steps_together` of units that were checked."""
    if (2 * demands.takes.min(axis=0) > demands.limits).any():
        return 1
    in_row = len(demands) * float((demands.limits / demands.totals).min())
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
