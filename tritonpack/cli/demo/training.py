"""Train the demo's model the three ways and measure them.

Each way has a fresh process, so that memory and caches of one way don't serve another. The processes take turns, one
step each, so that other load on the machine slows all ways down alike.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritonpack.cli.demo.corpus import Document
from tritonpack.cli.demo.model import WAYS, Settings, Way, attention_of, build_model, collate

WARMUP_STEPS = 2  # not timed: allocators, caches and, on a GPU, compilation


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

    way: Way
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
        return 1 - sum(self.tokens) / sum(self.positions)


def train(
    way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
) -> Iterator[Run | None]:
    """Train from scratch in one way, with AdamW at a constant learning rate.

    Yields:
        None when the model is built and after each optimizer step, then the measurements.
    """
    device = settings.device
    model = build_model(settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.shape.learning_rate)
    losses, seconds, positions = [], [], []
    with attention_of(way, model):
        _forget_peak(device)
        before = _memory(device, peak=False)
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
        peak = _memory(device, peak=True)
    yield Run(
        way=way,
        losses=tuple(losses),
        seconds=tuple(seconds),
        tokens=tuple(sum(map(len, documents)) for documents in steps),
        positions=tuple(positions),
        peak_bytes=None if peak is None or before is None else peak - before,
        validation_loss=_validation_loss(model, validation, device),
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
    """The loss in float32, each document alone, whichever way the model was trained."""
    model.eval().float()
    losses = [
        model(**collate("padded", [document], device)).loss.item() * (len(document) - 1)
        for document in documents
        if len(document) > 1  # a single token predicts nothing
    ]
    return sum(losses) / sum(len(document) - 1 for document in documents)


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):  # without permission the peak includes importing, and building the model
        Path("/proc/self/clear_refs").write_text("5")


def _memory(device: str, peak: bool) -> int | None:
    """The bytes in use, or the most since `_forget_peak`; None where it can't be measured."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    status = Path("/proc/self/status")  # of Linux
    if not status.exists():
        return None
    sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(sizes["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
