"""The columns of a tokenized document: checked, and converted to tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonpack.checks import check_choice, describe
from tritonpack.removed import refuse_removed

Objective = Literal["causal", "tokens"]
Columns = dict[str, Tensor]
T = TypeVar("T")
Named = tuple[str, Columns]  # the name of a document for messages, such as "document 3", and its columns

TOKENS, LABELS, MASK = "input_ids", "labels", "attention_mask"
IGNORED_LABEL = -100  # transformers and torch's cross_entropy leave it out of the loss
# Columns with one value per token, and their value for padding.
PER_TOKEN = {
    "token_type_ids": 0, "mm_token_type_ids": 0, "completion_mask": 0, "assistant_masks": 0, "special_tokens_mask": 1,
}  # fmt: skip
LEARNED = ("completion_mask", "assistant_masks")  # 0 for tokens without a label
LEFT_OUT = ("length",)  # Trainer groups documents by it
MADE = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Boundaries of a row that holds several documents; the first is TRL's name.
SEQ_LENGTHS, POSITIONS = "seq_lengths", "position_ids"
_INTEGERS = (TOKENS, LABELS, MASK, *PER_TOKEN)  # columns with one integer per token
_MEDIA = ("pixel", "image", "video", "audio", "input_features")
TAKEN = (*_INTEGERS, *LEFT_OUT, SEQ_LENGTHS, POSITIONS)


class Numbered(list[Any]):
    """Examples with their numbers in a dataset, by which messages name documents in place of their places here."""

    numbers: Sequence[int]


def is_iterable(values: Any) -> bool:
    """Return whether values can be iterated over, and aren't text, a mapping, a class, or a single number."""
    others = (Mapping, str, bytes, type)
    return isinstance(values, Iterable) and not isinstance(values, others) and getattr(values, "ndim", None) != 0


def is_unit(example: Any) -> bool:
    """Return whether an example is a list of documents, and not a document."""
    return isinstance(example, (list, tuple)) and all(isinstance(document, Mapping) for document in example)


def named(example: Any, number: int) -> list[tuple[str, Any]]:
    """The document or the documents of an example, each after its name for messages."""
    if not is_unit(example):
        return [(f"document {number}", example)]
    return [(f"document {place} of example {number}", document) for place, document in enumerate(example)]


def read_features(features: Any, collator: str, read: Callable[[Any], list[T]]) -> list[tuple[str, T]]:
    """Call `read` on each document of features; return its results, each after the name of its document. A feature is
    a document or a list of documents.

    Raises:
        ValueError: features that aren't a list, or hold nothing; what `read` refuses, after the document's name.
    """
    if not is_iterable(features):
        raise ValueError(
            f"{collator} takes a list of documents, each a mapping with {TOKENS!r}, or of bins; got "
            f"{type(features).__name__}. Put a single document into a list. Take documents from a dataset one by "
            "one, [dataset[i] for i in range(8)], not as dataset[:8]."
        )
    found: list[tuple[str, T]] = []
    examples = list(features)
    for number, example in zip(getattr(features, "numbers", range(len(examples))), examples, strict=True):
        for name, document in named(example, number):
            with naming(name):
                for each in read(document):
                    found.append((name, each))
    if not found:
        raise ValueError(f"{collator} needs at least one document; got an empty list of features.")
    return found


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put a name, such as "document 3", before the messages of ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what} {error}") from error


