"""Continuous batching brings attention of its own, so a patched model refuses it."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache

import tritonpack
from tests.patches.models import tiny_model

GREEDY = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1)
REFUSED = pytest.raises(tritonpack.UnsupportedModelError, match=r"continuous batching .* tritonpack\.unpatch\(model\)")


def options() -> dict[str, Any]:
    sizes = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    return {"generation_config": GREEDY, "continuous_batching_config": sizes}


def test_it_is_refused_while_the_model_is_patched() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with tritonpack.patch(model):
        with REFUSED:
            model.generate_batch([[5, 6, 7]], **options())
        with REFUSED, model.continuous_batching_context_manager(**options()):
            pass
    model.init_continuous_batching(**options())


def test_a_model_that_is_patched_meanwhile_refuses_the_call() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    paged = object.__new__(PagedAttentionCache)
    with tritonpack.patch(model), REFUSED:
        model(torch.tensor([[5, 6, 7]]), cache=paged)
