"""Embeddings and poolers that depend on other tokens. In a patched model these are tokens of the same document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward, PackingContext
from tritonpack.patches.placement import Documents


class EsmEmbeddings(InstanceForward):
    """ESM's embeddings with `token_dropout`: masked tokens are zeros, and the other tokens are scaled up.

    The layer divides by the share of unmasked tokens in the row. So its input is multiplied by this share, and divided
    by the share in the document.
    """

    def call(self, *args: Any, **kwargs: Any) -> Tensor:
        module, arguments = self.module, self.bound(args, kwargs)
        ids, packed_batch = arguments.get("input_ids"), arguments.get("attention_mask")
        if module.token_dropout and ids is not None and isinstance(packed_batch, PackedBatch):
            embeddings = arguments.get("inputs_embeds")
            embeddings = module.word_embeddings(ids) if embeddings is None else embeddings
            scale = _unmasked_in_row_over_document(ids == module.mask_token_id, packed_batch)
            arguments["inputs_embeds"] = embeddings * scale[..., None].to(embeddings.dtype)
        return self.inner(**arguments)


def _unmasked_in_row_over_document(masked: Tensor, packed_batch: PackedBatch) -> Tensor:
    """Return (B, T) float32, the share of unmasked tokens in the row divided by the share in each token's document."""
    live = packed_batch.not_padding()
    document = packed_batch.runs()[0].flatten().cumsum(0) - 1

    def in_document(counted: Tensor) -> Tensor:
        counts = torch.zeros(document.shape, dtype=torch.long, device=document.device)
        return counts.scatter_add(0, document, counted.flatten().long())[document].view(masked.shape)

    of_row = 1 - masked.sum(1, keepdim=True) / live.sum(1, keepdim=True)
    of_document = 1 - in_document(masked) / in_document(torch.ones_like(masked))
    # A document with only masked tokens has no token to scale.
    return of_row / of_document.clamp(min=torch.finfo(of_document.dtype).eps)


class DocumentPooler(InstanceForward):
    """The pooler of a text model. It makes a vector from the first token of each document instead of each row.

    Rows that hold one document each, padded on any side, are pooled as in the unpatched model. Waits for the device.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        states, packed_batch = arguments[self.names[0]], self.context.current.packed_batch
        if packed_batch is not None and isinstance(states, Tensor) and states.shape[:2] == packed_batch.tokens:
            documents = Documents.of(packed_batch)
            arguments[self.names[0]] = states if documents is None else documents.cut(states)
        return self.inner(**arguments)


class PooledModel(InstanceForward):
    """The forward of a model that passes only the first token of each row to its pooler: it passes each document's."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output, packed_batch = self.inner(*args, **kwargs), self.context.current.packed_batch
        if isinstance(output, dict) and output.get("pooler_output") is not None and packed_batch is not None:
            documents = Documents.of(packed_batch)
            if documents is not None:
                first = documents.cut(output["last_hidden_state"])[:, 0]
                activation = getattr(self.module, ACTIVATIONS[self.name])
                output["pooler_output"] = activation(self.module.pooler(first))
        return output


# Models that pass only the first token of each row to their pooler: the activation of its result.
ACTIVATIONS = {"AlbertModel": "pooler_activation", "BigBirdModel": "activation"}


def pooler_forward(module: nn.Module, context: PackingContext) -> InstanceForward | None:
    """Return the forward that pools each document of a patched module; None for a module without a pooler."""
    if type(module).__name__ in ACTIVATIONS:
        return PooledModel(module, context)
    pooler = getattr(module, "pooler", None)
    # By transformers' convention a pooler takes hidden states (B, T, n) and reads the first token of each row.
    if isinstance(pooler, nn.Module) and type(pooler).__name__.endswith("Pooler"):
        return DocumentPooler(pooler, context)
    return None
