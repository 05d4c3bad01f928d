"""Which versions are installed, and which of them don't go together."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tritonpack.cli.doctor.findings import Finding
from tritonpack.cli.machine import installed_version


@dataclass(frozen=True)
class Known:
    """A package, and the versions that tritonpack knows.

    Attributes:
        least: the oldest that works, as pyproject.toml has it; None where any does.
        newest: the newest that the tests ran with.
        beyond: what to do about newer ones; None where there is nothing to do.
    """

    package: str
    least: str | None
    newest: str
    beyond: str | None = None


KNOWN = (
    Known("python", "3.10", "3.13"),
    Known("torch", "2.8", "2.13"),
    Known("triton", "3.6", "3.9"),
    Known(
        "transformers",
        "5.6",
        "5.23",
        "a model that patch() doesn't know is tried on a few tokens first; `tritonpack check MODEL` tries yours in all "
        "forms of packing",
    ),
    Known("numpy", None, "2.4"),
    Known("numba", "0.61", "0.68"),
)


def installed_versions() -> dict[str, str | None]:
    """The version of every package that counts, None for those that are absent."""
    return {"python": platform.python_version()} | {row.package: installed_version(row.package) for row in KNOWN[1:]}


def examine_versions(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    """What is too old, newer than known, or known not to go together."""
    for row in KNOWN:
        version = versions[row.package]
        if version is None:
            continue
        if row.least and _minor(version) < _minor(row.least):
            detail = f"{version} is too old; tritonpack needs {row.least} or later"
            yield Finding(row.package, "wrong", detail + f" (pip install -U '{row.package}>={row.least}')")
        elif row.beyond and _minor(version) > _minor(row.newest):
            detail = f"{version} is newer than {row.newest}, the newest tested: {row.beyond}"
            yield Finding(row.package, "warning", detail)
    yield from _known_troubles(versions)


def examine_gpu() -> Iterator[Finding]:
    """A GPU that torch can't see."""
    if torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return
    if torch.version.cuda is None:
        remedy = f"torch {torch.__version__} is built without CUDA; install a build with it (pytorch.org/get-started)"
    else:
        remedy = f"torch {torch.__version__} can't use it; is the driver new enough for CUDA {torch.version.cuda}?"
    yield Finding("GPU", "warning", f"nvidia-smi is here, but torch sees no GPU: {remedy}")


def device_name() -> str:
    """The device that computes here, in words."""
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads (torch sees no GPU)"
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability {capability}"


def _known_troubles(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    triton, numpy = versions["triton"], versions["numpy"]
    if triton and numpy and _minor(triton) == (3, 6) and _minor(numpy) >= (2, 4):
        yield Finding(
            "triton and numpy",
            "warning",
            f"Triton {triton} with NumPy {numpy}: kernels fail in Triton's interpreter (TRITON_INTERPRET=1), not on "
            "GPUs; install Triton 3.7 or later, or numpy<2.4",
        )


def _minor(version: str) -> tuple[int, ...]:
    """(3, 6) of "3.6.0+git1234"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
