"""The forward kernel for Hopper, in Gluon: one warp loads, two warpgroups compute 64 rows each of a tile of 128.

A program computes one tile after the other. The loading warp fills two rings of shared-memory buffers by TMA, one with
keys and one with values, and continues with the next tile while the others still compute. Each computing warpgroup
keeps the tensor cores busy during its softmax: it requests the scores of a block together with the output of the block
before, and the softmax runs while that output is being summed. The warpgroups request products in turns, so that the
softmax of one overlaps with the products of the other.

Legend: as in forward.py; a half is the 64 rows of one warpgroup. `number` counts the tiles of the program, `done` its
blocks in earlier tiles. Each buffer has two barriers: `filled` completes when a block is loaded (of values: and unseen
values are zeroed), `free` when it has been read, in a ring by both halves. Parity n % 2 waits for the n-th completion
of a barrier, counted from 0. A new barrier counts as complete for parity 1, so all buffers are free at the start.
The mathematics is docs/math.md, section 2; the reasons for this form are in docs/decisions/hopper-forward.md.
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
    copy_block,
    copy_seen,
    count_unseen,
    product_layout,
    request_product,
    seen_rows,
    store_layout,
)
from tritonpack.kernels.primitives import LN2, block_range, load_bounds


@dataclass(frozen=True)
class HopperTileShape:
    """The shape of a tile of 128 query rows, and how a program computes it.

    Attributes:
        block_n: keys of a block.
        stages: buffers in each of the two rings.
        heads: as in TileShape.
        registers: per thread, of the loading warp's group and of the computing groups. The sum over all three groups of
            128 threads is at most 64 Ki.
        turns: whether the two halves request products in turns.
    """

    block_n: int
    stages: int
    heads: int = 8
    registers: tuple[int, int] = (24, 240)
    turns: bool = True


# Head dimension -> tile, for the 16-bit types on sm_90.
HOPPER_TILES = {64: HopperTileShape(128, 3), 128: HopperTileShape(128, 2), 256: HopperTileShape(64, 2)}


@gluon.jit(do_not_specialize=["num_tiles", "head_blocks", "num_queries"])
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
    num_tiles,
    head_blocks,
    num_queries,
    scale_log2,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
):
    """out [T_q, H, D] and lse [H, T_q]; any number of programs, with 4 warps each, and the kernel adds more.

    Descriptors read the 64 rows of a half from q, and blocks [1, BLOCK_N, D] from k and v, (heads, tokens, D).
    """
    dtype: gl.constexpr = q_desc.dtype
    tokens: gl.constexpr = q_desc.block_shape[1]
    q = gl.allocate_shared_memory(dtype, [2, ROWS // tokens, tokens, BLOCK_D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, BLOCK_D], v_desc.layout)
    q_filled = barriers(2, 1)
    k_filled = barriers(STAGES, 1)
    v_filled = barriers(STAGES, 1)
    q_free = barriers(2, 1)
    k_free = barriers(STAGES, 2)
    v_free = barriers(STAGES, 2)
    turn = barriers(2, 1)
    fence_async_shared()

    buffers = (q, k, v, q_filled, k_filled, v_filled, q_free, k_free, v_free)
    tiles = (tiles_ptr, num_tiles, head_blocks)
    results = (out_ptr, lse_ptr, stride_ot, stride_oh, num_queries)
    bounds = (key_start_ptr, key_stop_ptr)
    gl.warp_specialize(
        [
            (_compute_upper, (buffers, turn, results, tiles, bounds, scale_log2, HEADS, BLOCK_N, BLOCK_D, STAGES,
                              TURNS)),
            (_compute_lower, (buffers, turn, results, tiles, bounds, scale_log2, HEADS, BLOCK_N, BLOCK_D, STAGES,
                              TURNS)),
            (_load, (q_desc, k_desc, v_desc, v_ptr, stride_vt, stride_vh, buffers, tiles, bounds, query_start_ptr,
                     query_stop_ptr, GROUP, HEADS, BLOCK_N, BLOCK_D, STAGES)),
        ],
        [4, 1],
        [COMPUTE_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _find_tile(tiles, number, HEADS: gl.constexpr):
    """The first head and the table's entry of the program's tile `number`; after its last tile first = end = 0.

    Each tile counts once for every block of heads, which varies fastest. In a round each program takes the next one.
    Every second round goes backward, because the first tiles of a round are the heaviest. Empty entries come last.
    """
    tiles_ptr, num_tiles, head_blocks = tiles
    programs = gl.num_programs(0)
    item = number * programs + gl.program_id(0) + (number & 1) * (programs - 1 - 2 * gl.program_id(0))
    tile = item // head_blocks
    entry_ptr = tiles_ptr + 3 * tile
    first = gl.load(entry_ptr, mask=tile < num_tiles, other=0)
    end = gl.load(entry_ptr + 1, mask=tile < num_tiles, other=0)
    reads_unseen_keys = gl.load(entry_ptr + 2, mask=tile < num_tiles, other=0)
    used = (first < end).to(gl.int32)
    return item % head_blocks * HEADS, first * used, end * used, reads_unseen_keys


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, v_ptr, stride_vt, stride_vh, buffers, tiles, bounds, query_start_ptr, query_stop_ptr,
    GROUP: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: loads keys one block ahead of values, and q after its first keys, when a buffer is free."""
    q, k, v, q_filled, k_filled, v_filled, q_free, k_free, v_free = buffers
    key_start_ptr, key_stop_ptr = bounds
    TOKENS: gl.constexpr = 2 * ROWS // HEADS
    number = 0
    done = 0
    head, first, end, reads_unseen_keys = _find_tile(tiles, number, HEADS)
    while first < end:
        begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, end - 1, BLOCK_N)
        kv_head = head // GROUP
        for ahead in range(blocks + 1):
            if ahead < blocks:
                slot = (done + ahead) % STAGES
                mbarrier.wait(k_free.index(slot), ((done + ahead) // STAGES & 1) ^ 1)
                mbarrier.expect(k_filled.index(slot), BLOCK_N * BLOCK_D * 2)
                copy_block(k_desc, [kv_head, begin + ahead * BLOCK_N, 0], k_filled.index(slot), k.index(slot))
            if ahead == 0:
                for half in gl.static_range(2):
                    mbarrier.wait(q_free.index(half), (number & 1) ^ 1)
                    mbarrier.expect(q_filled.index(half), ROWS * BLOCK_D * 2)
                    place = [head + half * ROWS // TOKENS, first + half * ROWS % TOKENS, 0]
                    copy_block(q_desc, place, q_filled.index(half), q.index(half))
            else:
                block = ahead - 1
                key = begin + block * BLOCK_N
                unseen = 0
                if (reads_unseen_keys != 0) & ((block < full) | (block >= full_end)):  # all rows see the other blocks
                    key_end = gl.load(key_stop_ptr + (end - 1))
                    unseen = count_unseen(seen_rows(key, query_start_ptr, query_stop_ptr, key_end, BLOCK_N))
                slot = (done + block) % STAGES
                mbarrier.wait(v_free.index(slot), ((done + block) // STAGES & 1) ^ 1)
                if unseen > 0:
                    key_end = gl.load(key_stop_ptr + (end - 1))
                    copy = (v_ptr + kv_head.to(gl.int64) * stride_vh, stride_vt, v.index(slot))
                    copy_seen((copy,), key, query_start_ptr, query_stop_ptr, key_end, BLOCK_N, BLOCK_D)
                    fence_async_shared()
                    mbarrier.arrive(v_filled.index(slot))
                else:
                    mbarrier.expect(v_filled.index(slot), BLOCK_N * BLOCK_D * 2)
                    copy_block(v_desc, [kv_head, key, 0], v_filled.index(slot), v.index(slot))
        number += 1
        done += blocks
        head, first, end, reads_unseen_keys = _find_tile(tiles, number, HEADS)


@gluon.jit
def _compute_upper(
    buffers, turn, results, tiles, bounds, scale_log2, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tiles' first 64 rows; it has the first turn."""
    if TURNS:
        mbarrier.arrive(turn.index(0))
    _compute(buffers, turn, results, tiles, bounds, scale_log2, 0, HEADS, BLOCK_N, BLOCK_D, STAGES, TURNS)


@gluon.jit
def _compute_lower(
    buffers, turn, results, tiles, bounds, scale_log2, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The warpgroup of the tiles' last 64 rows."""
    _compute(buffers, turn, results, tiles, bounds, scale_log2, 1, HEADS, BLOCK_N, BLOCK_D, STAGES, TURNS)


@gluon.jit
def _compute(
    buffers, turn, results, tiles, bounds, scale_log2, HALF: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Compute one half of each tile: outputs and log-sum-exps of its rows."""
    q, k, v, q_filled, k_filled, v_filled, q_free, k_free, v_free = buffers
    out_ptr, lse_ptr, stride_ot, stride_oh, num_queries = results
    key_start_ptr, key_stop_ptr = bounds
    TOKENS: gl.constexpr = 2 * ROWS // HEADS
    S_LAYOUT: gl.constexpr = product_layout(BLOCK_N)
    O_LAYOUT: gl.constexpr = product_layout(BLOCK_D)
    WIDE: gl.constexpr = store_layout(BLOCK_D)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows = q.index(HALF).reshape([ROWS, BLOCK_D])
    number = 0
    done = 0
    head, first, end, _exposed = _find_tile(tiles, number, HEADS)
    begin, full, full_end, blocks = block_range(key_start_ptr, key_stop_ptr, first, gl.maximum(end, 1) - 1, BLOCK_N)
    while first < end:
        offs_r = HALF * ROWS + gl.arange(0, ROWS, ROW)
        offs_m = first + offs_r % TOKENS
        start, stop = load_bounds(key_start_ptr, key_stop_ptr, offs_m, end)  # [M]
        next_head, next_first, next_end, _exposed = _find_tile(tiles, number + 1, HEADS)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        l_i = gl.zeros([ROWS], gl.float32, ROW)
        mbarrier.wait(q_filled.index(HALF), number & 1)

        if blocks > 0:
            slot = done % STAGES
            mbarrier.wait(k_filled.index(slot), done // STAGES & 1)
            if TURNS:
                mbarrier.wait(turn.index(HALF), done & 1)
            scores = request_product(rows, k.index(slot), S_LAYOUT, BLOCK_N, BLOCK_D)
            if TURNS:
                mbarrier.arrive(turn.index(1 - HALF))
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_free.index(slot))
            p, m_i, l_i, alpha = _softmax(scores, m_i, l_i, scale_log2, begin, start, stop, S_LAYOUT, BLOCK_N, True)
            p = as_operand(p, q.dtype, O_LAYOUT)
            for phase in gl.static_range(3):
                lo = 1 if phase == 0 else (gl.maximum(full, 1) if phase == 1 else gl.maximum(full_end, 1))
                hi = full if phase == 0 else (full_end if phase == 1 else blocks)
                for block in range(lo, hi):
                    n = done + block
                    slot = n % STAGES
                    previous = (n - 1) % STAGES
                    mbarrier.wait(k_filled.index(slot), n // STAGES & 1)
                    if TURNS:
                        mbarrier.wait(turn.index(HALF), n & 1)
                    scores = request_product(rows, k.index(slot), S_LAYOUT, BLOCK_N, BLOCK_D)
                    mbarrier.wait(v_filled.index(previous), (n - 1) // STAGES & 1)
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
                    p = as_operand(weights, q.dtype, O_LAYOUT)
            last = done + blocks - 1
            slot = last % STAGES
            mbarrier.wait(v_filled.index(slot), last // STAGES & 1)
            acc = warpgroup_mma(p, v.index(slot).reshape([BLOCK_N, BLOCK_D]), acc, is_async=True)
            mbarrier.arrive(q_free.index(HALF))
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(v_free.index(slot))
        else:
            mbarrier.arrive(q_free.index(HALF))

        number += 1
        done += blocks
        begin, full, full_end, blocks = block_range(
            key_start_ptr, key_stop_ptr, next_first, gl.maximum(next_end, 1) - 1, BLOCK_N
        )
        lse = (m_i + gl.log2(l_i)) * LN2  # -inf in rows that see nothing
        lse_ptrs = lse_ptr + (head + offs_r // TOKENS).to(gl.int64) * num_queries + offs_m
        gl.store(lse_ptrs, lse, mask=offs_m < end)
        share = 1.0 / gl.where(l_i == 0.0, 1.0, l_i)
        acc = acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
        out = gl.convert_layout(acc.to(q.dtype), WIDE)
        offs_r = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
        offs_m = first + offs_r % TOKENS
        offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))
        row_offs = offs_m.to(gl.int64) * stride_ot + (head + offs_r // TOKENS) * stride_oh
        gl.store(out_ptr + row_offs[:, None] + offs_d[None, :], out, mask=(offs_m < end)[:, None])
        head, first, end = next_head, next_first, next_end


@gluon.jit
def _softmax(
    scores, m_i, l_i, scale_log2, key, start, stop, S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """(weights [M, N], new maximum, new sum, alpha): a step of the online softmax; alpha rescales the earlier sums."""
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
