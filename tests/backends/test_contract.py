"""The contract of backends: all fulfil it, and adding one takes a file and a row of the registry."""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack
from tritonpack import BackendUnavailableError, BlockDiagonalMask, backends, varlen_attention
from tritonpack.backends import BACKENDS, BackendModule, blocked, load, reference, resolve_backend

FUNCTIONS = ("check_device", "plan_tiles", "forward", "backward")
PACKAGE = Path(tritonpack.__file__).parent


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "auto"])
def test_every_backend_has_the_functions_of_the_contract(name: str, function: str) -> None:
    try:
        module = load(name)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    wanted = list(inspect.signature(getattr(BackendModule, function)).parameters.values())[1:]  # without self
    given = inspect.signature(getattr(module, function)).parameters.values()
    assert [(p.name, p.kind) for p in given] == [(p.name, p.kind) for p in wanted]


def test_a_new_backend_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append("forward")
        return reference.forward(*arguments)

    def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        calls.append("backward")
        return reference.backward(*arguments)

    file = SimpleNamespace(
        check_device=reference.check_device, plan_tiles=reference.plan_tiles, forward=forward, backward=backward
    )
    monkeypatch.setattr(backends, "loaded", {})
    monkeypatch.setitem(sys.modules, "tritonpack.backends.fifth", file)
    monkeypatch.setattr("tritonpack.backends.BACKENDS", (*BACKENDS, "fifth"))
    q, k, v = (torch.randn(5, 2, 16, requires_grad=True) for _ in range(3))
    mask = BlockDiagonalMask.from_seqlens([3, 2])
    fifth: Any = "fifth"
    expected = varlen_attention(q, k, v, mask, backend="reference")
    out = varlen_attention(q, k, v, mask, backend=fifth)
    assert torch.equal(out, expected)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)
    assert calls == ["forward", "backward"]


def test_only_the_registry_lists_the_backends() -> None:
    """No other file of the package has a list of two or more of their names."""
    lists = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                names = {element.value for element in node.elts if isinstance(element, ast.Constant)} & {*BACKENDS}
                lists += [path.relative_to(PACKAGE).as_posix()] if len(names) > 1 else []
    assert lists == ["backends/__init__.py"]


def call(backend: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention of 4 queries and keys in 2 heads of 16."""
    q, k, v = (torch.randn(4, 2, 16, dtype=dtype) for _ in range(3))
    return varlen_attention(q, k, v, BlockDiagonalMask.from_seqlens([4]), backend=backend)


@pytest.fixture
def other_gpus() -> Iterator[None]:
    """Within a test that fakes GPUs, what is known of real ones is forgotten."""
    backends.has_matrix_products.cache_clear()
    yield
    backends.has_matrix_products.cache_clear()


class TestChoice:
    @pytest.mark.parametrize(("name", "module"), [("reference", reference), ("blocked", blocked), ("auto", blocked)])
    def test_resolved_module(self, name: Any, module: Any) -> None:
        assert load(resolve_backend(name, torch.zeros(4, 2, 16))) is module

    @pytest.mark.parametrize("name", ["reference", "blocked"])
    def test_no_other_backend_runs_when_the_named_one_fails(self, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError(f"{name} is broken")

        monkeypatch.setattr({"reference": reference, "blocked": blocked}[name], "forward", broken)
        with pytest.raises(RuntimeError, match=f"{name} is broken"):
            call(name)

    def test_triton_needs_a_gpu_or_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr("tritonpack.backends.triton.INTERPRETED", False)
        with pytest.raises(BackendUnavailableError, match="needs tensors on a GPU; got cpu"):
            call("triton")

    def test_triton_refuses_float64(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr("tritonpack.backends.triton.INTERPRETED", True)
        with pytest.raises(BackendUnavailableError, match="takes bfloat16, float16 and float32; got float64"):
            call("triton", torch.float64)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
    @pytest.mark.usefixtures("other_gpus")
    def test_triton_needs_matrix_instructions_in_16_bits(
        self, capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr("torch.version.hip", None)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        q: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype)
        if capability < (8, 0) and dtype != torch.float32:
            with pytest.raises(BackendUnavailableError, match=rf"8\.0.*got {dtype} on Tesla T4\. Use back"):
                resolve_backend("triton", q)
            assert resolve_backend("auto", q) == "blocked"
        else:
            assert resolve_backend("triton", q) == resolve_backend("auto", q) == "triton"

    @pytest.mark.parametrize(
        ("gpu", "multiplies"),
        [
            ("gfx906", False),
            ("gfx90a:sramecc+:xnack-", True),
            ("gfx1030", False),
            ("gfx1100", True),
            ("gfx1250", True),
        ],
    )
    @pytest.mark.usefixtures("other_gpus")
    def test_amd_gpus_need_matrix_instructions_too(
        self, gpu: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr("torch.version.hip", "7.0")
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "AMD")
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(gcnArchName=gpu))
        q: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float16)
        assert resolve_backend("auto", q) == ("triton" if multiplies else "blocked")
        if not multiplies:
            with pytest.raises(BackendUnavailableError, match=r"CDNA and RDNA 3, .*got torch.float16 on AMD\."):
                resolve_backend("triton", q)

    @pytest.mark.parametrize("name", ["triton", "gluon"])
    def test_missing_triton_is_named_with_a_remedy(self, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in [one for one in sys.modules if one.split(".")[0] == "triton"]:
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setattr(backends, "loaded", {})
        for module in ("triton", "gluon"):
            monkeypatch.delitem(sys.modules, f"tritonpack.backends.{module}", raising=False)
            monkeypatch.delattr(backends, module, raising=False)
        monkeypatch.setitem(sys.modules, "triton", None)
        with pytest.raises(BackendUnavailableError, match=r"needs Triton 3\.6 or later, which can't be imported here"):
            call(name)
        assert call("auto").shape == (4, 2, 16)

    def test_gluon_needs_a_hopper_gpu(self) -> None:
        pytest.importorskip("triton")
        with pytest.raises(BackendUnavailableError, match=r"Hopper GPU \(sm_90\), and has no interpreter; got cpu"):
            call("gluon")

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
    def test_auto_on_a_gpu(self, dtype: torch.dtype) -> None:
        q = torch.zeros(4, 2, 16, dtype=dtype, device="cuda")
        assert resolve_backend("auto", q) == ("blocked" if dtype == torch.float64 else "triton")
