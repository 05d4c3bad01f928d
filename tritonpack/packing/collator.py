"""PackingCollator: makes one row of tokenized documents, whose columns it checks, and the boundaries between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonpack import notices
from tritonpack.checks import check_choice, describe
from tritonpack.packing.lengths import TOKENS, check_integer
from tritonpack.removed import refuse_removed

Objective = Literal["causal", "tokens"]
Columns = dict[str, Tensor]
T = TypeVar("T")
Named = tuple[str, Columns]  # the name of a document for messages, such as "document 3", and its columns

LABELS, MASK = "labels", "attention_mask"
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


@dataclass(frozen=True)
class PackingCollator:
    """Lays documents end to end in one row, for transformers.Trainer or any DataLoader.

    For a causal model the first label of each document is -100, because the token before it belongs to another
    document. So the loss is the mean over the same predicted tokens as for a padded batch.

    >>> batch = PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    >>> batch["position_ids"].tolist(), batch["seq_idx"].tolist()
    ([[0, 1, 2, 0, 1]], [[0, 0, 0, 1, 1]])
    >>> batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
    ([0, 3, 5], 3)

    A feature may be a row of several documents, as `pack_dataset` and TRL make it. The batch is the same:

    >>> row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    >>> PackingCollator()([row])["labels"].tolist()
    [[-100, 6, 7, -100, 9]]

    The columns that it takes; it refuses all others by name:

    | column | in the batch |
    |---|---|
    | `input_ids` | the same |
    | `labels` | the same, see `objective` |
    | `token_type_ids`, `mm_token_type_ids`, `special_tokens_mask` and the columns in `per_token` | the same |
    | `completion_mask`, `assistant_masks` | the same; labels of tokens are -100 where it is 0. Labels that aren't a \
copy of the input ids must be -100 there already. transformers' Trainer removes both columns first unless \
`remove_unused_columns=False` |
    | `attention_mask` | left out; it must be 1 everywhere |
    | `seq_lengths` | the lengths of the documents of a row |
    | `position_ids` | made; given ones must count from 0 in each document, and say where the documents of a row begin |
    | `length` | left out |

    Attributes:
        pad_to_multiple_of: pad the row to a multiple of this many tokens; None adds no padding. Padding is one more
            document (positions from 0, labels -100, its own offset), so no other document sees it. The batch then has
            an `attention_mask`, 0 for padding. With that mask transformers' own FlashAttention doesn't keep documents
            apart; a patched model does.
        pad_token_id: the token of the padding, at least 0.
        objective: what a label belongs to. "causal": the next token. Labels are made from the input ids if no document
            of the batch has any. "tokens": the token itself, for masked language models, token classification and
            encoders with decoders. All labels are kept, and none are made.
        max_document_length: the number of tokens that are kept of each document, in all columns; None keeps all.
        per_token: further columns with one value, or one row of values, per token: (1, T, ...) in the batch. Every
            document must have them. Padding is 0 in them.

    Raises:
        ValueError: a wrong setting.
    """

    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    objective: Objective = "causal"
    max_document_length: int | None = None
    per_token: Collection[str] = ()

    def __post_init__(self) -> None:
        for option in ("pad_to_multiple_of", "max_document_length"):
            if getattr(self, option) is not None:
                check_integer(getattr(self, option), option)
        check_integer(self.pad_token_id, "pad_token_id", 0)
        if self.objective == "documents":
            refuse_removed(["objective='documents'"], "PackingCollator")
        check_choice(self.objective, get_args(Objective), "objective")
        check_names(self.per_token, "per_token", {*TAKEN, *MADE})

    def __call__(self, features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> dict[str, Tensor | int]:
        """Collate one batch.

        Args:
            features: one mapping per document, with the columns of the table above as lists, arrays or tensors. A
                feature may also be a list of such mappings, or a row of documents with `seq_lengths` or `position_ids`.

        Returns:
            For T tokens, on the CPU: `input_ids` and `position_ids` (1, T) int64, positions restarting at 0; `labels`
            (1, T) int64; `seq_idx` (1, T) int32, the document of each token; `cu_seq_lens_q` and `cu_seq_lens_k`
            (documents + 1,) int32, the start of each document, and T; `max_length_q` and `max_length_k`, ints, the
            length of the longest document; with `pad_to_multiple_of` also `attention_mask` (1, T) int64; further
            columns (1, T, ...), integers as int64.

        Raises:
            ValueError: no features, a column that can't be packed or that some documents don't have, a document that
                is empty, isn't a row of integers, has a negative token or padding, labels of another length, or labels
                that contradict a mask.
        """
        read = partial(read_feature, per_token=self.per_token, longest=self.max_document_length)
        return self.join(read_features(features, "PackingCollator", read), "PackingCollator")

    def join(self, documents: list[Named], collator: str) -> dict[str, Tensor | int]:
        """The batch of documents that are read; the collator's name is for messages."""
        rows, lengths = join(documents)
        if self.objective == "causal" and LABELS not in rows:
            rows[LABELS] = torch.from_numpy(masked_labels(rows, lengths))
        flash = "do so, too" if self.pad_to_multiple_of is None else "don't beside the mask of pad_to_multiple_of"
        warn_if_unpatched(
            len(documents),
            "unpatched-model",
            f"{collator} laid {len(documents)} documents into one row, and no model is patched in this process. Most "
            "models then let the documents see each other. Call tritonpack.patch(model) before the first batch. A "
            "patched model keeps documents apart. transformers' FlashAttention implementations, which read "
            f"position_ids in training, {flash}.",
        )
        tokens = sum(lengths)
        padding = -tokens % (self.pad_to_multiple_of or 1)
        if tokens + padding >= 2**31:
            raise ValueError(f"a row holds at most 2**31 - 1 tokens; got {tokens + padding}. Pass fewer documents.")
        if padding:
            lengths.append(padding)
            filling: dict[str, Any] = {TOKENS: self.pad_token_id, LABELS: IGNORED_LABEL, **PER_TOKEN}
            for name, row in rows.items():
                rows[name] = torch.cat([row, row.new_full((padding, *row.shape[1:]), filling.get(name, 0))])
        counts, places = torch.tensor(lengths, device="cpu"), torch.arange(tokens + padding, device="cpu")
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        seq_idx = torch.repeat_interleave(counts)
        if self.objective == "causal":
            rows[LABELS][offsets[:-1]] = IGNORED_LABEL
        if self.pad_to_multiple_of is not None:
            rows[MASK] = (places < tokens).to(torch.int64)
        rows |= {"position_ids": places - offsets[seq_idx], "seq_idx": seq_idx.to(torch.int32)}
        batch: dict[str, Tensor | int] = {}
        for name, row in rows.items():
            batch[name] = row[None]
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = offsets.to(torch.int32)
        batch["max_length_q"] = batch["max_length_k"] = max(lengths)
        return batch


