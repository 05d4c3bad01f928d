"""The columns of a tokenized document: checked, and converted to tensors in host memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonpack.checks import check_choice, describe
from tritonpack.removed import refuse_removed

Objective = Literal["causal", "tokens"]
Columns = dict[str, Tensor]
Name = int | str  # of a document, for messages: its number, or "0 of example 5"

TOKENS = "input_ids"
IGNORED_LABEL = -100  # transformers and torch's cross_entropy leave it out of the loss
LABELS = ("labels", "label", "label_ids")  # the names in transformers' collators
# Columns with one value per token, and their value for padding.
PER_TOKEN = {
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "completion_mask": 0,
    "assistant_masks": 0,
    "special_tokens_mask": 1,
}
LEARNED = ("completion_mask", "assistant_masks")  # 0 for tokens without a label
LEFT_OUT = ("length",)  # Trainer groups documents by it
MADE = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Boundaries of a row that holds several documents; the first is TRL's name.
SEQ_LENGTHS, POSITIONS = "seq_lengths", "position_ids"
TAKEN = (TOKENS, *LABELS, "attention_mask", *PER_TOKEN, *LEFT_OUT, SEQ_LENGTHS, POSITIONS)
_TAKEN = frozenset(TAKEN)
_MEDIA = ("pixel", "image", "video", "audio", "input_features")


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


def documents_of(features: Any, collator: str) -> tuple[list[Any], list[Name]]:
    """The documents of features, each a document or a list of documents, and their names for messages.

    Raises:
        ValueError: features that aren't a list, or hold nothing; the message names the collator.
    """
    if not is_iterable(features):
        raise ValueError(
            f"{collator} takes a list of documents, each a mapping with {TOKENS!r}, or of bins; got "
            f"{type(features).__name__}. Put a single document into a list. Take documents from a dataset one by "
            "one, [dataset[i] for i in range(8)], not as dataset[:8]."
        )
    numbers = getattr(features, "numbers", None)
    documents: list[Any] = []
    names: list[Name] = []
    for place, feature in enumerate(features):
        several = is_unit(feature)
        for at, document in enumerate(feature if several else [feature]):
            number = len(documents) if numbers is None else numbers[place]
            names.append(f"{at} of example {number}" if several and numbers is not None else number)
            documents.append(document)
    if not documents:
        raise ValueError(f"{collator} needs at least one document; got an empty list of features.")
    return documents, names


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put a name, such as "document 3", before the messages of ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what} {error}") from error


def read_feature(
    feature: Any,
    number: Name,
    objective: Objective = "causal",
    per_token: Collection[str] = (),
    longest: int | None = None,
    never_learned: Collection[int] = (),
) -> list[Columns]:
    """The columns of a document, or of each document of a row, checked and cut to `longest` tokens.

    Args:
        feature: a document, or a row of documents with `seq_lengths`, `position_ids` or both.
        number: the feature's name for messages.
        per_token: columns with one value per token, beside `PER_TOKEN`.
        never_learned: see `combine_labels`.

    Returns:
        For each document `input_ids`, the columns with one value per token, and `labels` if it has any, (n, ...) each.
        Integers are int64. Labels are combined with the masks of `LEARNED`.

    Raises:
        ValueError: see PackingCollator.
    """
    try:
        columns = _convert(feature, per_token)
        tokens = len(columns[TOKENS])
        for name, values in columns.items():
            if len(values) != tokens:
                hint = f", {IGNORED_LABEL} to leave it out of the loss" if name == "labels" else ""
                raise ValueError(f"has {tokens} input_ids but {len(values)} {name}; give every token one value{hint}.")
        lengths = None if feature.keys().isdisjoint((SEQ_LENGTHS, POSITIONS)) else _lengths(feature, tokens)
        if "labels" in columns:
            columns["labels"] = masked_labels(columns, lengths or [tokens], objective == "causal", never_learned)
    except ValueError as error:
        raise ValueError(f"document {number} {error}") from error
    if lengths is None and longest is None:
        return [columns]
    lengths = lengths or [tokens]
    parts = {name: values.split(lengths) for name, values in columns.items()}
    return [{name: values[at][:longest] for name, values in parts.items()} for at in range(len(lengths))]


def _convert(feature: Any, per_token: Collection[str]) -> Columns:
    """The columns of a feature that are packed, as tensors."""
    if not isinstance(feature, Mapping) or TOKENS not in feature:
        given = f"the keys {sorted(map(str, feature))}" if isinstance(feature, Mapping) else type(feature).__name__
        raise ValueError(f"must be a mapping with 'input_ids'; got {given}. Tokenize the text first.")
    if unknown := feature.keys() - _TAKEN.union(per_token):
        _refuse(sorted(map(str, unknown)))
    if absent := set(per_token) - feature.keys():
        raise ValueError(f"has no {quote(sorted(absent))}, which per_token names; got {quote(feature)}.")
    columns = {TOKENS: integers(feature[TOKENS], TOKENS)}
    tokens = len(columns[TOKENS])
    if not tokens:
        raise ValueError("is empty; every document needs at least one token. Filter empty ones out first.")
    for name, values in feature.items():
        if name in PER_TOKEN or name == "attention_mask":
            column = integers(values, name, bools=True)
            if name in LEARNED and (column > 1).any():
                raise ValueError(
                    f"needs only 0 and 1 in {name}; got {column.tolist()!r:.100}. Write 1 for the tokens that are "
                    "learned and 0 for the others."
                )
            if name in PER_TOKEN:
                columns[name] = column
            elif len(column) != tokens or not bool((column == 1).all()):
                raise ValueError(
                    f"has an attention_mask that isn't 1 for each of its {tokens} tokens (length {len(column)}, sum "
                    f"{int(column.sum())}); packing takes documents without padding. Tokenize with padding=False, or "
                    "keep only the tokens with a mask of 1."
                )
        elif name in per_token:
            columns[name] = as_tensor(values, name, "one number, or one row of numbers, per token", least_dimensions=1)
        elif name in LABELS and "labels" in columns:
            both = quote([each for each in LABELS if each in feature])
            raise ValueError(f"has {both}, which all name its labels; keep one of them.")
        elif name in LABELS:
            columns["labels"] = integers(values, name, negative=True)
    return columns


def _refuse(unknown: list[str]) -> NoReturn:
    """ValueError for columns that can't be packed."""
    advice = f"it takes {quote(TAKEN)}. Name columns with one value per token in per_token=(...)"
    if made := [name for name in unknown if name in MADE]:
        advice = f"it makes {quote(made)} itself"
    elif any(name.startswith(_MEDIA) for name in unknown):
        advice = (
            "it packs only tokens. VisionPackingCollator(model) packs documents with images and videos. For sounds use "
            "the processor's own collator; a patched model takes its batches, too"
        )
    raise ValueError(
        f"has {quote(unknown)}, which PackingCollator can't pack; {advice}. Remove other columns from the dataset "
        "(dataset.remove_columns)."
    )


