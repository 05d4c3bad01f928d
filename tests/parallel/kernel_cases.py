"""The exchanges with the Triton kernels as their backend: heads in steps and blocks of keys are strided and small."""

from functools import partial

import torch

from tests.parallel.attention_cases import EXCHANGES, low_precision

CASES = {exchange: partial(low_precision, exchange, torch.float32, "triton") for exchange in EXCHANGES}
