"""Tiny random encoders with decoders, and their calls with pairs of documents."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import EncoderDecoderConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as NAMES

from tests.patches import zoo
from tests.patches.zoo_rows import FULL, SLIDING, VOCAB, WINDOW
from tests.small_copies import packed_forms, subject
from tests.small_copies.small_copy import spread

__all__ = ["EXACT", "LENGTHS", "STOCK_FAILS", "pairs_subject", "source_of", "targets", "tiny_pair_model"]

LENGTHS = packed_forms.LENGTHS

# A few buckets for the distances of short documents.
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
STARTS = {"decoder_start_token_id": 2}
GEMMA = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW, "query_pre_attn_scalar": 8}

# Settings of each type besides `zoo_rows.COMMON`.
EXACT: dict[str, dict[str, Any]] = {
    "bart": STARTS,
    "bigbird_pegasus": STARTS | {"attention_type": "original_full"},
    "encoder-decoder": {},
    "blenderbot": STARTS,
    "blenderbot-small": STARTS,
    "m2m_100": STARTS,
    "marian": STARTS,
    "mbart": {},
    "mt5": BUCKETS | {"decoder_start_token_id": 0},
    "mvp": STARTS,
    "nllb-moe": STARTS
    | {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 2, "moe_token_dropout": 0.0},
    "pegasus": STARTS,
    "plbart": {},
    "seamless_m4t": {},
    "seamless_m4t_v2": {},
    "switch_transformers": BUCKETS
    | {
        "decoder_start_token_id": 0,
        "expert_capacity": 3,
        "num_experts": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0.0,
    },
    "t5": BUCKETS | {"decoder_start_token_id": 0},
    "t5gemma": {"encoder": GEMMA, "decoder": GEMMA | {"cross_attention_hidden_size": 32}},
    "t5gemma2": {"encoder": {"text_config": GEMMA}, "decoder": GEMMA},
    "umt5": BUCKETS | {"decoder_start_token_id": 0},
}

# Forms that fail in stock transformers 5.24.
STOCK_FAILS = {"switch_transformers": {"with_cache"}}  # it tells its encoder to use a cache, too


def tiny_pair_model(
    name: str, *, kind: str | None = None, dtype: torch.dtype = torch.float64, attention: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:  # fmt: skip
    """A random model in evaluation mode.

    Args:
        name: A key of `EXACT`.
        kind: The name of its class; the sequence-to-sequence language model by default.
        dtype: Of the weights.
        attention: transformers' own choice if None.
        overrides: Replace keys of the configuration.
    """
    config = _of_two_models() if name == "encoder-decoder" else zoo.tiny_config(name, **{**EXACT[name], **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, kind or NAMES[name])._from_config(config, attn_implementation=attention)
    spread(model, torch.Generator().manual_seed(0))
    return model.to(dtype).eval()


def _of_two_models() -> PreTrainedConfig:
    """RoBERTa, whose positions begin after padding_idx, and GPT-2."""
    encoder = zoo.tiny_config("roberta", is_decoder=False)
    decoder = zoo.tiny_config("gpt2", add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id, config.vocab_size, config.decoder_start_token_id = 0, VOCAB, 2
    return config


def targets(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[Tensor]:
    """Random token ids `[1, n]` of the decoder's documents."""
    return zoo.documents(lengths, seed)


def pairs_subject(model: PreTrainedModel, *, stock: bool = False) -> subject.Subject:
    """How a model is called with pairs."""
    return subject.pairs_subject(model, targets, torch.arange(zoo.FIRST_TOKEN, VOCAB), stock=stock)


def source_of(target: Tensor) -> Tensor:
    """The encoder's document `[1, m]` of a target `[1, n]`."""
    return pairs_subject(None).call(target)["input_ids"]
