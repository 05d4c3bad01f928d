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
DTYPE = torch.float32 if GPU else torch.float64  # the kernels multiply float32 on a GPU at its full precision
LENGTHS = [1, 63, 0, 65, 7]
attention = load(Path(__file__).parents[1], GPU or "cpu").flash_attn_varlen_func


def tensors(*heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(sum(LENGTHS), h, 32, dtype=DTYPE).to(DEVICE).requires_grad_() for h in heads]


def offsets() -> torch.Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return attention(q, k, v, offsets(), offsets(), max(LENGTHS), max(LENGTHS), causal=causal)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    rows = [[x.transpose(0, 1) for x in document] for document in zip(*(x.split(LENGTHS) for x in (q, k, v)))]
    out = [scaled_dot_product_attention(*row, is_causal=causal, enable_gqa=True) for row in rows if row[0].shape[1]]
    return torch.cat(out, 1).transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_equal_each_document_alone(causal: bool) -> None:
    leaves, dout = tensors(4, 2, 2), tensors(4)[0].detach()
    results = [(out := run(*leaves, causal), *torch.autograd.grad(out, leaves, dout)) for run in (packed, alone)]
    torch.testing.assert_close(*results)


def test_a_change_to_a_document_moves_no_bit_of_another() -> None:
    first, stop = LENGTHS[0], sum(LENGTHS[:2])  # the second document
    results = []
    for change in (0, 1):
        leaves, dout = tensors(4, 2, 2), tensors(4)[0].detach()
        for x in (*leaves, dout):
            x.data[first:stop] += change
        out = packed(*leaves, True)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for before, after in zip(*results):
        assert not torch.equal(before[first:stop], after[first:stop])
        assert torch.equal(before[:first], after[:first])
        assert torch.equal(before[stop:], after[stop:])


def test_a_batch_of_rows_of_one_length() -> None:
    module = load(Path(__file__).parents[1], GPU or "cpu")
    q, k, v = (x.unflatten(0, (2, -1)) for x in tensors(4, 2, 2))
    expected = [x.transpose(1, 2) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*expected, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(module.flash_attn_func(q, k, v, causal=True), expected)
