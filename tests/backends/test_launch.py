"""Launches with Triton's search left out: the binary is the one that Triton takes, for every kind of argument."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.virtual_gpu.driver import fake_gpu
from tritonpack import varlen_attention
from tritonpack.backends import launch as launcher
from tritonpack.backends import triton as triton_backend
from tritonpack.backends.launch import launch
from tritonpack.testing import CASES, make_inputs

pytestmark = pytest.mark.compile


@triton.jit(do_not_specialize=["count"])
def _kernel(x_desc, x_ptr, y_ptr, stride, count, factor, WIDTH: tl.constexpr, ADD: tl.constexpr):  # noqa: N803
    value = tl.load(x_ptr + stride * tl.program_id(0) + count)
    if ADD:
        value += factor
    tl.store(x_ptr + tl.arange(0, WIDTH), value)


X = torch.zeros(64, 64, dtype=torch.float32)
PLAIN: dict[str, Any] = {
    "x_desc": TensorDescriptor(X, [64, 64], [64, 1], [16, 32]), "x_ptr": X, "y_ptr": None, "stride": 64, "count": 100,
    "factor": 0.5, "WIDTH": 16, "ADD": True, "num_warps": 4,
}  # fmt: skip
CONSTANTS = ("WIDTH", "ADD", "num_warps")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "another-tensor": {"x_ptr": torch.zeros(640)}, "another-dtype": {"x_ptr": X.to(torch.bfloat16)},
    "address": {"x_ptr": X.flatten()[1:]}, "address-of-8": {"x_ptr": X.flatten()[2:]}, "pointer-for-none": {"y_ptr": X},
    **{f"stride {stride}": {"stride": stride}
       for stride in (1, 48, 50, 0, 2**31, 2**31 - 16, -(2**31), -(2**31) - 16)},
    **{f"count {count}": {"count": count} for count in (2**63, 1, 2**40)},
    **{f"factor {factor}": {"factor": factor} for factor in (2, 1, 1.0)},
    "another-block": {"x_desc": TensorDescriptor(X, [64, 64], [64, 1], [32, 32])},
    "another-shape": {"x_desc": TensorDescriptor(X, [32, 64], [64, 1], [16, 32])},
    "another-constant": {"WIDTH": 32}, "another-flag": {"ADD": False}, "another-option": {"num_warps": 8},
}  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_the_binary_is_the_one_that_triton_takes(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if binaries of all other kinds are known."""
    monkeypatch.setattr(launcher, "_binaries", {})
    known = []
    with fake_gpu(arch) as launches:
        for name, kind in KINDS.items():
            arguments = PLAIN | kind
            constants = {one: arguments.pop(one) for one in CONSTANTS}
            _kernel[(3,)](**arguments, **constants)
            expected = list(launches)[-1].binary
            for _ in range(2):
                launch(_kernel, 3, arguments, constants)
                assert list(launches)[-1].binary == expected, name
            assert list(launches)[-1].grid == (3, 1, 1)
            known.append(len(launcher._binaries))
    assert known[1] == 1  # another tensor of the same kind
    assert len({*known}) > 15


def test_token_counts_are_no_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_binaries", {})
    constants = {name: PLAIN[name] for name in CONSTANTS}
    arguments = {name: x for name, x in PLAIN.items() if name not in CONSTANTS}
    with fake_gpu():
        for count in range(2, 500):
            launch(_kernel, count, arguments | {"count": count}, constants)
    assert len(launcher._binaries) == 2  # multiples of 16, and others


def _calls(function: Callable[[], object]) -> int:
    """How many Python functions a call runs; the garbage collector's don't count."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_calls_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's time in counts, which no other process changes; `python -m benchmarks.cpu -k host` measures it."""
    inputs = make_inputs(CASES[0], torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    searches, descriptors = [], []
    search, describe = JITFunction.run, triton_backend._Descriptor

    def layer() -> None:
        out = varlen_attention(q, k, v, inputs.mask, backend="triton")
        torch.autograd.grad(out, (q, k, v), inputs.dout)

    with fake_gpu() as launches:
        layer()  # the mask's tables
        layer()
        launches.clear()
        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", lambda *x, **y: (searches.append(x), search(*x, **y))[1])
            patch.setattr(triton_backend, "_Descriptor", lambda *x: (descriptors.append(x), describe(*x))[1])
            layer()
        assert launches.kernels == ["forward_kernel", "dq_kernel", "dkdv_kernel"]
        assert (len(searches), len(descriptors)) == (0, 11)
        # 456 when this was written, with Triton 3.9; about 50 compare bounds, which only here lie in host memory.
        assert _calls(layer) < 500
