"""The exchanges with the Triton backend, which gets strided heads and small blocks of keys from them."""

from functools import partial

import torch

from tests.parallel.attention_cases import EXCHANGES, low_precision

CASES = {exchange: partial(low_precision, exchange, torch.float32, "triton") for exchange in EXCHANGES}
