"""Train the demo's model the three ways and measure them.

Each way has a fresh process, so that none finds memory or caches that another left behind, and the processes take
turns, one step each: whatever else slows the machine down for a while slows all ways down alike.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tritonpack.cli.demo.corpus import Document
from tritonpack.cli.demo.model import WAYS, Settings, Way, attention_of, build_model, collate, padded_batch, to_device

WARMUP_STEPS = 2  # not timed: allocators, caches and, on a GPU, compilation
VALIDATION_BATCH = 16


class ProcessFailedError(RuntimeError):
    """A process that trained one way ended early; its own message is on stderr."""


@dataclass(frozen=True)
class Run:
    """What one way of training measured.

    Attributes:
        losses: the training loss of each step, in nats per predicted token.
        seconds: the time of each step, forward, backward and optimizer, without collating.
        tokens: each step's tokens that belong to documents.
        positions: each step's positions that the model computed, padding included.
        peak_bytes: the most memory training took beyond the model's parameters; None where it can't be measured.
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
    """One way of training, from scratch, with AdamW at a constant learning rate."""

    def __init__(
        self, way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
    ) -> None:
        self._way, self._steps, self._validation, self._settings = way, steps, validation, settings
        self._batches = [collate(way, documents) for documents in steps]
        self._model = build_model(settings).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=settings.shape.learning_rate)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._patch = ExitStack()
        self._patch.enter_context(attention_of(way, self._model))
        self._bytes_before = _start_measuring_memory(settings.device)

    def step(self) -> None:
        """The next optimizer step, timed."""
        batch = self._batches[len(self._losses)]
        start = time.perf_counter()
        loss = self._model(**to_device(batch, self._settings.device)).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.item())
        if self._settings.device == "cuda":
            torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - start)

    def finish(self) -> Run:
        """What was measured; leaves the model with stock attention."""
        peak = _peak_memory(self._settings.device)
        self._patch.close()
        return Run(
            way=self._way,
            losses=tuple(self._losses),
            seconds=tuple(self._seconds),
            tokens=tuple(sum(map(len, documents)) for documents in self._steps),
            positions=tuple(batch["input_ids"].numel() for batch in self._batches),
            peak_bytes=None if peak is None or self._bytes_before is None else peak - self._bytes_before,
            validation_loss=_validation_loss(self._model, self._validation, self._settings),
        )


def train_in_turns(
    steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
) -> dict[Way, Run]:
    """Train every way on the same documents, one optimizer step per entry of `steps`.

    Raises:
        ProcessFailedError: a process failed; its own traceback is on stderr.
    """
    from tqdm import tqdm

    with ExitStack() as stack:
        workers = {way: stack.enter_context(_Worker(way, steps, validation, settings)) for way in WAYS}
        for worker in workers.values():
            worker.receive()  # ready
        for _ in tqdm(steps, desc="training three ways", unit="step", leave=False):
            for worker in workers.values():
                worker.ask("step")
        return {way: worker.ask("finish") for way, worker in workers.items()}


class _Worker:
    """A process with a Training in it, whose methods are called one at a time; leaving the context ends it."""

    def __init__(
        self, way: Way, steps: Sequence[Sequence[Document]], validation: Sequence[Document], settings: Settings
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._way = way
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, way, steps, validation, settings))
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        self._process.join()

    def ask(self, method: str) -> Any:
        """Call a method of the Training and wait for its result."""
        with suppress(BrokenPipeError):  # the process has ended: receiving says so
            self._connection.send(method)
        return self.receive()

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            message = f"training the {self._way} way failed with exit code {self._process.exitcode}"
            raise ProcessFailedError(message) from None


def _work(
    connection: Connection,
    way: Way,
    steps: Sequence[Sequence[Document]],
    validation: Sequence[Document],
    settings: Settings,
) -> None:
    torch.set_num_threads(settings.threads)
    training = Training(way, steps, validation, settings)
    connection.send(None)
    with suppress(EOFError):  # nobody asks any more
        while True:
            connection.send(getattr(training, connection.recv())())


@torch.no_grad()
def _validation_loss(model: torch.nn.Module, documents: Sequence[Document], settings: Settings) -> float:
    """Judged alike whichever way the model was trained: documents apart, stock attention, float32."""
    model.eval().float()
    by_length = sorted(documents, key=len)
    total, count = 0.0, 0
    for start in range(0, len(by_length), VALIDATION_BATCH):
        batch = padded_batch(by_length[start : start + VALIDATION_BATCH])
        predicted = int((batch["labels"][:, 1:] >= 0).sum())
        if predicted:  # a loss over no tokens is nan
            total += predicted * model(**to_device(batch, settings.device)).loss.item()
            count += predicted
    return total / count


def _start_measuring_memory(device: str) -> int | None:
    """Bytes in use now; forgets an earlier peak where the system allows it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if sys.platform != "linux":
        return None
    # Where this isn't permitted, the peak includes what importing and building the model took.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak_memory(device: str) -> int | None:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM") if sys.platform == "linux" else None


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
