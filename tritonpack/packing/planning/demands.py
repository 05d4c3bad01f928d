"""Demands: what units take of a row, as the arrays that the planner's loops read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import fit_lengths
from tritonpack.packing.units import Units, fit_units


class Demands:
    """What units take of a row: tokens, and of each other resource that some unit takes.

    The columns of selected units are read when they are first asked for.

    Attributes:
        lengths: (units,) int32, tokens, from 1 to `capacity`.
        squares: (units,) int64, sums of squared lengths.
        others: (units, resources) int64, of each other resource, at most its budget.
        kinds: (units,) int64, from 0 to 2**31. Units of one kind take the same. Larger units have smaller kinds, where
            the size of a unit is the largest share of a row that it takes, of any resource.
        capacity: tokens of a row.
        budgets: (resources,) int64, at least 1, what a row holds of each other resource.
    """

    def __init__(
        self,
        columns: Mapping[str, NDArray[Any]],
        capacity: int,
        budgets: NDArray[np.int64],
        numbers: NDArray[np.intp] | None = None,
    ) -> None:
        """`columns` are the first four attributes, of all units; `numbers` are those of the selected ones."""
        self._columns, self._numbers = columns, numbers
        self.capacity, self.budgets = capacity, budgets

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        return self._column("lengths")

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        return self._column("squares")

    @cached_property
    def others(self) -> NDArray[np.int64]:
        return self._column("others")

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        return self._column("kinds")

    def _column(self, name: str) -> NDArray[Any]:
        column = self._columns[name]
        return column if self._numbers is None else column[self._numbers]

    @classmethod
    def of(
        cls, lengths: Sequence[int] | NDArray[Any] | Units, capacity: int, budgets: Mapping[str, int] | None
    ) -> Demands:
        """The demands of units or documents; ValueError for one that doesn't fit (see `fit_units`)."""
        if not isinstance(lengths, Units) and not budgets:
            tokens = fit_lengths(lengths, capacity).lengths
            wide = tokens.astype(np.int64)
            nothing = np.zeros((len(tokens), 0), dtype=np.int64)
            columns = {"lengths": tokens, "squares": wide * wide, "others": nothing, "kinds": capacity - wide}
            return cls(columns, capacity, np.zeros(0, dtype=np.int64))
        units = fit_units(lengths, capacity, budgets).units
        taken = [name for name, values in units.resources.items() if values.any()]
        others = np.zeros((len(units), len(taken)), dtype=np.int64)
        limits = np.array([(budgets or {})[name] for name in taken], dtype=np.int64)
        for column, name in enumerate(taken):
            others[:, column] = units.resources[name]
        shares = -(-others * capacity // np.maximum(limits, 1))
        sizes = np.maximum(units.tokens, shares.max(axis=1, initial=0))
        kinds = _numbered([*others.T, units.squares, -units.tokens, -sizes])
        tokens = units.tokens.astype(np.int32)
        return cls({"lengths": tokens, "squares": units.squares, "others": others, "kinds": kinds}, capacity, limits)

    def __len__(self) -> int:
        return len(self._columns["lengths"] if self._numbers is None else self._numbers)

    def select(self, numbers: NDArray[Any]) -> Demands:
        """The demands of these units, in this order; a mask also selects."""
        numbers = np.flatnonzero(numbers) if numbers.dtype == bool else numbers.astype(np.intp, copy=False)
        own = numbers if self._numbers is None else self._numbers[numbers]
        return Demands(self._columns, self.capacity, self.budgets, own)

    def with_budgets(self, budgets: NDArray[np.int64]) -> Demands:
        """The same units for rows of other budgets."""
        return Demands(self._columns, self.capacity, budgets, self._numbers)

    @property
    def totals(self) -> list[int]:
        """What all units take together: of tokens, and of each other resource."""
        return [int(self.lengths.sum(dtype=np.int64)), *self.others.sum(axis=0).tolist()]

    @property
    def limits(self) -> list[int]:
        """What a row holds: of tokens, and of each other resource."""
        return [self.capacity, *self.budgets.tolist()]

    def fewest_steps(self, num_ranks: int) -> int:
        """A number of steps that no plan of all units can go below."""
        return max(-(-total // (num_ranks * most)) for total, most in zip(self.totals, self.limits, strict=True))


def _numbered(columns: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The place of each row of values among all different rows, sorted by the last column first."""
    order = np.lexsort(columns)
    differs = np.zeros(len(order), dtype=np.int64)
    for column in columns:
        differs[1:] |= column[order[1:]] != column[order[:-1]]
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(differs)
    return numbers
