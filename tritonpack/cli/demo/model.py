"""The demo's model, and the three ways to make a batch of a step's documents."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tritonpack import patch
from tritonpack.cli.demo.corpus import END_OF_DOCUMENT, VOCABULARY_SIZE, Document
from tritonpack.errors import PackingWarning
from tritonpack.packing import PackingCollator
from tritonpack.packing.columns import IGNORED_LABEL

Way = Literal["padded", "naive", "packed"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Shape:
    """The size of a model.

    Attributes:
        name: its name in the output.
        config: arguments of `LlamaConfig`.
        learning_rate: the learning rate of AdamW that suits it.
    """

    name: str
    config: Mapping[str, Any]
    learning_rate: float


def _shape(name: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, rate: float) -> Shape:
    config = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return Shape(name, config, rate)


SIZES = {
    "tiny": _shape("tiny", hidden=64, intermediate=176, layers=2, heads=4, kv_heads=2, rate=3e-3),
    "small": _shape("small", hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=4, rate=6e-4),
}


@dataclass(frozen=True)
class Settings:
    """What the three ways of one comparison have in common."""

    seed: int
    device: str
    dtype: torch.dtype
    shape: Shape
    max_length: int
    threads: int


def build_model(settings: Settings) -> torch.nn.Module:
    """A Llama with stock scaled-dot-product attention. One seed gives the same weights at every call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **settings.shape.config,
        max_position_embeddings=settings.max_length,
        bos_token_id=None,
        eos_token_id=END_OF_DOCUMENT,
        pad_token_id=END_OF_DOCUMENT,
    )
    torch.manual_seed(settings.seed)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(settings.device, settings.dtype)


def attention_of(way: Way, model: torch.nn.Module) -> AbstractContextManager[Any]:
    """A context in which the model has the attention of that way: tritonpack's for `packed`, else stock attention."""
    return patch(model) if way == "packed" else nullcontext()


def collate(way: Way, documents: Sequence[Document], device: str) -> dict[str, Any]:
    """The batch of one step: a padded row per document, or one row with all of them, the same for naive and packed."""
    if way == "padded":
        rows = [torch.as_tensor(document) for document in documents]
        batch: dict[str, Any] = {
            "input_ids": _pad(rows, END_OF_DOCUMENT),
            "labels": _pad(rows, IGNORED_LABEL),
            "attention_mask": _pad([torch.ones_like(row) for row in rows], 0),
        }
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PackingWarning)  # naive: no model of its process is patched
            batch = PackingCollator()([{"input_ids": document} for document in documents])
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def _pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
