"""The forward kernel for Hopper, in Gluon: one warp loads, two warpgroups compute 64 rows each of a tile of 128.

The loading warp fills two rings of shared-memory buffers by TMA, one with keys and one with values. Each computing
warpgroup keeps the tensor cores busy during its softmax: it requests the scores of a block together with the output of
the block before, and the softmax runs while that output is being summed. The warpgroups request products in turns, so
that the softmax of one overlaps with the products of the other.

Legend: as in forward.py; a half is the 64 rows of one warpgroup. Each buffer of a ring has two barriers: `filled`
completes when a block is loaded (of values: and unseen values are zeroed), `free` when both halves have read it. Parity
n % 2 waits for the n-th completion of a barrier, counted from 0. A new barrier counts as complete for parity 1, so all
buffers are free at the start.
The mathematics is docs/math.md, section 2; the reasons for this form are in docs/decisions/hopper-forward.md.
"""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonpack.kernels.primitives import LN2, block_range, load_bounds, load_tile

# Renamed after Triton 3.6.
copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@dataclass(frozen=True)
class HopperTileShape:
    """The shape of a tile of 128 query rows, and how a program computes it.

    Attributes:
        block_n: keys of a block.
        stages: buffers in each of the two rings.
        registers: per thread, of the loading warp's group and of the computing groups. The sum over all three groups of
            128 threads is at most 64 Ki.
        turns: whether the two halves request products in turns.
    """

    block_n: int
    stages: int
    registers: tuple[int, int] = (24, 240)
    turns: bool = True


ROWS = gl.constexpr(64)  # rows of a half

# Head dimension -> tile, for the 16-bit types on sm_90.
HOPPER_TILES = {64: HopperTileShape(128, 3), 128: HopperTileShape(128, 2), 256: HopperTileShape(64, 2)}


