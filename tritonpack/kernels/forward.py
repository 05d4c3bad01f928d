"""The forward kernel: a program computes the outputs of one tile of queries.

The rows of a tile are the same tokens of HEADS query heads that share a key head, one head after the other.
Legend: M query rows, N keys of a block, D and V the head dimensions of keys and values padded to powers of
two; t token, h head. The pointers of features that a call doesn't use are None.
The mathematics is docs/math.md, sections 2 and 6: scores in base 2, a running maximum, one division at the end.
"""

import triton
import triton.language as tl

from tritonpack.kernels.primitives import (
    LEFT_MASKED,
    LN2,
    LOG2E,
    UNMASKED,
    ZEROED_KEYS,
    block_range,
    dot,
    dropout_keys,
    kept,
    load_alibi,
    load_bounds,
    load_places,
    load_rows,
    load_tile,
    masked_block,
    phase_range,
    score,
    tree_phase_range,
    visible_keys,
    visible_transposed,
    zero_unseen,
)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride_at", "stride_ah", "drop_below"])
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    blocks_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    diagonal_ptr,
    places_ptr,
    sinks_ptr,
    alibi_ptr,
    seed_ptr,
    stride_ot,
    stride_oh,
    stride_at,
    stride_ah,
    num_queries,
    num_keys,
    scale_log2,
    softcap_log2,
    drop_below,
    keep_scale,
    HEAD_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEFERRED: tl.constexpr,
):
    """Write out [T_q, H, D_v] and lse [H, T_q]; a program for each tile and block of HEADS heads.

    The query bounds are the bounds of the transposed mask: no query sees a key whose interval is empty. In a mask of
    trees a pair is visible if both bounds allow it, and `blocks` has the first key of each block that a tile visits.

    With DEFERRED the product of a block's weights and values is requested in the next block's step, after its scores,
    so that the softmax runs while that product is computed.
    """
    TREE: tl.constexpr = blocks_ptr is not None
    head_block, _number, tile_ptr, first, end, third = load_tile(tiles_ptr, HEAD_BLOCKS, 5 if TREE else 3)
    if first >= end:
        return
    first_head = head_block * HEADS
    kv_head = first_head // GROUP
    head = first_head + tl.arange(0, BLOCK_M) // (BLOCK_M // HEADS)  # [M]
    offs_m = first + tl.arange(0, BLOCK_M) % (BLOCK_M // HEADS)  # [M], tokens
    start, stop = load_bounds(key_start_ptr, key_stop_ptr, offs_m, end)  # [M]
    slopes, diagonal = load_alibi(alibi_ptr, diagonal_ptr, offs_m, head, end, stride_at, stride_ah)  # [M]
    if seed_ptr is not None:
        drop_keys = dropout_keys(tl.load(seed_ptr), head)  # [M]
    if TREE:
        key_end = num_keys
    else:
        EVEN: tl.constexpr = seed_ptr is not None
        begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, end - 1, BLOCK_N, EVEN)
        key_end = tl.load(key_stop_ptr + end - 1)

    q = load_rows(q_desc, first, first_head, BLOCK_M, BLOCK_D, HEAD_DIM, UPCAST, HEADS)  # [M, D]
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    if sinks_ptr is None or TREE:
        m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    else:  # the sink is the first key of every row
        m_i = tl.load(sinks_ptr + head) * LOG2E
        l_i = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    p = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)  # rounded only in `dot`: 16 bits would go through shared memory
    alpha = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    value = -1  # the first key of the block that p belongs to; before the first step p is zero, so any block serves
    # In trees all masked blocks are in ZEROED_KEYS: two phases.
    for phase in tl.static_range(UNMASKED if TREE else LEFT_MASKED, 4, 2 if TREE else 1):
        if TREE:
            step_begin, step_end = tree_phase_range(phase, tile_ptr, third)
        else:
            step_begin, step_end = phase_range(phase, third, full, full_end, blocks)
        if step_begin < step_end:  # an empty loop would prepare its loads, too
            for step in tl.range(step_begin, step_end):
                if TREE:
                    key = tl.load(blocks_ptr + step)
                else:
                    block = masked_block(step, full, full_end) if phase == ZEROED_KEYS else step
                    key = begin + block * BLOCK_N
                offs_n = key + tl.arange(0, BLOCK_N)
                if not DEFERRED or value < 0:
                    value = key
                k = load_rows(k_desc, key, kv_head, BLOCK_N, BLOCK_D, HEAD_DIM, UPCAST)  # [N, D]
                v = load_rows(v_desc, value, kv_head, BLOCK_N, BLOCK_V, HEAD_DIM_V, UPCAST)  # [N, V]
                products = tl.dot(q, k.T, input_precision="ieee")  # [M, D] @ [D, N] -> [M, N]
                if phase == ZEROED_KEYS:
                    v = zero_unseen(v, query_start_ptr, query_stop_ptr, value + tl.arange(0, BLOCK_N), key_end)
                if DEFERRED:
                    acc = dot(p, v, acc * alpha[:, None])  # [M, N] @ [N, V] -> [M, V]
                distance = diagonal[:, None] - load_places(places_ptr, offs_n, key_end)[None, :]
                scores, unit, _ = score(products, scale_log2, softcap_log2, alibi_ptr, slopes[:, None], distance)
                if phase != UNMASKED:
                    visible = visible_keys(phase, offs_n, start, stop)
                    if TREE:
                        visible &= visible_transposed(
                            offs_m[:, None], offs_n[None, :], query_start_ptr, query_stop_ptr, num_keys
                        )
                    scores = tl.where(visible, scores, float("-inf"))
                m_new = tl.maximum(m_i, tl.max(scores, 1) * unit)
                # The maximum of a row without a key so far is -inf. With 0 in its place its exponentials are 0.
                pivot = tl.where(m_new == float("-inf"), 0.0, m_new) if phase != UNMASKED else m_new
                p = tl.exp2(scores * unit - pivot[:, None])
                alpha = tl.exp2(m_i - pivot)
                l_i = l_i * alpha + tl.sum(p, 1)
                if seed_ptr is not None:
                    p = tl.where(kept(drop_keys[:, None], offs_m, key, BLOCK_N, drop_below), p, 0.0)
                if not DEFERRED:
                    acc = dot(p, v, acc * alpha[:, None])  # [M, N] @ [N, V] -> [M, V]
                m_i = m_new
                value = key
    if DEFERRED and value >= 0:
        v = load_rows(v_desc, value, kv_head, BLOCK_N, BLOCK_V, HEAD_DIM_V, UPCAST)
        if TREE or third != 0:  # without trees the third field is `reads_unseen_keys`
            v = zero_unseen(v, query_start_ptr, query_stop_ptr, value + tl.arange(0, BLOCK_N), key_end)
        acc = dot(p, v, acc * alpha[:, None])

    if sinks_ptr is not None and TREE:  # the sink is one more key of every row that sees a key
        sink = tl.load(sinks_ptr + head) * LOG2E
        top = tl.maximum(m_i, sink)
        alpha = tl.exp2(m_i - top)
        l_i = tl.where(m_i == float("-inf"), 0.0, l_i * alpha + tl.exp2(sink - top))
        acc *= alpha[:, None]
        m_i = top
    in_range = offs_m < end
    lse = (m_i + tl.log2(l_i)) * LN2  # -inf in rows that see nothing
    if sinks_ptr is not None:
        lse = tl.where(start < stop, lse, float("-inf"))
    tl.store(lse_ptr + head.to(tl.int64) * num_queries + offs_m, lse, mask=in_range)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    if seed_ptr is not None:
        acc *= keep_scale
    offs_v = tl.arange(0, BLOCK_V)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh + offs_v[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_range[:, None] & (offs_v < HEAD_DIM_V)[None, :])
