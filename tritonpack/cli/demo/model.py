"""The demo's model and the three ways to feed it a step's documents."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tritonpack.cli.demo.corpus import END_OF_DOCUMENT, VOCABULARY_SIZE, Document
from tritonpack.errors import PackingWarning
from tritonpack.packing import PackingCollator
from tritonpack.packing.columns import IGNORED_LABEL

Way = Literal["padded", "naive", "packed"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Shape:
    """A model's configuration, and the learning rate that suits it.

    Attributes:
        name: for people.
        config: what `LlamaConfig` is told beside the length of documents and the marks at their ends.
        learning_rate: of AdamW.
    """

    name: str
    config: Mapping[str, Any]
    learning_rate: float


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
LEARNING_RATES = {"tiny": 3e-3, "small": 6e-4}


def shape_of(size: str) -> Shape:
    """One of the demo's own models."""
    return Shape(size, {**SIZES[size], "vocab_size": VOCABULARY_SIZE}, LEARNING_RATES[size])


@dataclass(frozen=True)
class Settings:
    """What every way of one comparison shares."""

    seed: int
    device: str
    dtype: torch.dtype
    shape: Shape
    max_length: int
    threads: int


def build_model(settings: Settings, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A Llama with stock scaled-dot-product attention; the same weights whenever it's called with one seed."""
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
    # Rounded to the training dtype first, so that a model in float64 starts from the very same numbers.
    return model.to(settings.dtype).to(settings.device, dtype or settings.dtype)


def attention_of(way: Way, model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Within this context the model attends as that way does: tritonpack's attention for `packed`, else its own."""
    if way != "packed":
        return nullcontext()
    from tritonpack import patch

    return patch(model)


def collate(way: Way, documents: Sequence[Document]) -> dict[str, Any]:
    """One step's documents as that way's batch; `naive` and `packed` are given the very same one."""
    if way == "padded":
        return padded_batch(documents)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackingWarning)  # of a model that isn't patched: that is what naive means
        return PackingCollator()([{"input_ids": document} for document in documents])


def padded_batch(documents: Sequence[Document]) -> dict[str, Tensor]:
    """One document per row, padded on the right to the longest of them."""
    rows = [torch.as_tensor(document) for document in documents]

    def pad(values: list[Tensor], padding: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)

    return {
        "input_ids": pad(rows, END_OF_DOCUMENT),
        "labels": pad(rows, IGNORED_LABEL),
        "attention_mask": pad([torch.ones_like(row) for row in rows], 0),
    }


def to_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    """The batch with its tensors on `device`."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
