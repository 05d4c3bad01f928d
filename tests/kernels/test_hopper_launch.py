"""The launch of the Hopper kernel without a GPU: its arguments compile, once for all lengths."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tritonpack import BlockDiagonalMask
from tritonpack.backends import gluon
from tritonpack.kernels.hopper import hopper_forward_kernel
from tritonpack.options import make_options

pytestmark = pytest.mark.compile


class _Hopper:
    """The part of a driver that compiling for a launch needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that launches compile; they aren't run."""
    kernels: list[Any] = []

    class Compile:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **arguments: kernels.append(hopper_forward_kernel.warmup(grid=(*grid, 1), **arguments))

    monkeypatch.setattr(gluon, "hopper_forward_kernel", Compile())
    monkeypatch.setattr(gluon, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(driver, "_active", _Hopper())  # without a GPU its setter can't restore the old driver
    return kernels


def test_one_kernel_for_all_lengths(compiled: list[Any]) -> None:
    for tokens in (300, 333, 512, 1):
        q, k, v = (torch.zeros(tokens, heads, 128, dtype=torch.bfloat16) for heads in (8, 2, 2))
        mask = BlockDiagonalMask.from_seqlens([tokens])
        options = make_options(
            q, mask, scale=None, softcap=0.0, sinks=None, alibi_slopes=None, dropout_p=0.0, dropout_seed=None,
            pack_invariant=False,
        )  # fmt: skip
        gluon.forward(q, k, v, mask, options, gluon.plan_tiles(q, k, v, mask, options, backward=False))
    assert len(compiled) == 4
    assert len({id(kernel) for kernel in compiled}) == 1
    assert compiled[0].metadata.num_warps == 12  # 9 were requested
