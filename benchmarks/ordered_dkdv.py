"""A sketch of one ordered pass for Hopper, in Gluon: dK and dV as the backend "gluon" computes them, and dQ added.

`python -m benchmarks.ordered_dq --compile` counts its instructions, and `tests/benchmarks/test_ordered_dq.py` runs it
in the emulator. It isn't launched. It differs from `tritonpack/kernels/hopper_dkdv.py` in this: each half stores its dS
in shared memory, waits for the other half's, and computes half of the columns of the block's dQ from all 128 keys. A
third role, one warp, waits for the block's turn, adds dQ to float32 sums by a copy that adds, and passes the turn on.
So the computing warps wait for an addition only if it isn't over one block later. Keys that no query sees must be
finite, because they aren't cleaned. Copies that add need Triton 3.9.

Legend: as in hopper_dkdv.py. dS has two buffers: a half that fills one never overwrites what the other half reads,
because both have passed the barrier of the block in between.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonpack.kernels.hopper_dkdv import _add_block, _load_queries
from tritonpack.kernels.hopper_primitives import (
    ROWS,
    barriers,
    product_layout,
    request_product,
    store_rows,
    visited_block,
)
from tritonpack.kernels.primitives import load_bounds, load_tile, masked_block


@gluon.jit
def ordered_dkdv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    q_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    turns_ptr,
    places_ptr,
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
    """dk and dv [T_k, H_kv, D], and dq added to float32 sums (heads, tokens, D).

    turns [H, T_q / BLOCK_M] counts the tiles that have added to a block, from 0. places [tiles, T_q / BLOCK_M] is how
    many tiles before this one add to it.
    """
    kv_head, number, _tile_ptr, first, end, exposed = load_tile(tiles_ptr, num_kv_heads, 3)
    if first >= end:
        return
    begin, full, full_end, blocks = _aligned_range(query_start_ptr, query_stop_ptr, first, end - 1, BLOCK_M)
    query_end = gl.load(query_stop_ptr + (end - 1))

    dtype: gl.constexpr = q_desc.dtype
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], k_desc.layout)
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    dout = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, BLOCK_D], q_desc.layout)
    lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINE)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], LINE)
    ds = gl.allocate_shared_memory(dtype, [4, ROWS, BLOCK_M], FLAT)  # a buffer's two halves, then the other's
    dq = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M, BLOCK_D // 2], dq_desc.layout)
    tile_filled = barriers(2, 1)
    filled = barriers(STAGES, 2)
    free = barriers(STAGES, 2)
    ds_ready = barriers(2, 2)
    dq_ready = barriers(2, 1)
    dq_free = barriers(2, 1)
    fence_async_shared()

    buffers = (k, v, q, dout, lse2, delta, tile_filled, filled, free)
    sums = (ds, dq, ds_ready, dq_ready, dq_free)
    work = (begin, full, full_end, blocks)
    results = (dk_ptr, dv_ptr, stride_dkt, stride_dkh, stride_dvt, stride_dvh)
    bounds = (query_start_ptr, query_stop_ptr)
    inputs = (q_ptr, dout_ptr, stride_qt, stride_qh, stride_dot, stride_doh, lse2_ptr, delta_ptr, num_queries)
    order = (turns_ptr, places_ptr, number, num_queries)
    gl.warp_specialize(
        [
            (_upper, (buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work,
                      GROUP, BLOCK_M, BLOCK_D, STAGES)),
            (_lower, (buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work,
                      GROUP, BLOCK_M, BLOCK_D, STAGES)),
            (_load_queries, (q_desc, k_desc, v_desc, dout_desc, inputs, buffers, key_start_ptr, key_stop_ptr, query_end,
                             kv_head, first, exposed, work, GROUP, BLOCK_M, BLOCK_D, STAGES)),
            (_add_to_sums, (dq_desc, sums, order, kv_head, work, GROUP, BLOCK_M, BLOCK_D)),
        ],
        [4, 1, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _aligned_range(start_ptr, stop_ptr, first, last, BLOCK: gl.constexpr):
    """`block_range` with blocks that begin at multiples of BLOCK, because tiles must add to the same blocks.

    A tile of fewer than 128 keys has no full blocks, because dQ would sum over the keys past its end, too.
    """
    begin, end = gl.load(start_ptr + first), gl.load(stop_ptr + last)
    common, common_end = gl.load(start_ptr + last), gl.load(stop_ptr + first)
    low = begin // BLOCK * BLOCK
    blocks = gl.where(begin < end, gl.cdiv(end - low, BLOCK), 0)
    full = gl.minimum(gl.cdiv(gl.maximum(common - low, 0), BLOCK), blocks)
    full = gl.where(last - first + 1 < 2 * ROWS, blocks, full)
    return low, full, gl.maximum(gl.maximum(common_end - low, 0) // BLOCK, full), blocks


@gluon.jit
def _add_to_sums(
    dq_desc, sums, order, kv_head, work, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr
):
    """The warp that adds each block's dQ when it is this tile's turn. Blocks come as in `_load_queries`."""
    _ds, dq, _ds_ready, dq_ready, dq_free = sums
    turns_ptr, places_ptr, tile, num_queries = order
    begin, full, full_end, blocks = work
    masked = full + blocks - full_end
    lines = gl.cdiv(num_queries, BLOCK_M)
    for number in range(blocks * GROUP):
        is_masked = number < masked * GROUP
        place = gl.where(is_masked, number, number - masked * GROUP)
        steps = gl.where(is_masked, masked, blocks - masked)
        head = kv_head * GROUP + place // steps
        row = begin + visited_block(place % steps + gl.where(is_masked, 0, masked), masked, full, full_end) * BLOCK_M
        turn_ptr = turns_ptr + head.to(gl.int64) * lines + row // BLOCK_M
        before = gl.load(places_ptr + tile.to(gl.int64) * lines + row // BLOCK_M)
        for half in gl.static_range(2):
            mbarrier.wait(dq_ready.index(half), number & 1)
        while gl.atomic_add(turn_ptr, 0, sem="acquire") < before:
            pass
        for half in gl.static_range(2):
            tma.async_atomic_add(dq_desc, [head, row, half * (BLOCK_D // 2)], dq.index(half))
        tma.store_wait(0, read_only=False)
        gl.atomic_add(turn_ptr, 1, sem="release")
        for half in gl.static_range(2):
            mbarrier.arrive(dq_free.index(half))


@gluon.jit
def _upper(
    buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's first 64 keys."""
    _half(
        buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work, 0, GROUP, BLOCK_M, BLOCK_D, STAGES
    )


