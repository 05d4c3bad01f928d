"""Measured: what each example of a dataset takes of a row, measured once from columns or from the examples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.packing.documents import TOKENS, checked_length, fetch, measure_lengths
from tritonpack.packing.lengths import whole_lengths
from tritonpack.packing.units import Units

DocumentsOf = Callable[[Any], Sequence[Mapping[str, Any]]]
SizesOf = Callable[[Any, int], list[Any]]  # of an example and its number: of each document what `measure` returns
Resource = str | Callable[[Any], int] | Sequence[int] | NDArray[Any]
LENGTH_COLUMNS = ("length", "lengths")
GIVEN = "the argument lengths"
BY_COLLATOR = "collate_fn.measure"
_PASS_LENGTHS = (
    "For documents of another form pass a collate_fn that takes them and has a method measure, such as "
    "VisionPackingCollator(model), or pass lengths=, the tokens of each."
)
_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class Measured:
    """What the examples of a dataset take of a row.

    Attributes:
        units: a unit for each example, with documents of their whole lengths.
        lengths: (documents,) int64, the tokens of each document, one example after the other; None if only units are
            known.
        counts: (units,) int64, the documents of each example, 1 if only units are known.
        source: where the lengths come from, for messages.
    """

    units: Units
    lengths: NDArray[np.int64] | None
    counts: NDArray[np.int64]
    source: str

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
        tokens, squares = _sums(np.minimum(self.lengths, longest), self.counts)
        return Units(tokens, squares, self.units.resources)

    def padded_tokens(self, numbers: NDArray[Any], longest: int | None) -> int:
        """The tokens of a padded batch of the documents of these units, each cut to `longest` tokens."""
        if self.lengths is None:
            return len(numbers) * int(self.units.tokens[numbers].max())
        ends = np.cumsum(self.counts)
        documents = [
            self.lengths[end - count : end] for end, count in zip(ends[numbers], self.counts[numbers], strict=True)
        ]
        held = np.concatenate(documents)
        widest = int(held.max())
        return len(held) * (widest if longest is None else min(widest, longest))


def measure(
    dataset: Any,
    lengths: Any,
    documents: DocumentsOf | None,
    resources: Mapping[str, Resource],
    dropped: Collection[str],
    sizes_of: SizesOf | None = None,
    of_sizes: Collection[str] = (),
) -> Measured:
    """Measure the examples of a dataset, reading as little as possible.

    Columns of a `datasets.Dataset` are read without loading examples. If an example must be loaded, each is loaded
    once.

    Args:
        dataset: indexed by example.
        lengths: (examples,) integers, the tokens of the one document of each example; Units; None measures.
        documents, resources: see `dataloader`.
        dropped: columns that aren't used.
        sizes_of: counts the tokens and the resources of each document; None counts `input_ids`.
        of_sizes: the resources that it counts, by name.

    Raises:
        ValueError: what can't be measured; the message names the example.
    """
    if isinstance(lengths, Measured):
        return lengths
    known = {name: _given(dataset, name, resource) for name, resource in resources.items()}
    by_example: dict[str, Any] = {name: resources[name] for name, values in known.items() if values is None}
    is_table = hasattr(dataset, "with_format") and TOKENS in (getattr(dataset, "column_names", None) or ())
    own: list[list[int]] | None = None
    if lengths is not None:
        source = GIVEN
    elif documents is None and (column := _length_column(dataset, dropped)) is not None:
        lengths, source = column
    elif sizes_of is not None:
        own, source = [], BY_COLLATOR
    elif documents is None and is_table:
        lengths, source = measure_lengths(dataset, remedy=_PASS_LENGTHS), TOKENS
    else:
        own, source = [], TOKENS if documents is None else "the documents of each example"
    if own is not None or by_example or of_sizes:
        counted: dict[str, list[int]] = {name: [] for name in (*by_example, *of_sizes)}
        for number, example in _examples(dataset):
            is_counted = own is not None or len(of_sizes) > 0
            sizes = sizes_of(example, number) if sizes_of is not None and is_counted else []
            if own is not None:
                own.append([size.tokens for size in sizes] or _lengths_of(example, number, documents))
            for name in of_sizes:
                counted[name].append(sum(getattr(size, name) for size in sizes))
            for name, resource in by_example.items():
                counted[name].append(resource_of(example, number, name, resource))
        known |= counted
    if isinstance(lengths, Units):
        if both := sorted(set(known) & set(lengths.resources)):
            raise ValueError(f"lengths=Units(...) has {both[0]!r}, and so has resources; pass it once.")
        resources_of_units = {**lengths.resources, **known}
        units = Units(lengths.tokens, lengths.squares, resources_of_units)
        flat, counts = None, np.ones(len(units), dtype=np.int64)
    else:
        flat = whole_lengths(np.concatenate(own) if own is not None else lengths).astype(np.int64)
        counts = np.array([1] * len(flat) if own is None else [len(each) for each in own], dtype=np.int64)
    if len(counts) != len(dataset):
        raise ValueError(f"{len(counts)} lengths for a dataset of {len(dataset)} documents. Give each its length.")
    if flat is not None:
        units = Units(*_sums(flat, counts), known)
    return Measured(units, flat, counts, source)


def documents_of(example: Any, number: int, documents: DocumentsOf | None) -> list[Any] | None:
    """The documents of an example; None if it is a document itself.

    Raises:
        ValueError: `documents` fails, or returns something else than a list of documents. Lists that are empty.
    """
    found, made = example, f"example {number}"
    if documents is not None:
        found, made = called(documents, example, number, "documents"), f"documents(...) of example {number}"
    is_list = isinstance(found, (list, tuple)) and all(isinstance(document, Mapping) for document in found)
    if documents is None and not is_list:
        return None
    if not is_list or not found:
        raise ValueError(
            f"{made} must be a list of documents, each a mapping with {TOKENS!r}, and at least one; got {found!r:.100}."
        )
    return list(found)


def _lengths_of(example: Any, number: int, documents: DocumentsOf | None) -> list[int]:
    """The tokens of each document of an example."""
    found = documents_of(example, number, documents)
    if found is None:
        return [checked_length(example, number, None, _PASS_LENGTHS)]
    lengths = []
    for place, document in enumerate(found):
        try:
            lengths.append(checked_length(document, place, None, _PASS_LENGTHS))
        except ValueError as error:
            raise ValueError(f"example {number}: {error}") from None
    return lengths


def resource_of(example: Any, number: int, name: str, resource: str | Callable[[Any], int]) -> int:
    """What an example takes of a resource, by a column or a function.

    Raises:
        ValueError: no such column, a function that fails, a value that isn't an integer of at least 0.
    """
    if isinstance(resource, str):
        if not isinstance(example, Mapping) or resource not in example:
            raise ValueError(
                f"resources[{name!r}] names the column {resource!r}, which example {number} hasn't: it has "
                f"{described(example)}."
            )
        value = example[resource]
    else:
        value = called(resource, example, number, f"resources[{name!r}]")
    try:
        whole = index(value)
    except (TypeError, ValueError, RuntimeError):  # of torch, if it has several values
        whole = -1
    if whole < 0 or isinstance(value, bool):
        raise ValueError(f"{name} of example {number} must be an integer of at least 0; got {value!r:.100}.")
    return whole


def size_of(measure: Callable[[Any], Any], document: Any, number: int) -> Any:
    """What the `measure` of a collator returns for a document of an example: its `tokens`, and resources by name.

    Raises:
        ValueError: it fails, or returns no number of tokens.
    """
    size = called(measure, document, number, BY_COLLATOR)
    tokens = getattr(size, "tokens", None)
    if not isinstance(tokens, (int, np.integer)) or tokens < 1:
        raise ValueError(
            f"{BY_COLLATOR} must return an object whose attribute tokens is an integer of at least 1; for example "
            f"{number} it returned {size!r:.100}."
        )
    return size


def called(function: Callable[[Any], Any], example: Any, number: int, name: str) -> Any:
    """What a function of the user's returns for an example; a ValueError that names the example if it fails."""
    try:
        return function(example)
    except Exception as error:
        raise ValueError(
            f"{name} failed on example {number}, which has {described(example)}: {type(error).__name__}: {error}"
        ) from error


