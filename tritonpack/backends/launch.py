"""Launches of Triton kernels that search for each binary once.

`kernel[grid](...)` searches at every launch, which takes longer than the launch. It returns the binary, and `launch`
runs this binary for all arguments that Triton's search doesn't tell apart. Triton's settings that change a binary, such
as TRITON_DEBUG, are read at its first launch.
"""

from __future__ import annotations

from collections.abc import Hashable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

_binaries: dict[Hashable, tuple[Any, list[str]]] = {}


def launch(kernel: Any, grid: tuple[int, int], arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        kernel: a function decorated by `triton.jit` or `gluon.jit`.
        grid: the number of programs along both axes.
        arguments: the kernel's arguments at run time: tensors, descriptors, numbers, or None.
        constants: its compile-time constants, and Triton's options, such as num_warps.
    """
    if torch.version.hip or not isinstance(kernel, JITFunction):
        # Binaries for AMD also depend on the bytes of a tensor's storage. The interpreter has no binaries.
        kernel[grid](**arguments, **constants)
        return
    kinds = [x if x is None else _kind(x) for x in arguments.values()]
    key = (kernel.fn, driver.active.get_current_device(), *constants.values(), *kinds)
    found = _binaries.get(key)
    if found is None:
        binary = kernel[grid](**arguments, **constants)
        if binary is not None:  # it is None if a hook of Triton took the launch
            _binaries[key] = binary, list(signature(kernel.fn).parameters)
        return
    binary, names = found
    values = arguments | constants
    binary[grid[0], grid[1], 1](*[values[name] for name in names])


def _kind(x: Any) -> Hashable:
    """What a binary depends on in an argument, or more: its type, how an address is aligned, and whether an integer is
    1, a multiple of 16, or too large for 32 or 63 bits. So there are a few kinds, however many token counts."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, int):
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x >> 63
    if isinstance(x, float):
        return float
    if isinstance(x, tuple):
        return tuple([y if y is None else _kind(y) for y in x])
    return type(x), x.base.dtype, getattr(x, "layout", None), *x.block_shape  # a descriptor
