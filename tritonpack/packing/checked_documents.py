"""CheckedDocuments: the documents that `dataloader` loads, with the columns that are packed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.columns import TAKEN
from tritonpack.packing.documents import TOKENS, NumberedDocuments, fetch
from tritonpack.packing.measured import (
    BY_COLLATOR,
    GIVEN,
    LENGTH_COLUMNS,
    DocumentsOf,
    Resource,
    checked_resources,
    documents_of,
    measure,
    resource_of,
    size_of,
)
from tritonpack.packing.units import Units


class CheckedDocuments(Dataset):
    """The documents of each example of a dataset, each checked against the length that was planned.

    An item is a document, or a list of the documents of an example.

    Attributes:
        measured: what each example takes of a row.
        columns: the names of the columns of the first document that are used, and of those that aren't.

    Args:
        dataset, lengths, documents, resources, drop_columns: see `dataloader`.
        collate: the collator whose columns the documents have; None for one that takes examples of any form.
        measure_by: a collator's `measure`: the tokens of a document, and resources, as attributes of what it returns.
        budgets: see `dataloader`. `measure_by` counts those of its resources that neither lengths nor resources have.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Any,
        documents: DocumentsOf | None,
        resources: Mapping[str, Resource] | None,
        drop_columns: Collection[str],
        collate: PackingCollator | None,
        measure_by: Callable[[Any], Any] | None = None,
        budgets: Any = None,
    ) -> None:
        if not len(dataset):
            raise ValueError("the dataset has no document to pack; it is empty.")
        if isinstance(drop_columns, str) or not all(isinstance(name, str) for name in drop_columns):
            raise ValueError(
                f"drop_columns must be a collection of column names, such as ('text',); got {drop_columns!r}."
            )
        if TOKENS in drop_columns:
            raise ValueError(f"{TOKENS} can't be dropped; leave it out of drop_columns.")
        if documents is not None and not callable(documents):
            raise ValueError(
                f"documents must be a function that returns the documents of an example; got {documents!r:.100}."
            )
        resources = checked_resources(resources)
        self.dataset = dataset
        self._documents, self._measure_by = documents, measure_by
        self._dropped = frozenset(drop_columns)
        of_resources = {each for each in resources.values() if isinstance(each, str)}
        self._unused = self._dropped.union(of_resources, LENGTH_COLUMNS if collate is not None else ())
        first = fetch(dataset, [0])[0]
        for name, resource in resources.items():  # before the columns, of which a misspelt one looks like any other
            if isinstance(resource, str):
                resource_of(first, 0, name, resource)
        found = documents_of(first, 0, documents)
        self.columns = self._check_columns(first if found is None else found[0], collate)
        sizes_of, of_sizes = None, []
        if measure_by is not None:
            sizes_of, given = self._sizes_of, {*resources, *(lengths.resources if isinstance(lengths, Units) else ())}
            wanted = [name for name in (budgets if isinstance(budgets, Mapping) else ()) if name not in given]
            of_sizes = [name for name in wanted if hasattr(sizes_of(first, 0)[0], name)]
        self.measured = measure(dataset, lengths, documents, resources, self._dropped, sizes_of, of_sizes)
        # Units of a collator of one's own need not be the sums of lengths, such as those of trees.
        self._checks_lengths = collate is not None or self.measured.source != GIVEN
        self._by_example: dict[str, Any] = {
            name: each for name, each in resources.items() if isinstance(each, str) or callable(each)
        }
        self._checked(first, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        pairs = zip(fetch(self.dataset, numbers), numbers, strict=True)
        return NumberedDocuments((self._checked(*pair) for pair in pairs), numbers)

    def _checked(self, example: Any, number: int) -> Any:
        """The documents of an example without columns that aren't used; ValueError unless they are as planned."""
        units = self.measured.units
        for name, resource in self._by_example.items():
            if (amount := resource_of(example, number, name, resource)) != units.resources[name][number]:
                raise ValueError(
                    f"example {number} has {amount} {name}, but had {units.resources[name][number]} when it was "
                    "measured. A resource must be the same at each loading."
                )
        found = documents_of(example, number, self._documents)
        held = [example] if found is None else found
        if not all(isinstance(document, Mapping) and TOKENS in document for document in held):
            return example if found is None else found  # the collator says what is wrong
        used = self._used(held)
        if self._measure_by is not None:
            sizes = [size_of(self._measure_by, document, number) for document in used]
            self._check_sizes(sizes, number)
        elif self._checks_lengths:
            self._check_lengths([len(document[TOKENS]) for document in held], number)
        return used[0] if found is None else used

    def _used(self, documents: Sequence[Any]) -> list[Any]:
        """Documents without columns that aren't used."""
        return [
            {name: each[name] for name in each if name not in self._unused} if isinstance(each, Mapping) else each
            for each in documents
        ]

    def _sizes_of(self, example: Any, number: int) -> list[Any]:
        """What the collator's `measure` returns for each document of an example."""
        assert self._measure_by is not None
        found = documents_of(example, number, self._documents)
        used = self._used([example] if found is None else found)
        return [size_of(self._measure_by, document, number) for document in used]

    def _check_sizes(self, sizes: Sequence[Any], number: int) -> None:
        """ValueError unless an example takes what was planned, by the collator's `measure`."""
        if self._checks_lengths:
            self._check_lengths([size.tokens for size in sizes], number)
        units = self.measured.units
        for name, planned in {"tokens": units.tokens, **units.resources}.items():
            if not hasattr(sizes[0], name):
                continue
            amount = sum(getattr(size, name) for size in sizes)
            if amount != planned[number]:
                raise ValueError(
                    f"example {number} has {amount} {name} by {BY_COLLATOR}, but {planned[number]} were given for it. "
                    f"Pass what {BY_COLLATOR} counts, or leave lengths= and resources= out: it then measures the "
                    "examples itself."
                )

    def _check_lengths(self, own: list[int], number: int) -> None:
        units, source = self.measured.units, self.measured.source
        if self._documents is not None and source != GIVEN:
            remedy = "The function documents must return the same at each call."
        else:
            remedy = "Pass lengths= with the number of each document's tokens."
        if sum(own) != units.tokens[number]:
            raise ValueError(
                f"document {number} has {sum(own)} tokens, but {units.tokens[number]} by {source}. {remedy}"
            )
        if sum(length**2 for length in own) != units.squares[number]:
            raise ValueError(
                f"example {number} has documents of {own} tokens, but others by {source}. Pass "
                "lengths=Units.of_sequences(...) with the tokens of each document, or leave lengths out."
            )

    def _check_columns(self, first: Any, collate: PackingCollator | None) -> tuple[list[str], list[str]]:
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
        if collate is None:
            return used, unused
        refused = tuple(name for name in used if name not in {*TAKEN, *collate.per_token})
        try:
            collate([{name: first[name] for name in used} if names else first])
        except ValueError as error:
            if names and TOKENS not in names and self._documents is None:
                raise ValueError(
                    f"{error} If examples have their tokens in other columns, as preference pairs do, pass documents=, "
                    "a function of an example that returns its documents."
                ) from error
            if not refused or TOKENS not in used:
                raise
            raise ValueError(f"{error} To leave them out while loading, pass drop_columns={refused!r}.") from error
        return used, unused
