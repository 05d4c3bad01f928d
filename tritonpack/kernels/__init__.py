"""The Triton kernels. They know nothing of models or packing, only the interval of keys of each query."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def serve(x: Tensor) -> bool:
    """Whether a kernel, instead of torch operators, builds or writes out the mask of a tensor.

    A kernel does if the tensor lies on a GPU and Triton is installed. Fake tensors and traced code use torch operators,
    which the compiler fuses.
    """
    return x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling() and _triton_is_here()


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None
