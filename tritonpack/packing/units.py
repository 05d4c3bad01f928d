"""Units: the items of a dataset that packing never divides, and what each of them takes of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.lengths import whole_lengths

Resources = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Units:
    """What each item of a dataset takes of a row, for items that aren't one document each.

    A unit is what must share a row: a preference pair, the completions of one prompt, a document with its images. Its
    sequences don't see each other, so the cost of attention is the sum over them.

    Two pairs of sequences, and the image patches of each pair:

    >>> units = Units.of_sequences([[3, 2], [4, 4]], patches=[16, 0])
    >>> units.tokens.tolist(), units.squares.tolist(), units.resources["patches"].tolist()
    ([5, 8], [13, 32], [16, 0])

    Attributes:
        tokens: (units,) int64, at least 1.
        squares: (units,) int64, the sum of squared lengths of the sequences. A tree of T tokens with P visible pairs of
            a query and a key counts as 2 P - T, which is n**2 for a single sequence of n tokens.
        resources: what else a unit takes of a row, by name: (units,) int64 each, at least 0.

    Raises:
        ValueError: arrays of different lengths or other dtypes, or values that are too small.
    """

    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    resources: Resources = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", whole_lengths(self.tokens).astype(np.int64))
        object.__setattr__(self, "squares", _whole(self.squares, "squares", len(self.tokens), 1))
        if not isinstance(self.resources, Mapping) or not all(isinstance(name, str) for name in self.resources):
            raise ValueError(
                f"resources must be a mapping from names to rows of integers; got {self.resources!r:.100}."
            )
        checked = {name: _whole(row, f"resource {name!r}", len(self), 0) for name, row in self.resources.items()}
        object.__setattr__(self, "resources", checked)

    @classmethod
    def of_documents(cls, lengths: Sequence[int] | NDArray[Any], **resources: Any) -> Units:
        """Units of one document each.

        Args:
            lengths: (units,) integers of at least 1.
            **resources: (units,) integers of at least 0 each.

        Raises:
            ValueError: rows of other values or lengths.
        """
        tokens = whole_lengths(lengths).astype(np.int64)
        return cls(tokens, tokens**2, resources)

    @classmethod
    def of_sequences(cls, lengths: Sequence[Sequence[int] | NDArray[Any]], **resources: Any) -> Units:
        """Units of one or more sequences each.

        Args:
            lengths: for each unit the tokens of its sequences, at least 1 each.
            **resources: (units,) integers of at least 0 each.

        Raises:
            ValueError: a unit without sequences or with lengths that aren't positive integers; rows of other lengths.
        """
        tokens, squares = np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths), dtype=np.int64)
        for number, unit in enumerate(lengths):
            try:
                own = whole_lengths(unit).astype(np.int64)
            except ValueError as error:
                raise ValueError(f"unit {number}: {error}") from None
            tokens[number], squares[number] = own.sum(), (own**2).sum()
        return cls(tokens, squares, resources)

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, numbers: Any) -> Units:
        """The units of these numbers, in this order; a mask of booleans also selects."""
        return Units(
            self.tokens[numbers],
            self.squares[numbers],
            {name: values[numbers] for name, values in self.resources.items()},
        )


def as_units(lengths: Sequence[int] | NDArray[Any] | Units) -> Units:
    """Units as they are, and lengths as units of one document each."""
    return lengths if isinstance(lengths, Units) else Units.of_documents(lengths)


def _whole(values: Any, name: str, count: int, least: int) -> NDArray[np.int64]:
    """(count,) int64, none below `least`."""
    array = np.asarray(values)
    if array.shape != (count,) or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be {count} integers, one for each unit; got {array.dtype} of shape {array.shape}."
        )
    if array.size and (array.min() < least or array.max() >= 2**62):
        wrong = int(np.flatnonzero((array < least) | (array >= 2**62))[0])
        raise ValueError(f"{name} must be integers of at least {least}; unit {wrong} has {array[wrong]}.")
    return array.astype(np.int64)
