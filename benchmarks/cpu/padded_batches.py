"""Training steps on padded batches: stock, without padding, and with common beginnings once.

`python -m benchmarks.cpu -k padded_batches`. Forward and backward of a small Llama; every implementation gets the same
padded batch, and its loss is compared with stock's before it is timed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack
from benchmarks.harness.registry import register

VOCAB = 1024
OPTIONS: dict[str, dict[str, Any] | None] = {
    "stock, sdpa": None,
    "tritonpack": {},
    "tritonpack, unpad": {"unpad": True},
    "tritonpack, share_prefixes": {"share_prefixes": True},
}


def completions() -> dict[str, Tensor]:
    """8 completions of 256 tokens on a prompt of 2,048, labels on the completions."""
    prompt = torch.randint(1, VOCAB, (1, 2048)).expand(8, -1)
    ids = torch.cat([prompt, torch.randint(1, VOCAB, (8, 256))], 1)
    labels = ids.clone()
    labels[:, :2048] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def ragged() -> dict[str, Tensor]:
    """16 rows of 64 to 1,024 tokens, padded to the longest."""
    lengths = torch.linspace(64, 1024, 16).long()
    ids = torch.randint(1, VOCAB, (16, 1024))
    mask = (torch.arange(1024) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def full() -> dict[str, Tensor]:
    """8 rows of 512 tokens without padding and without common beginnings."""
    ids = torch.randint(1, VOCAB, (8, 512))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


CASES = {"8 x 256 on 2,048": completions, "16 rows of 64 to 1,024": ragged, "8 rows of 512": full}


def model(options: dict[str, Any] | None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    if options is not None:
        tritonpack.patch(made, **options)
    return made


@register("training on padded batches", case=tuple(CASES), repeats=5)
def padded_batches(case: str) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = CASES[case]()

    def step(model: LlamaForCausalLM) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        model.zero_grad()
        return loss.item()

    calls = {name: partial(step, model(options)) for name, options in OPTIONS.items()}
    expected = next(iter(calls.values()))()
    for name, call in calls.items():
        assert math.isclose(call(), expected, rel_tol=1e-5), name
    return calls
