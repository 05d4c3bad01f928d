"""Tiny random models of the families that are tested most closely, with windows short enough to matter."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 64

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
    config._experts_implementation = "eager"  # the fused one knows no float64
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()


def generate(
    model: PreTrainedModel, ids: Tensor, *, cache: str = "dynamic", padding: int = 0, tokens: int = 12
) -> tuple[Tensor, Tensor]:
    """Greedy continuation of rows of ids, the first of them padded on the left: all tokens, and the logits of the new
    ones.

    Args:
        cache: as `generate` takes it: "dynamic" or "static".
        padding: how many tokens of the first row are padding.
        tokens: how many are made.
    """
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    made = model.generate(
        ids * mask, attention_mask=mask, max_new_tokens=tokens, do_sample=False, cache_implementation=cache,
        disable_compile=True, eos_token_id=-1, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return made.sequences, torch.stack(made.logits)


class Graphs:
    """A backend of torch.compile that runs graphs as they are and counts them; nothing compiled before is left.

    Attributes:
        count: how many graphs there have been.
    """

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return module
