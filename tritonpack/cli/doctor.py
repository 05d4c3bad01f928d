"""`tritonpack doctor`: what is installed, what can run here, and whether what can run is right.

Each check computes something small and returns a sentence about it, or raises an exception: SkipTest if this machine
can't run it and doesn't need to.
"""

from __future__ import annotations

import platform
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tritonpack
from tritonpack.backends import BACKENDS, Backend, has_matrix_products, resolve_backend
from tritonpack.cli.machine import console_beside, installed_version, require_writable, resolve_device, write_json
from tritonpack.errors import BackendUnavailableError
from tritonpack.packing.lengths import count

# The oldest version of each package that works, as in pyproject.toml.
OLDEST = {"python": "3.10", "torch": "2.8", "triton": "3.6", "transformers": "5.6", "numpy": "1.24", "numba": "0.61"}
NEWEST_TRANSFORMERS = "5.24"  # the newest that the tests ran with
_STYLES = {"right": "green", "wrong": "bold red", "warning": "yellow", "not here": "dim"}


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        what: the name of the check.
        outcome: "right"; "wrong": it should work here and doesn't; "warning": it works, but something else may not;
            "not here": this machine can't run it and doesn't need to.
        detail: figures, or the reason and the remedy.
        seconds: how long the check took.
    """

    what: str
    outcome: str
    detail: str
    seconds: float = 0.0


def examine(path: Path | None = None) -> bool:
    """Print versions, the device and the result of each check; write the same to `path` as JSON if there is one.

    Returns:
        Whether everything that can run here is right.

    Raises:
        ValueError: `path` can't be written.
    """
    require_writable(path)
    versions = {name: platform.python_version() if name == "python" else installed_version(name) for name in OLDEST}
    device = f"CPU, {count(torch.get_num_threads(), 'thread')} (torch sees no GPU)"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        device = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
    facts = {"tritonpack": tritonpack.__version__, "system": f"{platform.system()} {platform.machine()}"}
    facts |= {**{name: version or "not installed" for name, version in versions.items()}, "device": device}
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(name, escape(fact))
    console = console_beside(path)
    console.print(grid)

    torch.set_num_threads(1)  # the tensors are tiny
    findings = [*examine_versions(versions), *examine_gpu()]
    with Console(stderr=True).status("") as status:
        for what, check in CHECKS.items():
            status.update(what)
            findings.append(run_check(what, check))
    rows = Table("what", "here", "seconds", "")
    for one in findings:
        rows.add_row(one.what, f"[{_STYLES[one.outcome]}]{one.outcome}[/]", f"{one.seconds:.1f}", escape(one.detail))
    console.print(rows, escape(verdict(findings)), sep="\n")
    passed = not any(finding.outcome == "wrong" for finding in findings)
    write_json(path, {"passed": passed, "facts": facts, "findings": [finding._asdict() for finding in findings]})
    return passed


def run_check(what: str, check: Callable[[], str]) -> Finding:
    """Run a check; an exception of any kind becomes a finding, so that the other checks still run."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, detail = "right", check()
    except SkipTest as error:
        outcome, detail = "not here", str(error)
    except Exception as error:
        outcome, detail = "wrong", f"{type(error).__name__}: {error}"
    return Finding(what, outcome, detail, round(time.perf_counter() - begin, 2))


def verdict(findings: Sequence[Finding]) -> str:
    """A sentence about all findings."""
    named = {outcome: ", ".join(f.what for f in findings if f.outcome == outcome) for outcome in _STYLES}
    if named["wrong"]:
        return f"Something should work here and doesn't: {named['wrong']}."
    rest = f" Not on this machine: {named['not here']}." if named["not here"] else ""
    noted = f" Mind the warnings: {named['warning']}." if named["warning"] else ""
    return f"Everything that can run here is right.{rest}{noted}"


