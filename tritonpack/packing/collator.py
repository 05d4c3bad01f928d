"""PackingCollator: tokenized documents into one flat row, with everything a packed model needs to keep them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100  # what transformers and torch's cross_entropy leave out of the loss
_KEYS = ("input_ids", "labels", "attention_mask")
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class PackingCollator:
    """Lay documents end to end in one row, without padding; for transformers.Trainer or any DataLoader.

    Each document's first label is -100, because the token before it belongs to another document; so the loss is the
    mean over the same predicted tokens as for a padded batch. `num_items_in_batch`, by which Trainer weighs
    accumulated batches, counts them rightly.

    >>> batch = PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [-100, 9]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
    >>> batch["position_ids"].tolist(), batch["seq_idx"].tolist()
    ([[0, 1, 2, 0, 1]], [[0, 0, 0, 1, 1]])
    >>> batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
    ([0, 3, 5], 3)

    Attributes:
        pad_to_multiple_of: pad the row to a multiple of this many tokens; None leaves it as it is. Padding is one more
            document (positions from 0, labels -100, its own offset), so it mixes with no other.
        pad_token_id: the token that padding is made of; needed with `pad_to_multiple_of`.

    Raises:
        ValueError: `pad_to_multiple_of` that isn't a positive integer, or one of the two settings without the other.
    """

    pad_to_multiple_of: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        multiple, token = self.pad_to_multiple_of, self.pad_token_id
        if multiple is not None and (not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1):
            raise ValueError(f"pad_to_multiple_of must be a positive integer or None; got {multiple!r}.")
        if (multiple is None) != (token is None):
            raise ValueError(
                "pad_to_multiple_of and pad_token_id go together: pass both to pad the row, or neither; got "
                f"pad_to_multiple_of={multiple} and pad_token_id={token}."
            )

    def __call__(self, features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> dict[str, Tensor | int]:
        """Collate one batch.

        Args:
            features: one mapping per document: `input_ids`, optionally `labels` of the same length (default: the
                input ids) and an `attention_mask` of ones. Each is a one-dimensional list, array or tensor of integers.
                Lists of such mappings, which is what PackedDataset calls a bin, are laid end to end in the same row.

        Returns:
            For T tokens in all, on the CPU: `input_ids`, `labels` and `position_ids` (1, T) int64, positions
            restarting at 0; `seq_idx` (1, T) int32, each token's document; `cu_seq_lens_q` and `cu_seq_lens_k`
            (documents + 1,) int32, where documents begin and, last, T; `max_length_q` and `max_length_k`, Python ints,
            the longest document.

        Raises:
            ValueError: no features, a key that can't be packed, a document that is empty, isn't a row of integers or
                holds padding, labels of another length. Nothing is dropped.
        """
        whole: list[Any] = []
        for feature in features:
            whole.extend(feature if _is_bin(feature) else [feature])
        if not whole:
            raise ValueError("PackingCollator needs at least one document; got an empty list of features.")
        documents = [_document(feature, number) for number, feature in enumerate(whole)]
        token_rows = [ids for ids, _ in documents]
        label_rows = [labels for _, labels in documents]
        padding = -sum(map(len, token_rows)) % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if padding:
            assert self.pad_token_id is not None
            token_rows.append(torch.full((padding,), self.pad_token_id, dtype=torch.int64))
            label_rows.append(torch.full((padding,), IGNORED_LABEL, dtype=torch.int64))

        lengths = torch.tensor([len(row) for row in token_rows])
        if int(lengths.sum()) >= 2**31:
            raise ValueError(f"a row holds at most 2**31 - 1 tokens; got {int(lengths.sum())}. Pass fewer documents.")
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        labels = torch.cat(label_rows)
        labels[offsets[:-1]] = IGNORED_LABEL
        seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        cu_seq_lens = offsets.to(torch.int32)
        return {
            "input_ids": torch.cat(token_rows)[None],
            "labels": labels[None],
            "position_ids": (torch.arange(len(labels)) - offsets[seq_idx])[None],
            "seq_idx": seq_idx.to(torch.int32)[None],
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens,
            "max_length_q": int(lengths.max()),
            "max_length_k": int(lengths.max()),
        }


def _is_bin(feature: Any) -> bool:
    return isinstance(feature, (list, tuple)) and all(isinstance(document, Mapping) for document in feature)


def _document(feature: Mapping[str, Any], number: int) -> tuple[Tensor, Tensor]:
    """input_ids and labels of one feature, checked."""
    if not isinstance(feature, Mapping) or "input_ids" not in feature:
        given = f"the keys {sorted(feature)}" if isinstance(feature, Mapping) else type(feature).__name__
        raise ValueError(f"document {number} must be a mapping with 'input_ids'; got {given}. Tokenize the text first.")
    unknown = sorted(set(feature) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"document {number} has {_quote(unknown)}, which PackingCollator can't pack; it takes {_quote(_KEYS)}. "
            "Remove the others from the dataset first (dataset.remove_columns)."
        )
    input_ids = _integers(feature["input_ids"], "input_ids", number)
    if len(input_ids) == 0:
        raise ValueError(
            f"document {number} is empty; every document needs at least one token. Filter empty ones out first."
        )
    labels = _integers(feature["labels"], "labels", number) if "labels" in feature else input_ids
    if len(labels) != len(input_ids):
        raise ValueError(
            f"document {number} has {len(input_ids)} input_ids but {len(labels)} labels; give every token one label, "
            f"{IGNORED_LABEL} to leave it out of the loss."
        )
    if "attention_mask" in feature:
        mask = _integers(feature["attention_mask"], "attention_mask", number)
        if len(mask) != len(input_ids) or not bool((mask == 1).all()):
            raise ValueError(
                f"document {number} has an attention_mask that isn't 1 for each of its {len(input_ids)} tokens (length "
                f"{len(mask)}, sum {int(mask.sum())}); packing takes documents without padding. Tokenize with "
                "padding=False, or keep only the tokens whose mask is 1."
            )
    return input_ids, labels


def _integers(values: Any, name: str, number: int) -> Tensor:
    """Values as a one-dimensional int64 tensor in host memory; an empty list is an empty tensor."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} of document {number} must be a row of integers; got {values!r:.100}.") from error
    if tensor.ndim != 1 or (tensor.numel() and tensor.dtype not in _INTEGER_DTYPES):
        raise ValueError(
            f"{name} of document {number} must be a row of integers; got {str(tensor.dtype).removeprefix('torch.')} of "
            f"shape {tuple(tensor.shape)}."
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} of document {number} lies on {tensor.device}; collate in host memory and move the batch then."
        )
    return tensor.to(torch.int64)


def _quote(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