def warn_if_unpatched(documents: int, key: str, message: str) -> None:
    """Warn once if documents share a row, and transformers' models are imported and none is patched here."""
    known = "transformers.modeling_utils" in sys.modules and not notices.patched_models
    if documents > 1 and known and notices.knows_patched_models():
        notices.say_once(key, message)


class Numbered(list[Any]):
    """Examples with their numbers in a dataset, by which messages name documents in place of their places here."""

    numbers: Sequence[int]


def is_iterable(values: Any) -> bool:
    """Return whether values can be iterated over, and aren't text, a mapping, a class, or a single number."""
    others = (Mapping, str, bytes, type)
    return isinstance(values, Iterable) and not isinstance(values, others) and getattr(values, "ndim", None) != 0


def named(example: Any, number: int) -> tuple[bool, list[tuple[str, Any]]]:
    """Return whether an example is a list of documents, and (name for messages, document) for each."""
    if not isinstance(example, (list, tuple)) or not all(isinstance(document, Mapping) for document in example):
        return False, [(f"document {number}", example)]
    return True, [(f"document {place} of example {number}", document) for place, document in enumerate(example)]


def read_features(features: Any, collator: str, read: Callable[[Any], list[T]]) -> list[tuple[str, T]]:
    """The results of `read` for each document of features (documents or lists of documents), after its name.

    Raises:
        ValueError: features that aren't a list, or hold nothing; what `read` refuses, after the document's name.
    """
    if not is_iterable(features):
        raise ValueError(
            f"{collator} takes a list of documents, each a mapping with {TOKENS!r}, or of bins; got "
            f"{type(features).__name__}. Take documents from a dataset one by one, [dataset[i] for i in range(8)], not "
            "as dataset[:8]."
        )
    found: list[tuple[str, T]] = []
    examples = list(features)
    for number, example in zip(getattr(features, "numbers", range(len(examples))), examples, strict=True):
        for name, document in named(example, number)[1]:
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

    They are `input_ids`, columns with one value per token, and `labels` if it has any, combined with the masks of
    `LEARNED`: (n, ...) each, integers as int64. A ValueError, see PackingCollator, begins behind the document's name.
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
            f"has {quote(unknown)}, which PackingCollator can't pack; {advice}. Remove other columns: "
            f"dataset.remove_columns(...), or dataloader(..., drop_columns={tuple(unknown)!r})."
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
            raise ValueError(f"needs only 0 and 1 in {column}, 1 for learned tokens; got {tensor.tolist()!r:.100}.")
    mask = columns.pop(MASK, None)
    if mask is not None and not mask.eq(1).all():
        raise ValueError(
            f"has an attention_mask that isn't 1 for each of its {tokens} tokens (sum {int(mask.sum())}). Tokenize "
            "without padding (padding=False), or keep the tokens with a mask of 1 alone."
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
    columns = {TOKENS: sequences} if labels is None else {TOKENS: sequences, LABELS: labels}
    if wrong := [values for values in columns.values() if not is_iterable(values)]:
        raise ValueError(
            "sequences must be a list with a row of integers for each sequence, and so must labels; got "
            f"{describe(wrong[0])}."
        )
    rows = [*map(list, columns.values())]
    if not rows[0] or len(rows[0]) != len(rows[-1]):
        raise ValueError(
            f"got {len(rows[0])} sequences and labels for {len(rows[-1])}; pass at least one sequence, and labels for "
            "each or none."
        )
    found: list[Named] = []
    for number, values in enumerate(zip(*rows, strict=True)):
        with naming(f"sequence {number}"):
            found += [(f"sequence {number}", each) for each in read_feature(dict(zip(columns, values, strict=True)))]
    return found


def _lengths(feature: Mapping[str, Any], tokens: int) -> list[int]:
    """The lengths of the documents of a row, by its `seq_lengths` and `position_ids`."""
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
                f"document{of_lengths}. PackingCollator makes them itself: remove the column (dataset.remove_columns)."
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

    The columns are (tokens,) integers. ValueError names the first label where a mask is 0, counted over all documents.
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
    """The columns of all documents, end to end, and the lengths of the documents; ValueError unless all have the same
    columns, of one kind and shape."""
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


def check_names(names: Any, option: str, others: Collection[str]) -> None:
    """ValueError unless the value of an option is a collection of names of columns, and of none of `others`."""
    if not isinstance(names, (list, tuple, set, frozenset)) or not set(map(type, names)) <= {str}:
        raise ValueError(f"{option} must be a collection of column names, such as ('bbox',); got {names!r:.100}.")
    if wrong := sorted({*others}.intersection(names)):
        raise ValueError(f"{option} can't name {quote(wrong)}; leave that out.")


def quote(names: Collection[str]) -> str:
    """Names for a message, in quotes."""
    return ", ".join(map(repr, names))
