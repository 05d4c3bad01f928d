"""The backward kernels: dQ and the row statistics by tiles of queries, then dK and dV by tiles of keys.

No two programs write to the same place, so the gradients are deterministic. A program sums over the query heads that
share its key head. The mathematics is docs/math.md, sections 3 and 6.

Legend: M query rows, N keys, D and V the head dimensions of keys and values padded to powers of two; t token, h head.
The row statistics are `lse2` (base 2, +inf in rows that see nothing, so that their probabilities are 0) and `delta`,
both [H, T_q]. dK and dV load them in whole blocks, so BLOCK_M elements that are never written follow: rows from T_q on
see no key, and their q and dout are zeros. The pointers of features that a call doesn't use are None.

Both factors of dS are masked, not their product: the compiler would select among 16-bit numbers after the product, with
twice the instructions.
"""

import triton
import triton.language as tl

from tritonpack.kernels.primitives import (
    LEFT_MASKED,
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
    within,
    zero_unseen,
)


@triton.jit(
    do_not_specialize=["num_queries", "num_keys", "stride_dlh", "stride_dlt", "stride_at", "stride_ah", "drop_below"]
)
def dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    dsinks_ptr,
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
    stride_dlh,
    stride_dlt,
    stride_dqt,
    stride_dqh,
    stride_at,
    stride_ah,
    num_queries,
    num_keys,
    scale,
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
):
    """Write dq [T_q, H, D], lse2 and delta = rowsum(out * dout) - dlse, both [H, T_q].

    A program for each tile and block of HEADS heads. The rows of a tile are the same tokens of HEADS heads that share a
    key head, one head after the other: fewer tokens have fewer hidden pairs if documents are short. With sinks the
    kernel also writes each tile's share of their gradient, [H, tiles], except for empty tiles.
    """
    TREE: tl.constexpr = blocks_ptr is not None
    head_block, number, tile_ptr, first, end, third = load_tile(tiles_ptr, HEAD_BLOCKS, 5 if TREE else 3)
    if first >= end:
        return
    first_head = head_block * HEADS
    kv_head = first_head // GROUP
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    row = tl.arange(0, BLOCK_M)
    offs_m = first + row % TOKENS
    head = first_head + row // TOKENS  # [M]
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

    rows = offs_m.to(tl.int64)
    in_range = offs_m < end
    offs_v = tl.arange(0, BLOCK_V)
    out_ptrs = out_ptr + (rows * stride_ot + head * stride_oh)[:, None] + offs_v[None, :]
    out = tl.load(out_ptrs, mask=in_range[:, None] & (offs_v < HEAD_DIM_V)[None, :], other=0.0)  # [M, V]
    statistics = head.to(tl.int64) * num_queries + offs_m
    lse = tl.load(lse_ptr + statistics, mask=in_range, other=float("-inf"))  # [M]
    live = lse > float("-inf")
    dout = load_rows(dout_desc, first, first_head, BLOCK_M, BLOCK_V, HEAD_DIM_V, UPCAST, HEADS)  # [M, V]
    # Without `where`, the product is fused into the sum, and redundant lanes round the same sum differently.
    delta = tl.sum(tl.where(live[:, None], out.to(tl.float32) * dout.to(tl.float32), 0.0), 1)  # [M]
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * stride_dlh + rows * stride_dlt, mask=live, other=0.0)
    lse2 = tl.where(live, lse * LOG2E, float("inf"))  # [M]
    tl.store(lse2_ptr + statistics, lse2, mask=in_range)
    tl.store(delta_ptr + statistics, delta, mask=in_range)
    if sinks_ptr is not None:
        share = tl.exp2(tl.load(sinks_ptr + head) * LOG2E - lse2)
        # With `where` for the same reason
        shares = tl.where(live, share * delta, 0.0)
        shares = tl.sum(tl.reshape(shares, (HEADS, TOKENS)), 1)
        heads = first_head + tl.arange(0, HEADS)
        tl.store(dsinks_ptr + heads * (tl.num_programs(0) // HEAD_BLOCKS) + number, -shares)
    q = load_rows(q_desc, first, first_head, BLOCK_M, BLOCK_D, HEAD_DIM, UPCAST, HEADS)  # [M, D]
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for phase in tl.static_range(UNMASKED if TREE else LEFT_MASKED, 4, 2 if TREE else 1):  # as in the forward kernel
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
                k = load_rows(k_desc, key, kv_head, BLOCK_N, BLOCK_D, HEAD_DIM, UPCAST)  # [N, D]
                v = load_rows(v_desc, key, kv_head, BLOCK_N, BLOCK_V, HEAD_DIM_V, UPCAST)  # [N, V]
                summed = k
                if phase == ZEROED_KEYS:
                    summed = zero_unseen(k, query_start_ptr, query_stop_ptr, offs_n, key_end)
                products = tl.dot(q, k.T, input_precision="ieee")  # [M, D] @ [D, N] -> [M, N]
                distance = diagonal[:, None] - load_places(places_ptr, offs_n, key_end)[None, :]
                scores, unit, slope = score(products, scale_log2, softcap_log2, alibi_ptr, slopes[:, None], distance)
                exponents = scores * unit - lse2[:, None]
                if phase != UNMASKED:
                    visible = visible_keys(phase, offs_n, start, stop)
                    if TREE:
                        visible &= visible_transposed(
                            offs_m[:, None], offs_n[None, :], query_start_ptr, query_stop_ptr, num_keys
                        )
                    exponents = tl.where(visible, exponents, float("-inf"))
                p = tl.exp2(exponents)
                dp = tl.dot(dout, v.T, input_precision="ieee")  # [M, V] @ [V, N] -> [M, N]
                if seed_ptr is not None:
                    keep = kept(drop_keys[:, None], offs_m, key, BLOCK_N, drop_below)
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                dp = (dp - delta[:, None]) * slope
                if phase != UNMASKED:
                    dp = tl.where(visible, dp, 0.0)
                dq = dot(p * dp, summed, dq)  # [M, N] @ [N, D] -> [M, D]

    offs_d = tl.arange(0, BLOCK_D)
    offs = (rows * stride_dqt + head * stride_dqh)[:, None] + offs_d[None, :]
    mask = in_range[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(dq_ptr + offs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "stride_at", "stride_ah", "drop_below"])
def dkdv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    blocks_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    diagonal_ptr,
    places_ptr,
    alibi_ptr,
    seed_ptr,
    stride_dkt,
    stride_dkh,
    stride_dvt,
    stride_dvh,
    stride_at,
    stride_ah,
    num_queries,
    num_keys,
    scale,
    scale_log2,
    softcap_log2,
    drop_below,
    keep_scale,
    HEAD_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    UPCAST: tl.constexpr,
    QUERIES_LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write dk [T_k, H_kv, D] and dv [T_k, H_kv, D_v], or one of them if the other's pointer is None.

    A program for each tile of keys and key head. At large head dimensions the two accumulators don't fit in registers
    together; two launches, which both compute the scores, then cost less than spilling.

    QUERIES_LEFT makes q and dout the left operands of the first two products, instead of k and v, and zeroes q and dout
    only in the products that sum over them. The results are the same (docs/decisions/kernel-forms.md).
    """
    TREE: tl.constexpr = blocks_ptr is not None
    HAS_DK: tl.constexpr = dk_ptr is not None
    HAS_DV: tl.constexpr = dv_ptr is not None
    kv_head, _number, tile_ptr, first, end, third = load_tile(tiles_ptr, HEAD_BLOCKS, 5 if TREE else 3)
    if first >= end:
        return
    offs_n = first + tl.arange(0, BLOCK_N)
    start, stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, end)  # [N]
    seed = 0 if seed_ptr is None else tl.load(seed_ptr)
    place = load_places(places_ptr, offs_n, end)  # [N]
    if TREE:
        query_end = num_queries
    else:
        EVEN: tl.constexpr = seed_ptr is not None
        begin, full, full_end, blocks = block_range(query_start_ptr, query_stop_ptr, first, end - 1, BLOCK_M, EVEN)
        query_end = tl.load(query_stop_ptr + end - 1)

    k = load_rows(k_desc, first, kv_head, BLOCK_N, BLOCK_D, HEAD_DIM, UPCAST)  # [N, D]
    if HAS_DK:
        v = load_rows(v_desc, first, kv_head, BLOCK_N, BLOCK_V, HEAD_DIM_V, UPCAST)  # [N, V]
        dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    if HAS_DV:
        dv = tl.zeros([BLOCK_N, BLOCK_V], dtype=tl.float32)
    # Phase 0 has the masked blocks, phase 1 the full ones, each in one loop over the heads of the group and their
    # blocks, because two nested loops take more registers.
    for phase in tl.static_range(2):
        head = kv_head * GROUP
        if TREE:
            list_begin, list_end = tree_phase_range(ZEROED_KEYS if phase == 0 else UNMASKED, tile_ptr, third)
            steps = list_end - list_begin
        else:
            steps = full + blocks - full_end if phase == 0 else full_end - full
        step = 0
        for _ in tl.range(0, steps * GROUP):
            if TREE:
                row = tl.load(blocks_ptr + list_begin + step)
            else:
                block = step + (tl.where(step >= full, full_end - full, 0) if phase == 0 else full)
                row = begin + block * BLOCK_M
            offs_m = row + tl.arange(0, BLOCK_M)
            q = load_rows(q_desc, row, head, BLOCK_M, BLOCK_D, HEAD_DIM, UPCAST)  # [M, D]
            dout = load_rows(dout_desc, row, head, BLOCK_M, BLOCK_V, HEAD_DIM_V, UPCAST)  # [M, V]
            statistics = tl.cast(head, tl.int64) * num_queries + offs_m
            lse2_m = tl.load(lse2_ptr + statistics)  # [M]
            delta_m = tl.load(delta_ptr + statistics)  # [M]
            if phase == 0:  # rows that see nothing, or lie after the tile's last query, may hold NaN
                live = ((lse2_m < float("inf")) & (offs_m < query_end))[:, None]
                if HAS_DV and not QUERIES_LEFT:
                    dout = tl.where(live, dout, 0.0)
                if HAS_DK and not QUERIES_LEFT:
                    q = tl.where(live, q, 0.0)
            if QUERIES_LEFT:
                products = tl.dot(q, k.T, input_precision="ieee").T  # [M, D] @ [D, N] -> [M, N] -> [N, M]
            else:
                products = tl.dot(k, q.T, input_precision="ieee")  # [N, D] @ [D, M] -> [N, M]
            slopes, diagonal = load_alibi(alibi_ptr, diagonal_ptr, offs_m, head, num_queries, stride_at, stride_ah)
            distance = diagonal[None, :] - place[:, None]
            scores, unit, slope = score(products, scale_log2, softcap_log2, alibi_ptr, slopes[None, :], distance)
            p = tl.exp2(scores * unit - lse2_m[None, :])
            if phase == 0:
                visible = within(offs_m[None, :], start[:, None], (stop - start)[:, None])
                if TREE:
                    visible &= visible_transposed(
                        offs_n[:, None], offs_m[None, :], key_start_ptr, key_stop_ptr, num_queries
                    )
                p = tl.where(visible, p, 0.0)
            if seed_ptr is not None:
                keep = kept(dropout_keys(seed, head), offs_n, row, BLOCK_M, drop_below, OF_KEYS=True)
            if HAS_DV:
                weights = p if seed_ptr is None else tl.where(keep, p * keep_scale, 0.0)
                summed = tl.where(live, dout, 0.0) if QUERIES_LEFT and phase == 0 else dout
                dv = dot(weights, summed, dv)  # [N, M] @ [M, V] -> [N, V]
            if HAS_DK:
                if QUERIES_LEFT:
                    dp = tl.dot(dout, v.T, input_precision="ieee").T  # [M, V] @ [V, N] -> [M, N] -> [N, M]
                else:
                    dp = tl.dot(v, dout.T, input_precision="ieee")  # [N, V] @ [V, M] -> [N, M]
                if seed_ptr is not None:
                    dp = tl.where(keep, dp * keep_scale, 0.0)
                dp = (dp - delta_m[None, :]) * slope
                if phase == 0:
                    dp = tl.where(visible, dp, 0.0)
                ds = p * dp
                summed = tl.where(live, q, 0.0) if QUERIES_LEFT and phase == 0 else q
                dk = dot(ds, summed, dk)  # [N, M] @ [M, D] -> [N, D]
            step += 1
            wrapped = step == steps
            step = tl.where(wrapped, 0, step)
            head = tl.where(wrapped, head + 1, head)

    rows = offs_n.to(tl.int64)[:, None]
    in_range = (offs_n < end)[:, None]
    if HAS_DK:
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        dk_ptrs = dk_ptr + rows * stride_dkt + kv_head * stride_dkh + offs_d
        tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=in_range & (offs_d < HEAD_DIM))
    if HAS_DV:
        offs_v = tl.arange(0, BLOCK_V)[None, :]
        dv_ptrs = dv_ptr + rows * stride_dvt + kv_head * stride_dvh + offs_v
        tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=in_range & (offs_v < HEAD_DIM_V))
