"""The cost of a patch: `patch()` and `unpatch()`, and forward passes of a model with little else to compute."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack
from benchmarks.harness.registry import OURS, register

TOKENS = 16
LAYERS = (16, 32, 80)
KINDS = ("subclass", "own forward")


@lru_cache(maxsize=1)
def llama(layers: int) -> LlamaForCausalLM:
    """A model with as many layers as large models, and narrow, so that it fits any machine."""
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=2)
    config.num_hidden_layers = layers
    return LlamaForCausalLM(config)


@register("patch() and unpatch()", layers=LAYERS)
def patch(layers: int) -> dict[str, Any]:
    return {OURS: lambda: tritonpack.patch(llama(layers)).unpatch()}


class Subclass(LlamaForCausalLM):
    """A class that isn't known to be exact, so that a model of it is proven."""


class OwnForward(LlamaForCausalLM):
    """A class whose loss is proven too, because its forward isn't known."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels=labels, **more)


@register("patch(), proof and unpatch() of an unknown model of narrow layers", layers=LAYERS, kind=KINDS, repeats=5)
def proof(layers: int, kind: str) -> dict[str, Any]:
    """The cost of the first call of an unknown model, paid once. It should be below 1% of the first minute, 0.6 s."""
    kinds = {"subclass": Subclass, "own forward": OwnForward}
    model: LlamaForCausalLM = kinds[kind](deepcopy(llama(layers).config))

    def prove() -> None:
        with tritonpack.patch(model) as handle:
            handle.prove()

    return {OURS: prove}


@register(f"forward pass of 32 narrow layers, {TOKENS} tokens")
def overhead() -> dict[str, Any]:
    """With one document, so that both implementations compute the same."""
    stock = llama(32)
    ours = LlamaForCausalLM(deepcopy(stock.config))
    tritonpack.patch(ours)
    batch = {"input_ids": torch.arange(TOKENS)[None], "position_ids": torch.arange(TOKENS)[None]}

    @torch.no_grad()
    def forward(model: LlamaForCausalLM) -> None:
        model(**batch, use_cache=False)

    return {OURS: partial(forward, ours), "stock": partial(forward, stock)}
