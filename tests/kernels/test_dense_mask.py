"""The kernel that writes dense masks, in Triton's interpreter, against torch, to the bit."""

import random

import pytest
import torch

pytest.importorskip("triton")

from tests.masks.random_masks import random_intervals
from tritonpack import BlockDiagonalMask, kernels
from tritonpack.kernels import dense_mask

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

MASKS = {
    "packed": BlockDiagonalMask.from_cu_seqlens([0, 9, 9, 50, 51], total_q=60),
    "one document": BlockDiagonalMask.from_seqlens([65]),
    "bidirectional": BlockDiagonalMask.from_seqlens([33, 40], causal=False),
    "cross": BlockDiagonalMask.from_seqlens([3, 0, 20], [64, 5, 70]),
    "many keys": BlockDiagonalMask.from_seqlens([10], [300], window=(40, 40), causal=False),
    "all": BlockDiagonalMask.from_seqlens([64], [256], causal=False),
    "none": BlockDiagonalMask.from_cu_seqlens([0], total_q=20),
    "no rows": BlockDiagonalMask.from_seqlens([0], [7]),
    "no keys": BlockDiagonalMask.from_seqlens([7], [0]),
    **{f"random {seed}": random_intervals(random.Random(seed), 70) for seed in range(4)},
}


@pytest.mark.parametrize("block", [(16, 16), (8, 512)], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.fast("cross-(16, 16)", "all-(8, 512)", "none-(16, 16)", "random 1-(16, 16)", "random 3-(8, 512)")
def test_equal_to_torch(name: str, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS[name]

    def forms() -> list[torch.Tensor]:
        additive = [mask.to_dense(dtype, additive=True) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
        return [mask.to_dense(), mask.to_dense(torch.bfloat16), *additive, mask.to_bits()]

    plain = forms()
    monkeypatch.setattr(kernels, "serve", lambda x: True)
    monkeypatch.setattr(dense_mask, "BLOCK_M", block[0])
    monkeypatch.setattr(dense_mask, "BLOCK_N", block[1])
    for ours, theirs in zip(forms(), plain, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.stride() == theirs.stride() or not ours.numel()
        assert torch.equal(ours, theirs)
