"""plan_epoch: plans the documents of each rank in each step of an epoch, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_choice, check_flag, is_number
from tritonpack.packing.cost import CostModel
from tritonpack.packing.equal_steps import divide_steps
from tritonpack.packing.lengths import check_integer, fit_lengths

Objective = Literal["quadratic", "linear", "cost"]
Tail = Literal["drop", "spread", "keep"]

FULL = 0.95  # tail="drop" keeps a last step that is filled to this share
MOST_TOKENS = 2**30  # tokens of a row: sums of a few squares stay within 64 bits
# Under "spread" a step may hold this many times its part of all tokens. The values are tried in this order: smaller
# ones make more equal steps, and more often leave documents over.
_SLACK = (1.002, 1.005, 1.01, 1.02, 1.05, 1.1)


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

    Raises:
        ValueError: arrays or numbers that aren't as above.
    """

    items: NDArray[np.int32]
    offsets: NDArray[np.int64]
    num_ranks: int
    capacity: int

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

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // self.num_ranks

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
        return (
            f"Plan({self.num_steps} steps of {self.num_ranks} ranks with {self.capacity} tokens each, "
            f"{len(self.items)} documents)"
        )


def plan_epoch(
    lengths: Sequence[int] | NDArray[Any],
    capacity: int,
    num_ranks: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    objective: Objective = "quadratic",
    cost_model: CostModel | None = None,
    tail: Tail = "drop",
    lookahead: float = 0.01,
    steps_together: int = 1,
    least_steps: int = 1,
    shuffle: bool = True,
) -> Plan:
    """Plan every step of an epoch: the documents of each rank, at most `capacity` tokens.

    The documents are shuffled, and the steps take them nearly in that order: with a lookahead of up to 0.05 a document
    is deferred by two steps at most. The plan depends only on the arguments.

    Args:
        lengths: (documents,) integers, each from 1 to `capacity` (see `fit_lengths`).
        capacity: tokens of a row, from 1 to 2**30.
        num_ranks: rows of a step, at most the number of documents.
        seed, epoch: at least 0; both decide the order.
        objective: what the ranks of a step get equal shares of: "quadratic" squared lengths (attention's load),
            "linear" tokens, "cost" the cost that `cost_model` computes. Under "cost" a row that has its share takes no
            more documents, even if it has room, because a step takes as long as its costliest row.
        cost_model: required for the objective "cost", and only for it.
        tail: what happens to documents that don't fill a last step. "drop" leaves them out of this epoch, unless they
            fill the step to 95%. "keep" makes a short last step, with at least one document for every rank. "spread"
            divides all documents over the fewest possible steps, which are about equally full.
        lookahead: the share of its tokens that a step is offered in addition, from 0 to 1. A larger share fills rows
            better and defers more documents.
        steps_together: the number of steps that are planned at once; their rows are then divided among them. Use it if
            a step holds few documents. A document may be deferred by two times as many steps.
        least_steps: the least number of steps: if the epoch has fewer, steps with many documents are divided. With the
            largest number of several epochs each of them has that number, because how well rows fill depends on the
            order.
        shuffle: shuffle the documents.

    Raises:
        ValueError: lengths that don't fit, a wrong option, fewer documents than ranks, no full step under "drop",
            documents that can't be divided into whole steps under "keep" and "spread".
        ImportError: numba can't be imported.
    """
    capacity = check_integer(capacity, "capacity", 1, MOST_TOKENS)
    num_ranks = check_integer(num_ranks, "num_ranks")
    steps_together = check_integer(steps_together, "steps_together")
    least_steps = check_integer(least_steps, "least_steps")
    check_options(objective, cost_model, tail, lookahead)
    check_flag(shuffle, "shuffle")
    lengths = fit_lengths(lengths, capacity).lengths
    check_rank_count(len(lengths), num_ranks)
    order = shuffled(len(lengths), seed, epoch) if shuffle else np.arange(len(lengths), dtype=np.int32)
    stream = lengths[order]
    costs = _costs(stream, capacity, num_ranks * steps_together, objective, cost_model)

    from tritonpack.packing.heuristics import group_by_bin
    from tritonpack.packing.planner import plan_steps  # imports numba, which is slow

    options: dict[str, Any] = {"lookahead": lookahead, "together": steps_together, "level": objective == "cost"}
    steps = partial(plan_steps, stream, costs, num_ranks, capacity, **options)
    if tail == "spread":
        step_of, rank_of = _spread(steps, stream, capacity, num_ranks)
    else:
        step_of, rank_of = steps(target=capacity)
    num_steps = int(step_of.max()) + 1
    if tail == "drop":
        left = int(stream[step_of == num_steps - 1].sum(dtype=np.int64))
        if left < FULL * num_ranks * capacity:
            num_steps -= 1
        if not num_steps:
            raise ValueError(
                f"{left} tokens don't fill one step of {num_ranks} ranks with {capacity} tokens each, and tail='drop' "
                "leaves out what doesn't. Use tail='keep' or 'spread', fewer ranks or shorter rows."
            )
    else:
        _complete_last_step(step_of, rank_of, num_ranks, tail)

    kept = step_of < num_steps
    rows = step_of[kept] * np.int64(num_ranks) + rank_of[kept]
    documents = order[kept]
    items, offsets = group_by_bin(rows, np.arange(len(rows), dtype=np.int32), num_steps * num_ranks)
    items, offsets = divide_steps(documents[items], offsets, num_ranks, least_steps)
    return Plan(items, offsets, num_ranks, capacity)


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


