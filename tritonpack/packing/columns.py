"""The columns of a tokenized document: which of them PackingCollator takes, as what, and what it says of the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Objective = Literal["causal", "tokens", "documents"]

IGNORED_LABEL = -100  # what transformers and torch's cross_entropy leave out of the loss
LABELS = ("labels", "label", "label_ids")  # as transformers' collators name them
# Columns of one value per token, and what padding holds in them.
PER_TOKEN = {
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "completion_mask": 0,
    "assistant_masks": 0,
    "special_tokens_mask": 1,
}
LEARNED = ("completion_mask", "assistant_masks")  # 1 for the tokens that labels made from input_ids are to hold
LEFT_OUT = ("length",)  # what Trainer groups documents by; offsets say the same
MADE = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_TAKEN = ("input_ids", *LABELS, "attention_mask", *PER_TOKEN, *LEFT_OUT)
_MEDIA = ("pixel", "image", "video", "audio", "input_features")

Columns = dict[str, Tensor]


def per_token_names(names: Any) -> tuple[str, ...]:
    """The user's names of columns with one value per token, checked."""
    known = isinstance(names, (list, tuple, set, frozenset))
    if not known or not all(isinstance(name, str) for name in names):
        raise ValueError(f"per_token must be a collection of column names, such as ('bbox',); got {names!r}.")
    reserved = [name for name in names if name in (*_TAKEN, *MADE)]
    if reserved:
        raise ValueError(f"per_token names {_quote(reserved)}, which PackingCollator knows already; leave them out.")
    return tuple(names)


def read_document(
    feature: Any, number: int, objective: Objective, per_token: Sequence[str], longest: int | None
) -> Columns:
    """One document's columns, checked and cut.

    Args:
        feature: a mapping with `input_ids`.
        number: the document's, for messages.
        objective: what labels are of: "causal" and "tokens" take one per token, "documents" one per document.
        per_token: columns with a value per token besides those in `PER_TOKEN`.
        longest: tokens that are kept; None keeps all.

    Returns:
        `input_ids`, `labels` where there are any, and the columns with a value per token, (n, ...) each; integers are
        int64. Under "documents" `labels` are of any shape.

    Raises:
        ValueError: see PackingCollator.
    """
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        given = f"the keys {sorted(map(str, feature))}" if isinstance(feature, Mapping) else type(feature).__name__
        raise ValueError(f"document {number} must be a mapping with 'input_ids'; got {given}. Tokenize the text first.")
    _refuse_unknown(feature, number, per_token)
    columns = {"input_ids": _integers(feature["input_ids"], "input_ids", number)}
    tokens = len(columns["input_ids"])
    if not tokens:
        raise ValueError(
            f"document {number} is empty; every document needs at least one token. Filter empty ones out first."
        )
    if "attention_mask" in feature:
        _refuse_padding(_integers(feature["attention_mask"], "attention_mask", number, bools=True), tokens, number)
    for name in feature:
        if name in PER_TOKEN:
            columns[name] = _one_each(_integers(feature[name], name, number, bools=True), name, number, tokens)
            if name in LEARNED:
                _require_mask(columns[name], name, number)
        elif name in per_token:
            columns[name] = _one_each(_values(feature[name], name, number), name, number, tokens)
    label = _label(feature, number, objective)
    if label is not None and objective != "documents":
        label = _one_each(label, "labels", number, tokens)
    if absent := [name for name in per_token if name not in columns]:
        raise ValueError(f"document {number} has no {_quote(absent)}, which per_token names; got {_quote(feature)}.")
    cut = {name: values[:longest] for name, values in columns.items()}
    if label is None:
        return cut
    return cut | {"labels": label if objective == "documents" else label[:longest]}


def labels_of_tokens(columns: Columns) -> Tensor:
    """The labels of a document that brings none: its input ids, -100 where a column of `LEARNED` is 0."""
    labels = columns["input_ids"].clone()
    for name in LEARNED:
        if name in columns:
            labels[columns[name] == 0] = IGNORED_LABEL
    return labels


