"""Embeddings that a layer scales by what it counts in the row: by what each document has instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonpack.patches.current import InstanceForward
from tritonpack.patches.packing import Packing


class EsmEmbeddings(InstanceForward):
    """ESM's embeddings with `token_dropout`: masked tokens are zeros, and the others grow by the share of masked ones.

    The layer divides by the share of unmasked tokens in the row. What it embeds is multiplied by that, and divided by
    the share in each token's document.
    """

    def call(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        module: Any = self.module
        if module.token_dropout and input_ids is not None and isinstance(attention_mask, Packing):
            embeddings = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            scale = _unmasked_in_row_over_document(input_ids == module.mask_token_id, attention_mask)
            inputs_embeds = embeddings * scale[..., None].to(embeddings.dtype)
        return self.inner(input_ids, attention_mask, position_ids, inputs_embeds)


def _unmasked_in_row_over_document(masked: Tensor, packing: Packing) -> Tensor:
    """(B, T) float32: the share of unmasked tokens (B, T) in the row, over that in each token's document."""
    live = packing.not_padding()
    document = packing.runs()[0].flatten().cumsum(0) - 1

    def in_document(counted: Tensor) -> Tensor:
        counts = torch.zeros(document.shape, dtype=torch.long, device=document.device)
        return counts.scatter_add(0, document, counted.flatten().long())[document].view(masked.shape)

    of_row = 1 - masked.sum(1, keepdim=True) / live.sum(1, keepdim=True)
    of_document = 1 - in_document(masked) / in_document(torch.ones_like(masked))
    # A document of masked tokens alone has nothing to scale.
    return of_row / of_document.clamp(min=torch.finfo(of_document.dtype).eps)
