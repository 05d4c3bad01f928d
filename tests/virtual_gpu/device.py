"""A virtual NVIDIA GPU: what Triton launches is executed from its PTX, on the CPU, as adversarially as the rules allow.

    with virtual_gpu("sm_90", seed=3) as gpu:
        out = varlen_attention(q, k, v, mask)  # tensors in host memory

Triton compiles the kernels, and its own launcher passes them to `cuLaunchKernelEx` of a library (machine.c) that runs
them. docs/virtual-gpu.md says what is modelled and what isn't.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import triton

from tests.virtual_gpu import driver
from tests.virtual_gpu.library import library
from tests.virtual_gpu.translate import INS, Translator

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
MAX_REPORTS = 100
# Triton 3.6 lets LLVM move conversions of A's registers behind wgmma.fence; ptxas orders registers itself.
FENCES_OPERANDS = not triton.__version__.startswith("3.6")


class _Program(ctypes.Structure):  # of machine.h
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ins", "pool", "constants", "params")),
        *((name, ctypes.c_int32) for name in ("num_ins", "num_constants", "num_params", "param_bytes")),
        *((name, ctypes.c_int32) for name in ("register_bytes", "threads")),
        ("name", ctypes.c_char * 104),
    )


class Line(NamedTuple):
    """Counts of an instruction since the first launch of a block.

    Attributes:
        number: of its line in the PTX, from 1.
        runs: by warps.
        lanes: by lanes.
        waves: passes over the banks of shared memory, or sectors of 32 bytes of global memory.
    """

    number: int
    runs: int
    lanes: int
    waves: int


class Executable:
    """A kernel's PTX, translated.

    Attributes:
        name: of the kernel.
        ptx: its text.
        program: what the library runs.

    Raises:
        Unsupported: an instruction that isn't modelled.
    """

    def __init__(self, name: str, ptx: str) -> None:
        self.name, self.ptx = name, ptx
        translated = Translator(ptx, _handler, _params()).run()
        kernel = translated.kernel
        self.program = _Program(
            num_ins=len(translated.instructions),
            num_constants=len(translated.constants),
            num_params=len(kernel.params),
            param_bytes=sum(kernel.params[-1][1:]) if kernel.params else 0,
            register_bytes=translated.register_bytes,
            threads=kernel.threads,
            name=kernel.name.encode()[:103],
        )
        constants = [part for value in translated.constants for part in value]
        tables = {
            "ins": b"".join(INS.pack(*ins) for ins in translated.instructions),
            "pool": struct.pack(f"<{len(translated.pool)}i", *translated.pool),
            "constants": struct.pack(f"<{len(constants)}Q", *constants),
            "params": b"".join(struct.pack("<2i", offset, size) for _, offset, size in kernel.params),
        }
        self._kept: list[object] = [*translated.kept]  # memory that the program points to
        for field, table in tables.items():
            buffer = ctypes.create_string_buffer(table, len(table) + 1)
            self._kept.append(buffer)
            setattr(self.program, field, ctypes.addressof(buffer))
        self._instructions = tables["ins"]

    def forget(self) -> None:
        """Count from zero."""
        ctypes.memmove(self.program.ins, self._instructions, len(self._instructions))

    def lines(self) -> list[Line]:
        """Its instructions, in order."""
        table = (ctypes.c_char * (INS.size * self.program.num_ins)).from_address(self.program.ins).raw
        return [Line(ins[2], *ins[-3:]) for ins in INS.iter_unpack(table)]


def _handler(name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _params() -> int:
    return ctypes.addressof((ctypes.c_char * 65536).in_dll(library(), "params"))


class VirtualGPU:
    """The GPU of a block: its launches, kernels and reports.

    Attributes:
        launches: its launches, in order.
        executables: the kernels that were launched in it.
    """

    def __init__(self, launches: driver.Launches, rewrite: Callable[[str, str], str] | None) -> None:
        self.launches = launches
        self.executables: list[Executable] = []
        self._rewrite = rewrite
        self._ready: set[int] = set()

    @property
    def reports(self) -> list[str]:
        """The faults that were found, at most 100: kernel, program, warp, lane, line of the PTX, and what is wrong."""
        texts = ((ctypes.c_char * 512) * MAX_REPORTS).in_dll(library(), "reports")
        return [text.value.decode() for text in texts[: ctypes.c_int.in_dll(library(), "num_reports").value]]

    def _before_launch(self, function: int, arguments: tuple[Any, ...]) -> None:
        if function not in self._ready:
            name, ptx = driver.loaded[function]
            key = name, self._rewrite(name, ptx) if self._rewrite else ptx
            if key not in _executables:
                _executables[key] = Executable(*key)
            _executables[key].forget()
            self.executables.append(_executables[key])
            library().vg_load(ctypes.c_void_p(function), ctypes.byref(_executables[key].program))
            self._ready.add(function)
        extents = sorted({extent for argument in arguments for extent in _extents(argument)})
        library().vg_clear_memory()
        for start, stop in extents:
            library().vg_add_argument(ctypes.c_uint64(start), ctypes.c_uint64(stop))
        for start, stop in _union(extents):
            library().vg_add_region(ctypes.c_uint64(start), ctypes.c_uint64(stop))


_executables: dict[tuple[str, str], Executable] = {}


@contextmanager
def virtual_gpu(
    arch: str = "sm_80",
    *,
    seed: int = 1,
    races: bool = True,
    preempts: bool = True,
    rewrite: Callable[[str, str], str] | None = None,
    check: bool = True,
) -> Iterator[VirtualGPU]:
    """Launch kernels on a virtual GPU.

    Args:
        arch: "sm_80", "sm_90", "sm_100" or "sm_120"; the last two as far as a kernel needs no tcgen05.
        seed: of the order of programs and warps, of when copies land, and of all undefined bits, from 1 on. Results
            that are defined have equal bits for all seeds.
        races: look for races.
        preempts: a warp may be interrupted at any instruction; otherwise only where it waits.
        rewrite: (name, PTX) -> PTX, before it is translated.
        check: raise an error if a fault was found.

    Raises:
        ValueError: another architecture or seed.
        RuntimeError: a machine with a GPU, whose libcuda is loaded, or without a C compiler; another such block hasn't
            ended, in this thread or another.
        Unsupported: a kernel with an instruction that isn't modelled.
        AssertionError: on leaving, faults that were found.
    """
    if arch not in ARCHS:
        raise ValueError(f'arch is "{arch}"; the virtual GPU models {", ".join(ARCHS)}.')
    if seed < 1:
        raise ValueError(f"seed is {seed}; seeds begin at 1.")
    with ExitStack() as stack:
        gpu = VirtualGPU(stack.enter_context(driver.fake_gpu(arch)), rewrite)
        library().vg_unload()
        stack.callback(library().vg_unload)
        ctypes.c_uint64.in_dll(library(), "seed").value = seed
        settings = {"races": races, "preempts": preempts, "num_reports": 0, "fences_operands": FENCES_OPERANDS}
        for name, value in settings.items():
            ctypes.c_int.in_dll(library(), name).value = value
        stack.callback(driver.before_launch.remove, gpu._before_launch)
        driver.before_launch.append(gpu._before_launch)
        stack.enter_context(_filled_with_nan())
        error = None
        try:
            yield gpu
        except Exception as raised:  # the reports say why
            error = raised
        if gpu.reports and check:
            faults = "\n".join(gpu.reports)
            raise AssertionError(f"the virtual GPU found {len(gpu.reports)} faults:\n{faults}") from error
        if error is not None:
            raise error


@contextmanager
def _filled_with_nan() -> Iterator[None]:
    """torch.empty returns NaN."""
    settings: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        settings.fill_uninitialized_memory = filled


def _extents(argument: Any) -> Iterator[tuple[int, int]]:
    """The first byte, and the one behind the last, of an argument's tensors or of what a descriptor describes."""
    if isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _extents(part)
        return
    tensor = getattr(argument, "base", argument)  # a descriptor's, of Triton or of Gluon
    if isinstance(tensor, torch.Tensor) and 0 not in argument.shape:
        strides = tensor.stride() if tensor is argument else argument.strides
        last = sum((size - 1) * stride for size, stride in zip(argument.shape, strides, strict=True))
        yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _union(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    regions: list[tuple[int, int]] = []
    for start, stop in extents:
        if regions and start <= regions[-1][1]:
            regions[-1] = regions[-1][0], max(stop, regions[-1][1])
        else:
            regions.append((start, stop))
    return regions
