"""The backend "gluon": experimental kernels for Hopper; `auto` never chooses it.

It supports 16-bit types, head dimensions 64, 128 and 256, and plain softmax. At head dimension 256 the Triton backend
computes the gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonpack.backends import triton as triton_backend
from tritonpack.backends.launch import launch
from tritonpack.backends.tile_table import Cut, TileTables, tile_tables
from tritonpack.backends.triton import aligned, descriptor, plan_cuts
from tritonpack.errors import BackendUnavailableError
from tritonpack.kernels.hopper import HOPPER_TILES, HopperTileShape, hopper_forward_kernel
from tritonpack.kernels.hopper_dkdv import HOPPER_DKDV_TILES, HopperDkdvTileShape, hopper_dkdv_kernel
from tritonpack.kernels.hopper_dq import HOPPER_DQ_TILES, HopperDqTileShape, hopper_dq_kernel
from tritonpack.kernels.hopper_primitives import ROWS
from tritonpack.kernels.primitives import LOG2E
from tritonpack.kernels.tile_shapes import heads_per_tile
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions

__all__ = ["backward", "check_device", "forward", "plan_tiles"]


def check_device(q: Tensor) -> None:
    """Refuse tensors that aren't on a Hopper GPU; `plan_tiles` refuses dtypes, sizes and options."""
    hopper = q.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(q.device) == (9, 0)
    if not hopper:
        name = torch.cuda.get_device_name(q.device) if q.is_cuda else str(q.device)
        raise BackendUnavailableError(
            f"backend='gluon' needs tensors on a Hopper GPU (sm_90), and has no interpreter; got {name}. Use "
            "backend='auto'."
        )


