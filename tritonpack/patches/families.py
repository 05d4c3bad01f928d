"""The model families that can be patched, as data. A family is added by a row here, once the tests show it exact."""

from __future__ import annotations

from typing import Any

# transformers' model type -> the family's name. All of these reach attention through transformers' attention interface
# and describe their masks by its mask functions (causal, or causal with a sliding window).
FAMILIES = {
    "gemma": "Gemma",
    "gpt_neox": "GPT-NeoX",
    "granite": "Granite",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "OLMo 2",
    "phi3": "Phi-3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "starcoder2": "StarCoder2",
}

# Arguments that models of other families hand to attention and that would change its result.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices", "head_mask")


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer (how many keys a query sees, itself included), None for full attention."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or []
    if layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return (window,) * config.num_hidden_layers
