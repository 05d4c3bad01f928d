"""Plan: which documents each rank takes in each step of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import check_rows, positive_integer


@dataclass(frozen=True, eq=False)
class Plan:
    """An epoch's steps, one row of documents per rank and step: items, and the offsets at which rows begin (CSR form).

    Two steps of two ranks; rank 1 takes documents 0 and 4 in the first step:

    >>> plan = Plan(np.array([2, 0, 4, 1, 3]), np.array([0, 1, 3, 4, 5]), num_ranks=2, capacity=8)
    >>> plan.num_steps, plan.row(0, 1).tolist()
    (2, [0, 4])
    >>> [row.tolist() for row in plan.rows_of_rank(0)]
    [[2], [1]]

    Attributes:
        items: (entries,) int32, document indices.
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
        check_rows(self.items, self.offsets)
        positive_integer(self.num_ranks, "num_ranks")
        positive_integer(self.capacity, "capacity")
        if (len(self.offsets) - 1) % self.num_ranks:
            raise ValueError(
                f"a plan has whole steps: a multiple of {self.num_ranks} rows for as many ranks; got "
                f"{len(self.offsets) - 1} rows."
            )

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // self.num_ranks

    def __len__(self) -> int:
        return self.num_steps

    def row(self, step: int, rank: int) -> NDArray[np.int32]:
        """The documents of one rank in one step, a view; IndexError for a step or a rank that the plan hasn't."""
        step, rank = index(step), index(rank)
        if not 0 <= step < self.num_steps or not 0 <= rank < self.num_ranks:
            raise IndexError(
                f"step {step}, rank {rank} of a plan with {self.num_steps} steps of {self.num_ranks} ranks"
            )
        row = step * self.num_ranks + rank
        return self.items[self.offsets[row] : self.offsets[row + 1]]

    def rows_of_rank(self, rank: int) -> Iterator[NDArray[np.int32]]:
        """One rank's rows, step by step."""
        return iter([self.row(step, rank) for step in range(self.num_steps)])

    def sums(self, values: NDArray[np.number]) -> NDArray[np.number]:
        """(num_steps, num_ranks): the sum over each row's documents of `values` (documents,), in their own dtype."""
        if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "iuf":
            raise ValueError(f"values must be a one-dimensional array of numbers; got {values!r:.100}.")
        if len(self.items) and len(values) <= self.items.max():
            raise ValueError(f"values are of {len(values)} documents, but the plan holds document {self.items.max()}.")
        totals = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values[self.items])])
        return np.diff(totals[self.offsets]).reshape(self.num_steps, self.num_ranks)

    def __repr__(self) -> str:
        return (
            f"Plan({self.num_steps} steps of {self.num_ranks} ranks with {self.capacity} tokens each, "
            f"{len(self.items)} documents)"
        )
