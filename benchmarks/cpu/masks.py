"""Building masks on a CPU, and writing them out beside the usual ways (`benchmarks/gpu/masks.py` has the calls)."""

from __future__ import annotations

import torch

from benchmarks.gpu.masks import cases
from benchmarks.harness.registry import CASES

CASES.extend(cases(torch.device("cpu"), 131_072, 4096))
