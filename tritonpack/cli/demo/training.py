"""Train a small Llama on padded, naively concatenated and packed batches, and measure each way.

Each way has a fresh process, so that memory and caches of one way don't serve another. The processes take turns, one
step each, so that other load on the machine slows all ways down alike.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tritonpack import patch
from tritonpack.cli.demo.corpus import END_OF_DOCUMENT, VOCABULARY_SIZE, Document
from tritonpack.errors import PackingWarning
from tritonpack.packing import PackingCollator
from tritonpack.packing.columns import IGNORED_LABEL

Way = Literal["padded", "naive", "packed"]
WAYS: tuple[Way, ...] = get_args(Way)
WARMUP_STEPS = 2  # not timed: allocators, caches and, on a GPU, compilation


@dataclass(frozen=True)
class Settings:
    """The settings that the three ways of one comparison share.

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
class Run:
    """The measurements of one way.

    Attributes:
        losses: the training loss of each step, in nats per predicted token.
        seconds: the time of each step: forward, backward and optimizer, without collating.
        tokens: the tokens of documents in each step.
        positions: the positions that the model computed in each step, padding included.
        peak_bytes: the most memory that training took beyond the model's parameters; None where it can't be measured.
        validation_loss: nats per predicted token of the held-out documents, each alone with stock attention.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    peak_bytes: int | None
    validation_loss: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of documents per second after warm-up."""
        return sum(self.tokens[WARMUP_STEPS:]) / sum(self.seconds[WARMUP_STEPS:])

    @property
    def padding_share(self) -> float:
        """The share of the positions that is padding."""
        return 1 - sum(self.tokens) / sum(self.positions)

    def gap(self, other: Run) -> float:
        """The largest difference between the training losses of two runs at one step; NaN if a loss is NaN."""
        return float(np.abs(np.subtract(self.losses, other.losses)).max())


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


def attention_of(way: Way, model: torch.nn.Module) -> AbstractContextManager[Any]:
    """A context in which the model has the attention of a way: tritonpack's for `packed`, else stock attention."""
    return patch(model) if way == "packed" else nullcontext()


def collate(way: Way, documents: Sequence[Document], device: str) -> dict[str, Any]:
    """The batch of one step: a padded row per document, or one row with all of them, the same for naive and packed."""
    if way == "padded":
        rows = [torch.as_tensor(document) for document in documents]
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses, seconds, positions = [], [], []
    with attention_of(way, model):
        before = _memory(device, reset=True)
        yield None
        for documents in steps:
            batch = collate(way, documents, device)
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            positions.append(batch["input_ids"].numel())
            yield None
        peak = _memory(device)
    tokens = tuple(sum(map(len, documents)) for documents in steps)
    taken = None if peak is None or before is None else peak - before
    yield Run(
        tuple(losses), tuple(seconds), tokens, tuple(positions), taken, _validation_loss(model, validation, device)
    )


def train_in_turns(
    steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
) -> dict[Way, Run]:
    """Train every way on the same documents, one optimizer step per entry of `steps`.

    Raises:
        BrokenProcessPool: a process ended early, for example for lack of memory.
    """
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools: dict[Way, ProcessPoolExecutor] = {
            way: stack.enter_context(
                ProcessPoolExecutor(1, context, initializer=_begin, initargs=(way, steps, validation, settings))
            )
            for way in WAYS
        }
        for built in [pool.submit(_next) for pool in pools.values()]:  # all processes start at once
            built.result()
        for _ in tqdm(steps, desc="training three ways", unit="step", leave=False, disable=None):
            for pool in pools.values():
                pool.submit(_next).result()
        return {way: pool.submit(_next).result() for way, pool in pools.items()}


_training: Iterator[Any]  # of this process


def _begin(way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings) -> None:
    global _training
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends this process
    torch.set_num_threads(settings.threads)
    _training = train(way, steps, validation, settings)


def _next() -> Any:
    return next(_training)


@torch.no_grad()
def _validation_loss(model: torch.nn.Module, documents: Sequence[Document], device: str) -> float:
    """The loss in float32, each document alone with stock attention."""
    model.eval().float()
    documents = [document for document in documents if len(document) > 1]  # a single token predicts nothing
    losses = [model(**collate("padded", [one], device)).loss.item() * (len(one) - 1) for one in documents]
    return sum(losses) / sum(len(one) - 1 for one in documents)


def _memory(device: str, reset: bool = False) -> int | None:
    """The most bytes in use since the last reset; with `reset` those in use now. None where they can't be measured."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")  # of Linux
    if not status.exists():
        return None
    if reset:
        with suppress(OSError):  # without permission the peak includes importing, and building the model
            Path("/proc/self/clear_refs").write_text("5")
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(sizes["VmRSS" if reset else "VmHWM"].split()[0]) * 1024
