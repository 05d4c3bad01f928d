"""The mask of a call with cumulative offsets, built once for all layers that pass the same offsets.

A mask is kept as long as the tensor of query offsets lives, and used again if the call passes the same tensors,
unchanged. torch doesn't count some writes (see `_OUTDATED`), so values are compared, too: on the CPU a changed value
builds the mask again; on a GPU an assertion there stops the program.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from tritonpack.checks import require
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.bounds import is_capturing, outside_inference_mode

MASKS_PER_OFFSETS = 8  # with different windows or totals

_OUTDATED = (
    "cu_seqlens or seqused were overwritten since the last call in a way that torch doesn't count (a collective in "
    "place, .data, another library's kernel). Pass a new tensor for a new batch: cu_seqlens.clone()."
)

# Tensor of query offsets -> options and identities -> the mask, and a reference, the version and a copy of each tensor.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mask_from_offsets(
    cu_q: Tensor, cu_k: Tensor, used_q: Tensor | None = None, used_k: Tensor | None = None, **options: Any
) -> BlockDiagonalMask:
    """`BlockDiagonalMask.from_cu_seqlens` with its options and errors; the same object for the same offsets.

    `used_q` and `used_k`, (documents,) int32 or int64, say how many rows of each document are used, from its first;
    None means all. The other rows see nothing and aren't seen. The diagonal ends at the last used row.
    """
    roles = (cu_q, cu_k, used_q, used_k)
    tensors = list({id(x): x for x in roles if x is not None}.values())
    if not _keeps(cu_q.device) or any(type(x) is not Tensor or x.is_inference() for x in tensors):
        return _build(*roles, options)
    key, masks = (*options.items(), *map(id, roles)), _kept.setdefault(cu_q, {})
    mask, sources = masks.get(key, (None, []))
    if mask is None or not all(map(_is_unchanged, tensors, sources)):
        if len(masks) == MASKS_PER_OFFSETS:
            masks.clear()
        mask = _build(*roles, options)
        masks[key] = mask, [(weakref.ref(x), x._version, x.clone()) for x in tensors]
    return mask


def _is_unchanged(x: Tensor, source: tuple[weakref.ref[Tensor], int, Tensor]) -> bool:
    ref, version, value = source
    if ref() is not x or x._version != version or x.shape != value.shape:
        return False
    if x.device.type == "cpu":
        return torch.equal(value, x)
    require((value == x).all(), _OUTDATED)
    return True


def regular_offsets(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """(batch + 1,) int32, the offsets of rows of one length; the same tensor for the same arguments."""
    return (_offsets if _keeps(device) else _offsets.__wrapped__)(batch, seqlen, device)


@lru_cache(maxsize=16)
def _offsets(batch: int, seqlen: int, device: torch.device) -> Tensor:
    return outside_inference_mode(lambda: torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen)


def _keeps(device: torch.device) -> bool:
    """Return whether tensors may be kept for later calls: no tracer runs and no CUDA graph is captured."""
    traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    return not traced and device.type in ("cpu", "cuda") and not is_capturing(device)


def _build(cu_q: Tensor, cu_k: Tensor, used_q: Any, used_k: Any, options: dict[str, Any]) -> BlockDiagonalMask:
    if used_q is None and used_k is None:
        return BlockDiagonalMask.from_cu_seqlens(cu_q, None if cu_k is cu_q else cu_k, **options)
    # Each document becomes three: its used rows, the other queries without keys, the other keys without queries.
    stop_q, stop_k = _used_stop(cu_q, used_q, "seqused_q"), _used_stop(cu_k, used_k, "seqused_k")
    pieces_q = torch.cat([torch.stack([cu_q[:-1], stop_q, cu_q[1:]], 1).flatten(), cu_q[-1:]])
    pieces_k = torch.cat([torch.stack([cu_k[:-1], stop_k, stop_k], 1).flatten(), cu_k[-1:]])
    return BlockDiagonalMask.from_cu_seqlens(pieces_q, pieces_k, **options)


def _used_stop(cu: Tensor, used: Tensor | None, name: str) -> Tensor:
    """The end of the used rows of each document."""
    if used is None:
        return cu[1:]
    message = f"{name} must hold a number for each document, from 0 to the document's length."
    if used.shape[0] != cu.shape[0] - 1:
        raise ValueError(message)
    require(((used >= 0) & (used <= cu.diff())).all(), message)
    return (cu[:-1] + used).to(cu.dtype)
