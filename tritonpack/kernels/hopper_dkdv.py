"""The backward kernel for Hopper that computes dK and dV, in Gluon, by tiles of 128 keys.

One warp loads, and two warpgroups compute 64 keys each. A tile's k and v stay in shared memory. The loading warp fills
a ring of buffers with q, dout and the row statistics, for all query heads that share the key head: the masked blocks of
all heads first, then the full ones. Probabilities and dS stay in registers, as left operands of the products that sum
over queries. Exponentials are computed while dP is summed, dS is computed while dV is summed, and the scores of the
next block are requested together with dK. No product runs across the end of an iteration, because ptxas would then
wait after each part of a product.

Legend: as in hopper.py, but a half is 64 keys.
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
    line_layout,
    product_layout,
    request_product,
    seen_rows,
    store_rows,
    visited_block,
)
from tritonpack.kernels.primitives import block_range, load_bounds, load_tile, masked_block


@dataclass(frozen=True)
class HopperDkdvTileShape:
    """The shape of a tile of 128 keys, and how a program computes it.

    Attributes:
        block_m: queries of a block.
        stages: buffers in the ring.
        registers: per thread, of the loading warp's group and of the computing groups, as in `HopperTileShape`.
    """

    block_m: int
    stages: int
    registers: tuple[int, int] = (24, 240)


# Head dimension -> tile, for the 16-bit types on sm_90. At 256 the sums of dK and dV alone would fill the registers.
HOPPER_DKDV_TILES = {64: HopperDkdvTileShape(64, 4), 128: HopperDkdvTileShape(64, 3)}


@gluon.jit(do_not_specialize=["num_queries", "num_kv_heads"])
def hopper_dkdv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    q_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    stride_qt,
    stride_qh,
    stride_dot,
    stride_doh,
    stride_dkt,
    stride_dkh,
    stride_dvt,
    stride_dvh,
    num_queries,
    num_kv_heads,
    scale,
    scale_log2,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
):
    """dk and dv [T_k, H_kv, D]; grid (tiles times key heads), 4 warps, and more are added.

    lse2 and delta are [H, T_q], as dQ's kernel leaves them. Descriptors read blocks [1, 64, D] of k and v and
    [1, BLOCK_M, D] of q and dout from (heads, tokens, D).
    """
    kv_head, _number, _tile_ptr, first, end, reads_unseen_queries = load_tile(tiles_ptr, num_kv_heads, 3)
    if first >= end:
        return
    begin, full, full_end, blocks = block_range(query_start_ptr, query_stop_ptr, first, end - 1, BLOCK_M)
    query_end = gl.load(query_stop_ptr + (end - 1))

    dtype: gl.constexpr = q_desc.dtype
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], k_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINE)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINE)
    tile_filled = barriers(2, 1)
    filled = barriers(STAGES, 2)
    free = barriers(STAGES, 2)
    fence_async_shared()

    buffers = (k, v, q, dout, lse2, delta, tile_filled, filled, free)
    work = (begin, full, full_end, blocks)
    results = (dk_ptr, dv_ptr, stride_dkt, stride_dkh, stride_dvt, stride_dvh)
    bounds = (query_start_ptr, query_stop_ptr)
    inputs = (q_ptr, dout_ptr, stride_qt, stride_qh, stride_dot, stride_doh, lse2_ptr, delta_ptr, num_queries)
    gl.warp_specialize(
        [
            (_dkdv_upper, (buffers, results, bounds, scale, scale_log2, kv_head, first, end, work,
                           GROUP, BLOCK_M, BLOCK_D, STAGES)),
            (_dkdv_lower, (buffers, results, bounds, scale, scale_log2, kv_head, first, end, work,
                           GROUP, BLOCK_M, BLOCK_D, STAGES)),
            (_load_queries, (q_desc, k_desc, v_desc, dout_desc, inputs, buffers, key_start_ptr, key_stop_ptr, query_end,
                             kv_head, first, reads_unseen_queries, work, GROUP, BLOCK_M, BLOCK_D, STAGES)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_queries(
    q_desc, k_desc, v_desc, dout_desc, inputs, buffers, key_start_ptr, key_stop_ptr, query_end, kv_head, first,
    reads_unseen_queries, work,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp of dK and dV: k and v once, then q, dout and the row statistics of all heads of the group.

    Numbers that are carried from block to block would be simpler than the divisions, but crash Triton 3.6.
    """
    k, v, q, dout, lse2, delta, tile_filled, filled, free = buffers
    q_ptr, dout_ptr, stride_qt, stride_qh, stride_dot, stride_doh, lse2_ptr, delta_ptr, num_queries = inputs
    begin, full, full_end, blocks = work
    masked = full + blocks - full_end
    for half in gl.static_range(2):
        mbarrier.expect(tile_filled.index(half), 2 * ROWS * BLOCK_D * 2)
        copy_block(k_desc, [kv_head, first + half * ROWS, 0], tile_filled.index(half), k.index(half))
        copy_block(v_desc, [kv_head, first + half * ROWS, 0], tile_filled.index(half), v.index(half))
    offs_m = gl.arange(0, BLOCK_M, line_layout(BLOCK_M))
    for number in range(blocks * GROUP):
        is_masked = number < masked * GROUP
        place = gl.where(is_masked, number, number - masked * GROUP)
        steps = gl.where(is_masked, masked, blocks - masked)  # of each head
        head = kv_head * GROUP + place // steps
        row = begin + visited_block(place % steps + gl.where(is_masked, 0, masked), masked, full, full_end) * BLOCK_M
        seen = row + offs_m < num_queries
        unseen = 0
        if (reads_unseen_queries != 0) & is_masked:
            seen = seen_rows(row, key_start_ptr, key_stop_ptr, query_end, BLOCK_M)
            unseen = count_unseen(seen)
        statistics = head.to(gl.int64) * num_queries + row + offs_m
        lse2_m = gl.load(lse2_ptr + statistics, mask=seen, other=0.0)
        delta_m = gl.load(delta_ptr + statistics, mask=seen, other=0.0)
        slot = number % STAGES
        mbarrier.wait(free.index(slot), (number // STAGES & 1) ^ 1)
        if unseen > 0:  # a weight of zero times NaN is NaN
            copies = (
                (q_ptr + head.to(gl.int64) * stride_qh, stride_qt, q.index(slot)),
                (dout_ptr + head.to(gl.int64) * stride_doh, stride_dot, dout.index(slot)),
            )
            copy_seen(copies, row, key_start_ptr, key_stop_ptr, query_end, BLOCK_M, BLOCK_D)
            fence_async_shared()
            mbarrier.arrive(filled.index(slot))
        else:
            mbarrier.expect(filled.index(slot), 2 * BLOCK_M * BLOCK_D * 2)
            copy_block(q_desc, [head, row, 0], filled.index(slot), q.index(slot))
            copy_block(dout_desc, [head, row, 0], filled.index(slot), dout.index(slot))
        lse2.index(slot).store(lse2_m)
        delta.index(slot).store(delta_m)
        mbarrier.arrive(filled.index(slot))


@gluon.jit
def _dkdv_upper(
    buffers, results, bounds, scale, scale_log2, kv_head, first, end, work,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's first 64 keys."""
    _dkdv(
        buffers, results, bounds, scale, scale_log2, kv_head, first, end, work, 0, GROUP, BLOCK_M, BLOCK_D, STAGES
    )  # fmt: skip


@gluon.jit
def _dkdv_lower(
    buffers, results, bounds, scale, scale_log2, kv_head, first, end, work,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's last 64 keys."""
    _dkdv(
        buffers, results, bounds, scale, scale_log2, kv_head, first, end, work, 1, GROUP, BLOCK_M, BLOCK_D, STAGES
    )  # fmt: skip


@gluon.jit
def _dkdv(
    buffers, results, bounds, scale, scale_log2, kv_head, first, end, work, HALF: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one half of a tile of keys: dk and dv."""
    k, v, q, dout, lse2, delta, tile_filled, filled, free = buffers
    dk_ptr, dv_ptr, stride_dkt, stride_dkh, stride_dvt, stride_dvh = results
    query_start_ptr, query_stop_ptr = bounds
    begin, full, full_end, blocks = work
    S_LAYOUT: gl.constexpr = product_layout(BLOCK_M)
    O_LAYOUT: gl.constexpr = product_layout(BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    low = first + HALF * ROWS
    start, stop = load_bounds(query_start_ptr, query_stop_ptr, low + gl.arange(0, ROWS, ROW), end)  # [N]
    k_rows = k.index(HALF).reshape([ROWS, BLOCK_D])
    v_rows = v.index(HALF).reshape([ROWS, BLOCK_D])
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    mbarrier.wait(tile_filled.index(HALF), 0)

    masked = full + blocks - full_end
    if blocks > 0:
        mbarrier.wait(filled.index(0), 0)
        scores = request_product(k_rows, q.index(0), S_LAYOUT, BLOCK_M, BLOCK_D)
        scores = warpgroup_mma_wait(0, deps=[scores])
        final = blocks * GROUP - 1
        step = 0
        for phase in gl.static_range(2):
            lo = 0 if phase == 0 else gl.minimum(masked * GROUP, final)
            hi = gl.minimum(masked * GROUP, final) if phase == 0 else final
            for number in range(lo, hi):
                slot = number % STAGES
                following = (number + 1) % STAGES
                row = begin + masked_block(step, full, full_end) * BLOCK_M
                dk, dv, p, ds = _add_block(
                    dk, dv, scores, v_rows, q.index(slot), dout.index(slot), lse2.index(slot), delta.index(slot),
                    scale_log2, row, start, stop, S_LAYOUT, O_LAYOUT, BLOCK_M, BLOCK_D, phase == 0,
                )  # fmt: skip
                mbarrier.wait(filled.index(following), (number + 1) // STAGES & 1)
                scores = request_product(k_rows, q.index(following), S_LAYOUT, BLOCK_M, BLOCK_D)
                dk, dv, p, ds, scores = warpgroup_mma_wait(0, deps=[dk, dv, p, ds, scores])
                mbarrier.arrive(free.index(slot))
                if phase == 0:
                    step = gl.where(step + 1 == masked, 0, step + 1)
        slot = final % STAGES
        row = begin + visited_block(blocks - 1, masked, full, full_end) * BLOCK_M
        dk, dv, p, ds = _add_block(
            dk, dv, scores, v_rows, q.index(slot), dout.index(slot), lse2.index(slot), delta.index(slot), scale_log2,
            row, start, stop, S_LAYOUT, O_LAYOUT, BLOCK_M, BLOCK_D, True,
        )  # fmt: skip
        dk, dv, p, ds = warpgroup_mma_wait(0, deps=[dk, dv, p, ds])
    # NaN in a key that no query sees reaches no other row.
    dk = gl.where(gl.convert_layout(start < stop, gl.SliceLayout(1, O_LAYOUT))[:, None], dk * scale, 0.0)
    store_rows(dk, dk_ptr + kv_head * stride_dkh, low, end, stride_dkt, BLOCK_D)
    store_rows(dv, dv_ptr + kv_head * stride_dvh, low, end, stride_dvt, BLOCK_D)


@gluon.jit
def _add_block(
    dk, dv, scores, v_rows, q, dout, lse2, delta, scale_log2, row, start, stop,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add a block with these scores [N, M] to dk and dv; the products, of which p and dS are operands, still run."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    dp = request_product(v_rows, dout, S_LAYOUT, BLOCK_M, BLOCK_D)
    p = gl.exp2(scores * scale_log2 - lse2.load(COLUMN)[None, :])
    if MASKED:
        p = gl.where(between(start - row, stop - row, S_LAYOUT, BLOCK_M), p, 0.0)
    weights = as_operand(p, q.dtype, O_LAYOUT)
    dv = warpgroup_mma(weights, dout.reshape([BLOCK_M, BLOCK_D]), dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = as_operand(p * (dp - delta.load(COLUMN)[None, :]), q.dtype, O_LAYOUT)
    dk = warpgroup_mma(ds, q.reshape([BLOCK_M, BLOCK_D]), dk, is_async=True)
    return dk, dv, weights, ds
