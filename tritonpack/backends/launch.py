"""Launches of Triton kernels that look up each binary once.

`kernel[grid](...)` looks the binary up at every launch, which takes longer than the launch. It returns the binary, and
`launch` runs this binary again for all arguments for which Triton would find the same one. Settings of Triton that
change a binary, such as TRITON_DEBUG, are read at its first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from inspect import signature
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

# Binaries, each with a function that puts a kernel's arguments in the order of its signature.
_binaries: dict[Hashable, tuple[Any, Callable[[dict[str, Any]], tuple[Any, ...]]]] = {}


def launch(kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        kernel: a function decorated by `triton.jit` or `gluon.jit`.
        programs: the number of programs.
        arguments: the kernel's run-time arguments: tensors, descriptors, numbers, or None.
        constants: the kernel's compile-time constants, and Triton's options, such as num_warps.
    """
    if torch.version.hip or not isinstance(kernel, JITFunction):
        # Binaries for AMD also depend on the size of a tensor's storage. The interpreter has no binaries.
        kernel[(programs,)](**arguments, **constants)
        return
    key = (kernel.fn, driver.active.get_current_device(), *constants.values(), *_kinds(arguments.values()))
    entry = _binaries.get(key)
    if entry is None:
        binary = kernel[(programs,)](**arguments, **constants)
        if binary is not None:  # it is None if a hook of Triton took the launch
            _binaries[key] = binary, itemgetter(*signature(kernel.fn).parameters)
        return
    binary, in_order = entry
    binary[programs, 1, 1](*in_order(arguments | constants))


def _kinds(values: Iterable[Any]) -> list[Hashable]:
    return [(x.dtype, x.data_ptr() % 16) if isinstance(x, Tensor) else _kind(x) for x in values]


def _kind(x: Any) -> Hashable:
    """Return the properties of an argument, other than a tensor, on which a binary may depend: its type, and whether an
    integer is 1, a multiple of 16, or too large for 32 or 63 bits. There are few kinds for all token counts."""
    if x is None:
        return None
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x >> 63
    if isinstance(x, float):
        return float
    if isinstance(x, tuple):
        return tuple(_kinds(x))
    return type(x), x.base.dtype, getattr(x, "layout", None), *x.block_shape  # a descriptor
