"""The Triton kernels. They import no models and no packing; each query sees an interval of keys."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def serve(x: Tensor) -> bool:
    """True if a Triton kernel builds or writes out the mask of a tensor, False if torch operators do.

    Kernels do for tensors on a GPU if Triton is installed. Fake tensors and traced code use torch operators, which the
    compiler fuses.
    """
    return x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling() and _triton_is_here()


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None
