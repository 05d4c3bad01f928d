"""GPUs without TMA: launches without a GPU compile once for all lengths, and load 16 bytes at a time."""

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.aot import Configuration, disassemble
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import launch
from tritonpack.kernels.tile_shapes import Kernel

pytestmark = pytest.mark.compile


def test_one_binary_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one head lie side by side, so the distance between heads depends on the number of tokens."""
    monkeypatch.setattr(launch, "_binaries", {})
    kernels = {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    masks = [BlockDiagonalMask.from_seqlens([tokens]) for tokens in (300, 1, 16, 33, 4096)]
    with fake_gpu("sm_80") as launches:
        for mask in masks:
            q, k = (torch.randn(heads, mask.num_queries, 24).transpose(0, 1).bfloat16() for heads in (4, 2))
            out = varlen_attention(q.requires_grad_(), k, k, mask, backend="triton")
            out.sum().backward()
        found = [(x.kernel, x.binary) for x in launches if x.kernel in kernels]
    assert len(found) == 5 * 3
    assert len(set(found)) == 3
    for binary, _ in launch._binaries.values():
        assert "cp.async.c" in binary.asm["ptx"]  # it copies 4 bytes or more


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "gfx942"])
@pytest.mark.parametrize("kernel", [pytest.param(k, marks=pytest.mark.slow) for k in ("forward", "dkdv")] + ["dq"])
def test_no_element_is_loaded_alone(kernel: Kernel, arch: str) -> None:
    listing = disassemble(Configuration(kernel, arch, 64, torch.bfloat16))[1]
    wide, narrow = ("LDGSTS.E.BYPASS.128", "LDG.E.U16") if arch == "sm_80" else ("load_dwordx4", "load_ushort")
    assert wide in listing
    assert narrow not in listing
