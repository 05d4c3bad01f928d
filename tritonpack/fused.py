"""The Triton backend: hands tensors and a mask to the kernels. The contract is that of tritonpack/attention.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonpack.kernels.backward import dkdv_kernel, dq_kernel, row_statistics_kernel
from tritonpack.kernels.forward import forward_kernel
from tritonpack.kernels.primitives import LOG2E
from tritonpack.kernels.tiles import ROW_PADDING, Kernel, Tile, current_arch, key_gradient_kernels, select_tile
from tritonpack.mask import BlockDiagonalMask


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D) in q's dtype, lse (H, T_q) float32."""
    out = q.new_empty(q.shape)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(float("-inf"))
    tile = _tile("forward", q)
    transposed = mask.transpose()
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(q.shape[0], tile.block_m), q.shape[1])](
            q_desc=_descriptor(q, tile.block_m),
            k_desc=_descriptor(k, tile.block_n),
            v_desc=_descriptor(v, tile.block_n),
            out_ptr=out,
            lse_ptr=lse,
            key_start_ptr=mask.key_start,
            key_stop_ptr=mask.key_stop,
            query_start_ptr=transposed.key_start,
            query_stop_ptr=transposed.key_stop,
            stride_ot=out.stride(0),
            stride_oh=out.stride(1),
            num_queries=q.shape[0],
            num_keys=k.shape[0],
            scale_log2=scale * LOG2E.value,
            **_constants(q, k, tile),
        )
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
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes and dtype of q, k, v; beside them it allocates 8 bytes per query row and head."""
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    (num_queries, heads, head_dim), (num_keys, kv_heads) = q.shape, k.shape[:2]
    transposed = mask.transpose()
    num_rows = triton.cdiv(num_queries, ROW_PADDING) * ROW_PADDING
    assert heads * num_rows < 2**31, "the row statistics are addressed with 32 bits"
    lse2, delta = torch.empty((2, heads, num_rows), dtype=torch.float32, device=q.device)
    scales = {"scale": scale, "scale_log2": scale * LOG2E.value}

    with torch.cuda.device_of(q):
        tile = _tile("row_statistics", q)
        dout = dout if dout.stride(2) == 1 else dout.contiguous()
        row_statistics_kernel[(num_rows // tile.block_m, heads)](
            out_ptr=out,
            dout_ptr=dout,
            lse_ptr=lse,
            dlse_ptr=lse if dlse is None else dlse,
            lse2_ptr=lse2,
            delta_ptr=delta,
            stride_ot=out.stride(0),
            stride_oh=out.stride(1),
            stride_dot=dout.stride(0),
            stride_doh=dout.stride(1),
            stride_dlh=0 if dlse is None else dlse.stride(0),
            stride_dlt=0 if dlse is None else dlse.stride(1),
            num_queries=num_queries,
            num_rows=num_rows,
            HAS_DLSE=dlse is not None,
            HEAD_DIM=head_dim,
            BLOCK_M=tile.block_m,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=tile.num_warps,
        )
        for kernel in key_gradient_kernels(triton.next_power_of_2(head_dim), q.dtype, current_arch(q.device)):
            tile = _tile(kernel, q)
            dkdv_kernel[(triton.cdiv(num_keys, tile.block_n), kv_heads)](
                q_desc=_descriptor(q, tile.block_m),
                k_desc=_descriptor(k, tile.block_n),
                v_desc=_descriptor(v, tile.block_n),
                dout_desc=_descriptor(dout, tile.block_m),
                lse2_desc=TensorDescriptor(lse2, [lse2.numel()], [1], [tile.block_m]),
                delta_desc=TensorDescriptor(delta, [delta.numel()], [1], [tile.block_m]),
                dk_ptr=dk,
                dv_ptr=dv,
                query_start_ptr=transposed.key_start,
                query_stop_ptr=transposed.key_stop,
                stride_kt=dk.stride(0),
                stride_kh=dk.stride(1),
                num_rows=num_rows,
                num_keys=num_keys,
                **scales,
                HAS_DK=kernel != "dv",
                HAS_DV=kernel != "dk",
                **_constants(q, k, tile),
            )
        tile = _tile("dq", q)
        dq_kernel[(triton.cdiv(num_queries, tile.block_m), heads)](
            q_desc=_descriptor(q, tile.block_m),
            k_desc=_descriptor(k, tile.block_n),
            v_desc=_descriptor(v, tile.block_n),
            dout_desc=_descriptor(dout, tile.block_m),
            lse2_ptr=lse2,
            delta_ptr=delta,
            dq_ptr=dq,
            key_start_ptr=mask.key_start,
            key_stop_ptr=mask.key_stop,
            query_start_ptr=transposed.key_start,
            query_stop_ptr=transposed.key_stop,
            stride_qt=dq.stride(0),
            stride_qh=dq.stride(1),
            num_rows=num_rows,
            num_queries=num_queries,
            num_keys=num_keys,
            **scales,
            **_constants(q, k, tile),
        )
    return dq, dk, dv


def _tile(kernel: Kernel, q: Tensor) -> Tile:
    return select_tile(kernel, triton.next_power_of_2(q.shape[2]), q.dtype, current_arch(q.device))


def _constants(q: Tensor, k: Tensor, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments that the three attention kernels share, none of which is a token count."""
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": q.shape[2],
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "UPCAST": q.dtype == torch.bfloat16 and q.device.type == "cpu",
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": triton.next_power_of_2(q.shape[2]),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """A (T, H, D) tensor as blocks of `rows` rows of one head; reads outside the tensor give zeros.

    The hardware wants 16-byte strides and a contiguous last dimension; what isn't so is copied, with zero columns
    after the last.
    """
    unit = 16 // x.element_size()
    if x.stride(2) != 1 or x.stride(0) % unit or x.stride(1) % unit or x.data_ptr() % 16 or 0 in x.stride():
        x = pad(x, (0, -x.shape[2] % unit)).contiguous()
    block = [1, rows, triton.next_power_of_2(x.shape[2])]
    return TensorDescriptor(x, [x.shape[1], x.shape[0], x.shape[2]], [x.stride(1), x.stride(0), 1], block)
