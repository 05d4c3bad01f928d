"""Embeddings and poolers that depend on other tokens: in a patched model these are tokens of the same document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward, PackingContext
from tritonpack.patches.placement import Documents


class DocumentEmbeddings(InstanceForward):
    """Embeddings of a layer that reads other tokens of the document."""


class EsmEmbeddings(DocumentEmbeddings):
    """ESM's embeddings with `token_dropout`: masked tokens are zeros, and the others are scaled up to make up for them.

    The layer divides by the share of unmasked tokens in the row. So its input is multiplied by that share, and divided
    by the document's.
    """

    def call(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        module: Any = self.module
        if module.token_dropout and input_ids is not None and isinstance(attention_mask, PackedBatch):
            embeddings = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            scale = _unmasked_in_row_over_document(input_ids == module.mask_token_id, attention_mask)
            inputs_embeds = embeddings * scale[..., None].to(embeddings.dtype)
        return self.inner(input_ids, attention_mask, position_ids, inputs_embeds)


class MobileBertEmbeddings(DocumentEmbeddings):
    """MobileBERT's embeddings, each made of three tokens: neighbours in other documents count as zeros."""

    def call(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        module: Any = self.module
        packed_batch = self.packed_batch
        if packed_batch is None or not module.trigram_input:
            return self.inner(input_ids, token_type_ids, position_ids, inputs_embeds)
        own = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        first = packed_batch.runs()[0]
        last = nn.functional.pad(first[:, 1:], (0, 1), value=True)
        before, after = own.roll(1, 1).masked_fill(first[..., None], 0), own.roll(-1, 1).masked_fill(last[..., None], 0)
        embeddings = module.embedding_transformation(torch.cat([after, own, before], dim=2))
        if token_type_ids is None:
            token_type_ids = torch.zeros(own.shape[:2], dtype=torch.long, device=own.device)
        places = packed_batch.places() if position_ids is None else position_ids
        embeddings = embeddings + module.position_embeddings(places) + module.token_type_embeddings(token_type_ids)
        return module.dropout(module.LayerNorm(embeddings))


def _unmasked_in_row_over_document(masked: Tensor, packed_batch: PackedBatch) -> Tensor:
    """(B, T) float32: the share of unmasked tokens in the row, divided by the share in each token's document."""
    live = packed_batch.not_padding()
    document = packed_batch.runs()[0].flatten().cumsum(0) - 1

    def in_document(counted: Tensor) -> Tensor:
        counts = torch.zeros(document.shape, dtype=torch.long, device=document.device)
        return counts.scatter_add(0, document, counted.flatten().long())[document].view(masked.shape)

    of_row = 1 - masked.sum(1, keepdim=True) / live.sum(1, keepdim=True)
    of_document = 1 - in_document(masked) / in_document(torch.ones_like(masked))
    # A document with only masked tokens has nothing to scale.
    return of_row / of_document.clamp(min=torch.finfo(of_document.dtype).eps)


class DocumentPooler(InstanceForward):
    """The pooler of a text model: makes a vector of the first token of each document instead of each row.

    Rows that hold one document each, padded on any side, are pooled as in the model. Waits for the device.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        states, packed_batch = arguments[self.names[0]], self.context.current.packed_batch
        if packed_batch is not None and isinstance(states, Tensor) and states.shape[:2] == packed_batch.tokens:
            documents = Documents.of(packed_batch)
            arguments[self.names[0]] = states if documents is None else documents.cut(states)
        return self.inner(**arguments)


class PooledModel(InstanceForward):
    """A model that passes only the first token of each row to its pooler: passes the first token of each document."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output, packed_batch = self.inner(*args, **kwargs), self.context.current.packed_batch
        if isinstance(output, dict) and output.get("pooler_output") is not None and packed_batch is not None:
            documents = Documents.of(packed_batch)
            if documents is not None:
                first = documents.cut(output["last_hidden_state"])[:, 0]
                activation = getattr(self.module, ACTIVATIONS[self.name])
                output["pooler_output"] = activation(self.module.pooler(first))
        return output


# Models that pass only the first token of each row to their pooler, and the activation of its result.
ACTIVATIONS = {"AlbertModel": "pooler_activation", "BigBirdModel": "activation"}


def pooler_forward(module: nn.Module, context: PackingContext) -> InstanceForward | None:
    """The forward that pools each document of a patched module; None for a module without a pooler."""
    if type(module).__name__ in ACTIVATIONS:
        return PooledModel(module, context)
    pooler = getattr(module, "pooler", None)
    # By transformers' convention it takes the hidden states (B, T, n) and reads the first of each row.
    if isinstance(pooler, nn.Module) and type(pooler).__name__.endswith("Pooler"):
        return DocumentPooler(pooler, context)
    return None
