"""PackingCollator: makes one row of tokenized documents, and the boundaries that keep them apart."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from tritonpack import notices
from tritonpack.checks import check_choice
from tritonpack.packing.columns import (
    IGNORED_LABEL,
    PER_TOKEN,
    Columns,
    Objective,
    join,
    join_labels_of_documents,
    labels_of_tokens,
    per_token_names,
    read_feature,
    require_same_columns,
)
from tritonpack.packing.documents import NumberedDocuments, is_iterable
from tritonpack.packing.lengths import check_integer, check_limit


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

    A classifier of documents gets one label for each:

    >>> documents = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8, 9], "label": 0}]
    >>> PackingCollator(objective="documents")(documents)["labels"].tolist()
    [1, 0]

    A feature may be a row of several documents, as `pack_dataset` and TRL make it. The batch is that of
    the single documents:

    >>> row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    >>> PackingCollator()([row])["labels"].tolist()
    [[-100, 6, 7, -100, 9]]

    The columns that it takes; it refuses all others by name:

    | column | in the batch |
    |---|---|
    | `input_ids` | the same |
    | `labels`, `label` or `label_ids` | `labels`, see `objective` |
    | `token_type_ids`, `mm_token_type_ids`, `special_tokens_mask` and the columns in `per_token` | the same |
    | `completion_mask`, `assistant_masks` | the same; labels of tokens are -100 where it is 0. Labels that aren't a \
copy of the input ids must be -100 there already, but for the first token of a causal model's document. transformers' \
Trainer removes both columns first unless `remove_unused_columns=False` |
    | `attention_mask` | left out; it must be 1 everywhere |
    | `seq_lengths` | the lengths of the documents of a row |
    | `position_ids` | made; given ones must count from 0 in each document, and say where the documents of a row begin |
    | `length` | left out |

    Attributes:
        pad_to_multiple_of: pad the row to a multiple of this many tokens; None adds no padding. Padding is one more
            document (positions from 0, labels -100, its own offset), so no other document sees it. The batch then has
            an `attention_mask`, 0 for padding. With that mask transformers' own FlashAttention doesn't keep documents
            apart; a patched model does.
        pad_token_id: the token of the padding, required with `pad_to_multiple_of`.
        objective: what a label belongs to. "causal": the next token. Labels are made from the input ids if no document
            of the batch has any. "tokens": the token itself, for masked language models, token classification and
            encoders with decoders. All labels are kept, and none are made. "documents": the whole document, one number
            or a row of numbers each.
        max_document_length: the number of tokens that are kept of each document, in all columns; None keeps all.
        per_token: further columns with one value, or one row of values, per token: (1, T, ...) in the batch. Every
            document must have them. Padding is 0 in them.

    Raises:
        ValueError: a wrong setting, or one of `pad_to_multiple_of` and `pad_token_id` without the other.
    """

    pad_to_multiple_of: int | None = None
    pad_token_id: int | None = None
    objective: Objective = "causal"
    max_document_length: int | None = None
    per_token: Collection[str] = ()

    def __post_init__(self) -> None:
        multiple, token = self.pad_to_multiple_of, self.pad_token_id
        check_limit(multiple, "pad_to_multiple_of")
        check_limit(self.max_document_length, "max_document_length")
        if token is not None:
            check_integer(token, "pad_token_id", 0)
        if (multiple is None) != (token is None):
            raise ValueError(
                "pad_to_multiple_of and pad_token_id go together: pass both to pad the row, or neither; got "
                f"pad_to_multiple_of={multiple} and pad_token_id={token}."
            )
        check_choice(self.objective, get_args(Objective), "objective")
        object.__setattr__(self, "per_token", per_token_names(self.per_token))

    def __call__(self, features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> dict[str, Tensor | int]:
        """Collate one batch.

        Args:
            features: one mapping per document, with the columns of the table above. `input_ids`, masks and labels of
                tokens are one-dimensional lists, arrays or tensors of integers. A feature may also be a list of such
                mappings, as an item of PackedDataset is, or a row of documents with `seq_lengths`, `position_ids` or
                both.

        Returns:
            For T tokens, on the CPU: `input_ids` and `position_ids` (1, T) int64, positions restarting at 0;
            `labels` (1, T) int64, or under "documents" (documents, ...); `seq_idx` (1, T) int32, the document of each
            token; `cu_seq_lens_q` and `cu_seq_lens_k` (documents + 1,) int32, the start of each document, and T;
            `max_length_q` and `max_length_k`, ints, the length of the longest document; with `pad_to_multiple_of` also
            `attention_mask` (1, T) int64; further columns (1, T, ...), integers as int64.

        Raises:
            ValueError: no features, a column that can't be packed or that some documents don't have, a document that
                is empty, isn't a row of integers, has a negative token or padding, labels of another length, or labels
                that contradict a mask.
        """
        return self._collate(features, type(self).__name__)

    def _collate(self, features: Any, name: str) -> dict[str, Tensor | int]:
        """What a call returns, for a collator of this name, which messages say."""
        documents, numbers = self._read(features, name)
        _warn_if_unpatched(name, len(documents), padded=self.pad_to_multiple_of is not None)
        batch: dict[str, Tensor | int] = {}
        if self.objective == "documents" and "labels" in documents[0]:
            batch["labels"] = join_labels_of_documents([columns.pop("labels") for columns in documents], numbers)
        if self.pad_to_multiple_of is not None:
            tokens = sum(len(columns["input_ids"]) for columns in documents)
            padding = -tokens % self.pad_to_multiple_of
            batch["attention_mask"] = (torch.arange(tokens + padding, device="cpu") < tokens).to(torch.int64)[None]
            if padding:
                filling: dict[str, Any] = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL, **PER_TOKEN}
                numbers.append(-1)  # has no fault that a message could name
                documents.append(
                    {
                        name: values.new_full((padding, *values.shape[1:]), filling.get(name, 0))
                        for name, values in documents[0].items()
                    }
                )
        rows = {name: join(documents, name, numbers) for name in documents[0]}
        lengths = torch.tensor([len(columns["input_ids"]) for columns in documents], device="cpu")
        if self.objective == "causal":
            rows["labels"][lengths.cumsum(0) - lengths] = IGNORED_LABEL
        return batch | {name: row[None] for name, row in rows.items()} | _boundaries(lengths)

    def _read(self, features: Any, name: str) -> tuple[list[Columns], list[int | str]]:
        """The columns of all documents, checked, with labels; and the numbers of their features, for messages."""
        whole = documents_of(features, name)
        known = features.names() if isinstance(features, NumberedDocuments) else range(len(whole))
        documents: list[Columns] = []
        numbers: list[int | str] = []
        for number, feature in zip(known, whole, strict=True):
            documents += read_feature(feature, number, self.objective, tuple(self.per_token), self.max_document_length)
            numbers += [number] * (len(documents) - len(numbers))
        require_same_columns(documents, numbers)
        if self.objective == "causal" and "labels" not in documents[0]:
            documents = [columns | {"labels": labels_of_tokens(columns)} for columns in documents]
        return documents, numbers


