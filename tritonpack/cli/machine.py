"""What commands ask of the machine that they run on."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import torch


def resolve_device(name: str) -> torch.device:
    """The device that an option stands for: "auto" is the GPU where there is one.

    Raises:
        ValueError: "cuda" where there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def require_writable(path: Path | None) -> None:
    """Create the file that --json names, if it names one, before the work that fills it.

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
    """A package's version, None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
