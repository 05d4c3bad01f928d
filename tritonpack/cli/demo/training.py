"""Train the demo's model the three ways and measure them.

Each way has a fresh process, so that memory and caches of one way don't serve another. The processes take turns, one
step each, so that other load on the machine slows all ways down alike.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

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


class Training:
    """Training from scratch in one way, with AdamW at a constant learning rate."""

    def __init__(
        self, way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
    ) -> None:
        self._way, self._steps, self._validation, self._settings = way, steps, validation, settings
        self._model = build_model(settings).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=settings.shape.learning_rate)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._positions: list[int] = []
        self._attention = ExitStack()
        self._attention.enter_context(attention_of(way, self._model))
        _forget_peak(settings.device)
        self._bytes_before = _memory(settings.device, peak=False)

    def step(self) -> None:
        """Take the next optimizer step and time it."""
        batch = collate(self._way, self._steps[len(self._losses)], self._settings.device)
        start = time.perf_counter()
        loss = self._model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.item())
        if self._settings.device == "cuda":
            torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - start)
        self._positions.append(batch["input_ids"].numel())

    def finish(self) -> Run:
        """Return the measurements. The model is left with stock attention."""
        peak = _memory(self._settings.device, peak=True)
        self._attention.close()
        return Run(
            way=self._way,
            losses=tuple(self._losses),
            seconds=tuple(self._seconds),
            tokens=tuple(sum(map(len, documents)) for documents in self._steps),
            positions=tuple(self._positions),
            peak_bytes=None if peak is None or self._bytes_before is None else peak - self._bytes_before,
            validation_loss=_validation_loss(self._model, self._validation, self._settings.device),
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
        for ready in [pool.submit(int) for pool in pools.values()]:  # all processes start at once
            ready.result()
        for _ in tqdm(steps, desc="training three ways", unit="step", leave=False):
            for pool in pools.values():
                pool.submit(_step).result()
        return {way: pool.submit(_finish).result() for way, pool in pools.items()}


_training: Training  # of this process


def _begin(way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings) -> None:
    global _training
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends this process
    torch.set_num_threads(settings.threads)
    _training = Training(way, steps, validation, settings)


def _step() -> None:
    _training.step()


def _finish() -> Run:
    return _training.finish()


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