def _lengths(feature: Mapping[str, Any], tokens: int) -> list[int] | None:
    """The lengths of the documents of a row, by `seq_lengths` and `position_ids`; None for a document by itself."""
    if SEQ_LENGTHS in feature:
        lengths = integers(feature[SEQ_LENGTHS], SEQ_LENGTHS).tolist()
        if not lengths or sum(lengths) != tokens or not all(lengths):
            raise ValueError(
                f"has {tokens} input_ids, but its seq_lengths are {lengths!r:.100}, which add up to {sum(lengths)}; "
                "give the length of each document of the row, at least 1."
            )
    if POSITIONS not in feature:
        return lengths
    positions = integers(feature[POSITIONS], POSITIONS)
    if SEQ_LENGTHS not in feature:
        starts = (positions == 0).nonzero()[:, 0]
        lengths = starts.diff(append=starts.new_tensor([len(positions)])).tolist()
    counted = torch.cat([torch.arange(length, device="cpu") for length in (0, *lengths)])
    if len(counted) != tokens or not torch.equal(positions, counted):
        of_lengths = f" of its seq_lengths {lengths!r:.100}" if SEQ_LENGTHS in feature else ""
        raise ValueError(
            f"has {len(positions)} position_ids for {tokens} input_ids that don't count from 0 in each "
            f"document{of_lengths}; PackingCollator makes position_ids itself and reads others only to find where the "
            "documents of a row begin. Remove the column (dataset.remove_columns)."
        )
    return None if SEQ_LENGTHS not in feature and len(lengths) == 1 else lengths