@gluon.constexpr_function
def _product_layout(columns):
    """The layout of a product in a warpgroup: 64 rows of `columns` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _wide_layout(columns, warps):
    """A layout with 8 columns, 16 bytes, per thread and whole rows per warp."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _line_layout(size):
    """The layout of a vector in one warp."""
    return gl.BlockedLayout([size // 32], [32], [1], [0])


@gluon.jit(do_not_specialize=["num_queries", "num_heads"])
def hopper_forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    v_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    key_start_ptr,
    key_stop_ptr,
    query_start_ptr,
    query_stop_ptr,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    num_queries,
    num_heads,
    scale_log2,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
):
    """out [T_q, H, D] and lse [H, T_q]; grid (tiles times heads), 4 warps, and the kernel adds more.

    Descriptors read blocks [1, 64, D] of q and [1, BLOCK_N, D] of k and v from (heads, tokens, D).
    """
    head, _number, _tile_ptr, first, end, exposed = load_tile(tiles_ptr, num_heads, 3)
    if first >= end:
        return
    begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, end - 1, BLOCK_N)
    key_end = gl.load(key_stop_ptr + (end - 1))

    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, ROWS, BLOCK_D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_filled = _barriers(2, 1)
    k_filled = _barriers(STAGES, 1)
    v_filled = _barriers(STAGES, 1)
    k_free = _barriers(STAGES, 2)
    v_free = _barriers(STAGES, 2)
    turn = _barriers(2, 1)
    fence_async_shared()

    rings = (q, k, v, q_filled, k_filled, v_filled, k_free, v_free)
    work = (begin, full, full_end, blocks)
    results = (out_ptr, lse_ptr, stride_ot, stride_oh, num_queries)
    bounds = (key_start_ptr, key_stop_ptr)
    gl.warp_specialize(
        [
            (_compute_upper, (rings, turn, results, bounds, scale_log2, head, first, end, work,
                              BLOCK_N, BLOCK_D, STAGES, TURNS)),
            (_compute_lower, (rings, turn, results, bounds, scale_log2, head, first, end, work,
                              BLOCK_N, BLOCK_D, STAGES, TURNS)),
            (_load, (q_desc, k_desc, v_desc, v_ptr, stride_vt, stride_vh, rings, query_start_ptr, query_stop_ptr,
                     key_end, head, first, exposed, work, GROUP, BLOCK_N, BLOCK_D, STAGES)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each complete after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, v_ptr, stride_vt, stride_vh, rings, query_start_ptr, query_stop_ptr, key_end, head,
    first, exposed, work,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: loads q, then keys one block ahead of values, each as soon as a buffer is free."""
    q, k, v, q_filled, k_filled, v_filled, k_free, v_free = rings
    begin, full, full_end, blocks = work
    kv_head = head // GROUP
    for half in gl.static_range(2):
        mbarrier.expect(q_filled.index(half), ROWS * BLOCK_D * 2)
        copy_block(q_desc, [head, first + half * ROWS, 0], q_filled.index(half), q.index(half))
    for ahead in range(blocks + 1):
        if ahead < blocks:
            slot = ahead % STAGES
            mbarrier.wait(k_free.index(slot), (ahead // STAGES & 1) ^ 1)
            mbarrier.expect(k_filled.index(slot), BLOCK_N * BLOCK_D * 2)
            copy_block(k_desc, [kv_head, begin + ahead * BLOCK_N, 0], k_filled.index(slot), k.index(slot))
        if ahead > 0:
            block = ahead - 1
            key = begin + block * BLOCK_N
            unseen = 0
            if (exposed != 0) & ((block < full) | (block >= full_end)):  # all rows see the other blocks
                unseen = _count_unseen(key, query_start_ptr, query_stop_ptr, key_end, BLOCK_N)
            slot = block % STAGES
            mbarrier.wait(v_free.index(slot), (block // STAGES & 1) ^ 1)
            if unseen > 0:
                _copy_seen(
                    v_ptr + kv_head.to(gl.int64) * stride_vh, stride_vt, v.index(slot), key, query_start_ptr,
                    query_stop_ptr, key_end, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                fence_async_shared()
                mbarrier.arrive(v_filled.index(slot))
            else:
                mbarrier.expect(v_filled.index(slot), BLOCK_N * BLOCK_D * 2)
                copy_block(v_desc, [kv_head, key, 0], v_filled.index(slot), v.index(slot))


@gluon.jit
def _count_unseen(key, query_start_ptr, query_stop_ptr, key_end, BLOCK_N: gl.constexpr):
    """The number of keys of a block that no query sees or that lie after the tile's last key."""
    layout: gl.constexpr = _line_layout(BLOCK_N)
    offs_n = key + gl.arange(0, BLOCK_N, layout)
    query_start, query_stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, key_end)
    return gl.sum((query_start >= query_stop).to(gl.int32), 0)


@gluon.jit
def _copy_seen(
    v_ptr, stride_vt, v, key, query_start_ptr, query_stop_ptr, key_end,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Copy a block of values, with zeros for values that no query sees or that lie after the tile's last key, because a
    probability of zero times NaN is NaN.

    Few tiles need this, so it copies few rows at a time, which takes few registers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    rows = v.reshape([BLOCK_N, BLOCK_D])
    offs_n = key + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    for i in gl.static_range(BLOCK_N // 8):
        query_start, query_stop = load_bounds(query_start_ptr, query_stop_ptr, offs_n, key_end)
        seen = (query_start < query_stop)[:, None]
        v_ptrs = v_ptr + offs_n.to(gl.int64)[:, None] * stride_vt + offs_d[None, :]
        for column in gl.static_range(0, BLOCK_D, 64):
            rows.slice(i * 8, 8).slice(column, 64, 1).store(gl.load(v_ptrs + column, mask=seen, other=0.0))
        offs_n += 8


@gluon.jit
def _compute_upper(
    rings, turn, results, bounds, scale_log2, head, first, end, work,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's first 64 rows; it has the first turn."""
    if TURNS:
        mbarrier.arrive(turn.index(0))
    _compute(
        rings, turn, results, bounds, scale_log2, head, first, end, work, 0, BLOCK_N, BLOCK_D, STAGES, TURNS
    )  # fmt: skip


@gluon.jit
def _compute_lower(
    rings, turn, results, bounds, scale_log2, head, first, end, work,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tile's last 64 rows."""
    _compute(
        rings, turn, results, bounds, scale_log2, head, first, end, work, 1, BLOCK_N, BLOCK_D, STAGES, TURNS
    )  # fmt: skip


@gluon.jit
def _compute(
    rings, turn, results, bounds, scale_log2, head, first, end, work, HALF: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Compute one half of a tile: outputs and log-sum-exps of its rows."""
    q, k, v, q_filled, k_filled, v_filled, k_free, v_free = rings
    out_ptr, lse_ptr, stride_ot, stride_oh, num_queries = results
    key_start_ptr, key_stop_ptr = bounds
    begin, full, full_end, blocks = work
    S_LAYOUT: gl.constexpr = _product_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = _product_layout(BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    low = first + HALF * ROWS
    offs_m = low + gl.arange(0, ROWS, ROW)
    start, stop = load_bounds(key_start_ptr, key_stop_ptr, offs_m, end)  # [M]
    rows = q.index(HALF).reshape([ROWS, BLOCK_D])
    acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l_i = gl.zeros([ROWS], gl.float32, ROW)
    mbarrier.wait(q_filled.index(HALF), 0)

    if blocks > 0:
        mbarrier.wait(k_filled.index(0), 0)
        scores = _request_scores(rows, k.index(0), S_LAYOUT, BLOCK_N, BLOCK_D)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(0))
        p, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale_log2, begin, start, stop, S_LAYOUT, BLOCK_N, True)
        p = _as_operand(p, q.dtype, O_LAYOUT)
        for phase in gl.static_range(3):
            lo = 1 if phase == 0 else (gl.maximum(full, 1) if phase == 1 else gl.maximum(full_end, 1))
            hi = full if phase == 0 else (full_end if phase == 1 else blocks)
            for block in range(lo, hi):
                slot = block % STAGES
                parity = block // STAGES & 1
                previous = (block - 1) % STAGES
                previous_parity = (block - 1) // STAGES & 1
                mbarrier.wait(k_filled.index(slot), parity)
                if TURNS:
                    mbarrier.wait(turn.index(HALF), block - 1 & 1)
                scores = _request_scores(rows, k.index(slot), S_LAYOUT, BLOCK_N, BLOCK_D)
                mbarrier.wait(v_filled.index(previous), previous_parity)
                acc = warpgroup_mma(p, v.index(previous).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
                if TURNS:
                    mbarrier.arrive(turn.index(1 - HALF))
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_free.index(slot))
                key = begin + block * BLOCK_N
                weights, m_i, l_i, alpha = _softmax(
                    scores, m_i, l_i, scale_log2, key, start, stop, S_LAYOUT, BLOCK_N, phase != 1
                )
                l_i = _before_waiting(l_i)
                acc, p = warpgroup_mma_wait(0, deps=[acc, p])
                mbarrier.arrive(v_free.index(previous))
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
                p = _as_operand(weights, q.dtype, O_LAYOUT)
        last = (blocks - 1) % STAGES
        mbarrier.wait(v_filled.index(last), (blocks - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v.index(last).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])

    lse = (m_i + gl.log2(l_i)) * LN2  # -inf in rows that see nothing
    gl.store(lse_ptr + head.to(gl.int64) * num_queries + offs_m, lse, mask=offs_m < end)
    share = 1.0 / gl.where(l_i == 0.0, 1.0, l_i)
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
    # Through the memory that held q, so that a thread writes 16 bytes at a time.
    WIDE: gl.constexpr = _wide_layout(BLOCK_D, 4)
    rows.store(acc.to(q.dtype))
    out = rows.load(WIDE)
    offs_m = low + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
    out_ptrs = out_ptr + offs_m.to(gl.int64)[:, None] * stride_ot + head * stride_oh + offs_d[None, :]
    gl.store(out_ptrs, out, mask=(offs_m < end)[:, None])


@gluon.jit
def _request_scores(rows, keys, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr):
    """Start [M, D] @ [D, N] -> [M, N] without waiting for it."""
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    return warpgroup_mma(rows, keys.reshape([BLOCK_N, BLOCK_D]).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    scores, m_i, l_i, scale_log2, key, start, stop, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """A block's weights [M, N], the rows' new maximum and sum, and the factor `alpha` of their earlier sums."""
    if MASKED:
        offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        visible = (offs_n[None, :] >= (start - key)[:, None]) & (offs_n[None, :] < (stop - key)[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale_log2)
    # The maximum of a row without a key so far is -inf. With 0 in its place its exponentials are exp2(-inf) = 0.
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    weights = gl.exp2(scores * scale_log2 - pivot[:, None])
    alpha = gl.exp2(m_i - pivot)
    return weights, m_new, l_i * alpha + gl.sum(weights, 1), alpha


@gluon.jit
def _as_operand(weights, dtype: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Weights in the layout of an operand of the product with the values, in registers."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))


@gluon.jit
def _before_waiting(l_i):
    """Return the sums unchanged, behind a store that never runs, because it needs a negative sum.

    The assembler doesn't know that sums aren't negative. It may move arithmetic below a wait for products, which would
    end the overlap of the softmax with a product, but it doesn't move a store. So this keeps the softmax before the
    wait. A trap instead of the store would work, too, but its branch would make the products synchronous.
    """
    ASM: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000; "
        "@p st.shared.f32 [a], $1; mov.b32 $0, $1; }"
    )
    return gl.inline_asm_elementwise(ASM, "=f,f", [l_i], gl.float32, is_pure=False, pack=1)
