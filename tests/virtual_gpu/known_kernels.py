"""Small kernels whose results are known, to test the virtual GPU itself."""

# Triton resolves annotations of kernels itself, so there is no `from __future__ import annotations` here.
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonpack.kernels.hopper_primitives import copy_block


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + offs, mask=offs < size) + tl.load(y_ptr + offs, mask=offs < size)
    tl.store(out_ptr + offs, total, mask=offs < size)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * size + offs, mask=offs < size, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * size + offs, e / tl.sum(e, 0), mask=offs < size)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, rows, columns, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, size, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        a_mask = (offs_m < rows)[:, None] & (offs_k < size)[None, :]
        b_mask = (offs_k < size)[:, None] & (offs_n < columns)[None, :]
        a = tl.load(a_ptr + offs_m[:, None] * size + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * columns + offs_n[None, :], mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    out_mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    tl.store(out_ptr + offs_m[:, None] * columns + offs_n[None, :], acc, mask=out_mask)


@triton.jit
def descriptor_matmul_kernel(
    a, b, out_ptr, rows, columns, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, size, BLOCK_K):
        if TRANSPOSED:
            acc = tl.dot(a.load([m, start]), b.load([n, start]).T, acc)
        else:
            acc = tl.dot(a.load([m, start]), b.load([start, n]), acc)
    offs_m, offs_n = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    out_mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    tl.store(out_ptr + offs_m[:, None] * columns + offs_n[None, :], acc, mask=out_mask)


@gluon.jit
def _load_blocks(x_desc, x, filled, free, blocks, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    for block in range(blocks):
        slot = block % STAGES
        mbarrier.wait(free.index(slot), (block // STAGES & 1) ^ 1)
        mbarrier.expect(filled.index(slot), BLOCK * BLOCK * 2)
        copy_block(x_desc, [block * BLOCK, 0], filled.index(slot), x.index(slot))


@gluon.jit
def _add_products(x, filled, free, out_ptr, blocks, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    acc = gl.zeros([BLOCK, BLOCK], gl.float32, LAYOUT)
    for block in range(blocks):
        slot = block % STAGES
        mbarrier.wait(filled.index(slot), block // STAGES & 1)
        rows = x.index(slot)
        acc = warpgroup_mma(rows, rows.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(slot))
    offs_m = gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))
    offs_n = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    gl.store(out_ptr + offs_m[:, None] * BLOCK + offs_n[None, :], acc)


@gluon.jit
def blocks_kernel(x_desc, out_ptr, blocks, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """The sum of the products of x's blocks with their transposes; one warp loads, four compute."""
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK, BLOCK], x_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(filled.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_add_products, (x, filled, free, out_ptr, blocks, BLOCK, STAGES)),
            (_load_blocks, (x_desc, x, filled, free, blocks, BLOCK, STAGES)),
        ],
        [1],
        [24],
    )


@triton.jit
def probe_kernel(x_ptr, out_ptr):
    """out is x [32, 32], transposed through shared memory; tests put PTX of their own in its place."""
    offs = tl.arange(0, 32)
    places = offs[:, None] * 32 + offs[None, :]
    tl.store(out_ptr + places, tl.trans(tl.load(x_ptr + places)))
