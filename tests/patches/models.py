"""Tiny random models of the families with the most tests. Their windows are shorter than the documents."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel

VOCAB = 64

# The names by which models take a cache and return it: "cache" since transformers 5.24.
NAMES_OF_CACHE = ("past_key_values", *({"cache"} & signature(LlamaModel.forward).parameters.keys()))

FAMILIES = (
    "gemma", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "starcoder2",
)  # fmt: skip

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SPECIFIC: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4, "num_local_experts": 2},
    "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "starcoder2": {"sliding_window": 4},
}


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float64, attention: str = "sdpa", **overrides: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **SPECIFIC.get(family, {}), **overrides})
    config._experts_implementation = "eager"  # the fused one does not take float64
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()


def generate(
    model: PreTrainedModel, ids: Tensor, *, cache: str = "dynamic", padding: int = 0, tokens: int = 12
) -> tuple[Tensor, Tensor]:
    """Continue rows of ids greedily: all tokens, and the logits of the new ones.

    The first row begins with `padding` tokens of padding; it ends with them if the number is negative.
    """
    mask = torch.ones_like(ids)
    mask[0, slice(padding) if padding >= 0 else slice(padding, None)] = 0
    made = model.generate(
        ids * mask, attention_mask=mask, max_new_tokens=tokens, do_sample=False, cache_implementation=cache,
        disable_compile=True, eos_token_id=-1, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return made.sequences, torch.stack(made.logits)


class Graphs:
    """A backend of torch.compile that runs graphs unchanged and counts them. Earlier graphs are dropped."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return module
