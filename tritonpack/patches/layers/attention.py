"""Forwards of attention layers outside of transformers' interface, or with their own mask."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from tritonpack.patches.interface import dense_attention_forward, interval_attention_forward
from tritonpack.patches.packed_batch import IntervalMask
from tritonpack.patches.parts import InstanceForward, PackingContext


class FalconAttention(InstanceForward):
    """Falcon's attention, which computes queries, keys and values by one layer, with rotary positions or ALiBi.

    With ALiBi the model adds slopes and mask into one tensor, so its mask stays dense.
    """

    def call(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        module, arguments = self.module, self.bound(args, kwargs)
        alibi, mask, cache = (arguments.pop(name, None) for name in ("alibi", "attention_mask", "layer_past"))
        states, rotary = arguments.pop("hidden_states"), arguments.pop("position_embeddings", None)
        query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(states)))
        if alibi is None:
            query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx)
        dropout = module.attention_dropout.p if alibi is not None and module.training else 0.0
        if isinstance(mask, Tensor):
            out = dense_attention_forward(query, key, value, mask, None, None, None, dropout, None)
        else:
            out, _ = interval_attention_forward(module, query, key, value, mask, dropout=dropout, **arguments)
        return module.dense(out.flatten(2)), None


class DocumentMask(InstanceForward):
    """Attention that makes its own causal mask, or none. It gets the mask of the documents as its padding mask."""

    def __init__(self, module: nn.Module, context: PackingContext, argument: str) -> None:
        super().__init__(module, context)
        self.argument = argument

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments, packed_batch = self.bound(args, kwargs), self.packed_batch
        padding = arguments[self.argument]
        if packed_batch is None or isinstance(padding, IntervalMask):  # cross-attention already has the right mask
            return self.inner(**arguments)
        mask = packed_batch.document_mask()
        if padding is not None and padding.ndim == 4:
            arguments[self.argument] = mask.to_tensor(padding.dtype, additive=True)
        else:
            causal = padding is not None and padding.ndim == 3
            arguments[self.argument] = mask.to_tensor()[:, 0].tril() if causal else mask.to_tensor()[:, 0]
        return self.inner(**arguments)


class EncoderAttention(InstanceForward):
    """Attention whose mask the encoder makes from the padding mask. It gets the mask of the documents instead."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        if self.packed_batch is not None:
            arguments["attention_mask"] = self.packed_batch.document_mask()
        return self.inner(**arguments)
