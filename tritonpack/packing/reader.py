"""Reader: the dataset that `dataloader` loads. It measures the examples of any dataset, and checks what it loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from tritonpack.packing.columns import TAKEN, quote
from tritonpack.packing.documents import (
    TOKENS,
    Numbered,
    checked_length,
    examples_of,
    fetch,
    require_lengths,
    table_column,
    table_lengths,
)
from tritonpack.packing.lengths import whole_lengths
from tritonpack.packing.units import Units

DocumentsOf = Callable[[Any], Sequence[Mapping[str, Any]]]
Resource = str | Callable[[Any], int] | Sequence[int] | NDArray[Any]

LENGTH_COLUMNS = ("length", "lengths")
_GIVEN, _BY_COLLATOR = "the argument lengths", "collate_fn.measure"  # where lengths come from
_PASS_LENGTHS = (
    "For documents of another form pass a collate_fn that takes them and has a method measure, such as "
    "VisionPackingCollator(model), or pass lengths=, the tokens of each."
)


class Reader(Dataset):
    """The documents of each example of a dataset: measured once, and checked when they are loaded.

    Item i is the document of example i, or the list of its documents.

    Attributes:
        units: what each example takes of a row, with documents of their whole lengths.
        lengths: (documents,) int64, the tokens of each document, one example after the other; None if only units are
            known.
        counts: (examples,) int64, the documents of each example; 1 if only units are known.
        source: where the lengths come from, for messages.
        columns: the columns of the first document that are used, and those that aren't.

    Args:
        dataset, documents, resources, drop_columns, budgets: see `dataloader`.
        lengths: see `dataloader`; or a `Reader` of the same dataset, which isn't measured again.
        collate: PackingCollator, which checks the columns of the first document; None for a collator of the user's.
        measure: the `measure` of a collator of the user's. It counts the resources in `budgets` that nothing else does.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Any = None,
        documents: DocumentsOf | None = None,
        resources: Mapping[str, Resource] | None = None,
        drop_columns: Collection[str] = (),
        collate: Any = None,
        measure: Callable[[Any], Any] | None = None,
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
        resources = {} if resources is None else resources
        if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
            raise ValueError(
                "resources must be a mapping from names to functions of an example, columns or rows of integers, such "
                f"as {{'patches': 'num_patches'}}; got {resources!r:.100}."
            )
        self.dataset, self._documents, self._measure = dataset, documents, measure
        self.units: Units
        self.lengths: NDArray[np.int64] | None
        self._resources = {name: each for name, each in resources.items() if isinstance(each, str) or callable(each)}
        self._dropped = frozenset(drop_columns)
        self._unused = {*drop_columns, *(LENGTH_COLUMNS if collate is not None else ())}
        self._unused.update(each for each in self._resources.values() if isinstance(each, str))
        (first,) = fetch(dataset, [0])
        for name, resource in self._resources.items():  # before the columns, of which a misspelt one looks like any
            if isinstance(resource, str):
                _amount_of(first, 0, name, resource)
        self.columns = self._check_columns(first, collate)
        if isinstance(lengths, Reader):
            for name in ("units", "lengths", "counts", "source"):
                setattr(self, name, getattr(lengths, name))
        else:
            self._count(first, lengths, resources, budgets if isinstance(budgets, Mapping) else ())
        # Units of a collator of the user's need not be the sums of lengths, such as those of trees.
        self._checks_lengths = collate is not None or self.source != _GIVEN
        self._checked(first, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        return Numbered(map(self._checked, fetch(self.dataset, numbers), numbers), numbers)

    def cut(self, longest: int | None) -> Units:
        """The units with at most `longest` tokens of each document.

        Raises:
            ValueError: only units are known, so documents can't be cut.
        """
        if longest is None:
            return self.units
        if self.lengths is None:
            raise ValueError(
                "lengths=Units(...) don't tell the lengths of documents, so max_document_length can't cut them. Cut "
                "the documents, and pass the units of what is left."
            )
        return _units(np.minimum(self.lengths, longest), self.counts, self.units.resources)

    def padded_tokens(self, numbers: NDArray[Any], longest: int | None) -> int:
        """The tokens of a padded batch of the documents of these examples, each cut to `longest` tokens."""
        if self.lengths is None:
            return len(numbers) * int(self.units.tokens[numbers].max())
        stops = np.cumsum(self.counts)[numbers]
        widest = max(self.lengths[stop - n : stop].max() for stop, n in zip(stops, self.counts[numbers], strict=True))
        return int(self.counts[numbers].sum() * min(widest, longest or widest))

    def _count(self, first: Any, lengths: Any, resources: Mapping[str, Resource], budgets: Iterable[str]) -> None:
        """Measure all examples. None is loaded if columns of a `datasets.Dataset` tell what they take."""
        known: dict[str, Any] = {}
        for name, given in resources.items():
            if isinstance(given, str):
                known[name] = table_column(self.dataset, given, f"the {name} of each example")
            else:
                known[name] = None if callable(given) else np.asarray(given)
        flat, self.source = (lengths, _GIVEN) if lengths is not None else self._known_lengths()
        units, is_counted = lengths if isinstance(lengths, Units) else None, flat is None
        of_units = {} if units is None else units.resources
        if both := sorted(known.keys() & of_units.keys()):
            raise ValueError(f"lengths=Units(...) has {both[0]!r}, and so has resources; pass it once.")
        if self._measure is not None:
            size = self._sizes(self._documents_of(first, 0)[0], 0)[0]
            known |= {name: None for name in budgets if name not in {*known, *of_units} and hasattr(size, name)}
        asked: dict[str, list[int]] = {name: [] for name, values in known.items() if values is None}
        own: list[int] = []
        counts: list[int] = []
        for number, example in examples_of(self.dataset) if is_counted or asked else ():
            found, is_unit = self._documents_of(example, number)
            sizes = self._sizes(found, number) if self._measure is not None else []
            for name, amounts in asked.items():
                resource = self._resources.get(name)
                amounts.append(_total(sizes, name) if resource is None else _amount_of(example, number, name, resource))
            counts.append(len(found))
            own += [size.tokens for size in sizes]
            for place, one in enumerate(found if is_counted and not sizes else ()):
                own.append(
                    checked_length(one, f"{place} of example {number}" if is_unit else number, None, _PASS_LENGTHS)
                )
        known |= asked
        if units is not None:
            self.lengths, self.counts = None, np.ones(len(units), dtype=np.int64)
            self.units = Units(units.tokens, units.squares, {**units.resources, **known})
            require_lengths(units, self.dataset)
            return
        tokens = whole_lengths(own if flat is None else flat).astype(np.int64)
        self.lengths, self.counts = tokens, np.array(counts if is_counted else np.ones(len(tokens)), dtype=np.int64)
        require_lengths(self.counts, self.dataset)
        self.units = _units(tokens, self.counts, known)

    def _known_lengths(self) -> tuple[NDArray[Any] | None, str]:
        """The lengths that columns of a `datasets.Dataset` tell, if they do, and where lengths come from."""
        for name in [name for name in LENGTH_COLUMNS if self._documents is None and name not in self._dropped]:
            remedy = f" Pass lengths=, or leave the column out: drop_columns=({name!r},)."
            column = table_column(self.dataset, name, "the number of each document's tokens", remedy)
            if column is not None:
                return column, f"the column {name!r}"
        if self._measure is not None:
            return None, _BY_COLLATOR
        if self._documents is not None:
            return None, "the documents of each example"
        return table_lengths(self.dataset), TOKENS

    def _documents_of(self, example: Any, number: int) -> tuple[list[Any], bool]:
        """The documents of an example, and whether it is a list of documents."""
        found, made = example, f"example {number}"
        if self._documents is not None:
            found, made = _called(self._documents, example, number, "documents"), f"documents(...) of example {number}"
        is_list = isinstance(found, (list, tuple)) and all(isinstance(document, Mapping) for document in found)
        if self._documents is None and not is_list:
            return [example], False
        if not is_list or not found:
            raise ValueError(
                f"{made} must be a list of documents, each a mapping with {TOKENS!r}, and at least one; got "
                f"{found!r:.100}."
            )
        return list(found), True

    def _sizes(self, documents: list[Any], number: int) -> list[Any]:
        """Return the collator's `measure` of each document of an example."""
        assert self._measure is not None
        sizes = []
        for one in documents:
            used = {name: one[name] for name in one if name not in self._unused} if isinstance(one, Mapping) else one
            size = _called(self._measure, used, number, _BY_COLLATOR)
            sizes.append(size)
            tokens = getattr(size, "tokens", None)
            if not isinstance(tokens, (int, np.integer)) or tokens < 1:
                raise ValueError(
                    f"{_BY_COLLATOR} must return an object whose attribute tokens is an integer of at least 1; for "
                    f"example {number} it returned {size!r:.100}."
                )
        return sizes

    def _checked(self, example: Any, number: int) -> Any:
        """The document or documents of an example; ValueError unless it takes what was measured."""
        units = self.units
        for name, resource in self._resources.items():
            if (amount := _amount_of(example, number, name, resource)) != units.resources[name][number]:
                raise ValueError(
                    f"example {number} has {amount} {name}, but had {units.resources[name][number]} when it was "
                    "measured. A resource must be the same at each loading."
                )
        documents, is_unit = self._documents_of(example, number)
        sizes = self._sizes(documents, number) if self._measure is not None else []
        for name in ("tokens", *units.resources) if sizes else ():
            planned = (units.tokens if name == "tokens" else units.resources[name])[number]
            if hasattr(sizes[0], name) and (amount := _total(sizes, name)) != planned:
                raise ValueError(
                    f"example {number} has {amount} {name} by {_BY_COLLATOR}, but {planned} were given or counted "
                    f"before. Pass what {_BY_COLLATOR} counts, or leave lengths= and resources= out: it then measures "
                    "the examples itself, and must return the same each time."
                )
        used, own = [], [size.tokens for size in sizes]
        for one in documents:
            is_mapping = isinstance(one, Mapping)
            used.append({name: one[name] for name in one if name not in self._unused} if is_mapping else one)
            if is_mapping and TOKENS in one and not sizes:
                own.append(len(one[TOKENS]))
        # If the documents have another form, the collator says what is wrong.
        if self._checks_lengths and len(own) == len(documents):
            if sum(own) != units.tokens[number]:
                remedy = "Pass lengths= with the number of each document's tokens."
                if self._documents is not None and self.source != _GIVEN:
                    remedy = "The function documents must return the same at each call."
                planned = f"{units.tokens[number]} by {self.source}"
                raise ValueError(f"document {number} has {sum(own)} tokens, but {planned}. {remedy}")
            if np.square(own).sum() != units.squares[number]:
                raise ValueError(
                    f"example {number} has documents of {own} tokens, but others by {self.source}. Pass "
                    "lengths=Units.of_sequences(...) with the tokens of each document, or leave lengths out."
                )
        return used if is_unit else used[0]

    def _check_columns(self, example: Any, collate: Any) -> tuple[list[str], list[str]]:
        """The names of the first document's columns that are used, and of those that aren't.

        Raises:
            ValueError: it has a column that can't be packed, or not one that is to be dropped.
        """
        first = self._documents_of(example, 0)[0][0]
        names = sorted(map(str, first)) if isinstance(first, Mapping) else []
        if absent := sorted(self._dropped - set(names)):
            raise ValueError(
                f"drop_columns names {quote(absent)}, but the first document has the columns "
                f"{', '.join(names) or 'none'}."
            )
        used, unused = ([name for name in names if (name in self._unused) is left_out] for left_out in (False, True))
        if collate is None:
            return used, unused
        try:
            collate([{name: first[name] for name in used} if names else first])
        except ValueError as error:
            refused = tuple(name for name in used if name not in {*TAKEN, *collate.per_token})
            if names and TOKENS not in names and self._documents is None:
                raise ValueError(
                    f"{error} If examples have their tokens in other columns, as preference pairs do, pass documents=, "
                    "a function of an example that returns its documents."
                ) from error
            if not refused or TOKENS not in used:
                raise
            raise ValueError(f"{error} To leave them out while loading, pass drop_columns={refused!r}.") from error
        return used, unused


def _amount_of(example: Any, number: int, name: str, resource: str | Callable[[Any], int]) -> int:
    """Return the amount of a resource that an example needs, from a column or by a function."""
    if isinstance(resource, str):
        if not isinstance(example, Mapping) or resource not in example:
            raise ValueError(
                f"resources[{name!r}] names the column {resource!r}, which example {number} hasn't: it has "
                f"{_described(example)}."
            )
        value = example[resource]
    else:
        value = _called(resource, example, number, f"resources[{name!r}]")
    try:
        whole = index(value)
    except (TypeError, ValueError, RuntimeError):  # of torch, if it has several values
        whole = -1
    if whole < 0 or isinstance(value, bool):
        raise ValueError(f"{name} of example {number} must be an integer of at least 0; got {value!r:.100}.")
    return whole


def _total(sizes: Iterable[Any], name: str) -> int:
    return sum(getattr(size, name) for size in sizes)


def _called(function: Callable[[Any], Any], example: Any, number: int, name: str) -> Any:
    """Call a user's function on an example; a ValueError names the example if it fails."""
    try:
        return function(example)
    except Exception as error:
        raise ValueError(
            f"{name} failed on example {number}, which has {_described(example)}: {type(error).__name__}: {error}"
        ) from error


def _described(example: Any) -> str:
    if isinstance(example, Mapping):
        return f"the columns {', '.join(sorted(map(repr, map(str, example)))) or '(none)'}"
    return f"the type {type(example).__name__}"


def _units(lengths: NDArray[np.int64], counts: NDArray[np.int64], resources: Mapping[str, Any]) -> Units:
    starts = np.cumsum(counts) - counts
    return Units(np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts), resources)
