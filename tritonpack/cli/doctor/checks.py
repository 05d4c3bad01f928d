"""The doctor's checks: each computes something small and returns a sentence about it, or raises an exception.

A check raises SkipTest if this machine can't run it and doesn't need to.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import get_args
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.backends import BACKENDS, Backend, has_matrix_products, resolve_backend
from tritonpack.cli.machine import resolve_device
from tritonpack.cli.words import count
from tritonpack.errors import BackendUnavailableError
from tritonpack.testing import CASES, check_backend, conformance, make_inputs

# "gluon" is left out: it is an experiment, and "auto" never chooses it.
TRIED: tuple[Backend, ...] = tuple(name for name in BACKENDS if name != "auto" and name != "gluon")

_CASES = {case.name: case for case in CASES}
_CHECKED = ("slack", "window-both", "cross-window-slack", "sinks", "everything", "head-dim-64")
_INTERPRETED = ("multi-query", "cross-more-queries")  # a second or two each in Triton's interpreter


def attention(backend: Backend) -> str:
    """Compare outputs and gradients of a backend with float64, by the rule of `tritonpack.testing`."""
    device = resolve_device("auto")
    try:
        resolve_backend(backend, torch.empty(1, 1, 16, device=device))
    except BackendUnavailableError as error:
        raise SkipTest(str(error)) from error
    names: tuple[str, ...] = _CHECKED
    dtypes, how = [torch.float32, torch.bfloat16], f"on {device.type}"
    if backend == "triton" and device.type == "cpu":
        names, dtypes, how = _INTERPRETED, [torch.float32], "in Triton's interpreter"
    elif backend == "triton":
        from tritonpack.kernels.tile_shapes import current_arch

        names, how = (*names, "head-dim-128"), f"compiled here, with the tiles of {current_arch(device)}"
        dtypes = dtypes if has_matrix_products(device) else [torch.float32]
    largest = 0.0
    for name in names:
        for dtype in dtypes:
            errors = check_backend(make_inputs(_CASES[name], dtype, device), backend)
            shares = [error / errors.allowed[key] for key, error in errors.backend.items() if errors.allowed[key]]
            largest = max(largest, *shares)
    what = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    cases = count(len(names), "case")
    return f"{cases}, forward and backward, {what}, {how}: at most {largest:.0%} of the error allowed"


def automatic() -> str:
    """Name the backends that "auto" selects here."""
    q = torch.empty(1, 1, 16, device=resolve_device("auto"))
    auto, double = resolve_backend("auto", q), resolve_backend("auto", q.double())
    return f"backend='auto' uses {auto} here, and {double} for float64"


def varlen_function() -> str:
    """Check flash_attn_varlen_func: bitwise isolation, unused slack, empty documents and equal repeated runs."""
    from tritonpack.flash_attn import flash_attn_varlen_func

    device = resolve_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    asked = ["isolation/*", "slack/*", "empty/*", "repeat/*"]
    report = conformance.run(flash_attn_varlen_func, dtypes=[dtype], device=device, only=asked)
    if not report.passed:
        raise AssertionError("; ".join(f"{x.check}: {x.detail}" for x in report.results if not x.passed))
    return f"isolated to the bit, slack inert, runs repeat: {count(len(report.of('pass')), 'conformance check')}"


def models() -> str:
    """Check on a small patched Llama that packed documents equal each document alone, and none changes another."""
    if importlib.util.find_spec("transformers") is None:
        raise SkipTest("transformers isn't installed, so there is no model to patch; pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from tritonpack.patches import patch
    from tritonpack.testing import check_isolation

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(resolve_device("auto"))
    with patch(model):
        report = check_isolation(model)
    return (
        f"a small Llama, patched: packed differs from alone by {report.packed_against_alone:.0e}, and "
        f"documents change each other by {report.moved_by_others:g}"
    )


def packing() -> str:
    """Pack lengths whose bins are known, and plan steps of two ranks. Both compile what a first packing would."""
    if importlib.util.find_spec("numba") is None:
        raise SkipTest("numba isn't installed, which packing needs; pip install numba")
    from tritonpack.packing import pack, plan_epoch

    bins = sorted(sorted(int(i) for i in items) for items in pack([6, 5, 4, 3, 2], capacity=10))
    if bins != [[0, 2], [1, 3, 4]]:
        raise AssertionError(f"lengths 6, 5, 4, 3, 2 in bins of 10 make {bins}, not [[0, 2], [1, 3, 4]]")
    lengths = np.arange(1, 11).repeat(8)
    plan = plan_epoch(lengths, 16, 2, tail="keep")
    fullest = int(plan.sums(lengths).max())
    if sorted(plan.items.tolist()) != list(range(len(lengths))) or fullest > 16:
        raise AssertionError(
            f"{plan} of {len(lengths)} documents for rows of 16 tokens holds rows of {fullest}: {plan.items}"
        )
    return "documents packed and planned as they should be"


def sequence_parallelism() -> str:
    """Compare each exchange, in a process group of this process alone, with attention without a group."""
    import torch.distributed as dist

    if not dist.is_available():
        raise SkipTest("this build of torch has no torch.distributed, so batches can't be shared by several GPUs")
    device = resolve_device("auto")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not getattr(dist, f"is_{backend}_available")():
        raise SkipTest(f"torch.distributed is built without {backend}")
    from tritonpack.parallel import attend, make_layout
    from tritonpack.parallel.dimensions import Exchange

    inputs = make_inputs(_CASES["multi-query"], torch.float32, device)
    layout, exchanges = make_layout("balanced", inputs.mask, 1), get_args(Exchange)

    def results(compute: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = compute(*leaves, inputs.mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = results(varlen_attention)
        for exchange in exchanges:
            found = results(partial(attend, layout=layout, exchange=exchange))
            torch.testing.assert_close(found, expected, msg=f"exchange={exchange!r}: ".__add__)
    finally:
        dist.destroy_process_group()
    return f"{', '.join(exchanges)}: as without a group, forward and backward (a group of one process by {backend})"


CHECKS: dict[str, Callable[[], str]] = {
    **{f"attention: {backend}": partial(attention, backend) for backend in TRIED},
    "attention: auto": automatic,
    "flash_attn functions": varlen_function,
    "patched models": models,
    "packing": packing,
    "sequence parallelism": sequence_parallelism,
}
