"""The host's time of layers' attention on a GPU: Python, torch, Triton's launcher, and a libcuda that runs nothing.

Tensors lie in host memory and are small. The parts are cumulative: each has all that comes before it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.registry import Call, register
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import triton as triton_backend
from tritonpack.masks import bounds
from tritonpack.patches.interface import interval_attention_forward
from tritonpack.patches.packed_batch import IntervalMask, Serving
from tritonpack.testing.cases import parents_of

LAYERS = 10  # in one measurement, because a call takes a fraction of a millisecond
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 1, 128
LENGTHS = [30, 20, 14]
PARTS = ("1 checks and options", "2 tables and autograd", "3 arguments of kernels", "4 launches")


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


@register(
    *(f"host, {direction} of {LAYERS} layers" for direction in ("forward and backward", "inference")),
    kind=("triton", "gluon", "trees", "features", "patched", "operators", "compiled"),
    repeats=300,
)
def host(kind: str) -> dict[str, Any]:
    """Every part of a layer of Triton's backend, and the whole of other layers."""
    names = PARTS if kind == "triton" else PARTS[-1:]
    return {name: partial(calls, kind, PARTS.index(name) + 1) for name in names}


def calls(kind: str, parts: int) -> Iterator[Call]:
    """The first parts of a layer in training and in inference."""
    for inference in (False, True):
        q, k, v = (
            torch.randn(TOKENS, heads, HEAD_DIM, dtype=torch.bfloat16, requires_grad=not inference)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        yield Call(*of_layer(layer(kind), q, k, v, parts))


def of_layer(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, parts: int
) -> tuple[Callable[[], None], Callable[[], AbstractContextManager[None]]]:
    """A layer's call, after a check of its launches, and the context that takes out all but the first parts."""
    dout = torch.randn_like(q)

    def run() -> None:
        for _ in range(LAYERS):
            out = attend(q, k, v)
            if q.requires_grad:
                torch.autograd.grad(out, (q, k, v), dout.view_as(out), allow_unused=True)

    with on_fake_gpu(len(PARTS)) as launches:
        run()  # the tables of the mask
        launches.clear()
        run()
        assert len(launches) == LAYERS * (3 if q.requires_grad else 1)
    return run, partial(on_fake_gpu, parts)


@contextmanager
def on_fake_gpu(parts: int) -> Iterator[Any]:
    """Launch kernels over a libcuda that runs nothing, without what comes after the first parts."""
    with fake_gpu() as launches, ExitStack() as stack:
        put = lambda *what: stack.enter_context(patch.object(*what))  # noqa: E731
        put(bounds, "on_host", lambda x: False)  # as on a GPU, where bounds aren't compared
        if parts < 4:
            put(triton_backend, "launch", lambda *rest: None)
        if parts < 3:
            put(triton_backend, "forward", lambda q, *rest: (torch.empty_like(q), q.new_empty(0)))
            put(triton_backend, "backward", lambda dout, dlse, *rest: (*map(torch.empty_like, rest[:3]), None))
        if parts < 2:
            put(sys.modules["tritonpack.attention"], "run_attention", lambda q, *rest: (q, q))
        yield launches