def join(documents: Sequence[Columns], name: str) -> Tensor:
    """A column of all documents end to end."""
    values = [columns[name] for columns in documents]
    for number, one in enumerate(values):
        if one.shape[1:] != values[0].shape[1:]:
            raise ValueError(
                f"{name} has the shape {tuple(one.shape)} in document {number} and {tuple(values[0].shape)} in "
                "document 0; only the number of tokens may differ."
            )
        if _kind(one.dtype) != _kind(values[0].dtype):  # torch.cat makes float16 of both, where 70000 is infinite
            raise ValueError(
                f"{name} is {_name(one.dtype)} in document {number} and {_name(values[0].dtype)} in document 0; give "
                "every document values of one kind, bool, integers or floating point."
            )
    return torch.cat(values)


def join_labels_of_documents(documents: Sequence[Columns]) -> Tensor:
    """(documents,) labels, or (documents, ...) where each document has a row of them."""
    labels = [columns["labels"] for columns in documents]
    for number, one in enumerate(labels):
        if one.shape != labels[0].shape:
            raise ValueError(
                f"labels has the shape {tuple(one.shape)} in document {number} and {tuple(labels[0].shape)} in "
                "document 0; objective='documents' takes one label per document, or as many of each. For labels of "
                "tokens pass objective='tokens' or 'causal'."
            )
    return torch.stack(labels)


def require_same_columns(documents: Sequence[Columns]) -> None:
    """ValueError unless all documents have the columns of the first."""
    for number, columns in enumerate(documents):
        if lacking := sorted(documents[0].keys() ^ columns.keys()):
            name, (with_it, without) = lacking[0], (number, 0) if lacking[0] in columns else (0, number)
            raise ValueError(
                f"document {with_it} has {name!r} and document {without} hasn't; give every document the same columns."
            )


def _refuse_unknown(feature: Mapping[Any, Any], number: int, per_token: Sequence[str]) -> None:
    unknown = sorted(map(str, {name for name in feature if name not in _TAKEN and name not in per_token}))
    if not unknown:
        return
    start = f"document {number} has {_quote(unknown)}, which PackingCollator can't pack"
    if "seq_lengths" in unknown:
        raise ValueError(
            f"{start}: a row with seq_lengths holds several documents already. Pass the documents one by one, or use "
            "the collator of the library that packed them."
        )
    if made := [name for name in unknown if name in MADE]:
        raise ValueError(
            f"{start}: it makes {_quote(made)} from the documents' lengths. Remove them first (dataset.remove_columns)."
        )
    if any(name.startswith(_MEDIA) for name in unknown):
        raise ValueError(
            f"{start}: it packs tokens alone. Batch documents with images or sounds by the processor's own collator; a "
            "patched model takes such batches, too."
        )
    raise ValueError(
        f"{start}; it takes {_quote(_TAKEN)}. Name columns with one value per token in per_token=(...), and remove the "
        "others from the dataset first (dataset.remove_columns)."
    )


def _refuse_padding(mask: Tensor, tokens: int, number: int) -> None:
    if len(mask) != tokens or not bool((mask == 1).all()):
        raise ValueError(
            f"document {number} has an attention_mask that isn't 1 for each of its {tokens} tokens (length "
            f"{len(mask)}, sum {int(mask.sum())}); packing takes documents without padding. Tokenize with "
            "padding=False, or keep only the tokens whose mask is 1."
        )


def _require_mask(mask: Tensor, name: str, number: int) -> None:
    """ValueError unless a mask of the learned tokens holds 0 and 1 alone."""
    other = ((mask != 0) & (mask != 1)).nonzero()
    if len(other):
        place = int(other[0])
        raise ValueError(
            f"{name} of document {number} must hold 0 and 1 alone; got {int(mask[place])} at token {place}. Write 1 "
            "for the tokens that are learned and 0 for the others."
        )


