"""The device, the files and the packages of the machine that a command runs on."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch


def resolve_device(name: str) -> torch.device:
    """The device for "auto" (the GPU where there is one), "cpu" or "cuda".

    Raises:
        ValueError: "cuda" without a GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def require_writable(path: Path | None) -> None:
    """Create the file that --json names, if there is one, before the work whose results it takes.

    Raises:
        ValueError: it can't be written.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"--json {path} can't be written: there is no folder {path.parent}; make it, or name another")
    try:
        path.touch()
    except OSError as error:
        raise ValueError(f"--json {path} can't be written: {error.strerror}; name another file") from error


def installed_version(package: str) -> str | None:
    """The version of a package; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
