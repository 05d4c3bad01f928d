"""The device and the packages of the machine that a command runs on."""

from __future__ import annotations

from importlib import metadata

import torch


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
