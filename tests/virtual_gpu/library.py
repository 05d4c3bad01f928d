"""The library of the virtual GPU: machine.c and its neighbours as a libcuda.so.1, for Triton's own driver."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import triton
from triton import knobs

from tests.virtual_gpu import alu

HERE = Path(__file__).parent
SOURCES = ("machine.c", "memory.c", "tensor.c")
HEADERS = ("machine.h", "alu.h", "libcuda.c")
# Sums aren't contracted, and overflow wraps: results are those that PTX defines.
FLAGS = ("-O3", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fno-math-errno", "-w", "-shared", "-fPIC")


def compiler() -> str | None:
    """The C compiler, CC or cc; None where there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


@cache
def library() -> ctypes.CDLL:
    """The library, compiled for this processor into Triton's cache, and loaded before Triton asks for one of its name.

    Raises:
        RuntimeError: there is no C compiler.
    """
    cc = compiler()
    if cc is None:
        raise RuntimeError("the virtual GPU needs a C compiler: install one, or name it in CC.")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    alu_source = alu.source()
    text = "".join((HERE / name).read_text() for name in (*SOURCES, *HEADERS)) + alu_source
    key = hashlib.sha256(f"{text}{include}{cc}{_processor()}".encode()).hexdigest()[:16]
    folder = Path(knobs.cache.dir) / f"virtual-gpu-{key}"
    path = folder / "libcuda.so.1"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as build:
            generated = Path(build) / "alu.c"
            generated.write_text(alu_source)
            made = Path(build) / path.name
            options = ("-Wl,-soname,libcuda.so.1", f"-I{include}", f"-I{HERE}", "-o", str(made), "-lm")
            command = [cc, *FLAGS, *(str(HERE / name) for name in SOURCES), str(generated), *options]
            if subprocess.run([*command, "-march=native"], capture_output=True).returncode:
                subprocess.run(command, check=True)  # some compilers don't know -march=native
            made.replace(path)  # at once, because other processes may do the same
    knobs.nvidia.libcuda_path = str(folder)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _processor() -> str:
    """The features of this processor, because a cache may be used by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
