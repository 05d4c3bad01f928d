"""The forward kernel: one program attends one tile of query rows of one head to the keys that the rows see.

Legend: M query rows, N keys of a block, D head dimension padded to a power of two; t token, h head.
The mathematics is docs/math.md, section 2: scores in base 2, a running maximum, one division at the end.
"""

import triton
import triton.language as tl

from tritonpack.kernels.primitives import LN2, block_range, dot, load_bounds, load_rows


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    stride_ot,
    stride_oh,
    num_queries,
    num_keys,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out [T_q, H, D] and lse [H, T_q]; grid (tiles of BLOCK_M rows, heads).

    The query bounds (the transposed mask) only tell which keys are seen at all: a NaN in the others must not spread.
    """
    head = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_M
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    offs_m = first + tl.arange(0, BLOCK_M)
    start, stop = load_bounds(key_start_ptr, key_stop_ptr, offs_m, num_queries)  # [M]
    begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, last, 1, BLOCK_N)

    q = load_rows(q_desc, first, head, BLOCK_M, BLOCK_D, UPCAST)  # [M, D]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for phase in tl.static_range(3):
        acc, top, total = _attend(
            acc,
            top,
            total,
            q,
            k_desc,
            v_desc,
            query_start_ptr,
            query_stop_ptr,
            start,
            stop,
            head // GROUP,
            begin,
            0 if phase == 0 else (full if phase == 1 else full_end),
            full if phase == 0 else (full_end if phase == 1 else blocks),
            num_keys,
            scale_log2,
            MASKED=phase != 1,
            PRECISION=PRECISION,
            UPCAST=UPCAST,
            BLOCK_N=BLOCK_N,
            BLOCK_D=BLOCK_D,
        )

    in_range = offs_m < num_queries
    lse = (top + tl.log2(total)) * LN2  # -inf where a row saw nothing
    tl.store(lse_ptr + head.to(tl.int64) * num_queries + offs_m, lse, mask=in_range)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_ot + head * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_range[:, None] & (offs_d < HEAD_DIM)[None, :])


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k_desc,
    v_desc,
    query_start_ptr,
    query_stop_ptr,
    start,
    stop,
    kv_head,
    begin,
    block_lo,
    block_hi,
    num_keys,
    scale_log2,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take the key blocks [block_lo, block_hi) into the running maximum, sum and weighted values of the tile's rows."""
    for block in tl.range(block_lo, block_hi):
        key = begin + block * BLOCK_N
        k = load_rows(k_desc, key, kv_head, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
        v = load_rows(v_desc, key, kv_head, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [M, D] @ [D, N] -> [M, N]
        if MASKED:
            offs_n = key + tl.arange(0, BLOCK_N)
            visible = (offs_n[None, :] >= start[:, None]) & (offs_n[None, :] < stop[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            query_start, query_stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, num_keys)
            v = tl.where((query_start < query_stop)[:, None], v, 0.0)
        new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
        # A row that has seen nothing yet has no maximum; 0 in its place leaves every exponential at exp2(-inf) = 0.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(scores * scale_log2 - pivot[:, None])
        decay = tl.exp2(top - pivot)
        total = total * decay + tl.sum(p, 1)
        acc = dot(p, v, acc * decay[:, None], PRECISION)  # [M, N] @ [N, D] -> [M, D]
        top = new_top
    return acc, top, total
