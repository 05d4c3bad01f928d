"""GPUs without TMA: launches without a GPU compile once for all lengths, and load 16 bytes at a time."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.aot import Configuration, disassemble
from tests.kernels.test_hopper_launch import _Hopper
from tritonpack import BlockDiagonalMask
from tritonpack.backends import triton as triton_backend
from tritonpack.kernels.tile_shapes import Kernel
from tritonpack.options import make_options

pytestmark = pytest.mark.compile


class _Ampere(_Hopper):
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that launches compile for sm_80; they aren't run."""
    found: list[Any] = []

    def launcher(self: JITFunction[Any], grid: tuple[int, ...]) -> Any:
        return lambda **arguments: found.append(self.warmup(grid=(*grid, 1)[:3], **arguments))

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(driver, "_active", _Ampere())  # without a GPU its setter can't restore the old driver
    monkeypatch.setattr(triton_backend, "current_arch", lambda device: "sm_80")
    return found


def test_one_binary_for_all_lengths(compiled: list[Any]) -> None:
    """Rows of one head lie side by side, so the distance between heads depends on the number of tokens."""
    for tokens in (300, 1, 16, 33, 4096):
        mask = BlockDiagonalMask.from_seqlens([tokens])
        q, k, dout = (torch.randn(heads, tokens, 24).transpose(0, 1).bfloat16() for heads in (4, 2, 4))
        options = make_options(q, mask)
        tiles = triton_backend.plan_tiles(q, k, k, mask, options, backward=True)
        out, lse = triton_backend.forward(q, k, k, mask, options, tiles)
        triton_backend.backward(dout, None, q, k, k, out, lse, mask, options, tiles)
    assert len(compiled) == 5 * 3
    assert len({id(kernel) for kernel in compiled}) == 3
    for kernel in compiled[:3]:
        assert "cp.async.c" in kernel.asm["ptx"]  # it copies 4 bytes or more


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "gfx942"])
@pytest.mark.parametrize("kernel", ["forward", pytest.param("dkdv", marks=pytest.mark.slow), "dq"])
def test_no_element_is_loaded_alone(kernel: Kernel, arch: str) -> None:
    listing = disassemble(Configuration(kernel, arch, 64, torch.bfloat16))[1]
    wide, narrow = ("LDGSTS.E.BYPASS.128", "LDG.E.U16") if arch == "sm_80" else ("load_dwordx4", "load_ushort")
    assert wide in listing
    assert narrow not in listing
