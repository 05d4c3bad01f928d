"""Tiny random encoders with decoders."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as NAMES

from tests.patches import zoo

# Model types that are packed exactly.
PAIRS = (
    "bart", "bigbird_pegasus", "encoder-decoder", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5",
    "mvp", "pegasus", "plbart", "seamless_m4t", "seamless_m4t_v2", "t5", "t5gemma", "t5gemma2", "umt5",
)  # fmt: skip


def tiny_pair_model(
    name: str, *, kind: str | None = None, dtype: torch.dtype = torch.float64, attention: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:  # fmt: skip
    """A random model in evaluation mode.

    Args:
        name: One of `PAIRS`.
        kind: The name of its class; the sequence-to-sequence language model by default.
        dtype: Of the weights.
        attention: transformers' own choice if None.
        overrides: Replace keys of the configuration.
    """
    config = zoo.tiny_config(name, **overrides)
    torch.manual_seed(0)
    model = getattr(transformers, kind or NAMES[name])._from_config(config, attn_implementation=attention)
    zoo.spread(model, torch.Generator().manual_seed(0))
    return model.to(dtype).eval()
