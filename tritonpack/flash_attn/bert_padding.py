"""Padded rows to a packed stream and back, with the names of `flash_attn.bert_padding`, in differentiable torch.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/bert_padding.py, version 2.8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.checks import MASKS, describe, is_length, plain_int, require

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of `input` (rows, ...) at `indices` (n,): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with `values` (n, ...) in the rows `indices` (n,)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch as one stream; waits for the device, which counts them.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or integers, 1 for tokens and 0 for padding.
        unused_mask: (batch, seqlen), 1 for places that are kept but don't count.

    Returns:
        hidden_states (total, ...); the indices (total,) of its rows in the flattened batch; cu_seqlens (batch + 1,)
        int32; the length of the longest row, an integer; and the tokens of each row that count, (batch,) int32.

    Raises:
        ValueError: other shapes, dtypes or numbers.
    """
    shape = getattr(hidden_states, "shape", ())[:2]
    if len(shape) < 2:
        raise ValueError(f"hidden_states must be a tensor (batch, seqlen, ...); got {describe(hidden_states)}.")
    for name, mask in {"unused_mask": unused_mask, "attention_mask": attention_mask}.items():
        if mask is None and name == "unused_mask":
            continue
        if not isinstance(mask, Tensor) or mask.shape != shape or mask.dtype not in MASKS:
            raise ValueError(f"{name} must be a bool or integer tensor {tuple(shape)}; got {describe(mask)}.")
        require(
            ((mask == 0) | (mask == 1)).all(),
            f"{name} must hold 0 and 1; other numbers tell no documents apart here. Lay documents end to end and pass "
            "their cu_seqlens instead.",
        )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()) if lengths.numel() else 0,
        attention_mask.sum(-1, dtype=torch.int32),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) of a stream (total, ...) from `unpad_input`, with zeros for padding.

    Raises:
        ValueError: indices that don't fit; on an accelerator an assertion checks them.
    """
    tensors = all(isinstance(x, Tensor) and x.ndim for x in (hidden_states, indices))
    fits = tensors and indices.shape == hidden_states.shape[:1] and indices.dtype == torch.int64
    if not fits or not all(is_length(plain_int(size)) for size in (batch, seqlen)):
        raise ValueError(
            "pad_input takes hidden_states (total, ...), int64 indices (total,), and integers batch and seqlen; got "
            f"{describe(hidden_states)}, {describe(indices)}, {describe(batch)} and {describe(seqlen)}."
        )
    require(
        ((indices >= 0) & (indices < batch * seqlen)).all(),
        lambda: f"indices must lie in 0..{batch * seqlen - 1}, the places of {batch} x {seqlen}.",
    )
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
