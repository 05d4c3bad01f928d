"""Small kernels whose results are known, to test the virtual GPU itself."""

# Triton resolves annotations of kernels itself, so there is no `from __future__ import annotations` here.
import triton
import triton.language as tl


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
