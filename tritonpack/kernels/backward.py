"""The backward kernels: row statistics, then dK and dV by tiles of keys, then dQ by tiles of queries.

No program adds to what another one writes, so the gradients are deterministic; the query heads that share a key head
are summed inside the program. The mathematics is docs/math.md, section 3.

Legend: M query rows, N keys, D head dimension padded to a power of two; t token, h head. The row statistics are
`lse2` (base 2, +inf in rows that see nothing, so that their probabilities are 0) and `delta`, both [H, ROWS] with
ROWS = T_q rounded up, so that blocks may read past the end.
"""

import triton
import triton.language as tl

from tritonpack.kernels.primitives import LOG2E, block_range, dot, load_bounds, load_rows


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride_dlh", "stride_dlt"])
def row_statistics_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    stride_ot,
    stride_oh,
    stride_dot,
    stride_doh,
    stride_dlh,
    stride_dlt,
    num_queries,
    num_rows,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """lse2 and delta = rowsum(out * dout) - dlse, [H, ROWS]; grid (tiles of BLOCK_M rows up to ROWS, heads)."""
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    in_range = offs_m < num_queries
    lse = tl.load(lse_ptr + head * num_queries + offs_m, mask=in_range, other=float("-inf"))
    live = lse > float("-inf")
    rows = offs_m.to(tl.int64)
    mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
    out = tl.load(out_ptr + rows[:, None] * stride_ot + head * stride_oh + offs_d[None, :], mask=mask, other=0.0)
    dout = tl.load(dout_ptr + rows[:, None] * stride_dot + head * stride_doh + offs_d[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + head * stride_dlh + rows * stride_dlt, mask=live, other=0.0)
    tl.store(delta_ptr + head * num_rows + offs_m, delta)
    tl.store(lse2_ptr + head * num_rows + offs_m, tl.where(live, lse * LOG2E, float("inf")))


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def dkdv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse2_desc,
    delta_desc,
    dk_ptr,
    dv_ptr,
    query_start_ptr,
    query_stop_ptr,
    stride_kt,
    stride_kh,
    num_rows,
    num_keys,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    HAS_DK: tl.constexpr,
    HAS_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dk and dv [T_k, H_kv, D], or one of them; grid (tiles of BLOCK_N keys, key heads).

    The bounds are those of the transposed mask. At large head dimensions both accumulators don't fit in registers, and
    two launches that repeat the scores cost less than spilling.
    """
    kv_head = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    last = tl.minimum(first + BLOCK_N, num_keys) - 1
    offs_n = first + tl.arange(0, BLOCK_N)
    start, stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, num_keys)  # [N]
    # The statistics are read 16 bytes at a time, so blocks of queries begin at a multiple of 4 rows.
    begin, full, full_end, blocks = block_range(query_start_ptr, query_stop_ptr, first, last, 4, BLOCK_M)

    k = load_rows(k_desc, first, kv_head, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
    v = load_rows(v_desc, first, kv_head, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    # One loop over (head of the group, block) per phase: a loop nested in the loop over heads costs registers.
    for phase in tl.static_range(2):
        head = kv_head * GROUP
        steps = full + blocks - full_end if phase == 0 else full_end - full
        step = 0
        for _ in tl.range(0, steps * GROUP):
            block = step + (tl.where(step >= full, full_end - full, 0) if phase == 0 else full)
            row = begin + block * BLOCK_M
            q = load_rows(q_desc, row, head, BLOCK_M, BLOCK_D, UPCAST)  # [M, D]
            dout = load_rows(dout_desc, row, head, BLOCK_M, BLOCK_D, UPCAST)  # [M, D]
            lse2 = lse2_desc.load([head * num_rows + row])  # [M]
            delta = delta_desc.load([head * num_rows + row])  # [M]
            if phase == 0:
                live = (lse2 < float("inf"))[:, None]
                q = tl.where(live, q, 0.0)
                dout = tl.where(live, dout, 0.0)
            scores = tl.dot(k, q.T, input_precision=PRECISION)  # [N, D] @ [D, M] -> [N, M]
            p = tl.exp2(scores * scale_log2 - lse2[None, :])
            if phase == 0:
                offs_m = row + tl.arange(0, BLOCK_M)
                visible = (offs_m[None, :] >= start[:, None]) & (offs_m[None, :] < stop[:, None])
                p = tl.where(visible, p, 0.0)
            if HAS_DV:
                dv = dot(p, dout, dv, PRECISION)  # [N, M] @ [M, D] -> [N, D]
            if HAS_DK:
                dp = tl.dot(v, dout.T, input_precision=PRECISION)  # [N, D] @ [D, M] -> [N, M]
                ds = p * (dp - delta[None, :])
                if phase == 0:
                    ds = tl.where(visible, ds, 0.0)
                dk = dot(ds, q, dk, PRECISION)  # [N, M] @ [M, D] -> [N, D]
            step += 1
            wrapped = step == steps
            step = tl.where(wrapped, 0, step)
            head = tl.where(wrapped, head + 1, head)

    offs_d = tl.arange(0, BLOCK_D)
    offs = offs_n.to(tl.int64)[:, None] * stride_kt + kv_head * stride_kh + offs_d[None, :]
    in_range = (offs_n < num_keys)[:, None] & (offs_d < HEAD_DIM)[None, :]
    if HAS_DK:
        tl.store(dk_ptr + offs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_range)
    if HAS_DV:
        tl.store(dv_ptr + offs, dv.to(dv_ptr.dtype.element_ty), mask=in_range)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    stride_qt,
    stride_qh,
    num_rows,
    num_queries,
    num_keys,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dq [T_q, H, D]; grid (tiles of BLOCK_M rows, heads)."""
    head = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_M
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    offs_m = first + tl.arange(0, BLOCK_M)
    start, stop = load_bounds(key_start_ptr, key_stop_ptr, offs_m, num_queries)  # [M]
    begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, last, 1, BLOCK_N)

    q = load_rows(q_desc, first, head, BLOCK_M, BLOCK_D, UPCAST)  # [M, D]
    dout = load_rows(dout_desc, first, head, BLOCK_M, BLOCK_D, UPCAST)  # [M, D]
    statistics = head.to(tl.int64) * num_rows + offs_m
    in_range = offs_m < num_queries
    lse2 = tl.load(lse2_ptr + statistics, mask=in_range, other=float("inf"))  # [M]
    delta = tl.load(delta_ptr + statistics, mask=in_range, other=0.0)  # [M]
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for phase in tl.static_range(2):
        steps = full + blocks - full_end if phase == 0 else full_end - full
        for step in tl.range(0, steps):
            block = step + (tl.where(step >= full, full_end - full, 0) if phase == 0 else full)
            key = begin + block * BLOCK_N
            k = load_rows(k_desc, key, head // GROUP, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
            v = load_rows(v_desc, key, head // GROUP, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
            offs_n = key + tl.arange(0, BLOCK_N)
            if phase == 0:
                query_start, query_stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, num_keys)
                k = tl.where((query_start < query_stop)[:, None], k, 0.0)
            scores = tl.dot(q, k.T, input_precision=PRECISION)  # [M, D] @ [D, N] -> [M, N]
            p = tl.exp2(scores * scale_log2 - lse2[:, None])
            dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [M, D] @ [D, N] -> [M, N]
            ds = p * (dp - delta[:, None])
            if phase == 0:
                visible = (offs_n[None, :] >= start[:, None]) & (offs_n[None, :] < stop[:, None])
                ds = tl.where(visible, ds, 0.0)
            dq = dot(ds, k, dq, PRECISION)  # [M, N] @ [N, D] -> [M, D]

    offs_d = tl.arange(0, BLOCK_D)
    offs = offs_m.to(tl.int64)[:, None] * stride_qt + head * stride_qh + offs_d[None, :]
    mask = in_range[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dq_ptr + offs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
