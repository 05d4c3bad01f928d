"""Units: the items of a dataset that packing never divides, and what each of them takes of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tritonpack.checks import check_choice
from tritonpack.packing.columns import naming, read_sequences
from tritonpack.packing.lengths import MAX_INT32, OverlongReport, check_integer, count, whole_lengths
from tritonpack.packing.trees.prefixes import sort_sequences

Resources = Mapping[str, NDArray[np.int64]]
MOST_OF_A_RESOURCE = 2**30  # the largest budget of a row: sums over the rows of a step stay within 64 bits


@dataclass(frozen=True, eq=False)
class Units:
    """The size of each item of a dataset, for items that aren't one document each.

    A unit is what must share a row: a preference pair, the completions of one prompt, a document with its images. Its
    sequences don't see each other, so the cost of attention is the sum over them.

    Two pairs of sequences, and the image patches of each pair:

    >>> units = Units.of_sequences([[3, 2], [4, 4]], patches=[16, 0])
    >>> units.tokens.tolist(), units.squares.tolist(), units.resources["patches"].tolist()
    ([5, 8], [13, 32], [16, 0])

    Attributes:
        tokens: (units,) int64, from 1 to 2**31 - 1.
        squares: (units,) int64, the sum of squared lengths of the sequences, from `tokens` to `tokens**2`. A tree of T
            tokens with P visible pairs of a query and a key counts as 2 P - T, which is n**2 for a single sequence of n
            tokens.
        resources: what else a unit takes of a row, by name: (units,) int64 each, at least 0.

    Raises:
        ValueError: arrays of different lengths or other dtypes, or values outside of these ranges.
    """

    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]
    resources: Resources = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _tokens(self.tokens))
        object.__setattr__(self, "squares", _whole(self.squares, "squares", len(self.tokens), 1))
        wrong = (self.squares < self.tokens) | (self.squares > self.tokens**2)
        if wrong.any():
            unit = int(np.argmax(wrong))
            raise ValueError(
                f"squares, the sum of squared lengths of a unit's sequences, must be from tokens to tokens**2; unit "
                f"{unit} has {self.tokens[unit]} tokens and squares {self.squares[unit]}."
            )
        if not isinstance(self.resources, Mapping) or not set(map(type, self.resources)) <= {str}:
            raise ValueError(
                f"resources must be a mapping from names to rows of integers; got {self.resources!r:.100}."
            )
        if "tokens" in self.resources:
            raise ValueError("tokens aren't one of the resources: every unit has them. Choose another name.")
        checked = {}
        for name, row in self.resources.items():
            checked[name] = _whole(row, f"resource {name!r}", len(self), 0)
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
        tokens = _tokens(lengths)
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
        parts = []
        for number, unit in enumerate(lengths):
            with naming(f"unit {number}:"):
                parts.append(_tokens(unit))
        counts = whole_lengths([len(part) for part in parts])
        return cls.of_counts(np.concatenate(parts), counts, resources)

    @classmethod
    def of_counts(cls, lengths: NDArray[np.int64], counts: NDArray[np.int64], resources: Resources) -> Units:
        """Units of `counts` sequences each, whose `lengths` lie one unit after the other."""
        starts = np.cumsum(counts) - counts
        return cls(np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts), resources)

    @classmethod
    def of_trees(cls, groups: Sequence[Sequence[Any]], **resources: Any) -> Units:
        """Units of sequences that begin alike, each of which is computed as a tree (see `pack_tree`).

        A prompt of two tokens and completions of three tokens and of one. The tree has 6 tokens. They see 1, 2, 3, 4
        and 5 tokens, and the completion of one token sees 3:

        >>> units = Units.of_trees([[[5, 6, 7, 8, 9], [5, 6, 4]]])
        >>> units.tokens.tolist(), units.squares.tolist() == [2 * (1 + 2 + 3 + 4 + 5 + 3) - 6]
        ([6], True)

        Args:
            groups: for each unit its sequences: at least one, of at least one token id each.
            **resources: (units,) integers of at least 0 each.

        Raises:
            ValueError: a unit without sequences, a sequence that isn't a row of integers; rows of other lengths.
        """
        tokens, squares = np.zeros(len(groups), dtype=np.int64), np.zeros(len(groups), dtype=np.int64)
        for number, group in enumerate(groups):
            with naming(f"unit {number}, a list of sequences of token ids:"):
                rows = read_sequences(group)
            lengths = np.array([len(row) for row in rows], dtype=np.int64)
            order, shared = sort_sequences(torch.cat(rows).numpy(), lengths)
            # A sequence adds the tokens that it doesn't share with the one before it. A token at depth d sees d + 1.
            own = lengths[order]
            tokens[number] = (own - shared).sum()
            squares[number] = (own * (own + 1) - shared * (shared + 1)).sum() - tokens[number]
        return cls(tokens, squares, resources)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def noun(self) -> str:
        """What messages call a unit: "document", if each is one."""
        return "document" if (self.squares == self.tokens**2).all() else "unit"

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


class UnitsReport(OverlongReport):
    """How units that exceed the budget of any resource were treated."""

    def __str__(self) -> str:
        if not self.documents:
            return "every unit fits"
        what = "unit that takes" if self.documents == 1 else "units that take"
        return f"{self.documents:,} {what} more than a row has dropped: {count(self.tokens_lost, 'token')} lost"


class FittedUnits(NamedTuple):
    """Units that fit into a row, and their numbers among all units.

    Attributes:
        units: the units that fit.
        documents: (units,) int32, ascending, their numbers; None if all fit.
        report: how many don't fit, and their tokens.
    """

    units: Units
    documents: NDArray[np.int32] | None
    report: UnitsReport


def fit_units(
    lengths: Sequence[int] | NDArray[Any] | Units,
    capacity: int,
    budgets: Mapping[str, int] | None = None,
    overlong: Literal["error", "drop"] = "error",
    *,
    name: str = "capacity",
    remedy: str = "leave such units out; samplers do with overlong='drop'",
) -> FittedUnits:
    """Check units, and leave out those that take more than a row has. They can't be cut, unlike documents.

    >>> units = Units.of_documents([5, 6], patches=[9, 0])
    >>> fitted = fit_units(units, capacity=8, budgets={"patches": 4}, overlong="drop")
    >>> fitted.documents.tolist(), str(fitted.report)
    ([1], '1 unit that takes more than a row has dropped: 5 tokens lost')

    Args:
        lengths: units, or lengths of documents.
        capacity: tokens of a row, at least 1.
        budgets: for each resource of the units what a row holds of it, from 0 to 2**30.
        overlong: "error" refuses units that don't fit; "drop" leaves them out.
        name, remedy: the name of the capacity in messages, and their advice for units that don't fit.

    Raises:
        ValueError: a wrong argument, a unit that doesn't fit under "error", no unit left under "drop".
    """
    check_choice(overlong, ("error", "drop"), "overlong")
    capacity = check_integer(capacity, name)
    units = lengths if isinstance(lengths, Units) else Units.of_documents(lengths)
    limits = {"tokens": capacity} | check_budgets(units, budgets)
    takes = {"tokens": units.tokens} | dict(units.resources)
    above = np.zeros(len(units), dtype=bool)
    for resource, values in takes.items():
        above |= values > limits[resource]
    count = int(above.sum())
    if not count:
        return FittedUnits(units, None, UnitsReport(overlong))
    if overlong == "error":
        unit = int(np.argmax(above))
        resource = next(each for each, values in takes.items() if values[unit] > limits[each])
        given = name if resource == "tokens" else f"budget of {resource}"
        raise ValueError(
            f"{count} of {len(units)} {units.noun}s take more than a row has (the first: {units.noun} {unit} takes "
            f"{takes[resource][unit]} {resource}, and the {given} is {limits[resource]}). Raise it to at least "
            f"{max(int(takes[resource].max()), 1)}, or {remedy}."
        )
    if count == len(units):
        raise ValueError(
            f"overlong='drop' leaves nothing: each of {count} {units.noun}s takes more than a row has "
            f"({', '.join(f'{most} {resource}' for resource, most in limits.items())}). Raise the {name} or a budget."
        )
    report = UnitsReport(overlong, count, int(units.tokens[above].sum()))
    return FittedUnits(units.select(~above), np.flatnonzero(~above).astype(np.int32), report)


def check_budgets(units: Units, budgets: Mapping[str, int] | None) -> dict[str, int]:
    """The budgets as a dict, in the order of the units' resources; ValueError if the two have other names."""
    if budgets is not None and not isinstance(budgets, Mapping):
        raise ValueError(f"budgets must be a mapping from names of resources to integers; got {budgets!r:.100}.")
    budgets = budgets or {}
    for name in units.resources:
        if name not in budgets:
            raise ValueError(
                f"the units have the resource {name!r}, and budgets={dict(budgets)} doesn't say how much of it a row "
                f"holds. Pass budgets={{{name!r}: ...}}, or leave {name!r} out of resources= and of the Units."
            )
    for name in budgets:
        if name not in units.resources:
            known = ", ".join(map(repr, units.resources)) or "none"
            raise ValueError(
                f"budgets has {name!r}, which isn't a resource of the units ({known}). Tokens are limited by the "
                f"capacity. Pass Units.of_documents(lengths, {name}=...), or to dataloader resources= with a column or "
                "a function that says how much of it an example takes."
            )
    checked = {}
    for name in units.resources:
        checked[name] = check_integer(budgets[name], f"the budget of {name}", 0, MOST_OF_A_RESOURCE)
    return checked


def _tokens(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    tokens = whole_lengths(lengths)
    if tokens.max() > MAX_INT32:
        unit = int(np.argmax(tokens > MAX_INT32))
        raise ValueError(f"a unit has at most {MAX_INT32} tokens; number {unit} has {tokens[unit]}.")
    return tokens.astype(np.int64)


def _whole(values: Any, name: str, count: int, least: int) -> NDArray[np.int64]:
    """(count,) int64, none below `least`."""
    array = np.asarray(values)
    if array.shape != (count,) or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be {count} integers, one for each unit; got {array.dtype} of shape {array.shape}."
        )
    if array.size and (array.min() < least or array.max() >= 2**62):
        wrong = int(np.flatnonzero((array < least) | (array >= 2**62))[0])
        raise ValueError(f"{name} must be integers from {least} to 2**62 - 1; unit {wrong} has {array[wrong]}.")
    return array.astype(np.int64)