def plan_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
) -> TileTables:
    """Make the tile tables of all kernels; without `backward` only the table of forward.

    Raises:
        BackendUnavailableError: (a ValueError) a dtype, a head dimension or an option that the kernels don't support.
    """
    _check(q, v, options)
    if mask.is_tree:
        raise BackendUnavailableError("backend='gluon' doesn't support masks of trees; use backend='triton' or 'auto'.")
    head_dim, rows = q.shape[2], 2 * ROWS.value
    tile = HOPPER_TILES[head_dim]
    tokens = rows // heads_per_tile(tile, q.shape[1] // k.shape[1])
    forward_cut = Cut(tokens, tile.block_n, rows)
    if not backward or head_dim not in HOPPER_DQ_TILES:
        return plan_cuts(q, k, v, mask, options, forward_cut, backward=backward)
    dkdv_cut = Cut(rows, HOPPER_DKDV_TILES[head_dim].block_m, of_keys=True)
    dq_cut = Cut(rows, HOPPER_DQ_TILES[head_dim].block_n)
    return TileTables(*tile_tables(mask, forward_cut, dkdv_cut, dq_cut, whole_documents=options.pack_invariant))


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables
) -> tuple[Tensor, Tensor]:
    """Compute out (T_q, H, D) in q's dtype and lse (H, T_q) float32; `tiles` are from `plan_tiles`."""
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    if not q.shape[0] or not k.shape[0]:
        return out.zero_(), lse.fill_(float("-inf"))
    assert tiles.forward is not None
    tile, transposed = HOPPER_TILES[q.shape[2]], mask.transpose()
    heads = heads_per_tile(tile, q.shape[1] // k.shape[1])
    num_tiles, head_blocks = tiles.forward.shape[0], q.shape[1] // heads
    q, k, v = aligned(q), aligned(k), aligned(v)
    half_heads = max(heads // 2, 1)  # heads of half a tile
    arguments = {
        "q_desc": _swizzled(q, ROWS.value // half_heads, half_heads),
        "k_desc": _swizzled(k, tile.block_n),
        "v_desc": _swizzled(v, tile.block_n),
        "v_ptr": v,
        "out_ptr": out,
        "lse_ptr": lse,
        "tiles_ptr": tiles.forward,
        "key_start_ptr": mask.key_start,
        "key_stop_ptr": mask.key_stop,
        "query_start_ptr": transposed.key_start,
        "query_stop_ptr": transposed.key_stop,
        "stride_vt": v.stride(0),
        "stride_vh": v.stride(1),
        "stride_ot": out.stride(0),
        "stride_oh": out.stride(1),
        "num_tiles": num_tiles,
        "head_blocks": head_blocks,
        "num_queries": q.shape[0],
        "scale_log2": options.scale * LOG2E.value,
    }
    constants = {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": heads,
        "BLOCK_N": tile.block_n,
        "TURNS": tile.turns,
        **_constants(q, tile),
    }
    with torch.cuda.device_of(q):
        programs = min(num_tiles * head_blocks, _multiprocessors(q.device))
        launch(hopper_forward_kernel, programs, arguments, constants)
    return out, lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockDiagonalMask,
    options: AttentionOptions,
    tiles: TileTables,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute (dq, dk, dv, None) in the shapes and dtypes of q, k, v.

    It allocates 8 more bytes per query row and head. The Triton backend computes head dimension 256.
    """
    if q.shape[2] not in HOPPER_DQ_TILES or not q.shape[0] or not k.shape[0]:
        return triton_backend.backward(dout, dlse, q, k, v, out, lse, mask, options, tiles)
    assert tiles.keys is not None
    assert tiles.queries is not None
    assert lse.is_contiguous(), "the kernel takes no strides of lse"
    assert out.stride(2) == 1, "the kernel takes no stride of the columns of out"
    (num_queries, heads, head_dim), kv_heads = q.shape, k.shape[1]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    q, k, v, dout = aligned(q), aligned(k), aligned(v), aligned(dout)
    dq_tile, dkdv_tile, transposed = HOPPER_DQ_TILES[head_dim], HOPPER_DKDV_TILES[head_dim], mask.transpose()
    lse2, delta = (torch.empty(heads, num_queries, dtype=torch.float32, device=q.device) for _ in range(2))
    common = {
        "lse2_ptr": lse2,
        "delta_ptr": delta,
        "key_start_ptr": mask.key_start,
        "key_stop_ptr": mask.key_stop,
        "query_start_ptr": transposed.key_start,
        "query_stop_ptr": transposed.key_stop,
        "num_queries": num_queries,
        "scale": options.scale,
        "scale_log2": options.scale * LOG2E.value,
    }
    group = {"GROUP": heads // kv_heads}
    with torch.cuda.device_of(q):
        arguments = {
            "q_desc": _swizzled(q, ROWS.value),
            "k_desc": _swizzled(k, dq_tile.block_n),
            "v_desc": _swizzled(v, dq_tile.block_n),
            "dout_desc": _swizzled(dout, ROWS.value),
            "k_ptr": k,
            "v_ptr": v,
            "out_ptr": out,
            "lse_ptr": lse,
            "dlse_ptr": dlse,
            "dq_ptr": dq,
            "tiles_ptr": tiles.queries,
            "stride_kt": k.stride(0),
            "stride_kh": k.stride(1),
            "stride_vt": v.stride(0),
            "stride_vh": v.stride(1),
            "stride_ot": out.stride(0),
            "stride_oh": out.stride(1),
            "stride_dlh": 0 if dlse is None else dlse.stride(0),
            "stride_dlt": 0 if dlse is None else dlse.stride(1),
            "stride_dqt": dq.stride(0),
            "stride_dqh": dq.stride(1),
            "num_heads": heads,
            **common,
        }
        constants = {**group, "BLOCK_N": dq_tile.block_n, **_constants(q, dq_tile)}
        launch(hopper_dq_kernel, heads * tiles.queries.shape[0], arguments, constants)
        arguments = {
            "q_desc": _swizzled(q, dkdv_tile.block_m),
            "k_desc": _swizzled(k, ROWS.value),
            "v_desc": _swizzled(v, ROWS.value),
            "dout_desc": _swizzled(dout, dkdv_tile.block_m),
            "q_ptr": q,
            "dout_ptr": dout,
            "dk_ptr": dk,
            "dv_ptr": dv,
            "tiles_ptr": tiles.keys,
            "stride_qt": q.stride(0),
            "stride_qh": q.stride(1),
            "stride_dot": dout.stride(0),
            "stride_doh": dout.stride(1),
            "stride_dkt": dk.stride(0),
            "stride_dkh": dk.stride(1),
            "stride_dvt": dv.stride(0),
            "stride_dvh": dv.stride(1),
            "num_kv_heads": kv_heads,
            **common,
        }
        constants = {**group, "BLOCK_M": dkdv_tile.block_m, **_constants(q, dkdv_tile)}
        launch(hopper_dkdv_kernel, kv_heads * tiles.keys.shape[0], arguments, constants)
    return dq, dk, dv, None


def _constants(q: Tensor, tile: HopperTileShape | HopperDqTileShape | HopperDkdvTileShape) -> dict[str, Any]:
    """Return the compile-time constants and options of all three kernels."""
    return {
        "BLOCK_D": q.shape[2],
        "STAGES": tile.stages,
        "LOAD_REGISTERS": tile.registers[0],
        "COMPUTE_REGISTERS": tile.registers[1],
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def _check(q: Tensor, v: Tensor, options: AttentionOptions) -> None:
    remedy = "Use backend='triton' (or 'auto')."
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise BackendUnavailableError(f"backend='gluon' takes bfloat16 and float16; got {q.dtype}. {remedy}")
    if q.shape[2] not in HOPPER_TILES or v.shape[2] != q.shape[2]:
        raise BackendUnavailableError(
            f"backend='gluon' takes head dimensions {', '.join(map(str, HOPPER_TILES))}, the same for q, k and v; got "
            f"{q.shape[2]} and {v.shape[2]}. {remedy}"
        )
    features = {
        "softcap": bool(options.softcap),
        "sinks": options.sinks is not None,
        "alibi_slopes": options.alibi_slopes is not None,
        "dropout_p": bool(options.dropout_p),
    }
    names = [name for name, used in features.items() if used]
    if names:
        raise BackendUnavailableError(
            f"backend='gluon' computes plain softmax attention; got {', '.join(names)}. {remedy}"
        )


@cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of programs that run at a time: each takes all registers of a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _swizzled(x: Tensor, rows: int, heads: int = 1) -> TensorDescriptor:
    """Describe a tensor (T, H, D) from `aligned` as blocks of rows and heads, in the shared-memory layout of tensor
    cores."""
    plain = descriptor(x, rows, heads=heads)
    assert not isinstance(plain, tuple), "Hopper has TMA"
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    return TensorDescriptor(plain.base, plain.shape, plain.strides, plain.block_shape, layout)
