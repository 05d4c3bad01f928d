"""The host's time of a layer's attention on a GPU: Python, torch, Triton's launcher, and a libcuda that runs nothing.

Tensors lie in host memory and are small. The parts are cumulative: each has all that comes before it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import triton as triton_backend
from tritonpack.masks import bounds
from tritonpack.patches.interface import interval_attention_forward
from tritonpack.patches.packed_batch import IntervalMask, Serving
from tritonpack.testing.cases import parents_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the fake libcuda is for machines without a GPU")

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 1, 128
LENGTHS = [30, 20, 14]
PARTS = ("1 checks and options", "2 tables and autograd", "3 arguments of kernels", "4 launches")
ALL = PARTS[-1]


class Watch(TorchDispatchMode):
    """A mode that does nothing, so that calls within it go to the operators, as under selective checkpoints."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def layer(kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A layer's attention as a function of q, k and v."""
    if kind == "trees":
        trees = BlockDiagonalMask.from_tree(parents_of([(-1, 30), (0, 20), (0, 14)]))
        return lambda q, k, v: varlen_attention(q, k, v, trees, backend="triton")
    mask = BlockDiagonalMask.from_seqlens(LENGTHS)
    if kind == "patched":
        serving = Serving("tritonpack", "triton")
        interval_mask = IntervalMask(mask, torch.Size((1, 1, TOKENS, TOKENS)), serving)
        module = torch.nn.Module()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))  # (1, H, T, D), as models lay heads out
            return interval_attention_forward(module, q, k, v, interval_mask, scaling=HEAD_DIM**-0.5)[0]

        return attend
    if kind == "operators":

        def observed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with Watch():
                return varlen_attention(q, k, v, mask, backend="triton")

        return observed
    if kind == "compiled":
        return torch.compile(lambda q, k, v: varlen_attention(q, k, v, mask, backend="triton"), backend="aot_eager")
    if kind == "features":
        options: dict[str, Any] = {"softcap": 30.0, "sinks": torch.zeros(HEADS), "alibi_slopes": torch.ones(HEADS)}
        return lambda q, k, v: varlen_attention(q, k, v, mask, **options, backend="triton")
    name: Any = kind
    return lambda q, k, v: varlen_attention(q, k, v, mask, backend=name)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        *(("triton", part) for part in PARTS),
        *((kind, ALL) for kind in ("gluon", "trees", "features", "patched", "operators", "compiled")),
    ],
)
@pytest.mark.parametrize("direction", ["forward and backward", "inference"])
def test_host(
    benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, kind: str, implementation: str, direction: str
) -> None:
    inference = direction == "inference"
    q, k, v = (
        torch.randn(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16, requires_grad=not inference)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dout, attend = torch.randn_like(q), layer(kind)

    def run() -> None:
        out = attend(q, k, v)
        if not inference:
            torch.autograd.grad(out, (q, k, v), dout.view_as(out), allow_unused=True)

    monkeypatch.setattr(bounds, "on_host", lambda x: False)  # as on a GPU, where bounds aren't compared
    with fake_gpu() as launches:
        run()  # the tables of the mask
        launches.clear()
        run()
        assert len(launches) == (1 if inference else 3)
        stub(monkeypatch, PARTS.index(implementation) + 1)
        benchmark.group = f"host, {direction} of a layer"
        benchmark.pedantic(run, rounds=300, iterations=5, warmup_rounds=20)


def stub(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Take out all but the first parts."""
    if parts < 4:
        monkeypatch.setattr(triton_backend, "launch", lambda *rest: None)
    if parts < 3:
        monkeypatch.setattr(triton_backend, "forward", lambda q, *rest: (torch.empty_like(q), q.new_empty(0)))
        monkeypatch.setattr(
            triton_backend, "backward", lambda dout, dlse, *rest: (*map(torch.empty_like, rest[:3]), None)
        )
    if parts < 2:
        monkeypatch.setattr("tritonpack.attention.run_attention", lambda q, *rest: (q, q))
