"""Marks of the tests that use the virtual GPU: a C compiler, and no real GPU."""

import os
import shutil

import pytest
import torch

# `compiler` of library.py, which needs Triton.
NEEDS = [
    pytest.mark.compile,
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="the virtual GPU needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
]
