"""`tritonpack check-backend module:function`: results of the conformance kit, as a table."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tritonpack.checks import check_choice
from tritonpack.cli.machine import console_beside, require_writable, resolve_device, write_json
from tritonpack.testing import conformance

_STYLES = {"pass": "green", "fail": "bold red", "not offered": "dim", "error": "bold red"}


def examine(
    function: str, device: str, dtypes: Sequence[str], only: Sequence[str], skip: Sequence[str], path: Path | None
) -> bool:
    """Run the checks, print a table, and write the results as JSON; returns whether one passed and none failed."""
    require_writable(path)
    for name in dtypes:
        check_choice(name, ("float32", "float16", "bfloat16"), "--dtype")
    where, called, asked = resolve_device(device), resolve(function), [getattr(torch, name) for name in dtypes] or None
    with Console(stderr=True).status(f"checking {escape(function)}"):
        report = conformance.run(called, dtypes=asked, device=where, only=only, skip=skip)
    rows = Table(Column("check", overflow="fold"), "dtype", "result", "detail", title=escape(report.function))
    for one in report.results:
        rows.add_row(one.check, one.dtype, f"[{_STYLES[one.outcome]}]{one.outcome}[/]", escape(one.detail))
    console_beside(path).print(rows, escape(report.summary()), sep="\n")
    write_json(path, asdict(report) | {"passed": report.passed})
    return report.passed


def resolve(name: str) -> Callable[..., Any]:
    """The function that "module:function" names; the module may lie in the working directory."""
    if not all(name.partition(":")):
        raise ValueError(f"name the function as module:function, such as flash_attn:flash_attn_func; got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = resolve_name(name)
    except Exception as error:  # a module may raise anything when it is imported
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} can't be imported: {why}; name the function as module:function") from error
    if not callable(function):
        raise ValueError(f"{name} is not a function but {type(function).__name__}; name a function")
    return function
