"""The virtual GPU executes kernels whose results are known, and refuses what it doesn't model."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.virtual_gpu import library
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import virtual_gpu
from tests.virtual_gpu.known_kernels import (
    add_kernel,
    blocks_kernel,
    descriptor_matmul_kernel,
    matmul_kernel,
    probe_kernel,
    softmax_kernel,
)
from tests.virtual_gpu.ptx import Unsupported

pytestmark = NEEDS
SEEDS = (1, 2, 3)


def same_for_all_seeds(arch: str, launch: Callable[[], Tensor]) -> Tensor:
    """The result of a launch, which has the same bits under all seeds."""
    found = []
    for seed in SEEDS:
        with virtual_gpu(arch, seed=seed):
            found.append(launch())
    for other in found[1:]:
        assert torch.equal(found[0], other)
    return found[0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_add_and_softmax(arch: str) -> None:
    x, y = torch.randn(2, 2500)
    rows = torch.randn(5, 777)

    def add() -> Tensor:
        add_kernel[(3,)](x, y, out := torch.empty(2500), 2500, 1024)
        return out

    def softmax() -> Tensor:
        softmax_kernel[(5,)](rows, out := torch.empty(5, 777), 777, 1024)
        return out

    assert torch.equal(same_for_all_seeds(arch, add), x + y)
    torch.testing.assert_close(same_for_all_seeds(arch, softmax), rows.softmax(1))


PRODUCTS = [
    *((arch, dtype, "ieee") for arch in ("sm_80", "sm_90") for dtype in (torch.float16, torch.bfloat16)),
    *((arch, torch.float32, "ieee") for arch in ("sm_80", "sm_90", "sm_100", "sm_120")),
    ("sm_80", torch.float32, "tf32"),
]


@pytest.mark.fast("sm_90-bfloat16-ieee")
@pytest.mark.parametrize(("arch", "dtype", "precision"), PRODUCTS, ids=lambda value: str(value).split(".")[-1])
def test_matmul(arch: str, dtype: torch.dtype, precision: str) -> None:
    """By fma in float32, by mma on sm_80 and by wgmma on sm_90 in the others; with rows and columns past the end."""
    a, b = torch.randn(100, 144).to(dtype), torch.randn(144, 120).to(dtype)

    def launch() -> Tensor:
        out = torch.empty(100, 120)
        matmul_kernel[(2, 2)](a, b, out, 100, 120, 144, 64, 64, 32, precision, num_warps=4, num_stages=3)
        return out

    error = (same_for_all_seeds(arch, launch) - a.double() @ b.double()).abs().max()
    # A sum of 144 products, whose factors tf32 rounds to 11 bits.
    assert error < 144 * 2.0**-21 if precision == "ieee" else 1e-3 < error < 144 * 2.0**-10


@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_through_descriptors(transposed: bool) -> None:
    a, b = torch.randn(100, 144).half(), torch.randn(*((128, 144) if transposed else (144, 128))).half()

    def launch() -> Tensor:
        out = torch.empty(100, 128)
        descriptors = [TensorDescriptor(x, list(x.shape), [x.shape[1], 1], [64, 64]) for x in (a, b)]
        descriptor_matmul_kernel[(2, 2)](*descriptors, out, 100, 128, 144, 64, 64, 64, transposed)
        return out

    error = (same_for_all_seeds("sm_90", launch) - a.double() @ (b.T if transposed else b).double()).abs().max()
    assert error < 144 * 2.0**-21


def test_warps_that_load_and_compute() -> None:
    """By a Gluon kernel: five blocks pass through two buffers."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

    x = torch.randn(320, 64).half()
    layout = gl.NVMMASharedLayout(128, 16, rank=2)

    def launch() -> Tensor:
        out = torch.empty(64, 64)
        blocks_kernel[(1,)](HopperDescriptor(x, [320, 64], [64, 1], [64, 64], layout), out, 5, 64, 2, num_warps=4)
        return out

    expected = sum(block.double() @ block.double().T for block in x.split(64))
    found = same_for_all_seeds("sm_90", launch).double()
    torch.testing.assert_close(found, expected, rtol=320 * 2.0**-24, atol=320 * 2.0**-21)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"arch": "sm_70"}, ValueError, 'arch is "sm_70"; the virtual GPU models sm_80, sm_90, sm_100, sm_120'),
        ({"seed": 0}, ValueError, "seed is 0; seeds begin at 1"),
        ({}, RuntimeError, "machines without a GPU"),
    ],
)
def test_refusals(arguments: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not arguments)
    with pytest.raises(error, match=message):
        virtual_gpu(**arguments).__enter__()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="needs a C compiler: install one, or name it in CC"):
        library.library.__wrapped__()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("sin.approx.f32 %r1, %r1;", "an instruction, or a form of one, that the virtual GPU doesn't model"),
        ("add.s64 %r1, %rd1, %rd1;", "%r1 has 4 bytes, and the instruction writes 8"),
        ("add.s64 %rd1, %r1, %rd1;", "%r1 has 4 bytes, and the instruction reads 8"),
        ("add.s32 %q1, %r1, %r1;", "the register %q1 isn't declared"),
    ],
)
def test_unknown_instructions(statement: str, message: str) -> None:
    """An error names the kernel, the line and the statement."""
    with pytest.raises(Unsupported) as raised, virtual_gpu(rewrite=partial(_before_params, statement)) as gpu:
        probe_kernel[(1,)](torch.randn(32, 32), torch.empty(32, 32))
    assert gpu.executables == []
    expected = rf"probe_kernel, PTX line \d+: {re.escape(statement[:-1])}: {re.escape(message)}"
    assert re.fullmatch(expected, str(raised.value))


def _before_params(statement: str, name: str, ptx: str) -> str:
    return ptx.replace("ld.param.b64", f"{statement}\nld.param.b64", 1)


def test_blocks_are_refused_within_a_block() -> None:
    with virtual_gpu():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="one virtual GPU at a time; leave the other block first"):
                virtual_gpu("sm_90").__enter__()
    with virtual_gpu("sm_90"):
        pass


def test_threads_share_a_block() -> None:
    x = torch.randn(2, 2500)

    def launch(seed: int) -> bool:
        out = torch.empty(2500)
        for _ in range(20):
            add_kernel[(3,)](x[seed], x[seed], out.fill_(0), 2500, 1024)
        return torch.equal(out, 2 * x[seed])

    with virtual_gpu() as gpu, ThreadPoolExecutor(2) as pool:
        assert all(pool.map(launch, range(2)))
    assert len(gpu.launches) == 40


@pytest.mark.slow
def test_faults_are_raised_with_the_reports() -> None:
    """The error that a call raises because the kernel stopped is the cause."""
    faults = pytest.raises(AssertionError, match=r"found 1 faults:\nprobe_kernel, .*: trap")
    with faults as raised, virtual_gpu(rewrite=partial(_before_params, "trap;")):
        probe_kernel[(1,)](torch.randn(32, 32), torch.empty(32, 32))
    assert "the kernel stopped" in str(raised.value.__cause__)
