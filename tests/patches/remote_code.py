"""A model of remote code: it asks transformers for a mask, and computes with it by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from tests.patches.models import VOCAB

FIRST_IMAGE = 40  # tokens from here on are images, alike ones belong to one image


def blocks(ids: Tensor) -> Tensor:
    return torch.where(ids >= FIRST_IMAGE, ids, -1)


def made_by(name: str) -> Callable[..., Any]:
    """One of transformers' functions that make masks, called as models call it."""
    make = getattr(masking_utils, f"create_{name}_mask")

    def mask(config: Any, hidden: Tensor, told: dict[str, Any], **more: Any) -> Any:
        given = () if name == "bidirectional" else (None, told["position_ids"])
        return make(config, hidden, told["attention_mask"], *given, **more)

    return mask


causal, window, both_ways = made_by("causal"), made_by("sliding_window_causal"), made_by("bidirectional")

# What makes a mask of ids, and whether transformers is allowed to skip it.
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda ids, *given: causal(*given, allow_is_causal_skip=False),
    "both ways": lambda ids, *given: both_ways(*given, allow_is_bidirectional_skip=False),
    "both ways or none": lambda ids, *given: both_ways(*given),
    "window": lambda ids, *given: window(*given, allow_is_causal_skip=False),
    "window or none": lambda ids, *given: window(*given),
    "chunks": lambda ids, *given: made_by("chunked_causal")(*given),
    "images": lambda ids, *given: causal(*given, block_sequence_ids=blocks(ids)),
    "images in a window": lambda ids, *given: window(*given, block_sequence_ids=blocks(ids)),
    "all": lambda ids, *given: causal(*given, or_mask_function=lambda *_: torch.tensor(True)),
}


def least(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


# What models compute with a mask and scores.
USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "where": lambda x, mask: torch.where(mask, x, least(x)),
    "not": lambda x, mask: x.masked_fill(~mask, least(x)),
    "and": lambda x, mask: x.masked_fill((mask & torch.ones_like(x, dtype=torch.bool)) == 0, least(x)),
    "index": lambda x, mask: x.masked_fill(~mask[:, 0][:, None], least(x)),
    "squeeze": lambda x, mask: x.masked_fill(~torch.squeeze(mask, 1)[:, None], least(x)),
    "float": lambda x, mask: x + (1 - mask.to(x.dtype)) * least(x),
    "passed on": lambda x, mask: torch.where(mask.to(x.device).contiguous()[:, :, :, : x.shape[-1]], x, least(x)),
    "ignored": lambda x, _: x + torch.full_like(x[0, 0], least(x)).triu(1),
    # A mask of transformers is bool here, and can't be added.
    "add": lambda x, mask: x.masked_fill(~mask, least(x)) if isinstance(mask, Tensor) else x + mask,
    "added": lambda x, mask: x.masked_fill(~mask, least(x)) if isinstance(mask, Tensor) else mask + x,
    "added in place": lambda x, mask: x.masked_fill_(~mask, least(x)) if isinstance(mask, Tensor) else x.__iadd__(mask),
}


class ComposedConfig(PreTrainedConfig):
    model_type = "composed"
    hidden_size: int = 16
    num_hidden_layers: int = 1
    vocab_size: int = VOCAB
    sliding_window: int = 3
    attention_chunk_size: int = 4
    mask: str = "causal"
    use: str = "where"


class Composed(PreTrainedModel):
    config_class = ComposedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.qkv = nn.Embedding(config.vocab_size, 16), nn.Linear(16, 48)
        self.post_init()
        nn.init.normal_(self.embed.weight)
        nn.init.normal_(self.qkv.weight, std=0.5)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        hidden = self.embed(input_ids)
        told = {"attention_mask": attention_mask, "position_ids": position_ids}
        mask = MASKS[self.config.mask](input_ids, self.config, hidden, told)
        query, key, value = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        if mask is None:
            mask = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)[None, None]
            mask = mask if "both" in self.config.mask else mask.tril()
        scores = USES[self.config.use](query @ key.mT, mask)
        return ((scores.softmax(-1) @ value)[:, 0],)


def composed(mask: str, use: str = "where") -> Any:
    torch.manual_seed(0)
    return Composed(ComposedConfig(mask=mask, use=use)).double().eval()
