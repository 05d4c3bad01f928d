"""Routers of experts that take a limited number of tokens: the limit counts for each document."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.checks import require
from tritonpack.patches.parts import InstanceForward


class SwitchRouter(InstanceForward):
    """The router of Switch Transformers: an expert takes the first `expert_capacity` tokens of each document."""

    def call(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed_batch = self.context.current.packed_batch
        chosen, weights, logits = self.inner(hidden_states)
        if packed_batch is None:
            return chosen, weights, logits
        module: Any = self.module
        probabilities = nn.functional.softmax(logits, dim=-1, dtype=module.dtype).to(hidden_states.dtype)
        wanted = nn.functional.one_hot(probabilities.argmax(-1), module.num_experts)
        count = wanted.cumsum(1)
        starts, _ = packed_batch.runs()
        before = torch.where(starts[..., None], count - wanted, 0).cummax(1).values
        return wanted * (count - before <= module.expert_capacity), weights, logits


class NllbMoeRouter(InstanceForward):
    """The router of NLLB-MoE, whose experts take a limited number of tokens of the whole batch.

    Packed rows are refused if an expert may be full: in training, unless `expert_capacity` is as large as the batch.
    """

    def call(self, hidden_states: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        packed_batch = self.context.current.packed_batch
        if packed_batch is None:  # one document in each row, which continues a cache
            return self.inner(hidden_states, None)
        starts, live = packed_batch.runs()
        module: Any = self.module
        total, capacity = hidden_states.shape[0], module.expert_capacity
        if not module.training and module.moe_eval_capacity_token_fraction > 0:
            capacity = math.ceil(module.moe_eval_capacity_token_fraction * total)
        elif capacity is None:
            capacity = 2 * math.ceil(total / module.num_experts)
        if capacity < total:
            documents = starts if live is None else starts & live
            require(
                (documents.sum(1) <= 1).all(),
                lambda: (
                    f"an expert of this model takes {capacity} tokens of a batch, here of {total}, so documents packed "
                    "into a row would crowd out each other's tokens. Raise expert_capacity of its routers to the "
                    "number of tokens in a batch (in evaluation moe_eval_capacity_token_fraction to 1), or don't pack."
                ),
            )
        return self.inner(hidden_states, None if live is None else ~live.flatten())
