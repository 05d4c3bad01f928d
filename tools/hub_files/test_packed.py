"""Packed documents equal each document alone by torch's attention, and see nothing of each other.

Run `pytest tests` in the repository. On a machine with a GPU the variant of that GPU runs.
"""

from pathlib import Path

import pytest
import torch
from loading import load
from torch.nn.functional import scaled_dot_product_attention

GPU = "rocm" if torch.version.hip else "cuda" if torch.cuda.is_available() else None
DEVICE = "cuda" if GPU else "cpu"
LENGTHS = [1, 63, 0, 65, 7]
KERNEL = load(Path(__file__).parents[1], GPU or "cpu")


def tensors(*heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), h, 32).to(DEVICE).requires_grad_() for h in heads]


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)
    return KERNEL.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS), causal=causal)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    documents = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    rows = [[x.transpose(0, 1) for x in document] for document in documents]
    out = [scaled_dot_product_attention(*row, is_causal=causal, enable_gqa=True) for row in rows if row[0].shape[1]]
    return torch.cat(out, 1).transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_equal_each_document_alone(causal: bool) -> None:
    """The error against float64 is at most twice the error of torch's float32, and 8 units in the last place."""
    results = []
    for run, dtype in ((packed, torch.float32), (alone, torch.float32), (alone, torch.float64)):
        q, k, v, dout = (x.detach().to(dtype).requires_grad_() for x in tensors(4, 2, 2, 4))
        out = run(q, k, v, causal)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for ours, plain, exact in zip(*results, strict=True):
        limit = 2 * (plain - exact).abs().max() + 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= limit


def test_a_change_to_a_document_moves_no_bit_of_another() -> None:
    first, stop = LENGTHS[0], sum(LENGTHS[:2])  # the second document
    results = []
    for change in (0, 1):
        q, k, v, dout = tensors(4, 2, 2, 4)
        for x in (q, k, v, dout):
            x.data[first:stop] += change
        out = packed(q, k, v, True)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for before, after in zip(*results, strict=True):
        assert not torch.equal(before[first:stop], after[first:stop])
        assert torch.equal(before[:first], after[:first])
        assert torch.equal(before[stop:], after[stop:])


def test_rows_of_one_length() -> None:
    rows = [x.unflatten(0, (2, -1)) for x in tensors(4, 2, 2)]
    out = KERNEL.flash_attn_func(*rows, causal=True)
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in rows), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-4, atol=1e-4)
