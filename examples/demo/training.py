"""Train a small Llama on documents: padded, unpadded inside of the model, naively concatenated, and packed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.demo.corpus import END_OF_DOCUMENT, VOCABULARY_SIZE, Document
from examples.demo.measuring import Measurements, Step, in_turns, measure
from tritonpack import patch
from tritonpack.errors import PackingWarning
from tritonpack.packing import PackingCollator
from tritonpack.packing.collator import IGNORED_LABEL
from tritonpack.patches.patching import Patch

Way = Literal["padded", "unpadded", "naive", "packed"]
WAYS: tuple[Way, ...] = get_args(Way)


@dataclass(frozen=True)
class Settings:
    """The settings that all ways of one comparison share.

    Attributes:
        model: the name of the model.
        config: arguments of `LlamaConfig`.
        learning_rate: the constant learning rate of AdamW.
        max_length: the most tokens of a document.
        threads: CPU threads of each process.
    """

    model: str
    config: Mapping[str, Any]
    learning_rate: float
    max_length: int
    device: str
    dtype: torch.dtype
    threads: int
    seed: int


@dataclass(frozen=True)
class Run(Measurements):
    """The measurements of one way. Losses are in nats per predicted token.

    Attributes:
        validation_loss: nats per predicted token of the held-out documents, each alone with stock attention.
    """

    validation_loss: float

    @property
    def padding_share(self) -> float:
        """The share of the computed tokens that is padding."""
        return 1 - sum(self.tokens) / sum(self.computed)


def build_model(settings: Settings) -> torch.nn.Module:
    """A Llama with stock scaled-dot-product attention. One seed gives the same weights at every call."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **{"vocab_size": VOCABULARY_SIZE, **settings.config},
        max_position_embeddings=settings.max_length,
        bos_token_id=None,
        eos_token_id=END_OF_DOCUMENT,
        pad_token_id=END_OF_DOCUMENT,
    )
    torch.manual_seed(settings.seed)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(settings.device, settings.dtype)


def attention_of(way: Way, model: torch.nn.Module) -> AbstractContextManager[Patch | None]:
    """A context in which the model has the attention of a way: stock for `padded` and `naive`, else tritonpack's."""
    if way in ("padded", "naive"):
        return nullcontext()
    return patch(model, unpad=way == "unpadded")


def collate(way: Way, documents: Sequence[Document], device: str) -> dict[str, Any]:
    """The batch of one step: padded rows for padded and unpadded, one row with all documents for naive and packed."""
    if way in ("padded", "unpadded"):
        rows = [torch.as_tensor(document, device="cpu") for document in documents]
        batch: dict[str, Any] = {
            "input_ids": pad_sequence(rows, batch_first=True, padding_value=END_OF_DOCUMENT),
            "labels": pad_sequence(rows, batch_first=True, padding_value=IGNORED_LABEL),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        }
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PackingWarning)  # naive: no model of its process is patched
            batch = PackingCollator()([{"input_ids": document} for document in documents])
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def train(
    way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
) -> Iterator[Run | None]:
    """Train from scratch in one way.

    Yields:
        None when the model is built and after each optimizer step, then the measurements.
    """
    device = settings.device
    model = build_model(settings).train()
    batches = (Step(collate(way, documents, device), sum(map(len, documents))) for documents in steps)
    with attention_of(way, model) as handle:
        measured = yield from measure(model, handle, settings.learning_rate, batches, _loss_of, device)
    yield Run(**vars(measured), validation_loss=_validation_loss(model, validation, device))


def train_in_turns(
    steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
) -> dict[Way, Run]:
    """Train every way on the same documents, one optimizer step per entry of `steps`.

    Raises:
        BrokenProcessPool: a process ended early, for example for lack of memory.
    """
    ways = {way: partial(train, way, steps, validation, settings) for way in WAYS}
    return in_turns(ways, len(steps), settings.threads)


def _loss_of(model: torch.nn.Module, step: Step) -> Tensor:
    loss: Tensor = model(**step.inputs).loss
    return loss


@torch.no_grad()
def _validation_loss(model: torch.nn.Module, documents: Sequence[Document], device: str) -> float:
    """The loss in float32, each document alone with stock attention."""
    model.eval().float()
    documents = [document for document in documents if len(document) > 1]  # a single token predicts nothing
    losses = [model(**collate("padded", [one], device)).loss.item() * (len(one) - 1) for one in documents]
    return sum(losses) / sum(len(one) - 1 for one in documents)