def read_feature(feature: Any, per_token: Collection[str] = (), longest: int | None = None) -> list[Columns]:
    """The columns of a document, or of each document of a row, checked and cut to `longest` tokens.

    Args:
        feature: a document, or a row of documents with `seq_lengths`, `position_ids` or both.
        per_token: columns with one value per token, beside `PER_TOKEN`.

    Returns:
        For each document `input_ids`, columns with one value per token, and `labels` if it has any, (n, ...) each,
        integers as int64. Labels are combined with the masks of `LEARNED`.

    Raises:
        ValueError: see PackingCollator. The message begins behind the name of the document.
    """
    if not isinstance(feature, Mapping) or TOKENS not in feature:
        given = f"the keys {sorted(map(str, feature))}" if isinstance(feature, Mapping) else type(feature).__name__
        raise ValueError(
            f"must be a mapping with {TOKENS!r}; got {given}. Tokenize the text first. If examples have their "
            "tokens in other columns, as preference pairs do, pass documents=, a function of an example that "
            "returns its documents, to dataloader."
        )
    if unknown := sorted(map(str, feature.keys() - {*TAKEN, *per_token})):
        advice = (
            f"it takes {quote(TAKEN)}, and makes {quote(MADE)} itself. Rename labels of tokens to {LABELS!r}, and name "
            "other columns with one value per token in per_token=(...)"
        )
        if any(column.startswith(_MEDIA) for column in unknown):
            advice = (
                "it packs only tokens. VisionPackingCollator(model) packs documents with images and videos. For "
                "sounds use the processor's own collator; a patched model takes its batches, too"
            )
        raise ValueError(
            f"has {quote(unknown)}, which PackingCollator can't pack; {advice}. Remove other columns from the "
            "dataset (dataset.remove_columns), or leave them out while loading: dataloader(..., "
            f"drop_columns={tuple(unknown)!r})."
        )
    if absent := set(per_token) - feature.keys():
        raise ValueError(f"has no {quote(sorted(absent))}, which per_token names; got {quote(feature)}.")
    columns: Columns = {}
    for column, values in feature.items():
        if column in _INTEGERS:
            columns[column] = integers(values, column)
        elif column in per_token:
            columns[column] = as_tensor(values, column, "one number, or one row of numbers, per token", least=1)
    tokens = len(columns[TOKENS])
    if not tokens:
        raise ValueError("is empty; every document needs at least one token. Filter empty ones out first.")
    for column, tensor in columns.items():
        if len(tensor) != tokens:
            hint = f", {IGNORED_LABEL} to leave it out of the loss" if column == LABELS else ""
            raise ValueError(f"has {tokens} input_ids but {len(tensor)} {column}; give every token one value{hint}.")
        if column in LEARNED and (tensor > 1).any():
            raise ValueError(
                f"needs only 0 and 1 in {column}; got {tensor.tolist()!r:.100}. Write 1 for the tokens that are "
                "learned and 0 for the others."
            )
    mask = columns.pop(MASK, None)
    if mask is not None and not mask.eq(1).all():
        raise ValueError(
            f"has an attention_mask that isn't 1 for each of its {tokens} tokens (sum {int(mask.sum())}). "
            "Packing takes documents without padding. Tokenize with padding=False, or keep the tokens with a mask "
            "of 1 alone."
        )
    lengths = [tokens] if feature.keys().isdisjoint((SEQ_LENGTHS, POSITIONS)) else _lengths(feature, tokens)
    if LABELS in columns:
        columns[LABELS] = torch.from_numpy(masked_labels(columns, lengths))
    if longest is None and len(lengths) == 1:
        return [columns]
    parts = {column: tensor.split(lengths) for column, tensor in columns.items()}
    return [{column: each[at][:longest] for column, each in parts.items()} for at in range(len(lengths))]


def read_sequences(sequences: Any, labels: Any = None) -> list[Named]:
    """Rows of token ids, and of labels if there are any, as documents; ValueError as of `pack_tree`."""
    given = [sequences] if labels is None else [sequences, labels]
    if wrong := [each for each in given if not is_iterable(each)]:
        raise ValueError(
            "sequences must be a list with a row of integers for each sequence, and so must labels; got "
            f"{describe(wrong[0])}."
        )
    rows = [*map(list, given)]
    if not rows[0]:
        raise ValueError("sequences is empty; pass at least one sequence.")
    if len(rows[0]) != len(rows[-1]):
        raise ValueError(
            f"got {len(rows[0])} sequences but labels for {len(rows[-1])}; give every sequence a row of labels."
        )
    features = [dict(zip((TOKENS, LABELS), each, strict=False)) for each in zip(*rows, strict=True)]
    found: list[Named] = []
    for number, feature in enumerate(features):
        with naming(f"sequence {number}"):
            found += [(f"sequence {number}", columns) for columns in read_feature(feature)]
    return found


