"""The versions that are installed, and which of them don't work together."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator, Mapping

import torch

from tritonpack.cli.doctor.findings import Finding
from tritonpack.cli.machine import installed_version
from tritonpack.cli.words import count

# The oldest version of each package that works, as in pyproject.toml; None where any does.
OLDEST = {"python": "3.10", "torch": "2.8", "triton": "3.6", "transformers": "5.6", "numpy": None, "numba": "0.61"}
NEWEST_TRANSFORMERS = "5.23"  # the newest that the tests ran with


def installed_versions() -> dict[str, str | None]:
    """The version of every package in OLDEST; None for those that aren't installed."""
    return {name: platform.python_version() if name == "python" else installed_version(name) for name in OLDEST}


def examine_versions(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """Versions that are too old, untested or known not to work together."""
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
    """A GPU that torch can't use."""
    if torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return
    if torch.version.cuda is None:
        remedy = f"torch {torch.__version__} is built without CUDA; install a build with it (pytorch.org/get-started)"
    else:
        remedy = f"torch {torch.__version__} can't use it; is the driver new enough for CUDA {torch.version.cuda}?"
    yield Finding("GPU", "warning", f"nvidia-smi is here, but torch sees no GPU: {remedy}")


def device_name() -> str:
    """The GPU, or the CPU if torch sees no GPU."""
    if not torch.cuda.is_available():
        return f"CPU, {count(torch.get_num_threads(), 'thread')} (torch sees no GPU)"
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {capability}"


def _minor(version: str) -> tuple[int, ...]:
    """(3, 6) for "3.6.0+git1234"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
