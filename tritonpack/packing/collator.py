"""PackingCollator: makes one row of tokenized documents, and the boundaries that keep them apart."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonpack import notices
from tritonpack.packing.columns import (
    IGNORED_LABEL,
    LABELS,
    MADE,
    MASK,
    PER_TOKEN,
    TAKEN,
    TOKENS,
    Named,
    Objective,
    check_names,
    check_objective,
    join,
    masked_labels,
    read_feature,
    read_features,
)
from tritonpack.packing.lengths import check_integer


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

    A feature may be a row of several documents, as `pack_dataset` and TRL make it. The batch is that of
    the single documents:

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
        check_objective(self.objective, "objective")
        check_names(self.per_token, "per_token", {*TAKEN, *MADE})

    def __call__(self, features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> dict[str, Tensor | int]:
        """Collate one batch.

        Args:
            features: one mapping per document, with the columns of the table above. `input_ids`, masks and labels of
                tokens are one-dimensional lists, arrays or tensors of integers. A feature may also be a list of such
                mappings, or a row of documents with `seq_lengths`, `position_ids` or
                both.

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
            documents,
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


def warn_if_unpatched(documents: Sized, key: str, message: str) -> None:
    """Warn once if documents share a row, and transformers' models are imported and none is patched here."""
    known = "transformers.modeling_utils" in sys.modules and not notices.patched_models
    if len(documents) > 1 and known and notices.knows_patched_models():
        notices.say_once(key, message)
