"""Functions that kernels share: dropout drops the pairs that the backends in torch drop."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tritonpack.backends.dropout import drop_below, keep_mask
from tritonpack.kernels.primitives import dropout_keys, kept

pytestmark = pytest.mark.interpreter

ROWS, COLUMNS, HEADS = 32, 16, 3


@triton.jit
def kept_kernel(
    out_ptr, seed_ptr, row, column, drop_below,
    OF_KEYS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Whether the pairs of ROWS rows and COLUMNS columns are kept. Rows are keys of one head, or queries of HEADS."""
    offs = tl.arange(0, ROWS)
    if OF_KEYS:
        key = dropout_keys(tl.load(seed_ptr), tl.program_id(0))
    else:
        key = dropout_keys(tl.load(seed_ptr), (tl.program_id(0) + offs) % HEADS)[:, None]
    keep = kept(key, row + offs, column, COLUMNS, drop_below, OF_KEYS)
    out_ptr += tl.program_id(0) * ROWS * COLUMNS
    tl.store(out_ptr + offs[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], keep)


@pytest.mark.parametrize("of_keys", [False, True], ids=["of-queries", "of-keys"])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (7, 24), (2**31 - 40, 2**31 - 16)])
@pytest.mark.parametrize("dropout_p", [0.01, 0.3, 0.8])
def test_kept_pairs(row: int, column: int, dropout_p: float, of_keys: bool) -> None:
    """Rows begin anywhere, columns at an even number; a tile of queries may hold rows of several heads."""
    seed = torch.tensor(2**40 + 5)
    out = torch.zeros(HEADS, ROWS, COLUMNS, dtype=torch.bool)
    kept_kernel[(HEADS,)](
        out, seed, row, column, drop_below(dropout_p), OF_KEYS=of_keys, ROWS=ROWS, COLUMNS=COLUMNS, HEADS=HEADS
    )
    heads, rows = torch.arange(HEADS)[:, None, None], torch.arange(ROWS)[:, None]
    queries, keys = row + rows, column + torch.arange(COLUMNS)
    if of_keys:
        queries, keys = keys, queries
    else:
        heads = (heads + rows) % HEADS
    assert torch.equal(out, keep_mask(seed, heads, queries, keys, dropout_p))
