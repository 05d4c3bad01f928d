"""The backward kernel for Hopper that computes dQ and the row statistics, in Gluon, by tiles of 128 queries.

One warp loads, and two warpgroups compute 64 queries each. A tile's q and dout stay on the multiprocessor, q in
registers. The loading warp fills a ring of buffers with keys and another with values, the masked blocks first, then the
full ones. dS stays in registers, as the left operand of its product with the keys. Exponentials are computed while dP
is summed. The scores of the next block are requested together with the product of dS and the keys. No product runs
across the end of an iteration, because ptxas would then wait after each part of a product.

Legend: as in hopper.py.
The mathematics is docs/math.md, section 3; the reasons for this form are in docs/decisions/hopper-backward.md.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonpack.kernels.hopper_primitives import (
    ROWS,
    as_operand,
    barriers,
    between,
    copy_block,
    copy_seen,
    count_unseen,
    product_layout,
    request_product,
    seen_rows,
    store_rows,
    visited_block,
    wide_layout,
)
from tritonpack.kernels.primitives import LOG2E, block_range, load_bounds, load_tile, masked_block


@dataclass(frozen=True)
class HopperDqTileShape:
    """The shape of a tile of 128 queries, and how a program computes it.

    Attributes:
        block_n: keys of a block.
        stages: buffers in the ring.
        registers: per thread, of the loading warp's group and of the computing groups, as in `HopperTileShape`.
    """

    block_n: int
    stages: int
    registers: tuple[int, int] = (24, 240)


# Head dimension -> tile, for the 16-bit types on sm_90.
HOPPER_DQ_TILES = {64: HopperDqTileShape(128, 3), 128: HopperDqTileShape(64, 4)}


@gluon.jit(do_not_specialize=["num_queries", "num_heads", "stride_dlh", "stride_dlt"])
def hopper_dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    tiles_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_dlh,
    stride_dlt,
    stride_dqt,
    stride_dqh,
    num_queries,
    num_heads,
    scale,
    scale_log2,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
):
    """dq [T_q, H, D], lse2 and delta [H, T_q] as in backward.py; grid (tiles times heads), 4 warps, and more are added.

    Descriptors read blocks [1, 64, D] of q and dout and [1, BLOCK_N, D] of k and v from (heads, tokens, D).
    """
    head, _number, _tile_ptr, first, end, reads_unseen_keys = load_tile(tiles_ptr, num_heads, 3)
    if first >= end:
        return
    begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, end - 1, BLOCK_N)
    key_end = gl.load(key_stop_ptr + (end - 1))

    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    tile_filled = barriers(2, 1)
    k_filled = barriers(STAGES, 1)
    v_filled = barriers(STAGES, 1)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    fence_async_shared()

    buffers = (q, dout, k, v, tile_filled, k_filled, v_filled, k_free, v_free)
    work = (begin, full, full_end, blocks)
    outputs = (out_ptr, lse_ptr, stride_ot, stride_oh, stride_dlh, stride_dlt)
    results = (lse2_ptr, delta_ptr, dq_ptr, stride_dqt, stride_dqh, num_queries)
    bounds = (key_start_ptr, key_stop_ptr)
    inputs = (k_ptr, v_ptr, stride_kt, stride_kh, stride_vt, stride_vh)
    gl.warp_specialize(
        [
            (_dq_upper, (buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work,
                         BLOCK_N, BLOCK_D, STAGES)),
            (_dq_lower, (buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work,
                         BLOCK_N, BLOCK_D, STAGES)),
            (_load_keys, (q_desc, k_desc, v_desc, dout_desc, inputs, buffers, query_start_ptr, query_stop_ptr, key_end,
                          head, first, reads_unseen_keys, work, GROUP, BLOCK_N, BLOCK_D, STAGES)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_keys(
    q_desc, k_desc, v_desc, dout_desc, inputs, buffers, query_start_ptr, query_stop_ptr, key_end, head, first,
    reads_unseen_keys, work,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp of dQ: q and dout once, then k and v, each block as soon as a buffer is free."""
    q, dout, k, v, tile_filled, k_filled, v_filled, k_free, v_free = buffers
    k_ptr, v_ptr, stride_kt, stride_kh, stride_vt, stride_vh = inputs
    begin, full, full_end, blocks = work
    masked = full + blocks - full_end
    kv_head = head // GROUP
    for half in gl.static_range(2):
        mbarrier.expect(tile_filled.index(half), 2 * ROWS * BLOCK_D * 2)
        copy_block(q_desc, [head, first + half * ROWS, 0], tile_filled.index(half), q.index(half))
        copy_block(dout_desc, [head, first + half * ROWS, 0], tile_filled.index(half), dout.index(half))
    for step in range(blocks):
        key = begin + visited_block(step, masked, full, full_end) * BLOCK_N
        unseen = 0
        if (reads_unseen_keys != 0) & (step < masked):  # all rows see the other blocks
            unseen = count_unseen(seen_rows(key, query_start_ptr, query_stop_ptr, key_end, BLOCK_N))
        slot = step % STAGES
        parity = (step // STAGES & 1) ^ 1
        mbarrier.wait(k_free.index(slot), parity)
        if unseen > 0:  # a product sums over keys; in dP a NaN of a hidden pair would meet p = 0
            mbarrier.wait(v_free.index(slot), parity)
            copies = (
                (k_ptr + kv_head.to(gl.int64) * stride_kh, stride_kt, k.index(slot)),
                (v_ptr + kv_head.to(gl.int64) * stride_vh, stride_vt, v.index(slot)),
            )
            copy_seen(copies, key, query_start_ptr, query_stop_ptr, key_end, BLOCK_N, BLOCK_D)
            fence_async_shared()
            mbarrier.arrive(k_filled.index(slot))
            mbarrier.arrive(v_filled.index(slot))
        else:
            mbarrier.expect(k_filled.index(slot), BLOCK_N * BLOCK_D * 2)
            copy_block(k_desc, [kv_head, key, 0], k_filled.index(slot), k.index(slot))
            mbarrier.wait(v_free.index(slot), parity)
            mbarrier.expect(v_filled.index(slot), BLOCK_N * BLOCK_D * 2)
            copy_block(v_desc, [kv_head, key, 0], v_filled.index(slot), v.index(slot))


@gluon.jit
def _dq_upper(
    buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's first 64 queries."""
    _dq(
        buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work, 0, BLOCK_N, BLOCK_D,
        STAGES,
    )  # fmt: skip


@gluon.jit
def _dq_lower(
    buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's last 64 queries."""
    _dq(
        buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work, 1, BLOCK_N, BLOCK_D,
        STAGES,
    )  # fmt: skip


@gluon.jit
def _dq(
    buffers, outputs, dlse_ptr, results, bounds, scale, scale_log2, head, first, end, work, HALF: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one half of a tile of queries: dq and the row statistics."""
    q, dout, k, v, tile_filled, k_filled, v_filled, k_free, v_free = buffers
    lse2_ptr, delta_ptr, dq_ptr, stride_dqt, stride_dqh, num_queries = results
    key_start_ptr, key_stop_ptr = bounds
    begin, full, full_end, blocks = work
    S_LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = product_layout(BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    low = first + HALF * ROWS
    start, stop = load_bounds(key_start_ptr, key_stop_ptr, low + gl.arange(0, ROWS, ROW), end)  # [M]
    dout_rows = dout.index(HALF).reshape([ROWS, BLOCK_D])
    lse2, delta = _statistics(
        outputs, dlse_ptr, lse2_ptr, delta_ptr, dout_rows, tile_filled.index(HALF), head, low, end, num_queries, BLOCK_D
    )
    lse2 = gl.convert_layout(lse2, ROW)
    delta = gl.convert_layout(delta, ROW)

    # In registers, which halves what the scores read from shared memory.
    q_rows = q.index(HALF).reshape([ROWS, BLOCK_D]).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    masked = full + blocks - full_end
    if blocks > 0:
        mbarrier.wait(k_filled.index(0), 0)
        scores = request_product(q_rows, k.index(0), S_LAYOUT, BLOCK_N, BLOCK_D)
        mbarrier.wait(v_filled.index(0), 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        final = blocks - 1
        for phase in gl.static_range(2):
            lo = 0 if phase == 0 else gl.minimum(masked, final)
            hi = gl.minimum(masked, final) if phase == 0 else final
            for step in range(lo, hi):
                slot = step % STAGES
                following = (step + 1) % STAGES
                key = begin + masked_block(step, full, full_end) * BLOCK_N
                dq, ds = _add_block(
                    dq, scores, dout_rows, k.index(slot), v.index(slot), v_free.index(slot), lse2, delta, scale_log2,
                    key, start, stop, S_LAYOUT, O_LAYOUT, BLOCK_N, BLOCK_D, phase == 0,
                )  # fmt: skip
                mbarrier.wait(k_filled.index(following), (step + 1) // STAGES & 1)
                mbarrier.wait(v_filled.index(following), (step + 1) // STAGES & 1)
                scores = request_product(q_rows, k.index(following), S_LAYOUT, BLOCK_N, BLOCK_D)
                dq, ds = warpgroup_mma_wait(1, deps=[dq, ds])
                mbarrier.arrive(k_free.index(slot))
                scores = warpgroup_mma_wait(0, deps=[scores])
        slot = final % STAGES
        key = begin + visited_block(final, masked, full, full_end) * BLOCK_N
        dq, ds = _add_block(
            dq, scores, dout_rows, k.index(slot), v.index(slot), v_free.index(slot), lse2, delta, scale_log2, key,
            start, stop, S_LAYOUT, O_LAYOUT, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
        dq, ds = warpgroup_mma_wait(0, deps=[dq, ds])
    # NaN in a row that sees nothing reaches no other row.
    dq = gl.where(gl.convert_layout(start < stop, gl.SliceLayout(1, O_LAYOUT))[:, None], dq * scale, 0.0)
    store_rows(dq, dq_ptr + head * stride_dqh, low, end, stride_dqt, BLOCK_D)


@gluon.jit
def _add_block(
    dq, scores, dout_rows, keys, values, values_free, lse2, delta, scale_log2, key, start, stop,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add a block with these scores [M, N] to dq; the product with the keys, of which dS is an operand, still runs."""
    dp = request_product(dout_rows, values, S_LAYOUT, BLOCK_N, BLOCK_D)
    p = gl.exp2(scores * scale_log2 - lse2[:, None])
    if MASKED:
        p = gl.where(between(start - key, stop - key, S_LAYOUT, BLOCK_N), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(values_free)
    ds = as_operand(p * (dp - delta[:, None]), keys.dtype, O_LAYOUT)
    dq = warpgroup_mma(ds, keys.reshape([BLOCK_N, BLOCK_D]), dq, is_async=True)
    return dq, ds


@gluon.jit
def _statistics(
    outputs, dlse_ptr, lse2_ptr, delta_ptr, dout_rows, filled, head, low, end, num_queries,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Compute and store lse2 and delta of the 64 rows from `low`."""
    out_ptr, lse_ptr, stride_ot, stride_oh, stride_dlh, stride_dlt = outputs
    WIDE: gl.constexpr = wide_layout(BLOCK_D, 4)
    offs_m = low + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
    in_range = offs_m < end
    rows = offs_m.to(gl.int64)
    out_ptrs = out_ptr + rows[:, None] * stride_ot + head * stride_oh + offs_d[None, :]
    out = gl.load(out_ptrs, mask=in_range[:, None], other=0.0)  # [M, D]
    statistics = head.to(gl.int64) * num_queries + offs_m
    lse = gl.load(lse_ptr + statistics, mask=in_range, other=float("-inf"))
    live = lse > float("-inf")
    mbarrier.wait(filled, 0)
    delta = gl.sum(out.to(gl.float32) * dout_rows.load(WIDE).to(gl.float32), 1)
    if dlse_ptr is not None:
        delta -= gl.load(dlse_ptr + head * stride_dlh + rows * stride_dlt, mask=live, other=0.0)
    delta = gl.where(live, delta, 0.0)
    lse2 = gl.where(live, lse * LOG2E, float("inf"))
    gl.store(lse2_ptr + statistics, lse2, mask=in_range)
    gl.store(delta_ptr + statistics, delta, mask=in_range)
    return lse2, delta  # [M]
