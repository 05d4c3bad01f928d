"""Demands: what units take of a row, as the arrays that the planner's loops read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import fit_lengths
from tritonpack.packing.units import Units, fit_units


@dataclass(frozen=True, eq=False)
class Demands:
    """What units take of a row: tokens, and of each other resource that some unit takes.

    Attributes:
        takes: (units, resources) int64; the first resource is tokens. No unit takes more than a row holds.
        squares: (units,) int64, sums of squared lengths.
        kinds: (units,) int64, from 0 to 2**30. Units of one kind take the same. Larger units have smaller kinds, where
            the size of a unit is the largest share of a row that it takes, of any resource.
        limits: (resources,) int64, at least 1, what a row holds.
    """

    takes: NDArray[np.int64]
    squares: NDArray[np.int64]
    kinds: NDArray[np.int64]
    limits: NDArray[np.int64]

    @classmethod
    def of(
        cls, lengths: Sequence[int] | NDArray[Any] | Units, capacity: int, budgets: Mapping[str, int] | None
    ) -> Demands:
        """The demands of units or documents; ValueError for one that doesn't fit (see `fit_units`)."""
        if not isinstance(lengths, Units) and not budgets:
            tokens = fit_lengths(lengths, capacity).lengths.astype(np.int64)
            return cls(tokens[:, None], tokens * tokens, capacity - tokens, np.array([capacity]))
        units = fit_units(lengths, capacity, budgets).units
        taken = [name for name, values in sorted(units.resources.items()) if values.any()]
        takes = np.stack([units.tokens, *(units.resources[name] for name in taken)], axis=1)
        limits = np.array([capacity, *((budgets or {})[name] for name in taken)], dtype=np.int64)
        sizes = (-(-takes * capacity // limits)).max(axis=1)
        columns = np.stack([-sizes, -units.tokens, units.squares, *takes.T[1:]])
        _, kinds = np.unique(columns, axis=1, return_inverse=True)
        return cls(takes, units.squares, kinds.reshape(-1).astype(np.int64), limits)

    def __len__(self) -> int:
        return len(self.takes)

    def select(self, numbers: NDArray[Any]) -> Demands:
        """The demands of these units, in this order; a mask also selects."""
        return replace(self, takes=self.takes[numbers], squares=self.squares[numbers], kinds=self.kinds[numbers])

    @property
    def totals(self) -> NDArray[np.int64]:
        """What all units take together, (resources,)."""
        return self.takes.sum(axis=0)

    def fewest_steps(self, num_ranks: int) -> int:
        """A number of steps that no plan of all units can go below."""
        return int((-(-self.totals // (num_ranks * self.limits))).max())
