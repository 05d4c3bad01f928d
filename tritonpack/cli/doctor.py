"""`tritonpack doctor`: what is installed, and what can run."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table

import tritonpack
from tritonpack.attention import Backend, resolve_backend
from tritonpack.errors import BackendUnavailableError

_PACKAGES = ("torch", "triton", "transformers", "numpy", "numba")
_BACKENDS: tuple[Backend, ...] = ("triton", "blocked", "reference")


def examine() -> None:
    """Print the versions, the device, and each attention backend with the reason where it can't run."""
    console = Console()
    facts = Table.grid(padding=(0, 2))
    facts.add_row("tritonpack", tritonpack.__version__)
    facts.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in _PACKAGES:
        facts.add_row(package, _version(package))
    facts.add_row("device", _device())
    console.print(facts)

    backends = Table("backend", "runs here", "")
    for backend in _BACKENDS:
        reason = why_not(backend)
        backends.add_row(backend, "no" if reason else "yes", reason)
    console.print(backends)
    auto = resolve_backend("auto", _probe())
    console.print(f"backend='auto' uses {auto} for float32 here.")


def why_not(backend: Backend) -> str:
    """Why a backend can't run on this machine's device; empty if it can."""
    try:
        resolve_backend(backend, _probe())
    except BackendUnavailableError as error:
        return str(error)
    return ""


def _probe() -> torch.Tensor:
    return torch.empty(1, 1, 16, device="cuda" if torch.cuda.is_available() else "cpu")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads (torch sees no GPU)"
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {capability}"
