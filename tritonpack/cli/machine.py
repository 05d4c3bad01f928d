"""What commands ask of the machine that they run on."""

from __future__ import annotations

from importlib import metadata

import torch


def resolve_device(name: str) -> torch.device:
    """The device that an option stands for: "auto" is the GPU where there is one.

    Raises:
        ValueError: "cuda" where there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def installed_version(package: str) -> str | None:
    """A package's version, None where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