def masked_labels(
    columns: Columns, lengths: Sequence[int], is_causal: bool = True, never_learned: Collection[int] = ()
) -> Tensor:
    """The labels of documents of these lengths, or a copy of their input ids, combined with the masks of `LEARNED`."""
    labels = columns["labels"] if "labels" in columns else columns[TOKENS].clone()
    if columns.keys().isdisjoint(LEARNED):
        return labels
    masks, ids = {name: columns[name].numpy() for name in LEARNED if name in columns}, columns[TOKENS].numpy()
    return torch.from_numpy(combine_labels(ids, labels.numpy(), masks, np.array(lengths), is_causal, never_learned))


def combine_labels(
    ids: NDArray[Any],
    labels: NDArray[Any],
    masks: Mapping[str, NDArray[Any]],
    lengths: NDArray[Any],
    is_causal: bool = True,
    never_learned: Collection[int] = (),
) -> NDArray[Any]:
    """Combine the labels of documents, one after the other, with their masks: -100 where a mask is 0.

    Labels that are a copy of the input ids choose no tokens, so the masks choose. Other labels choose themselves: they
    may leave out more tokens than the masks, and no label may stand where a mask is 0.

    >>> ids, mask = np.array([5, 6, 7, 8]), {"completion_mask": np.array([0, 0, 1, 1])}
    >>> combine_labels(ids, ids, mask, np.array([4])).tolist()
    [-100, -100, 7, 8]
    >>> combine_labels(ids, np.array([-100, -100, -100, 9]), mask, np.array([4])).tolist()
    [-100, -100, -100, 9]

    Args:
        ids, labels: (tokens,) integers.
        masks: (tokens,) 0 or 1 each, by name; at least one.
        lengths: (documents,) the tokens of each document, at least 1.
        is_causal: nothing predicts the first token of a document, so its label contradicts no mask.
        never_learned: tokens that a copy of the input ids may leave out, such as those of images.

    Raises:
        ValueError: a label where a mask is 0; the message names the first, numbered over all documents.
    """
    starts = np.cumsum(lengths) - lengths
    left_out = np.logical_or.reduce([mask == 0 for mask in masks.values()])
    ignored = labels == IGNORED_LABEL
    copied = (labels == ids) | (ignored & np.isin(ids, list(never_learned)))
    is_copy = np.logical_and.reduceat(copied, starts) if len(starts) else np.ones(0, bool)
    contrary = left_out & ~ignored & ~np.repeat(is_copy, lengths)
    if is_causal:
        contrary[starts] = False
    if contrary.any():
        token = int(contrary.argmax())
        name = next(name for name, mask in masks.items() if not mask[token])
        raise ValueError(
            f"has the label {int(labels[token])} at token {token}, where its {name} is 0. Masks choose the tokens "
            "of labels that are a copy of the input ids, and these aren't. Set such labels to "
            f"{IGNORED_LABEL}, or leave one of the two columns out (dataset.remove_columns)."
        )
    return np.where(left_out, labels.dtype.type(IGNORED_LABEL), labels)


def join(documents: Sequence[Columns], names: Sequence[Name]) -> Columns:
    """The columns of all documents, end to end.

    Raises:
        ValueError: a document with other columns than the first, or with values of another kind or shape.
    """
    first, joined = documents[0], dict[str, Tensor]()
    for name, columns in zip(names, documents, strict=True):
        if different := sorted(first.keys() ^ columns.keys()):
            with_it, without = (name, names[0]) if different[0] in columns else (names[0], name)
            raise ValueError(
                f"document {with_it} has {different[0]!r} and document {without} hasn't; give every document the same "
                "columns."
            )
        for column, wanted in first.items():
            one = columns[column]
            # torch.cat makes integers float16, where 70000 is infinite.
            if one.is_floating_point() != wanted.is_floating_point() or one.shape[1:] != wanted.shape[1:]:
                here, there = (f"{each.dtype} of shape {tuple(each.shape[1:])}" for each in (one, wanted))
                raise ValueError(
                    f"{column} holds {here} per token in document {name} and {there} in document {names[0]}; give "
                    "every document values of one kind and shape."
                )
    for column in first:
        joined[column] = torch.cat([*map(itemgetter(column), documents)])
    return joined


