"""What the doctor tries: each check computes something small and says what it found, or raises."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from tritonpack.attention import resolve_backend
from tritonpack.backends import BACKENDS, Backend
from tritonpack.cli.doctor.findings import NotHereError
from tritonpack.cli.machine import resolve_device
from tritonpack.errors import BackendUnavailableError
from tritonpack.testing import CASES, check_backend, conformance, make_inputs
from tritonpack.testing.cases import Case

# "gluon" is left out: it is an experiment, and "auto" never chooses it.
TRIED: tuple[Backend, ...] = tuple(name for name in BACKENDS if name != "auto" and name != "gluon")

_CASES: tuple[str, ...] = ("slack", "window-both", "cross-window-slack", "sinks", "everything", "head-dim-64")
_GPU_CASES: tuple[str, ...] = (*_CASES, "head-dim-128")
_INTERPRETED_CASES: tuple[str, ...] = ("multi-query", "cross-more-queries")  # a second or two each


def device() -> torch.device:
    """Where everything is tried."""
    return resolve_device("auto")


def attention(backend: Backend) -> str:
    """A backend's outputs and gradients, against float64, by the tolerance rule of tritonpack.testing."""
    where = device()
    try:
        resolve_backend(backend, torch.empty(1, 1, 16, device=where))
    except BackendUnavailableError as error:
        raise NotHereError(str(error)) from error
    names, dtypes = _CASES, [torch.float32, torch.bfloat16]
    how = f"on {where.type}"
    if backend == "triton":
        from tritonpack.kernels.tile_shapes import current_arch

        interpreted = where.type == "cpu"
        names = _INTERPRETED_CASES if interpreted else _GPU_CASES
        dtypes = [torch.float32] if interpreted else dtypes
        how = "in Triton's interpreter" if interpreted else f"compiled here, with the tiles of {current_arch(where)}"
    by_name = {case.name: case for case in CASES}
    nearest = 0.0
    for name in names:
        for dtype in dtypes:
            nearest = max(nearest, _nearest(by_name[name], dtype, where, backend))
    what = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{len(names)} cases, forward and backward, {what}, {how}: at most {nearest:.0%} of the error allowed"


def automatic() -> str:
    """What backend="auto" stands for here."""
    q = torch.empty(1, 1, 16, device=device())
    return (
        f"backend='auto' uses {resolve_backend('auto', q)} here, and {resolve_backend('auto', q.double())} for float64"
    )


def _nearest(case: Case, dtype: torch.dtype, where: torch.device, backend: Backend) -> float:
    """The largest share of what is allowed that an error takes."""
    errors = check_backend(make_inputs(case, dtype, where), backend)
    return max(errors.backend[name] / errors.allowed[name] for name in errors.backend if errors.allowed[name])


def varlen_function() -> str:
    """Isolation to the bit, inert slack, empty documents and repeated runs of our flash_attn_varlen_func."""
    from tritonpack.flash_attn import flash_attn_varlen_func

    where = device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    asked = ["isolation/*", "slack/*", "empty/*", "repeat/*"]
    report = conformance.run(flash_attn_varlen_func, dtypes=[dtype], device=where, only=asked)
    if not report.passed:
        raise AssertionError("; ".join(f"{x.check}: {x.detail}" for x in report.results if not x.passed))
    return f"isolated to the bit, slack inert, runs repeat: {len(report.of('pass'))} conformance checks"


def models() -> str:
    """A small Llama, patched: packed documents equal each alone, and none moves another."""
    if importlib.util.find_spec("transformers") is None:
        raise NotHereError("transformers isn't installed, so there is no model to patch; pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from tritonpack.patches import patch
    from tritonpack.testing import check_isolation

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device())
    with patch(model):
        report = check_isolation(model)
    return (
        f"a small Llama, patched: packed differs from alone by {report.packed_against_alone:.0e}, and "
        f"documents move each other by {report.moved_by_others:g}"
    )


def packing() -> str:
    """Best-fit decreasing on lengths whose packing is known."""
    if importlib.util.find_spec("numba") is None:
        raise NotHereError("numba isn't installed, which packing needs; pip install numba")
    from tritonpack.packing import pack

    packed = pack([6, 5, 4, 3, 2], capacity=10)
    bins = sorted(sorted(int(i) for i in items) for items in packed)
    if bins != [[0, 2], [1, 3, 4]]:
        raise AssertionError(f"lengths 6, 5, 4, 3, 2 in bins of 10 make {bins}, not [[0, 2], [1, 3, 4]]")
    return "documents packed as they should be (the first run on a machine compiles for some seconds)"


def sequence_parallelism() -> str:
    """Attention through a process group of this process alone, by every exchange, against that without one."""
    import torch.distributed as dist

    if not dist.is_available():
        raise NotHereError("this build of torch has no torch.distributed, so batches can't be shared by several GPUs")
    where = device()
    backends = [name for name in ("nccl", "gloo", "mpi", "xccl") if getattr(dist, f"is_{name}_available")()]
    wanted = "nccl" if where.type == "cuda" else "gloo"
    if wanted not in backends:
        raise NotHereError(f"torch.distributed has {', '.join(backends) or 'no backend'}, but not {wanted}")
    if dist.is_initialized():
        raise NotHereError("this process has a process group already; run the doctor in a process of its own")
    dist.init_process_group(wanted, store=dist.HashStore(), rank=0, world_size=1)
    try:
        _compare_exchanges(where)
    finally:
        dist.destroy_process_group()
    return f"all three exchanges agree with one device (a group of one process by {wanted}; {', '.join(backends)} here)"


def _compare_exchanges(where: torch.device) -> None:
    from typing import get_args

    from tritonpack.attention import varlen_attention
    from tritonpack.parallel import attend, make_layout
    from tritonpack.parallel.exchange import Exchange

    inputs = make_inputs(next(case for case in CASES if case.name == "multi-query"), torch.float32, where)
    layout = make_layout("balanced", inputs.mask, 1)

    def results(compute: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = compute(*leaves, inputs.mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]

    expected = results(varlen_attention)
    for exchange in get_args(Exchange):
        torch.testing.assert_close(results(partial(attend, layout=layout, exchange=exchange)), expected)


CHECKS: dict[str, Callable[[], str]] = {
    **{f"attention: {backend}": partial(attention, backend) for backend in TRIED},
    "attention: auto": automatic,
    "flash_attn functions": varlen_function,
    "patched models": models,
    "packing": packing,
    "sequence parallelism": sequence_parallelism,
}