@gluon.jit
def _lower(
    buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's last 64 keys."""
    _half(
        buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work, 1, GROUP, BLOCK_M, BLOCK_D, STAGES
    )


@gluon.jit
def _half(
    buffers, sums, results, bounds, scale, scale_log2, kv_head, first, end, work, HALF: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one half of a tile of keys, dk and dv, and half of the columns of each block's dq."""
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
    for half in gl.static_range(2):  # dq reads the keys of both
        mbarrier.wait(tile_filled.index(half), 0)

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
                dq = _request_dq(ds, k, sums, number, HALF, BLOCK_M, BLOCK_D)
                dk, dv, p, ds, dq = warpgroup_mma_wait(0, deps=[dk, dv, p, ds, dq])
                mbarrier.arrive(free.index(slot))
                mbarrier.wait(filled.index(following), (number + 1) // STAGES & 1)
                scores = request_product(k_rows, q.index(following), S_LAYOUT, BLOCK_M, BLOCK_D)
                _hand_over(dq, sums, number, scale, HALF, BLOCK_M, BLOCK_D)
                scores = warpgroup_mma_wait(0, deps=[scores])
                if phase == 0:
                    step = gl.where(step + 1 == masked, 0, step + 1)
        slot = final % STAGES
        row = begin + visited_block(blocks - 1, masked, full, full_end) * BLOCK_M
        dk, dv, p, ds = _add_block(
            dk, dv, scores, v_rows, q.index(slot), dout.index(slot), lse2.index(slot), delta.index(slot), scale_log2,
            row, start, stop, S_LAYOUT, O_LAYOUT, BLOCK_M, BLOCK_D, True,
        )  # fmt: skip
        dq = _request_dq(ds, k, sums, final, HALF, BLOCK_M, BLOCK_D)
        dk, dv, p, ds, dq = warpgroup_mma_wait(0, deps=[dk, dv, p, ds, dq])
        _hand_over(dq, sums, final, scale, HALF, BLOCK_M, BLOCK_D)
    dk = gl.where(gl.convert_layout(start < stop, gl.SliceLayout(1, O_LAYOUT))[:, None], dk * scale, 0.0)
    store_rows(dk, dk_ptr + kv_head * stride_dkh, low, end, stride_dkt, BLOCK_D)
    store_rows(dv, dv_ptr + kv_head * stride_dvh, low, end, stride_dvt, BLOCK_D)


@gluon.jit
def _request_dq(ds, k, sums, number, HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """Store this half's dS [N, M], wait for the other's, and start dS^T @ K -> [M, D / 2], half of the columns."""
    ds_stored, _dq, ds_ready, _dq_ready, _dq_free = sums
    COLUMNS: gl.constexpr = BLOCK_D // 2
    buffer = number & 1
    ds_stored.index(2 * buffer + HALF).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(buffer))
    mbarrier.wait(ds_ready.index(buffer), number // 2 & 1)
    dq = gl.zeros([BLOCK_M, COLUMNS], gl.float32, product_layout(COLUMNS))
    for half in gl.static_range(2):
        keys = k.index(half).reshape([ROWS, BLOCK_D]).slice(HALF * COLUMNS, COLUMNS, 1)
        weights = ds_stored.index(2 * buffer + half).permute((1, 0))
        dq = warpgroup_mma(weights, keys, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _hand_over(dq, sums, number, scale, HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr):
    """Store half of the columns of dQ for the warp that adds it."""
    _ds, dq_stored, _ds_ready, dq_ready, dq_free = sums
    mbarrier.wait(dq_free.index(HALF), (number & 1) ^ 1)
    dq_stored.index(HALF).reshape([BLOCK_M, BLOCK_D // 2]).store(dq * scale)
    fence_async_shared()
    mbarrier.arrive(dq_ready.index(HALF))
