"""The Triton kernels. Nothing here knows of models, documents or packing: only of intervals of keys per query."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def serve(x: Tensor) -> bool:
    """Whether the kernels that build and unfold masks take a tensor.

    They take what lies on a GPU, where Triton is installed. Tensors without values (fake ones) and traced code are
    left to torch's own operators, which the compiler sees through and fuses.
    """
    return x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling() and _triton_is_here()


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None