def _lengths(feature: Mapping[str, Any], tokens: int) -> list[int]:
    """The lengths of the documents of a feature, by its `seq_lengths` and `position_ids`, if it has any."""
    lengths, of_lengths = [tokens], ""
    if SEQ_LENGTHS in feature:
        lengths = integers(feature[SEQ_LENGTHS], SEQ_LENGTHS).tolist()
        of_lengths = f" of its seq_lengths {lengths!r:.100}"
        if sum(lengths) != tokens or not all(lengths):
            raise ValueError(
                f"has {tokens} input_ids, but its seq_lengths are {lengths!r:.100}, which add up to {sum(lengths)}; "
                "give the length of each document of the row, at least 1."
            )
    if POSITIONS in feature:
        positions = integers(feature[POSITIONS], POSITIONS)
        if not of_lengths:
            starts = (positions == 0).nonzero()[:, 0]
            lengths = starts.diff(append=starts.new_tensor([len(positions)])).tolist()
        counted = torch.cat([torch.arange(length, device="cpu") for length in (0, *lengths)])
        if len(counted) != tokens or not torch.equal(positions, counted):
            raise ValueError(
                f"has {len(positions)} position_ids for {tokens} input_ids that don't count from 0 in each "
                f"document{of_lengths}; PackingCollator makes position_ids itself and reads others only to find where "
                "the documents of a row begin. Remove the column (dataset.remove_columns)."
            )
    return lengths