def _boundaries(lengths: Tensor) -> dict[str, Tensor | int]:
    """The boundaries of documents of these lengths, in each form that models read."""
    total = int(lengths.sum())
    if total >= 2**31:
        raise ValueError(f"a row holds at most 2**31 - 1 tokens; got {total}. Pass fewer documents.")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    cu_seq_lens = offsets.to(torch.int32)
    return {
        "position_ids": (torch.arange(total, device="cpu") - offsets[seq_idx])[None],
        "seq_idx": seq_idx.to(torch.int32)[None],
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }


def documents_of(features: Any, collator: str) -> list[Any]:
    """The documents of features, each a document or a list of documents; at least one.

    Raises:
        ValueError: features that aren't a list, or hold nothing; the message names the collator.
    """
    if not is_iterable(features):
        raise ValueError(
            f"{collator} takes a list of documents, each a mapping with 'input_ids', or of bins; got "
            f"{type(features).__name__}. Put a single document into a list. Take documents from a dataset one by "
            "one, [dataset[i] for i in range(8)], not as dataset[:8]."
        )
    whole: list[Any] = []
    for feature in features:
        is_bin = isinstance(feature, (list, tuple)) and all(isinstance(document, Mapping) for document in feature)
        whole.extend(feature if is_bin else [feature])
    if not whole:
        raise ValueError(f"{collator} needs at least one document; got an empty list of features.")
    return whole


def may_lack_a_patch() -> bool:
    """Whether transformers' models are imported but none is patched in this process."""
    if notices.patched_models or "transformers.modeling_utils" not in sys.modules:
        return False
    return notices.knows_patched_models()


def _warn_if_unpatched(name: str, documents: int, *, padded: bool) -> None:
    """Warn if several documents share a row, and transformers' models are imported but none is patched."""
    if documents < 2 or not may_lack_a_patch():
        return
    flash = "don't, because of the attention_mask that pad_to_multiple_of adds" if padded else "do so, too"
    notices.say_once(
        "unpatched-model",
        f"{name} laid {documents} documents into one row, and no model is patched in this process. Most "
        "models then let the documents see each other. Call tritonpack.patch(model) before the first batch. A patched "
        "model keeps documents apart. transformers' FlashAttention implementations, which read position_ids in "
        f"training, {flash}.",
    )