def examine_versions(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """Versions of the packages in OLDEST that are too old, untested or known not to work together."""
    for package, oldest in OLDEST.items():
        version = versions[package]
        if version and _minor(version) < _minor(oldest):
            remedy = f"tritonpack needs {oldest} or later (pip install -U '{package}>={oldest}')"
            yield Finding(package, "wrong", f"{version} is too old; {remedy}")
    transformers, triton, numpy = (versions[package] for package in ("transformers", "triton", "numpy"))
    if transformers and _minor(transformers) > _minor(NEWEST_TRANSFORMERS):
        what = f"{transformers} is newer than {NEWEST_TRANSFORMERS}, the newest tested"
        advice = "patch() tries a model that it doesn't know on a few tokens first; so does `tritonpack check MODEL`"
        yield Finding("transformers", "warning", f"{what}: {advice}")
    if triton and numpy and _minor(triton) == (3, 6) and _minor(numpy) >= (2, 4):
        what = f"Triton {triton} with NumPy {numpy}: kernels fail in Triton's interpreter (TRITON_INTERPRET=1)"
        remedy = "not on GPUs; install Triton 3.7 or later, or numpy<2.4"
        yield Finding("triton and numpy", "warning", f"{what}, {remedy}")


def examine_gpu() -> Iterator[Finding]:
    """A GPU that torch can't use, or one without matrix instructions in Triton."""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            remedy = f"torch {torch.__version__} can't use it; is the driver new enough for CUDA {torch.version.cuda}?"
            if torch.version.cuda is None:
                remedy = f"torch {torch.__version__} is built without CUDA; install a build with it (pytorch.org)"
            yield Finding("GPU", "warning", f"nvidia-smi is here, but torch sees no GPU: {remedy}")
    elif not has_matrix_products(torch.device("cuda", torch.cuda.current_device())):
        kind = "compute capability " + ".".join(map(str, torch.cuda.get_device_capability()))
        if torch.version.hip:
            kind = torch.cuda.get_device_properties().gcnArchName
        needs = "Triton has matrix instructions from compute capability 8.0, CDNA and RDNA 3"
        then = "so backend='triton' refuses 16-bit types, and 'auto' uses 'blocked'"
        yield Finding("GPU", "warning", f"{torch.cuda.get_device_name()} ({kind}): {needs}, {then}")


def _minor(version: str) -> tuple[int, ...]:
    """(3, 6) for "3.6.0+git1234"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


_CHECKED = ("slack", "window-both", "cross-window-slack", "sinks", "everything", "head-dim-64")
_INTERPRETED = ("multi-query", "cross-more-queries")  # a second or two each in Triton's interpreter


def attention(backend: Backend) -> str:
    """Compare outputs and gradients of a backend with float64, by the rule of `tritonpack.testing`."""
    from tritonpack.testing import check_backend

    device = resolve_device("auto")
    try:
        used = resolve_backend(backend, torch.empty(1, 1, 16, device=device))
    except BackendUnavailableError as error:
        raise SkipTest(str(error)) from error
    if backend == "auto":
        double = resolve_backend("auto", torch.empty(1, 1, 16, device=device, dtype=torch.float64))
        return f"backend='auto' uses {used} here, and {double} for float64"
    names: tuple[str, ...] = _CHECKED
    dtypes, how = [torch.float32, torch.bfloat16], f"on {device.type}"
    if backend == "triton" and device.type == "cpu":
        names, dtypes, how = _INTERPRETED, [torch.float32], "in Triton's interpreter"
    elif backend == "triton":
        from tritonpack.kernels.tile_shapes import current_arch

        names, how = (*names, "head-dim-128"), f"compiled here, with the tiles of {current_arch(device)}"
        dtypes = dtypes if has_matrix_products(device) else [torch.float32]
    found = [check_backend(_inputs(name, dtype, device), backend) for name in names for dtype in dtypes]
    largest = max(e.backend[key] / limit for e in found for key, limit in e.allowed.items() if limit)
    what = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{len(names)} cases, forward and backward, {what}, {how}: at most {largest:.0%} of the error allowed"


def _inputs(case: str, dtype: torch.dtype, device: torch.device) -> Any:
    from tritonpack.testing import CASES, make_inputs

    return make_inputs(next(one for one in CASES if one.name == case), dtype, device)


def models() -> str:
    """Check on a small patched Llama that packed documents equal each document alone, and none changes another."""
    if find_spec("transformers") is None:
        raise SkipTest("transformers isn't installed, so there is no model to patch; pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from tritonpack.patches import patch
    from tritonpack.testing import check_isolation

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape)).to(resolve_device("auto"))
    with patch(model):
        report = check_isolation(model)
    differs = f"packed differs from alone by {report.packed_against_alone:.0e}"
    return f"a small Llama, patched: {differs}, and documents change each other by {report.moved_by_others:g}"


def packing() -> str:
    """Pack lengths whose bins are known, and plan steps of two ranks. Both compile what a first packing would."""
    if find_spec("numba") is None:
        raise SkipTest("numba isn't installed, which packing needs; pip install numba")
    from tritonpack.packing import pack, plan_epoch

    bins = sorted(sorted(map(int, items)) for items in pack([6, 5, 4, 3, 2], capacity=10))
    plan = plan_epoch([*range(1, 11)] * 8, 16, 2, tail="keep")
    if bins != [[0, 2], [1, 3, 4]] or sorted(plan.items.tolist()) != list(range(80)):
        raise AssertionError(f"lengths 6, 5, 4, 3, 2 in bins of 10 make {bins}; a plan of 80 documents holds {plan}")
    return "documents packed and planned as they should be"


# All but an experiment, which "auto" never chooses.
CHECKS: dict[str, Callable[[], str]] = {
    **{f"attention: {name}": partial(attention, name) for name in BACKENDS if name != "gluon"},
    "patched models": models,
    "packing": packing,
}