def _label(feature: Mapping[str, Any], number: int, objective: Objective) -> Tensor | None:
    """The labels of a document under any of their names, as a tensor."""
    given = [name for name in LABELS if name in feature]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"document {number} has {_quote(given)}, which all name its labels; keep one of them.")
    values, name = feature[given[0]], given[0]
    if objective == "documents":
        label = _tensor(values, name, number, "a number, or a row of numbers")
        return label.to(torch.int64) if label.dtype == torch.bool else label
    if _tensor(values, name, number, "a row of integers").ndim == 0:
        raise ValueError(
            f"{name} of document {number} is {values!r}, one number, and objective={objective!r} takes one for every "
            "token. Pass objective='documents' for a head that scores whole documents."
        )
    return _integers(values, name, number)


def _one_each(values: Tensor, name: str, number: int, tokens: int) -> Tensor:
    if len(values) != tokens:
        more = f", {IGNORED_LABEL} to leave it out of the loss" if name == "labels" else ""
        raise ValueError(
            f"document {number} has {tokens} input_ids but {len(values)} {name}; give every token one value{more}."
        )
    return values


def _integers(values: Any, name: str, number: int, *, bools: bool = False) -> Tensor:
    """A row of integers as int64; an empty list is an empty tensor."""
    tensor = _tensor(values, name, number, "a row of integers")
    integer = not tensor.is_floating_point() and (bools or tensor.dtype != torch.bool)
    if tensor.ndim != 1 or (tensor.numel() and not integer):
        raise ValueError(f"{name} of document {number} must be a row of integers; got {_describe(tensor)}.")
    return tensor.to(torch.int64)


def _values(values: Any, name: str, number: int) -> Tensor:
    """Numbers with the tokens as their first dimension."""
    tensor = _tensor(values, name, number, "numbers, one or one row per token")
    if tensor.ndim == 0:
        raise ValueError(f"{name} of document {number} must be numbers, one or one row per token; got {values!r}.")
    return tensor


def _tensor(values: Any, name: str, number: int, expected: str) -> Tensor:
    """A tensor in host memory: int64 of any integers, bool, or floating point."""
    if isinstance(values, Tensor) and (values.layout != torch.strided or values.is_nested):
        raise ValueError(
            f"{name} of document {number} must be {expected}; got a tensor of layout {values.layout}. Pass "
            "tensor.to_dense(), or one tensor per document."
        )
    if isinstance(values, Tensor) and values.dtype == torch.uint64 and values.device.type == "cpu":
        values = values.numpy()  # torch has no maximum of these
    if isinstance(values, np.ndarray) and values.dtype.kind == "u" and values.size and int(values.max()) >= 2**63:
        raise ValueError(
            f"{name} of document {number} must be {expected} of up to 63 bits; got {int(values.max())}. Look for "
            "negative ids that were cast to an unsigned type."
        )
    try:
        tensor = torch.from_numpy(_readable(values)) if isinstance(values, np.ndarray) else torch.as_tensor(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name} of document {number} must be {expected}; got {values!r:.100}.") from error
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} of document {number} lies on {tensor.device}; collate in host memory and move the batch then."
        )
    if tensor.is_complex():
        raise ValueError(f"{name} of document {number} must be {expected}; got {_describe(tensor)}.")
    return tensor.detach() if tensor.is_floating_point() or tensor.dtype == torch.bool else tensor.to(torch.int64)


def _readable(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that torch reads, whose integers are int64: arrays may be read-only, unsigned, of another byte order."""
    if array.dtype.kind not in "iu":
        return array.astype(array.dtype.newbyteorder("="))
    return array.astype(np.int64)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating point"
    return "bool" if dtype == torch.bool else "integers"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} of shape {tuple(tensor.shape)}"


def _quote(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
