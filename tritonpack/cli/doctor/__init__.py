"""`tritonpack doctor`: what is installed, what can run here, and whether what can run is right."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tritonpack
from tritonpack.cli.doctor.findings import Finding, NotHereError
from tritonpack.cli.doctor.versions import device_name, examine_gpu, examine_versions, installed_versions
from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json

_STYLES = {"right": "green", "wrong": "bold red", "warning": "yellow", "not here": "dim"}


def examine(path: Path | None = None) -> bool:
    """Print versions, the device and the result of each check; write the same to `path` as JSON if there is one.

    Returns:
        Whether everything that can run here is right.

    Raises:
        ValueError: `path` can't be written.
    """
    require_writable(path)
    console = Console(stderr=path == STANDARD_OUTPUT)
    versions = installed_versions()
    facts = {
        "tritonpack": tritonpack.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        **{name: version or "not installed" for name, version in versions.items()},
        "device": device_name(),
    }
    grid = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        grid.add_row(name, escape(fact))
    console.print(grid)

    torch.set_num_threads(1)  # the tensors are tiny
    findings = [*examine_versions(versions), *examine_gpu()]
    with Console(stderr=True).status("") as status:
        for what, check in _checks(findings).items():
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
        report = {"passed": passed, "facts": facts, "findings": [asdict(finding) for finding in findings]}
        write_json(path, report)
    return passed


def _checks(findings: list[Finding]) -> Mapping[str, Callable[[], str]]:
    """The checks; if they can't be imported, on an old torch for example, a finding says so."""
    try:
        return import_module("tritonpack.cli.doctor.checks").CHECKS
    except Exception as error:
        findings.append(Finding("tritonpack", "wrong", f"{type(error).__name__}: {error}"))
        return {}


def run_check(what: str, check: Callable[[], str]) -> Finding:
    """Run a check; an exception of any kind becomes a finding, so that the other checks still run."""
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, detail = "right", check()
    except NotHereError as error:
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
