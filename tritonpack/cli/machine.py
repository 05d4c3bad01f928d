"""The device and the packages of the machine that a command runs on, and where its results go."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

STANDARD_OUTPUT = Path("-")  # for JSON


def resolve_device(name: str) -> torch.device:
    """The device for "auto" (the GPU where there is one), "cpu" or "cuda".

    Raises:
        ValueError: "cuda" without a GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def installed_version(package: str) -> str | None:
    """The version of a package; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def console_beside(path: Path | None) -> Console:
    """rich's console for tables and sentences: standard output, or standard error if that gets the JSON."""
    return Console(stderr=path == STANDARD_OUTPUT, highlight=False)


def print_grid(console: Console, rows: Mapping[str, str | None]) -> None:
    """Print names and what belongs to each, in two columns; a name without anything is left out."""
    grid = Table.grid(padding=(0, 2))
    for name, what in rows.items():
        if what:
            grid.add_row(name, escape(what))
    console.print(grid)


def percent(share: float) -> str:
    """A share from 0 to 1 as a number with two decimals; "100" means all."""
    return "100" if share == 1 else f"{min(100 * share, 99.99):.2f}"


def require_writable(path: Path | None, option: str = "--json", read: Path | None = None) -> None:
    """Check before the work that results can be written to `path`, the value of `option`, and make its folder.

    Raises:
        ValueError: the folder can't be made or is read-only, or `path` is `read`, a file that the command reads.
    """
    if path is None or path == STANDARD_OUTPUT:
        return
    try:
        if read is not None and path.resolve() == read.resolve():
            raise OSError(0, f"the command reads {read.name}, which would be lost")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.is_file():  # and no device or pipe
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"{option} {path} can't be written: {error.strerror}; name another file") from error


def write_json(path: Path | None, values: Any) -> None:
    """Write values, which may hold paths, as JSON to a file, or to standard output for "-"; None writes nothing."""
    text = json.dumps(values, indent=1, default=os.fspath) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
    elif path is not None:
        path.write_text(text)
