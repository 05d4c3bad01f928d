"""The cost of a patch: `patch()` and `unpatch()`, and forward passes of a model with little else to compute."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack

TOKENS = 16


@lru_cache(maxsize=1)
def llama(layers: int) -> LlamaForCausalLM:
    """A model with as many layers as large models, and narrow, so that it fits any machine."""
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=2)
    config.num_hidden_layers = layers
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("layers", [16, 32, 80])
def test_patch(benchmark: BenchmarkFixture, layers: int) -> None:
    benchmark.group = "patch() and unpatch()"
    benchmark.pedantic(lambda: tritonpack.patch(llama(layers)).unpatch(), rounds=20, warmup_rounds=2)


class Unknown(LlamaForCausalLM):
    """A class that isn't known to be exact, so that a model of it is proven."""


@pytest.mark.parametrize("layers", [16, 32, 80])
def test_proof(benchmark: BenchmarkFixture, layers: int) -> None:
    """The cost of the first call of an unknown model, paid once. It should be below 1% of the first minute, 0.6 s."""
    model = Unknown(llama(layers).config)

    def patched() -> tuple[tuple[tritonpack.Patch], dict[str, object]]:
        return (tritonpack.patch(model),), {}

    def prove(handle: tritonpack.Patch) -> None:
        handle.prove()
        handle.unpatch()

    benchmark.group = "proof of an unknown model of narrow layers"
    benchmark.pedantic(prove, setup=patched, rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("implementation", ["tritonpack", "stock"])
def test_overhead(benchmark: BenchmarkFixture, implementation: str) -> None:
    """With one document, so that both implementations compute the same."""
    model = llama(32)
    batch = {"input_ids": torch.arange(TOKENS)[None], "position_ids": torch.arange(TOKENS)[None]}

    def forward() -> None:
        model(**batch, use_cache=False)

    benchmark.group = f"forward pass of 32 narrow layers, {TOKENS} tokens"
    with torch.no_grad():
        if implementation == "stock":
            benchmark.pedantic(forward, rounds=20, warmup_rounds=2)
        else:
            with tritonpack.patch(model):
                benchmark.pedantic(forward, rounds=20, warmup_rounds=2)
