"""Marks that tests of the virtual GPU share."""

import pytest
import torch

from tests.virtual_gpu.library import compiler

MARKS = [
    pytest.mark.compile,
    pytest.mark.skipif(compiler() is None, reason="the virtual GPU needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU, whose libcuda is loaded"),
]