def described(example: Any) -> str:
    """The columns of an example, or its type, for messages."""
    if isinstance(example, Mapping):
        return f"the columns {', '.join(sorted(map(repr, map(str, example)))) or '(none)'}"
    return f"the type {type(example).__name__}"


def _examples(dataset: Any) -> Iterator[tuple[int, Any]]:
    """All examples with their numbers, read a few at a time, which is faster for a `datasets.Dataset`."""
    for start in range(0, len(dataset), _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, len(dataset)))
        yield from zip(numbers, fetch(dataset, numbers), strict=True)


def checked_resources(resources: Any) -> dict[str, Resource]:
    """The resources by name; ValueError unless they are a mapping."""
    if resources is None:
        return {}
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
        raise ValueError(
            "resources must be a mapping from names to functions of an example, columns or rows of integers, such as "
            f"{{'patches': 'num_patches'}}; got {resources!r:.100}."
        )
    return dict(resources)


def _given(dataset: Any, name: str, resource: Resource) -> Any:
    """The row of integers of a resource; None if each example must be loaded for it."""
    if callable(resource):
        return None
    if isinstance(resource, str):
        has_column = hasattr(dataset, "with_format") and resource in (getattr(dataset, "column_names", None) or ())
        return _column(dataset, resource, f"the {name} of each example") if has_column else None
    return np.asarray(resource)


def _length_column(dataset: Any, dropped: Collection[str]) -> tuple[NDArray[Any], str] | None:
    """The first column of lengths of a dataset with column names, and its description."""
    for name in getattr(dataset, "column_names", None) or ():
        if name in LENGTH_COLUMNS and name not in dropped and hasattr(dataset, "with_format"):
            remedy = f" Pass lengths=, or leave the column out: drop_columns=({name!r},)."
            return _column(dataset, name, "the number of each document's tokens", remedy), f"the column {name!r}"
    return None


def _column(dataset: Any, name: str, meaning: str, remedy: str = "") -> NDArray[Any]:
    """A column of integers of a `datasets.Dataset`."""
    column = np.asarray(dataset.with_format("numpy")[name][:])
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise ValueError(
            f"the column {name!r} must hold {meaning}; got {column.dtype} of shape {column.shape}.{remedy}"
        )
    return column


def _sums(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens and the squares of units of so many documents each."""
    starts = np.cumsum(counts) - counts
    return np.add.reduceat(lengths, starts), np.add.reduceat(lengths**2, starts)
