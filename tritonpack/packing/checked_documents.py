"""CheckedDocuments: the documents that `dataloader` loads, with the columns that are packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.columns import TAKEN
from tritonpack.packing.documents import TOKENS, NumberedDocuments, fetch, measure_lengths
from tritonpack.packing.lengths import whole_lengths

LENGTH_COLUMNS = ("length", "lengths")


class CheckedDocuments(Dataset):
    """The documents of a dataset without dropped columns, each checked against the length that was planned.

    Attributes:
        lengths: (documents,) int64, the tokens of each document.
        source: where the lengths come from.
        columns: the names of the columns of the first document that are used, and of those that aren't.
    """

    def __init__(self, dataset: Any, lengths: Any, drop_columns: Collection[str], collate: PackingCollator) -> None:
        if not len(dataset):
            raise ValueError("the dataset has no document to pack; it is empty.")
        if isinstance(drop_columns, str) or not all(isinstance(name, str) for name in drop_columns):
            raise ValueError(
                f"drop_columns must be a collection of column names, such as ('text',); got {drop_columns!r}."
            )
        if TOKENS in drop_columns:
            raise ValueError(f"{TOKENS} can't be dropped; leave it out of drop_columns.")
        self.dataset = dataset
        self._dropped = frozenset(drop_columns)
        self._unused = self._dropped.union(LENGTH_COLUMNS)
        first = fetch(dataset, [0])[0]
        self.columns = self._check_columns(first, collate)
        measured, self.source = _measure(dataset, lengths, self._dropped)
        self.lengths = whole_lengths(measured).astype(np.int64)
        if len(self.lengths) != len(dataset):
            raise ValueError(
                f"{len(self.lengths)} lengths for a dataset of {len(dataset)} documents. Give each its length."
            )
        self._check_length(first, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        pairs = zip(fetch(self.dataset, numbers), numbers, strict=True)
        return NumberedDocuments((self._checked(*pair) for pair in pairs), numbers)

    def _checked(self, document: Any, number: int) -> Any:
        if not isinstance(document, Mapping) or TOKENS not in document:
            return document  # the collator says what is wrong
        self._check_length(document, number)
        return {name: document[name] for name in document if name not in self._unused}

    def _check_length(self, document: Any, number: int) -> None:
        if (count := len(document[TOKENS])) != self.lengths[number]:
            raise ValueError(
                f"document {number} has {count} tokens, but {self.lengths[number]} by {self.source}. Pass lengths= "
                "with the number of each document's tokens."
            )

    def _check_columns(self, first: Any, collate: PackingCollator) -> tuple[list[str], list[str]]:
        """The names of the columns that are used, and of those that aren't.

        Raises:
            ValueError: the first document has a column that can't be packed, or not one that is to be dropped.
        """
        names = sorted(map(str, first)) if isinstance(first, Mapping) else []
        if absent := sorted(self._dropped - set(names)):
            raise ValueError(
                f"drop_columns names {', '.join(map(repr, absent))}, but the first document has the columns "
                f"{', '.join(names) or 'none'}."
            )
        used, unused = ([name for name in names if (name in self._unused) is left_out] for left_out in (False, True))
        refused = tuple(name for name in used if name not in {*TAKEN, *collate.per_token})
        try:
            collate([{name: first[name] for name in used} if names else first])
        except ValueError as error:
            if not refused or TOKENS not in used:
                raise
            raise ValueError(f"{error} To leave them out while loading, pass drop_columns={refused!r}.") from error
        return used, unused


def _measure(dataset: Any, lengths: Any, dropped: Collection[str]) -> tuple[Any, str]:
    """The tokens of each document, and where they come from."""
    if lengths is not None:
        return lengths, "the argument lengths"
    names = [name for name in getattr(dataset, "column_names", None) or () if name in LENGTH_COLUMNS]
    for name in names:
        if name not in dropped and hasattr(dataset, "with_format"):
            column = np.asarray(dataset.with_format("numpy")[name][:])
            if column.ndim != 1 or column.dtype.kind not in "iu":
                raise ValueError(
                    f"the column {name!r} must hold the number of each document's tokens; got {column.dtype} of shape "
                    f"{column.shape}. Pass lengths=, or leave the column out: drop_columns=({name!r},)."
                )
            return column, f"the column {name!r}"
    return measure_lengths(dataset), TOKENS