def integers(values: Any, name: str, *, bools: bool = False, negative: bool = False) -> Tensor:
    """A row of integers as int64, none below 0 unless `negative`; an empty list is an empty row."""
    tensor = as_tensor(values, name, "a row of integers")
    is_integer = not tensor.is_floating_point() and (bools or tensor.dtype != torch.bool)
    if tensor.ndim != 1 or (tensor.numel() and not is_integer):
        raise ValueError(
            f"needs a row of integers as {name}; got {tensor.dtype} of shape {tuple(tensor.shape)}. Give one integer "
            "for each token."
        )
    tensor = tensor.to(torch.int64)
    if not negative and (tensor < 0).any():
        place = int((tensor < 0).int().argmax())
        raise ValueError(
            f"has {int(tensor[place])} at position {place} of {name}, which holds numbers of at least 0. Only labels "
            f"may be negative: {IGNORED_LABEL} leaves a token out of the loss."
        )
    return tensor


def as_tensor(values: Any, name: str, expected: str, *, least_dimensions: int = 0) -> Tensor:
    """A tensor in host memory: int64, bool, or floating point."""
    try:
        converted = values
        if isinstance(values, np.ndarray):  # torch can't read arrays that are read-only or of another byte order
            converted = values.astype(np.int64 if values.dtype.kind in "iu" else values.dtype.newbyteorder("="))
        elif isinstance(values, list) and values and type(values[0]) is int:
            array = np.array(values)  # which NumPy reads five times as fast as torch
            converted = array if array.dtype == np.int64 and array.ndim == 1 else values
        tensor = converted if isinstance(converted, Tensor) else torch.as_tensor(converted, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"needs {expected} as {name}; got {values!r:.100}.") from error
    if tensor.device.type != "cpu":
        raise ValueError(f"has {name} on {tensor.device}; collate in host memory, then move the batch.")
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.ndim < least_dimensions:
        raise ValueError(f"needs {expected} as {name}; got {values!r:.100}.")
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.detach()
    tensor = tensor.to(torch.int64)
    if str(getattr(values, "dtype", "")).endswith("uint64") and (tensor < 0).any():
        raise ValueError(f"needs {expected} as {name}; got uint64 values of 2**63 or more, such as negative ids.")
    return tensor


def read_sequences(sequences: Any, name: str = "sequences") -> list[Tensor]:
    """Rows of token ids, or of labels, as int64 tensors; ValueError for what `pack_tree` refuses, which names a row."""
    if not is_iterable(sequences):
        raise ValueError(f"{name} must be a list with a row of integers for each sequence; got {describe(sequences)}.")
    rows: list[Tensor] = []
    for number, row in enumerate(sequences):
        with naming(f"sequence {number}"):
            rows.append(integers(row, "labels" if name == "labels" else "tokens", negative=name == "labels"))
        if not len(rows[-1]):
            raise ValueError(f"sequence {number} is empty; every sequence needs at least one token. Leave it out.")
    if not rows:
        raise ValueError(f"{name} is empty; pass at least one sequence.")
    return rows


def check_objective(objective: Any, option: str) -> None:
    """ValueError unless the value of an option is an `Objective`."""
    if objective == "documents":
        refuse_removed(["objective='documents'"], "PackingCollator")
    check_choice(objective, get_args(Objective), option)


def check_names(names: Any, option: str) -> None:
    """ValueError unless the value of an option is a collection of column names."""
    if not isinstance(names, (list, tuple, set, frozenset)) or not set(map(type, names)) <= {str}:
        raise ValueError(f"{option} must be a collection of column names, such as ('bbox',); got {names!r:.100}.")


def quote(names: Collection[str]) -> str:
    """Names for a message, in quotes."""
    return ", ".join(map(repr, names))
