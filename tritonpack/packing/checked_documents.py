"""CheckedDocuments: the documents that `dataloader` loads, with the columns that are packed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.columns import TAKEN
from tritonpack.packing.documents import TOKENS, fetch, measure_lengths
from tritonpack.packing.lengths import whole_lengths

LENGTH_COLUMNS = ("length", "lengths")


class CheckedDocuments(Dataset):
    """The documents of a dataset without dropped columns, each checked against the length that was planned.

    Attributes:
        lengths: (documents,) int64, the tokens of each document.
        source: where the lengths come from.
        columns: the names of the columns of the first document that are used, and of those that aren't.
    """

    def __init__(self, dataset: Any, lengths: Any, drop_columns: Collection[str]) -> None:
        self.dataset = dataset
        if isinstance(drop_columns, str) or not all(isinstance(name, str) for name in drop_columns):
            raise ValueError(
                f"drop_columns must be a collection of column names, such as ('text',); got {drop_columns!r}."
            )
        self._dropped = frozenset(drop_columns)
        self.columns: tuple[list[str], list[str]] = ([], [])
        measured, self.source = _measure(dataset, lengths, self._dropped)
        self.lengths = whole_lengths(measured).astype(np.int64)
        if len(self.lengths) != len(dataset):
            raise ValueError(
                f"{len(self.lengths)} lengths for a dataset of {len(dataset)} documents. Give each its length."
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        return [self._checked(*pair) for pair in zip(fetch(self.dataset, numbers), numbers, strict=True)]

    def _checked(self, document: Any, number: int) -> Any:
        if not isinstance(document, Mapping) or TOKENS not in document:
            return document  # the collator says what is wrong
        count = len(document[TOKENS])
        if count != self.lengths[number]:
            raise ValueError(
                f"document {number} has {count} tokens, but {self.lengths[number]} by {self.source}. Pass lengths= "
                "with the number of each document's tokens."
            )
        unused = self._dropped.union(LENGTH_COLUMNS)
        return {name: document[name] for name in document if name not in unused}

    def check_columns(self, collate: PackingCollator) -> None:
        """ValueError if the first document has a column that can't be packed, or none that is to be dropped."""
        document = fetch(self.dataset, [0])[0]
        checked = self._checked(document, 0)
        if isinstance(document, Mapping):
            names = sorted(map(str, document))
            if absent := sorted(self._dropped - set(names)):
                raise ValueError(
                    f"drop_columns names {', '.join(map(repr, absent))}, but the first document has the columns "
                    f"{', '.join(names)}."
                )
            unused = self._dropped.union(LENGTH_COLUMNS)
            self.columns = ([one for one in names if one not in unused], [one for one in names if one in unused])
            taken = {*TAKEN, *collate.per_token}
            refused = tuple(name for name in self.columns[0] if name not in taken)
        else:
            refused = ()
        try:
            collate([checked])
        except ValueError as error:
            if not refused:
                raise
            raise ValueError(f"{error} To leave them out while loading, pass drop_columns={refused!r}.") from error


def _measure(dataset: Any, lengths: Any, dropped: Collection[str]) -> tuple[Any, str]:
    """The tokens of each document, and where they come from."""
    if lengths is not None:
        return lengths, "the lengths given"
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
