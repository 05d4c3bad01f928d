"""Cross-attention between documents of the decoder and of the encoder that belong together.

The n-th document of a row of the decoder belongs to the n-th document of the same row of the encoder. A query sees one
interval of the encoder's tokens, so cross-attention takes the same masks as self-attention (docs/math.md, section 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.patches.mask_spec import WHOLE_DOCUMENT
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving
from tritonpack.patches.parse_inputs import make_packed_batch

TELL_BOTH = (
    "Tell documents apart on both sides: the encoder's by a numbered attention_mask, cu_seq_lens_k, seq_idx or "
    "position_ids, the decoder's by a numbered decoder_attention_mask, cu_seq_lens_q, decoder_seq_idx or "
    "decoder_position_ids"
)


def cross_attention_mask(
    arguments: dict[str, Any], packed_batch: PackedBatch | None, names: list[str], serving: Serving
) -> IntervalMask:
    """The mask of a decoder's cross-attention.

    Args:
        arguments: of the decoder's forward; `encoder_attention_mask` may be a `PackedBatch`, or a mask (B, K) of
            integers, 0 for padding, that may number documents.
        packed_batch: the packing of the decoder's tokens; None if these continue a cache.
        names: the names of the arguments that the decoder takes.

    Raises:
        ValueError: a row has different numbers of documents on both sides, or their numbers differ.
        UnsupportedModelError: the decoder takes no such mask.
    """
    states, mask = arguments["encoder_hidden_states"], arguments.get("encoder_attention_mask")
    if isinstance(mask, IntervalMask):  # made for the module around this one, which was called first
        return mask
    if "encoder_attention_mask" not in names:
        raise UnsupportedModelError(
            "this decoder takes encoder_hidden_states and no encoder_attention_mask, so nothing can tell its "
            "cross-attention which documents belong together. Unpatch the model."
        )
    tokens = torch.Size(states.shape[:2])
    if not isinstance(mask, PackedBatch):
        if mask is not None and mask.ndim != 2:
            raise ValueError(
                f"encoder_attention_mask has shape {tuple(mask.shape)}; a patched model makes masks of more than two "
                "dimensions itself. Number documents in a mask of shape (batch, keys)."
            )
        mask = make_packed_batch({"attention_mask": mask}, tokens, states.device, serving)
    query = arguments.get("input_ids")
    query = arguments["inputs_embeds"] if query is None else query
    length = query.shape[1]
    shape = torch.Size((tokens[0], 1, length, tokens[1]))
    return IntervalMask(cross_mask(packed_batch, mask, length), shape, serving, None, WHOLE_DOCUMENT)


def cross_mask(queries: PackedBatch | None, keys: PackedBatch, length: int) -> BlockDiagonalMask:
    """The mask of `length` queries to a row: each sees the keys of the document that belongs to its own.

    Args:
        queries: the packing of the decoder; None if each row holds one document whose beginning is in a cache.
        keys: the packing of the encoder, with as many rows.
    """
    key_starts, key_live, key_number = _documents(keys)
    if queries is None:
        starts = torch.zeros((keys.tokens[0], length), dtype=torch.bool, device=keys.device)
        starts[:, 0] = True
        live, number = torch.ones_like(starts), torch.ones(starts.shape, dtype=torch.long, device=keys.device)
    else:
        starts, live, number = (x.to(keys.device) for x in _documents(queries))
    counts, key_counts = starts.sum(1), key_starts.sum(1)
    require(
        (counts == key_counts).all(),
        lambda: (
            f"{_mismatch(counts, key_counts)}. {TELL_BOTH}."
            if queries is not None
            else "a row that continues a cache must have one document on the encoder's side; "
            f"{_mismatch(counts, key_counts)}. Generate from one document to a row."
        ),
    )
    columns = length + keys.tokens[1] + 1  # more than any document's number
    row = torch.arange(keys.tokens[0], device=keys.device)[:, None] * columns
    wanted, had = (row + number).flatten(), (row + key_number).flatten()
    begin = torch.searchsorted(had, wanted)
    end = torch.searchsorted(had, wanted, right=True)  # past the padding that follows a document
    before = nn.functional.pad(key_live.flatten().cumsum(0), (1, 0))
    stop = begin + before[end] - before[begin]
    if queries is not None:
        _require_same_numbers(queries, keys, begin, live)
    start = torch.where(live.flatten(), begin, stop)
    return BlockDiagonalMask(start.to(torch.int32), stop.to(torch.int32), keys.tokens.numel())


def _documents(packed_batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Where documents begin and which tokens are not padding, (B, T) bool, and the number of each token's document in
    its row, (B, T) int64 from 1. Padding has the number of the document before it."""
    live = packed_batch.not_padding()
    starts = packed_batch.runs()[0] & live
    return starts, live, starts.cumsum(1)


def _mismatch(counts: Tensor, key_counts: Tensor) -> str:
    row = int((counts != key_counts).nonzero()[0])
    return f"row {row} has {int(counts[row])} documents in the decoder and {int(key_counts[row])} in the encoder"


def _require_same_numbers(queries: PackedBatch, keys: PackedBatch, begin: Tensor, live: Tensor) -> None:
    """If masks number the documents of both sides, require one number for documents that belong together."""
    masks = queries.attention_mask, keys.attention_mask
    if masks[0] is None or masks[1] is None:
        return
    numbers, key_numbers = masks[0].to(keys.device), masks[1].flatten()
    found = key_numbers[begin.clamp(max=key_numbers.shape[0] - 1)].view(numbers.shape)
    differ = (numbers != found) & live & (numbers.max() > 1) & (key_numbers.max() > 1)
    require(
        ~differ.any(),
        lambda: (
            f"document {int(numbers[differ][0])} of the decoder's mask would meet document {int(found[differ][0])} of "
            "the encoder's. Give both documents of a pair the same number, and every document a partner."
        ),
    )
