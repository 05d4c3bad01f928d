"""Units: groups of sequences that share a row, such as a preference pair or the completions of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from tritonpack.packing.collator import is_iterable, naming, read_sequences
from tritonpack.packing.lengths import MAX_INT32, TOKENS, OverlongReport, fit_lengths, whole_lengths
from tritonpack.packing.trees.prefixes import sort_sequences
from tritonpack.removed import refuse_attributes


@refuse_attributes
@dataclass(frozen=True, eq=False)
class Units:
    """The sizes of units: of what must share a row, such as a preference pair or the completions of a prompt.

    Its sequences don't see each other, so the cost of attention is the sum over them. Two pairs of sequences:

    >>> units = Units.of_sequences([[3, 2], [4, 4]])
    >>> units.tokens.tolist(), units.squares.tolist()
    ([5, 8], [13, 32])

    Attributes:
        tokens: (units,) int64, from 1 to 2**31 - 1.
        squares: (units,) int64, the sum of squared lengths of the sequences, from `tokens` to `tokens**2`. A tree of T
            tokens with P visible pairs of a query and a key counts as 2 P - T.

    Raises:
        ValueError: arrays of different lengths or other dtypes, or values outside of these ranges.
    """

    tokens: NDArray[np.int64]
    squares: NDArray[np.int64]

    def __post_init__(self) -> None:
        tokens, squares = _tokens(self.tokens), np.asarray(self.squares)
        rule = f"squares must be {len(tokens)} integers, the sums of squared lengths of the sequences of each unit"
        if squares.shape != tokens.shape or squares.dtype.kind not in "iu":
            raise ValueError(f"{rule}; got {squares.dtype} of shape {squares.shape}.")
        wrong = (squares < tokens) | (squares > tokens**2)
        if wrong.any():
            unit = int(np.argmax(wrong))
            raise ValueError(f"{rule}; unit {unit} has {tokens[unit]} tokens and squares {squares[unit]}.")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "squares", squares.astype(np.int64))

    @classmethod
    def of_sequences(cls, lengths: Sequence[Sequence[int] | NDArray[Any]]) -> Units:
        """Units of sequences, from the tokens of the sequences of each; ValueError for no sequence, or an empty one."""
        if not is_iterable(lengths):
            raise ValueError(f"lengths must be a list with a list of lengths for each unit; got {lengths!r:.100}.")
        parts = []
        for number, unit in enumerate(lengths):
            with naming(f"unit {number}:"):
                parts.append(_tokens(unit))
        return cls.of_counts(counts=whole_lengths([len(part) for part in parts]), lengths=np.concatenate(parts))

    @classmethod
    def of_counts(cls, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> Units:
        """Units of `counts` sequences each, whose `lengths` lie one unit after the other."""
        starts = np.cumsum(counts) - counts
        return cls(np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts))

    @classmethod
    def of_trees(cls, groups: Sequence[Sequence[Any]]) -> Units:
        """Units of sequences that begin alike, each of which is computed as a tree (see `pack_tree`).

        A prompt of two tokens, and completions of three tokens, which see 3, 4 and 5, and of one, which sees 3:

        >>> units = Units.of_trees([[[5, 6, 7, 8, 9], [5, 6, 4]]])
        >>> units.tokens.tolist(), units.squares.tolist() == [2 * (1 + 2 + 3 + 4 + 5 + 3) - 6]
        ([6], True)

        `groups` has for each unit its sequences of token ids. ValueError: no sequence, or one without token ids.
        """
        if not is_iterable(groups):
            raise ValueError(f"groups must be a list with a list of sequences for each unit; got {groups!r:.100}.")
        sizes = []
        for number, group in enumerate(groups):
            with naming(f"unit {number}, a list of sequences of token ids:"):
                rows = [columns[TOKENS] for _, columns in read_sequences(group)]
            lengths = np.array([len(row) for row in rows])
            order, shared = sort_sequences(torch.cat(rows).numpy(), lengths)
            # A sequence adds the tokens that it doesn't share with the one before it. A token at depth d sees d + 1.
            own, tokens = lengths[order], int((lengths - shared).sum())
            sizes.append((tokens, (own * (own + 1) - shared * (shared + 1)).sum() - tokens))
        return cls(*np.array(sizes, dtype=np.int64).reshape(-1, 2).T)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def are_documents(self) -> bool:
        """Return whether each unit is one sequence."""
        return bool((self.squares == self.tokens**2).all())

    @property
    def noun(self) -> str:
        """The word for a unit in messages."""
        return "document" if self.are_documents else "unit"


def as_units(lengths: Sequence[int] | NDArray[Any] | Units) -> Units:
    """Units unchanged, and lengths as units of one document each."""
    if isinstance(lengths, Units):
        return lengths
    tokens = _tokens(lengths)
    return Units(tokens, tokens**2)


def fit_for_sampler(
    units: Units, capacity: int, overlong: Literal["error", "drop"], can_cut: bool = True
) -> tuple[NDArray[np.int32], OverlongReport]:
    """The tokens of units, 0 for those that a sampler leaves out; see `fit_lengths`. A sampler can't cut documents."""
    if overlong not in ("error", "drop"):
        raise ValueError(
            f"overlong must be 'error' or 'drop'; got {overlong!r:.100}. Documents aren't cut here: pass "
            "max_document_length, of dataloader and PackingCollator, or split documents first, as pack_dataset does."
        )
    remedy = (
        f"pass overlong='drop', which leaves them out{'' if can_cut else ', or cut them before, as by dataset.map'}"
    )
    if units.are_documents and can_cut:
        remedy += (
            f"; to truncate pass max_document_length={capacity} to dataloader or its PackingCollator, or "
            f"lengths=numpy.minimum(lengths, {capacity}) and PackingCollator(max_document_length={capacity}); to split "
            "use pack_dataset"
        )
    report = fit_lengths(units.tokens, capacity, overlong, name="row size", remedy=remedy, noun=units.noun).report
    return np.where(units.tokens <= capacity, units.tokens, 0).astype(np.int32), report


def _tokens(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    tokens = whole_lengths(lengths)
    if tokens.max() > MAX_INT32:
        unit = int(np.argmax(tokens > MAX_INT32))
        rule = f"lengths must be at most {MAX_INT32} tokens; number {unit} has {tokens[unit]}"
        raise ValueError(f"{rule}. Cut it, or leave it out.")
    return tokens.astype(np.int64)
