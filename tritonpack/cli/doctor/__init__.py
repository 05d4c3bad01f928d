"""`tritonpack doctor`: what is installed, what can run here, and whether what can run is right."""

from __future__ import annotations

import platform
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from unittest import SkipTest

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tritonpack
from tritonpack.backends import has_matrix_products
from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json
from tritonpack.cli.machine import installed_version
from tritonpack.cli.words import count

# The oldest version of each package that works, as in pyproject.toml; None where any does.
OLDEST = {"python": "3.10", "torch": "2.8", "triton": "3.6", "transformers": "5.6", "numpy": None, "numba": "0.61"}
NEWEST_TRANSFORMERS = "5.24"  # the newest that the tests ran with

_STYLES = {"right": "green", "wrong": "bold red", "warning": "yellow", "not here": "dim"}


@dataclass(frozen=True)
class Finding:
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
    console = Console(stderr=path == STANDARD_OUTPUT)
    versions = {name: platform.python_version() if name == "python" else installed_version(name) for name in OLDEST}
    facts = {
        "tritonpack": tritonpack.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        **{name: version or "not installed" for name, version in versions.items()},
        "device": _device_name(),
    }
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(name, escape(fact))
    console.print(grid)

    torch.set_num_threads(1)  # the tensors are tiny
    findings = [*examine_versions(versions), *examine_gpu()]
    try:
        checks: Mapping[str, Callable[[], str]] = import_module("tritonpack.cli.doctor.checks").CHECKS
    except Exception as error:  # on an old torch, for example
        checks = {}
        findings.append(Finding("tritonpack", "wrong", f"{type(error).__name__}: {error}"))
    with Console(stderr=True).status("") as status:
        for what, check in checks.items():
            status.update(what)
            findings.append(run_check(what, check))
    rows = Table("what", "here", "seconds", "")
    for finding in findings:
        outcome = f"[{_STYLES[finding.outcome]}]{finding.outcome}[/]"
        rows.add_row(finding.what, outcome, f"{finding.seconds:.1f}", escape(finding.detail))
    console.print(rows)
    console.print(escape(verdict(findings)))
    passed = not any(finding.outcome == "wrong" for finding in findings)
    if path is not None:
        write_json(path, {"passed": passed, "facts": facts, "findings": [asdict(finding) for finding in findings]})
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
        if version and oldest and _minor(version) < _minor(oldest):
            detail = f"{version} is too old; tritonpack needs {oldest} or later (pip install -U '{package}>={oldest}')"
            yield Finding(package, "wrong", detail)
    transformers, triton, numpy = (versions[package] for package in ("transformers", "triton", "numpy"))
    if transformers and _minor(transformers) > _minor(NEWEST_TRANSFORMERS):
        yield Finding(
            "transformers",
            "warning",
            f"{transformers} is newer than {NEWEST_TRANSFORMERS}, the newest tested: patch() tries a model that it "
            "doesn't know on a few tokens first; `tritonpack check MODEL` tries yours in all forms of packing",
        )
    if triton and numpy and _minor(triton) == (3, 6) and _minor(numpy) >= (2, 4):
        yield Finding(
            "triton and numpy",
            "warning",
            f"Triton {triton} with NumPy {numpy}: kernels fail in Triton's interpreter (TRITON_INTERPRET=1), not on "
            "GPUs; install Triton 3.7 or later, or numpy<2.4",
        )


def examine_gpu() -> Iterator[Finding]:
    """A GPU that torch can't use, or one without matrix instructions in Triton."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        if not has_matrix_products(device):
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            properties = torch.cuda.get_device_properties(device) if torch.version.hip else None
            kind = properties.gcnArchName if properties else f"compute capability {capability}"
            detail = (
                f"{torch.cuda.get_device_name()} ({kind}): Triton has matrix instructions from compute capability 8.0, "
                "CDNA and RDNA 3, so backend='triton' refuses 16-bit types, and 'auto' uses 'blocked'"
            )
            yield Finding("GPU", "warning", detail)
        return
    if shutil.which("nvidia-smi") is None:
        return
    if torch.version.cuda is None:
        remedy = f"torch {torch.__version__} is built without CUDA; install a build with it (pytorch.org/get-started)"
    else:
        remedy = f"torch {torch.__version__} can't use it; is the driver new enough for CUDA {torch.version.cuda}?"
    yield Finding("GPU", "warning", f"nvidia-smi is here, but torch sees no GPU: {remedy}")


def _device_name() -> str:
    """The GPU, or the CPU if torch sees no GPU."""
    if not torch.cuda.is_available():
        return f"CPU, {count(torch.get_num_threads(), 'thread')} (torch sees no GPU)"
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {capability}"


def _minor(version: str) -> tuple[int, ...]:
    """(3, 6) for "3.6.0+git1234"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
