"""AttentionOptions: the checked parameters of attention besides q, k, v and the mask, as every backend takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonpack.checks import check_flag, describe, is_number, require
from tritonpack.masks.block_diagonal import BlockDiagonalMask


@dataclass(frozen=True)
class AttentionOptions:
    """The parameters of attention besides q, k, v and the mask (docs/math.md, section 6).

    Attributes:
        scale: the factor by which products of queries and keys are multiplied.
        softcap: scores become softcap * tanh(score / softcap); 0 means no cap.
        sinks: (H,) float32 (float64 with float64 inputs), the score of a key without a value, which every query of the
            head sees; None for no sinks. Differentiable.
        alibi_slopes: (T_q, H) or (1, H) float32 (float64 with float64 inputs); a score loses the slope times the
            distance of the key from its query. None for no ALiBi.
        dropout_p: the probability that a pair's weight is dropped.
        dropout_seed: () int64 on the inputs' device; it and (head, query, key) decide which pairs are dropped.
        pack_invariant: whether a document must have the same bits in every pack.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None
    pack_invariant: bool = False


def make_options(
    q: Tensor,
    mask: BlockDiagonalMask,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    pack_invariant: bool = False,
) -> AttentionOptions:
    """Check the options of `varlen_attention` and convert them for backends.

    Raises:
        ValueError: a value out of range, a wrong shape, dtype or device, or options that exclude each other.
    """
    check_flag(pack_invariant, "pack_invariant")
    if scale is not None and not (is_number(scale) and 0.0 < scale < math.inf):
        raise ValueError(
            f"scale must be a positive finite int or float, or None for 1/sqrt(head_dim); got {scale!r}. float() "
            "converts other numbers."
        )
    if not is_number(softcap) or not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a finite int or float above 0, or 0.0 for none; got {softcap!r}.")
    if not is_number(dropout_p) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be an int or float from 0 to below 1; got {dropout_p!r}.")
    if pack_invariant and dropout_p:
        raise ValueError(
            "pack_invariant=True and dropout exclude each other, because dropped pairs depend on the place of a "
            "document in the pack. Set dropout_p=0.0 or pack_invariant=False."
        )
    if pack_invariant and mask.is_tree:
        raise ValueError(
            "pack_invariant=True doesn't work in a mask of trees, whose blocks of keys begin at fixed places of the "
            "stream. Set pack_invariant=False, or compute each path as a document."
        )
    return AttentionOptions(
        scale=1.0 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        softcap=float(softcap),
        sinks=None if sinks is None else _sinks(sinks, q),
        alibi_slopes=None if alibi_slopes is None else _slopes(alibi_slopes, q, mask),
        dropout_p=float(dropout_p),
        dropout_seed=_seed(dropout_seed, q) if dropout_p or dropout_seed is not None else None,
        pack_invariant=pack_invariant,
    )


def _sinks(sinks: Tensor, q: Tensor) -> Tensor:
    if not isinstance(sinks, Tensor) or sinks.shape != (q.shape[1],) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be a floating-point tensor of shape (heads,) = ({q.shape[1]},); got {describe(sinks)}."
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks are on {sinks.device} and q on {q.device}; move them together.")
    return _widened(sinks, q, "sinks")


def _widened(values: Tensor, q: Tensor, name: str) -> Tensor:
    """Return values in the dtype of scores: float32, or float64 for float64 inputs."""
    wide = torch.promote_types(q.dtype, torch.float32)
    if torch.promote_types(values.dtype, wide) != wide:
        dtype, allowed = (str(dtype).removeprefix("torch.") for dtype in (values.dtype, wide))
        raise ValueError(
            f"{name} of {dtype} don't fit {str(q.dtype).removeprefix('torch.')} inputs; cast them to {allowed}."
        )
    return values.to(wide)


def _slopes(slopes: Tensor, q: Tensor, mask: BlockDiagonalMask) -> Tensor:
    heads = q.shape[1]
    if not isinstance(slopes, Tensor) or slopes.ndim not in (1, 2) or slopes.shape[-1] != heads:
        raise ValueError(
            f"alibi_slopes must be a tensor of shape (heads,) or (documents, heads) with {heads} heads; got "
            f"{describe(slopes)}."
        )
    if slopes.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"alibi_slopes must be float32; got {describe(slopes)}.")
    slopes = _widened(slopes, q, "alibi_slopes")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes are on {slopes.device} and q on {q.device}; move them together.")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient; pass alibi_slopes.detach().")
    if mask.diagonal is None:
        raise ValueError(
            "alibi_slopes need a mask with distances, but this mask has no diagonal: it is a transpose, or was built "
            "without one. Use a mask from a from_* constructor."
        )
    if slopes.ndim == 1:
        return slopes[None]
    if mask.document is None:
        raise ValueError("alibi_slopes per document need a mask that numbers its documents; pass one slope per head.")
    if mask.max_documents is not None and slopes.shape[0] > mask.max_documents:
        raise ValueError(f"alibi_slopes are for {slopes.shape[0]} documents, but the mask has {mask.max_documents}.")
    require(
        (mask.document < slopes.shape[0]).all(),
        lambda: f"alibi_slopes are for {slopes.shape[0]} documents, but the mask has more; pass a row per document.",
    )
    return slopes[mask.document]


def _seed(seed: int | Tensor | None, q: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(2**62, (), device=q.device)
    if isinstance(seed, Tensor):
        if seed.shape != () or seed.dtype != torch.int64 or seed.device != q.device:
            raise ValueError(f"dropout_seed must be an int64 scalar on {q.device}; got {describe(seed)}.")
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(
            f"dropout_seed must be an integer from 0 to 2**63 - 1, or None for torch's generator; got {seed!r}."
        )
    return torch.full((), seed, dtype=torch.int64, device=q.device)
