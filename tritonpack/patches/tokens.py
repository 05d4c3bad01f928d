"""Special tokens: the ids that a configuration names, such as padding, the ends of a document and images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritonpack.patches.families import CODEBOOKS

_NAMES = ("bos_index", "eos_index", "pad_index", "unk_index", "mask_index")


def special_tokens(config: Any) -> set[int]:
    """Return the ids that a configuration and its parts name."""
    found: set[int] = set()
    for name, value in config.__dict__.items():
        if is_config(value):
            found |= special_tokens(value)
        elif names_tokens(name):
            values = value if isinstance(value, (list, tuple)) else [value]
            found |= {token for token in values if type(token) is int and token >= 0}
    return found


def names_tokens(name: str) -> bool:
    """Whether a field holds token ids, by its name."""
    return name.endswith(("_token_id", "_token_ids", "_token_index", "_tokens")) or name in _NAMES


def is_config(value: Any) -> bool:
    """Whether the value of a field is a configuration too."""
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the text model, or the decoder if there are several."""
    try:
        return config.get_text_config()
    except ValueError:  # an encoder's and a decoder's
        return config.get_text_config(decoder=True)


def pad_token_of(config: Any, side: str) -> int | None:
    """Return the padding token of the encoder or of the decoder; each of two models in one has its own."""
    names = ("decoder",) if side == "decoder" else ("encoder", "text_encoder")
    parts = [part for name in names if is_config(part := getattr(config, name, None))]
    found = (getattr(part, "pad_token_id", None) for part in (*parts, text_config(config)))
    return next((token for token in found if token is not None), None)


def codebooks_of(model: nn.Module) -> int:
    """Return how many rows of ids stand for one row of the decoder's tokens."""
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    return max((config.num_codebooks for config in configs if config.model_type in CODEBOOKS), default=1)


def common_to_codebooks(ids: Tensor) -> Tensor:
    """Return (B, T) ids that all codebooks of a token share in (B, T, n) ids, as for padding; -1 where they differ."""
    return torch.where((ids == ids[..., :1]).all(-1), ids[..., 0], -1)


def is_bidirectional(config: Any) -> bool:
    """Whether a configuration makes a decoder see both directions."""
    return getattr(text_config(config), "use_bidirectional_attention", None) is True
