"""The contract of backends: all fulfil it, and adding one takes a file and a row of the registry."""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack import BackendUnavailableError, BlockDiagonalMask, backends, varlen_attention
from tritonpack.backends import BACKENDS, BackendModule, blocked, load, reference, resolve_backend

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "auto"])
def test_every_backend_has_the_functions_of_the_contract(name: str) -> None:
    if name in ("triton", "gluon"):
        pytest.importorskip("triton")
    for function in ("check_device", "plan_tiles", "forward", "backward"):
        wanted = list(inspect.signature(getattr(BackendModule, function)).parameters.values())[1:]  # without self
        given = inspect.signature(getattr(load(name), function)).parameters.values()
        assert [(p.name, p.kind) for p in given] == [(p.name, p.kind) for p in wanted]


def test_a_new_backend_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(name: str) -> Callable[..., Any]:
        return lambda *arguments: (calls.append(name), getattr(reference, name)(*arguments))[1]

    own = {name: counted(name) for name in ("forward", "backward")}
    file = SimpleNamespace(check_device=reference.check_device, plan_tiles=reference.plan_tiles, **own)
    monkeypatch.setattr(backends, "loaded", {})
    monkeypatch.setitem(sys.modules, "tritonpack.backends.fifth", file)
    monkeypatch.setattr("tritonpack.backends.BACKENDS", (*BACKENDS, "fifth"))
    call("fifth").sum().backward()
    assert calls == ["forward", "backward"]


def call(backend: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention of 4 queries and keys in 2 heads of 16."""
    q, k, v = (torch.randn(4, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    return varlen_attention(q, k, v, BlockDiagonalMask.from_seqlens([4]), backend=backend)


@pytest.mark.parametrize(("name", "module"), [("reference", reference), ("blocked", blocked), ("auto", blocked)])
def test_resolved_module(name: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other backend runs when the chosen one fails."""
    assert load(resolve_backend(name, torch.zeros(4, 2, 16))) is module

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(RuntimeError, match=f"{name} is broken"):
        call(name)


@pytest.mark.parametrize(
    ("backend", "interpreted", "dtype", "message"),
    [
        ("triton", False, torch.float32, "needs tensors on a GPU; got cpu"),
        ("triton", True, torch.float64, "takes bfloat16, float16 and float32; got float64"),
        ("gluon", False, torch.float32, r"Hopper GPU \(sm_90\), and has no interpreter; got cpu"),
    ],
)
def test_kernels_are_refused_on_a_cpu(
    backend: Any, interpreted: bool, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("tritonpack.backends.triton.INTERPRETED", interpreted)
    with pytest.raises(BackendUnavailableError, match=message):
        call(backend, dtype)


# NVIDIA's compute capabilities and AMD's architectures, and whether they have matrix instructions in 16 bits
GPUS = [
    ((7, 5), False), ((8, 0), True),
    ("gfx906", False), ("gfx90a:sramecc+:xnack-", True), ("gfx1030", False), ("gfx1100", True), ("gfx1250", True),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "multiplies"), GPUS)
def test_triton_needs_matrix_instructions_in_16_bits(
    gpu: Any, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda", 100 + GPUS.index((gpu, multiplies)))  # of which nothing is cached
    monkeypatch.setattr("torch.version.hip", "7.0" if isinstance(gpu, str) else None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "old")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: gpu)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(gcnArchName=gpu))
    words = "CDNA and RDNA 3, " if isinstance(gpu, str) else r"8\.0"
    for dtype in DTYPES[:3]:
        q: Any = SimpleNamespace(is_cuda=True, device=device, dtype=dtype)
        if multiplies or dtype == torch.float32:
            assert resolve_backend("triton", q) == resolve_backend("auto", q) == "triton"
            continue
        assert resolve_backend("auto", q) == "blocked"
        with pytest.raises(BackendUnavailableError, match=rf"{words}.*got {dtype} on old\. Use back"):
            resolve_backend("triton", q)


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_missing_triton_is_named_with_a_remedy(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ["triton", *(one for one in sys.modules if one.split(".")[0] == "triton")]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(backends, "loaded", {})
    for module in ("triton", "gluon"):
        monkeypatch.delitem(sys.modules, f"tritonpack.backends.{module}", raising=False)
        monkeypatch.delattr(backends, module, raising=False)
    with pytest.raises(BackendUnavailableError, match=r"needs Triton 3\.6 or later, which can't be imported here"):
        call(name)
    assert call("auto").shape == (4, 2, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_on_a_gpu(dtype: torch.dtype) -> None:
    q = torch.zeros(4, 2, 16, dtype=dtype, device="cuda")
    assert resolve_backend("auto", q) == ("blocked" if dtype == torch.float64 else "triton")