def masked_labels(columns: Mapping[str, Any], lengths: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """The labels of documents that lie end to end, or a copy of their input ids: -100 where a mask is 0.

    Labels that are a copy of the input ids choose no tokens, so the masks choose. Other labels choose themselves: they
    may leave out more tokens than the masks, and no label may stand where a mask is 0.

    >>> columns = {"input_ids": np.array([5, 6, 7, 8]), "completion_mask": np.array([0, 0, 1, 1])}
    >>> masked_labels(columns, [4]).tolist()
    [-100, -100, 7, 8]
    >>> masked_labels(columns | {"labels": np.array([-100, -100, -100, 9])}, [4]).tolist()
    [-100, -100, -100, 9]

    Args:
        columns: tensors or arrays of (tokens,) integers: `input_ids`, `labels` if there are any, masks of `LEARNED`.
        lengths: the tokens of each document, at least 1.

    Raises:
        ValueError: a label where a mask is 0; the message names the first, numbered over all documents.
    """
    ids, labels = np.asarray(columns[TOKENS]), np.asarray(columns.get(LABELS, columns[TOKENS]))
    if columns.keys().isdisjoint(LEARNED):
        return labels.copy()
    masks = {name: np.asarray(columns[name]) for name in LEARNED if name in columns}
    left_out = np.logical_or.reduce([mask == 0 for mask in masks.values()])
    is_copy = np.logical_and.reduceat(labels == ids, np.cumsum(lengths) - np.asarray(lengths))
    contrary = left_out & (labels != IGNORED_LABEL) & ~np.repeat(is_copy, lengths)
    if contrary.any():
        token = int(contrary.argmax())
        name = next(name for name, mask in masks.items() if not mask[token])
        raise ValueError(
            f"has the label {int(labels[token])} at token {token}, where its {name} is 0. Masks choose the tokens "
            "of labels that are a copy of the input ids, and these aren't. Set such labels to "
            f"{IGNORED_LABEL}, or leave one of the two columns out (dataset.remove_columns)."
        )
    return np.where(left_out, labels.dtype.type(IGNORED_LABEL), labels)


def join(documents: Sequence[Named]) -> tuple[Columns, list[int]]:
    """The columns of all documents, end to end, and the lengths of the documents.

    Raises:
        ValueError: a document with other columns than the first, or with values of another kind or shape.
    """
    first_name, first = documents[0]
    parts: dict[str, list[Tensor]] = {}
    for name, columns in documents:
        if different := sorted(first.keys() ^ columns.keys()):
            with_it, without = (name, first_name) if different[0] in columns else (first_name, name)
            raise ValueError(
                f"{with_it} has {different[0]!r} and {without} hasn't; give every document the same columns."
            )
        for column, wanted in first.items():
            one = columns[column]
            # torch.cat makes integers float16, where 70000 is infinite.
            if one.is_floating_point() != wanted.is_floating_point() or one.shape[1:] != wanted.shape[1:]:
                here, there = (f"{each.dtype} of shape {tuple(each.shape[1:])}" for each in (one, wanted))
                raise ValueError(
                    f"{column} holds {here} per token in {name} and {there} in {first_name}; give every document "
                    "values of one kind and shape."
                )
            parts.setdefault(column, []).append(one)
    return dict(zip(parts, map(torch.cat, parts.values()), strict=True)), [*map(len, parts[TOKENS])]


def integers(values: Any, name: str) -> Tensor:
    """A column of one integer per token as int64, none below 0 but labels; an empty list is an empty row."""
    tensor = as_tensor(values, name, "a row of integers")
    is_integer = not tensor.is_floating_point() and (tensor.dtype != torch.bool or name in (*PER_TOKEN, MASK))
    if tensor.ndim != 1 or (tensor.numel() and not is_integer):
        raise ValueError(
            f"needs a row of integers as {name}; got {tensor.dtype} of shape {tuple(tensor.shape)}. Give one integer "
            "for each token."
        )
    tensor = tensor.to(torch.int64)
    if name != LABELS and (tensor < 0).any():
        place = int((tensor < 0).int().argmax())
        raise ValueError(
            f"has {int(tensor[place])} at position {place} of {name}, which holds numbers of at least 0. Only labels "
            f"may be negative: {IGNORED_LABEL} leaves a token out of the loss."
        )
    return tensor


def as_tensor(values: Any, name: str, expected: str, least: int = 0) -> Tensor:
    """A tensor in host memory of at least `least` dimensions: int64, bool, or floating point."""
    try:
        converted = values
        if isinstance(values, np.ndarray):  # torch can't read arrays that are read-only or of another byte order
            converted = values.astype(np.int64 if values.dtype.kind in "iu" else values.dtype.newbyteorder("="))
        elif isinstance(values, list) and values and type(values[0]) is int:
            array = np.array(values)  # which NumPy reads five times as fast as torch
            converted = array if array.dtype == np.int64 and array.ndim == 1 else values
        elif isinstance(values, (list, tuple)) and values and hasattr(values[0], "ndim") and values[0].ndim:
            converted = torch.stack([as_tensor(each, name, expected) for each in values])
        tensor = converted if isinstance(converted, Tensor) else torch.as_tensor(converted, device="cpu")
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.ndim < least:
            raise TypeError
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"needs {expected} as {name}; got {values!r:.100}.") from error
    if tensor.device.type != "cpu":
        raise ValueError(f"has {name} on {tensor.device}; collate in host memory, then move the batch.")
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.detach()
    tensor = tensor.to(torch.int64)
    if str(getattr(values, "dtype", "")).endswith("uint64") and (tensor < 0).any():
        raise ValueError(f"needs {expected} as {name}; got uint64 values of 2**63 or more, such as negative ids.")
    return tensor


def check_objective(objective: Any, option: str) -> None:
    """ValueError unless the value of an option is an `Objective`."""
    if objective == "documents":
        refuse_removed(["objective='documents'"], "PackingCollator")
    check_choice(objective, get_args(Objective), option)


def check_names(names: Any, option: str, others: Collection[str]) -> None:
    """ValueError unless the value of an option is a collection of names of columns, and of none of `others`."""
    if not isinstance(names, (list, tuple, set, frozenset)) or not set(map(type, names)) <= {str}:
        raise ValueError(f"{option} must be a collection of column names, such as ('bbox',); got {names!r:.100}.")
    if wrong := sorted({*others}.intersection(names)):
        raise ValueError(f"{option} can't name {quote(wrong)}; leave that out.")


def quote(names: Collection[str]) -> str:
    """Names for a message, in quotes."""
    return ", ".join(map(repr, names))