def check_rank_count(documents: int, num_ranks: int) -> None:
    """ValueError for fewer documents than ranks."""
    if documents < num_ranks:
        raise ValueError(
            f"{documents} documents can't give each of {num_ranks} ranks one; use at most {documents} ranks, or more "
            "documents."
        )


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int32]:
    """0 to count - 1 in a random order; every pair of a seed and an epoch has its own."""
    sequence = np.random.SeedSequence([check_integer(seed, "seed", 0, None), check_integer(epoch, "epoch", 0, None)])
    return np.random.Generator(np.random.Philox(sequence)).permutation(count).astype(np.int32)


def _costs(
    lengths: NDArray[np.int32], capacity: int, num_rows: int, objective: Objective, cost_model: CostModel | None
) -> NDArray[np.int64]:
    per_token, per_square = {"quadratic": (0, 1), "linear": (1, 0)}.get(objective, (0, 0))
    if cost_model is not None:
        per_token, per_square = cost_model.whole_weights(capacity, num_rows)
    wide = lengths.astype(np.int64)
    return per_token * wide + per_square * wide * wide


def _spread(steps: Any, lengths: NDArray[np.int32], capacity: int, num_ranks: int) -> Any:
    """Plan all documents in the fewest possible steps, about equally full."""
    tokens = int(lengths.sum(dtype=np.int64))
    num_steps = -(-tokens // (num_ranks * capacity))
    while num_steps * num_ranks <= len(lengths):
        part = -(-tokens // (num_ranks * num_steps))
        needed = 0
        for target in [int(part * slack) for slack in _SLACK if part * slack < capacity] + [capacity]:
            step_of, rank_of = steps(target=target, last_step=num_steps - 1)
            needed = int(step_of.max()) + 1
            if needed <= num_steps:
                return step_of, rank_of
        num_steps = needed  # the number of steps with full rows
    raise _not_whole(len(lengths), num_ranks, "spread")


def _complete_last_step(step_of: NDArray[np.int32], rank_of: NDArray[np.int32], num_ranks: int, tail: str) -> None:
    """Give every rank a document in the last step, in place; missing ones are the latest of the step before."""
    last = int(step_of.max())
    leftover = np.flatnonzero(step_of == last)
    missing = num_ranks - len(leftover)
    if missing <= 0:
        return
    before = np.flatnonzero(step_of == last - 1)
    held = np.bincount(rank_of[before], minlength=num_ranks)
    for document in before[::-1]:
        if missing and held[rank_of[document]] > 1:
            held[rank_of[document]] -= 1
            missing -= 1
            step_of[document] = last
    if missing:
        raise _not_whole(len(step_of), num_ranks, tail)
    rank_of[step_of == last] = np.arange(num_ranks)


def _not_whole(documents: int, num_ranks: int, tail: str) -> ValueError:
    return ValueError(
        f"tail={tail!r}: the {documents} documents don't divide into steps in which each of {num_ranks} ranks has one. "
        "Use tail='drop' or fewer ranks."
    )
