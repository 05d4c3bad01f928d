"""`tritonpack doctor`: what is installed, what can run here, and whether what can run is right.

Each check computes something small and returns a sentence about it, or raises an exception: SkipTest if this machine
can't run it and doesn't need to, UserWarning if it works and something else may not.
"""

from __future__ import annotations

import platform
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import SkipTest

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tritonpack
from tritonpack.backends import BACKENDS, Backend, has_matrix_products, resolve_backend
from tritonpack.cli import machine
from tritonpack.errors import BackendUnavailableError
from tritonpack.packing.lengths import count

# The oldest version of each package that works, as in pyproject.toml.
OLDEST = {"torch": "2.8", "triton": "3.6", "transformers": "5.6", "numpy": "1.24", "numba": "0.61"}
NEWEST_TRANSFORMERS = "5.24"  # the newest that the tests ran with
_STYLES = {"right": "green", "wrong": "bold red", "warning": "yellow", "not here": "dim"}
# Cases of `tritonpack.testing`, and those that take a second or two each in Triton's interpreter.
_CASES = ("slack", "window-both", "cross-window-slack", "sinks", "everything", "head-dim-64", "head-dim-128")
_INTERPRETED = ("multi-query", "cross-more-queries")


def examine(path: Path | None = None) -> bool:
    """Print versions, the device and the result of each check, and write them as JSON; returns whether all is right."""
    machine.require_writable(path)
    facts = {"tritonpack": tritonpack.__version__, "system": f"{platform.system()} {platform.machine()}",
             "python": platform.python_version()}  # fmt: skip
    facts |= {name: machine.installed_version(name) or "not installed" for name in OLDEST}
    facts["device"] = f"CPU, {count(torch.get_num_threads(), 'thread')} (torch sees no GPU)"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts["device"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
    console = machine.console_beside(path)
    machine.print_grid(console, facts)

    torch.set_num_threads(1)  # the tensors are tiny
    found, rows = {}, Table("what", "here", "")
    with Console(stderr=True).status("") as status:
        for what, check in CHECKS.items():
            status.update(what)
            outcome, detail = found[what] = run_check(check)
            rows.add_row(what, f"[{_STYLES[outcome]}]{outcome}[/]", escape(detail))
    wrong = ", ".join(what for what, (outcome, _) in found.items() if outcome == "wrong")
    verdict = f"Something should work here and doesn't: {wrong}." if wrong else "Everything that can run here is right."
    console.print(rows, escape(verdict), sep="\n")
    findings = [{"what": what, "outcome": outcome, "detail": detail} for what, (outcome, detail) in found.items()]
    machine.write_json(path, {"passed": not wrong, "facts": facts, "findings": findings})
    return not wrong


def run_check(check: Callable[[], str]) -> tuple[str, str]:
    """The outcome of a check, a key of `_STYLES`, with figures, or the reason and the remedy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "right", check()
    except SkipTest as error:
        return "not here", str(error)
    except UserWarning as error:
        return "warning", str(error)
    except Exception as error:  # so that the other checks still run
        return "wrong", f"{type(error).__name__}: {error}"


def versions() -> str:
    """Compare the versions of packages with the oldest that work, and transformers with the newest that was tested."""
    found = {name: version for name in OLDEST if (version := machine.installed_version(name))}
    old = {name: version for name, version in found.items() if _minor(version) < _minor(OLDEST[name])}
    if old:
        wanted = " ".join(f"'{name}>={OLDEST[name]}'" for name in old)
        raise RuntimeError(f"{', '.join(map(' '.join, old.items()))}: too old; pip install -U {wanted}")
    transformers = found.get("transformers", NEWEST_TRANSFORMERS)
    if _minor(transformers) > _minor(NEWEST_TRANSFORMERS):
        raise UserWarning(
            f"transformers {transformers} is newer than {NEWEST_TRANSFORMERS}, the newest tested: patched models that "
            "aren't known are proven in their first call; so does `tritonpack check MODEL --weights`"
        )
    return "new enough"


def _minor(version: str) -> tuple[int, ...]:
    """(3, 6) for "3.6.0+git1234"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def gpu() -> str:
    """Find a GPU that torch can use."""
    if torch.cuda.is_available():
        return "torch sees it" + ("" if has_matrix_products(torch.device("cuda", 0)) else ", for float32 in Triton")
    if not shutil.which("nvidia-smi"):
        raise SkipTest("there is none")
    remedy = f"torch {torch.__version__} can't use it; is the driver new enough for CUDA {torch.version.cuda}?"
    if torch.version.cuda is None:
        remedy = f"torch {torch.__version__} is built without CUDA; install a build with it (pytorch.org)"
    raise UserWarning(f"nvidia-smi is here, but torch sees no GPU: {remedy}")


def attention(backend: Backend) -> str:
    """Compare outputs and gradients of a backend with float64, by the rule of `tritonpack.testing`."""
    from tritonpack.testing import CASES, check_backend, make_inputs

    device = machine.resolve_device("auto")
    try:
        used = resolve_backend(backend, torch.empty(1, 1, 16, device=device))
    except BackendUnavailableError as error:
        raise SkipTest(str(error)) from error
    names, dtypes, how = tuple(_CASES), [torch.float32, torch.bfloat16], f"by {used} on {device.type}"
    if backend == "triton" and device.type == "cpu":
        names, dtypes, how = _INTERPRETED, [torch.float32], "in Triton's interpreter"
    elif backend == "triton" and not has_matrix_products(device):
        dtypes = [torch.float32]
    cases = [case for case in CASES if case.name in names]
    found = [check_backend(make_inputs(case, dtype, device), backend) for case in cases for dtype in dtypes]
    largest = max(e.backend[key] / limit for e in found for key, limit in e.allowed.items() if limit)
    what = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{len(names)} cases, forward and backward, {what}, {how}: at most {largest:.0%} of the error allowed"


def models() -> str:
    """Check on a small patched Llama that packed documents equal each document alone, and none changes another."""
    if find_spec("transformers") is None:
        raise SkipTest("transformers isn't installed, so there is no model to patch; pip install transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from tritonpack.patches import patch
    from tritonpack.testing import check_isolation

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))
    with patch(model.to(machine.resolve_device("auto"))):
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
    "versions": versions, "GPU": gpu,
    **{f"attention: {name}": partial(attention, name) for name in BACKENDS if name != "gluon"},
    "patched models": models, "packing": packing,
}  # fmt: skip
