"""Forwards of attention layers outside of transformers' interface, or with a mask of their own."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from tritonpack.patches.interface import dense_attention_forward, interval_attention_forward
from tritonpack.patches.packed_batch import IntervalMask
from tritonpack.patches.parts import InstanceForward, PackingContext


class FalconAttention(InstanceForward):
    """Falcon's attention: packed queries, keys and values, rotary positions or ALiBi.

    With ALiBi the model adds slopes and mask into one tensor, so that form stays dense.
    """

    def call(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        module: Any = self.module
        query, key, value = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
        if alibi is None:
            assert position_embeddings is not None
            rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
            query, key = rotate(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, module.layer_idx)
        dropout = module.attention_dropout.p if alibi is not None and module.training else 0.0
        if isinstance(attention_mask, Tensor):
            out = dense_attention_forward(query, key, value, attention_mask, None, None, None, dropout, None)
        else:
            arguments = {"output_attentions": output_attentions, "position_ids": position_ids, **kwargs}
            out, _ = interval_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **arguments)
        return module.dense(out.flatten(2)), None


class DocumentMask(InstanceForward):
    """Attention that makes its own causal mask, or none: gets the mask of the documents in the argument for padding."""

    def __init__(self, module: nn.Module, context: PackingContext, argument: str) -> None:
        super().__init__(module, context)
        self.argument = argument

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments, packed_batch = self.bound(args, kwargs), self.packed_batch
        given = arguments[self.argument]
        if packed_batch is None or isinstance(given, IntervalMask):  # cross-attention gets the mask of the documents
            return self.inner(**arguments)
        mask = packed_batch.document_mask()
        if given is not None and given.ndim == 4:
            arguments[self.argument] = mask.to_tensor(given.dtype, additive=True)
        else:
            causal = given is not None and given.ndim == 3
            arguments[self.argument] = mask.to_tensor()[:, 0].tril() if causal else mask.to_tensor()[:, 0]
        return self.inner(**arguments)


class EncoderAttention(InstanceForward):
    """Attention in encoders that make its mask from the padding mask. It gets the mask of the documents instead."""

    def call(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        if self.packed_batch is not None:
            attention_mask = self.packed_batch.document_mask()
        return self.inner(hidden_states, attention_mask, **kwargs)
