"""The forward kernel: a program computes the outputs of one tile of queries.

The rows of a tile are the same tokens of HEADS query heads that share a key head, one head after the other.
Legend: M query rows, N keys of a block, D head dimension padded to a power of two, C columns of the values that a
program computes; t token, h head. Pointers that are None belong to features that a call doesn't use.
The mathematics is docs/math.md, sections 2 and 6: scores in base 2, a running maximum, one division at the end.
"""

import triton
import triton.language as tl

from tritonpack.kernels.primitives import (
    CLEANED,
    FULL,
    LN2,
    LOG2E,
    block_range,
    clean,
    dot,
    kept,
    load_alibi,
    load_bounds,
    load_rows,
    load_tile,
    masked_block,
    phase_range,
    score,
    visible_keys,
)


@triton.jit(do_not_specialize=["num_queries", "stride_at", "stride_ah", "drop_below"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    diagonal_ptr,
    sinks_ptr,
    alibi_ptr,
    seed_ptr,
    stride_ot,
    stride_oh,
    stride_at,
    stride_ah,
    num_queries,
    scale_log2,
    softcap_log2,
    drop_below,
    keep_scale,
    HEAD_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [T_q, H, D_v] and lse [H, T_q]; grid (tiles times blocks of HEADS heads, column chunks of the values).

    The query bounds, of the transposed mask, tell which keys are seen by a query at all.
    """
    head_block, _number, first, end, exposed = load_tile(tiles_ptr, HEAD_BLOCKS)
    if first >= end:
        return
    first_head = head_block * HEADS
    column = tl.program_id(1) * COLUMNS
    head = first_head + tl.arange(0, BLOCK_M) // (BLOCK_M // HEADS)  # [M]
    offs_m = first + tl.arange(0, BLOCK_M) % (BLOCK_M // HEADS)  # [M], tokens
    start, stop = load_bounds(key_start_ptr, key_stop_ptr, offs_m, end)  # [M]
    slopes, diagonal = load_alibi(alibi_ptr, diagonal_ptr, offs_m, head, end, stride_at, stride_ah)  # [M]
    seed = 0 if seed_ptr is None else tl.load(seed_ptr)
    begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, end - 1, 1, BLOCK_N)

    key_end = tl.load(key_stop_ptr + end - 1)

    q = load_rows(q_desc, first, first_head, 0, BLOCK_M, BLOCK_D, UPCAST)  # [M, D]
    acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    if sinks_ptr is None:
        m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    else:  # the sink is the first key of every row
        m_i = tl.load(sinks_ptr + head) * LOG2E
        l_i = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    for phase in tl.static_range(4):
        step_begin, step_end = phase_range(phase, exposed, full, full_end, blocks)
        if step_begin < step_end:  # an empty loop would prepare its loads, too
            for step in tl.range(step_begin, step_end):
                block = masked_block(step, full, full_end) if phase == CLEANED else step
                key = begin + block * BLOCK_N
                offs_n = key + tl.arange(0, BLOCK_N)
                k = load_rows(k_desc, key, first_head // GROUP, 0, BLOCK_N, BLOCK_D, UPCAST)  # [N, D]
                v = load_rows(v_desc, key, first_head // GROUP, column, BLOCK_N, COLUMNS, UPCAST)  # [N, C]
                products = tl.dot(q, k.T, input_precision=PRECISION)  # [M, D] @ [D, N] -> [M, N]
                distance = diagonal[:, None] - offs_n[None, :]
                scores, unit, _ = score(products, scale_log2, softcap_log2, alibi_ptr, slopes[:, None], distance)
                if phase != FULL:
                    visible = visible_keys(phase, offs_n, start, stop)
                    scores = tl.where(visible, scores, float("-inf"))
                if phase == CLEANED:
                    v = clean(v, query_start_ptr, query_stop_ptr, offs_n, key_end)
                m_new = tl.maximum(m_i, tl.max(scores, 1) * unit)
                # The maximum of a row without a key so far is -inf. With 0 in its place its exponentials are 0.
                pivot = tl.where(m_new == float("-inf"), 0.0, m_new) if phase != FULL else m_new
                p = tl.exp2(scores * unit - pivot[:, None])
                alpha = tl.exp2(m_i - pivot)
                l_i = l_i * alpha + tl.sum(p, 1)
                if seed_ptr is not None:
                    p = tl.where(kept(seed, head[:, None], offs_m[:, None], offs_n[None, :], drop_below), p, 0.0)
                acc = dot(p, v, acc * alpha[:, None], PRECISION)  # [M, N] @ [N, C] -> [M, C]
                m_i = m_new

    in_range = offs_m < end
    lse = (m_i + tl.log2(l_i)) * LN2  # -inf in rows that see nothing
    if sinks_ptr is not None:
        lse = tl.where(start < stop, lse, float("-inf"))
    if column == 0:
        tl.store(lse_ptr + head.to(tl.int64) * num_queries + offs_m, lse, mask=in_range)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if seed_ptr is not None:
        acc *= keep_scale
    offs_d = column + tl.arange(0, COLUMNS)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh + offs_d[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_range[:, None] & (offs_d < HEAD_DIM_V)[None, :])
