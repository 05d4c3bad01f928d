"""Launches of Triton kernels without a GPU: Triton's own driver and launcher, over a libcuda of our own.

Within `fake_gpu` the package's launchers take tensors in host memory, with the tiles of a GPU's architecture. Triton
specialises, compiles and loads each kernel, makes its descriptors, and passes its arguments to the driver. So wrong
signatures, specialisations that don't compile, descriptors and launches that a GPU would refuse raise errors, and the
host's time of a call is the one beside a GPU. Kernels write nothing, so results
are whatever memory held; device.py has a block in which kernels are executed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from tests.virtual_gpu.library import library
from tritonpack import kernels
from tritonpack.backends import gluon
from tritonpack.backends import triton as triton_backend
from tritonpack.kernels import tile_shapes

ROOM = 4096  # launches that the library records
MULTIPROCESSORS = 132  # of the GPU, whatever its architecture


class Launch(NamedTuple):
    """A launch that reached the driver.

    Attributes:
        kernel: its name.
        binary: the address of its function; each compiled kernel has its own.
        grid: the number of programs along each axis.
        threads: of a program.
        shared_bytes: dynamic shared memory of a program.
    """

    kernel: str
    binary: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


class _Record(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 104),
        ("binary", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
    )


class Launches:
    """The launches since the block began, in order; the first 4,096 are recorded, all are counted."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._count = ctypes.c_int.in_dll(library, "num_launches")
        self._records = (_Record * ROOM).in_dll(library, "launches")
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._count.value = 0

    def __len__(self) -> int:
        return self._count.value

    def __iter__(self) -> Iterator[Launch]:
        for record in self._records[: min(len(self), ROOM)]:
            yield Launch(record.name.decode(), record.binary, tuple(record.grid), record.threads, record.shared_bytes)

    @property
    def kernels(self) -> list[str]:
        """The name of the kernel of each launch."""
        return [launch.kernel for launch in self]


_one_block, _one_launch = threading.Lock(), threading.Lock()
# The kernels that were loaded, by the address of their function: name and PTX. What each launch calls first.
loaded: dict[int, tuple[str, str]] = {}
before_launch: list[Callable[[int, tuple[Any, ...]], None]] = []


class _Launcher(CudaLauncher):
    """Triton's launcher, which shows each launch's function and arguments first; threads launch one after the other."""

    def __call__(self, gx: int, gy: int, gz: int, stream: int, function: int, *others: Any) -> None:
        with _one_launch:
            for see in before_launch:
                see(function, others)
            super().__call__(gx, gy, gz, stream, function, *others)


def _load(kernel: CompiledKernel) -> None:
    new = kernel.module is None
    _init_handles(kernel)
    if new and isinstance(driver.active, _FakeDriver):
        loaded[kernel.function] = kernel.metadata.name, kernel.asm["ptx"]


_init_handles = CompiledKernel._init_handles
CompiledKernel._init_handles = _load


class _FakeDriver(CudaDriver):
    """Triton's driver, without its questions to torch. The device's number is its compute capability, so that Triton's
    caches of binaries keep architectures apart."""

    def __init__(self, capability: int) -> None:
        self.utils, self.launcher_cls = _utils(), _Launcher
        self.get_current_device = lambda: capability
        self.set_current_device = lambda device: None
        self.get_current_stream = lambda device: 0
        self.get_device_capability = lambda device: divmod(capability, 10)


@contextmanager
def fake_gpu(arch: str = "sm_90") -> Iterator[Launches]:
    """Launch kernels as on an NVIDIA GPU of an architecture, "sm_90" or another key of the tile tables.

    Masks must be made before, because kernels would build them and write no values. Their transposes and tile tables
    are built by kernels in this block.

    Raises:
        RuntimeError: there is a real GPU, whose libcuda is loaded; or a thread of this process is in such a block.
    """
    if torch.cuda.is_available():
        raise RuntimeError("fake_gpu is for machines without a GPU; this one has one.")
    if not _one_block.acquire(blocking=False):
        raise RuntimeError("a process has one virtual GPU at a time; leave the other block first, or launch in it.")
    with ExitStack() as stack:
        stack.callback(_one_block.release)
        for owner, name, answer in questions(arch):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, answer)
        library()  # before Triton looks for one
        before = driver._active
        driver.set_active(_driver(int(arch.removeprefix("sm_"))))
        stack.callback(setattr, driver, "_active", before)
        yield Launches(library())


def questions(arch: str) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The modules and names of the functions that ask about a tensor's device, and what answers for an architecture.

    Functions, not mocks, because a call of a mock takes 20 microseconds of a measured time.
    """
    own = tile_shapes.current_arch
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tritonpack") and getattr(module, "current_arch", None) is own
    ]
    return [
        *((module, "current_arch", lambda device: arch) for module in modules),
        *((backend, "check_device", lambda q: None) for backend in (triton_backend, gluon)),
        (kernels, "serve", lambda x: True),
        (gluon, "_multiprocessors", lambda device: MULTIPROCESSORS),
    ]


@cache
def _driver(capability: int) -> Any:
    return _FakeDriver(capability)


@cache
def _utils() -> Any:
    library()
    return CudaUtils()
