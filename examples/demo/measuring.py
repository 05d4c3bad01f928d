"""Measures ways of training beside each other.

Each way has a fresh process, so that memory and caches of one way don't serve another. The processes take turns of ten
steps, so that other load on the machine slows all ways down alike. After turns of one step, each step would begin with
the caches of the processor filled by another way, which costs short steps the most.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tritonpack.attention import varlen_attention
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.patches.patching import Patch

WARMUP_STEPS = 2  # not timed: allocators, caches and, on a GPU, compilation
TURN = 10  # steps

W = TypeVar("W", bound=str)


class Step(NamedTuple):
    """The batch of an optimizer step.

    Attributes:
        inputs: the arguments of the model, on its device.
        tokens: the tokens of documents, padding not counted.
        extra: what the loss needs beside the model's output.
    """

    inputs: dict[str, Any]
    tokens: int
    extra: Any = None


@dataclass(frozen=True)
class Measurements:
    """The measurements of one way.

    Attributes:
        losses: the training loss of each step.
        seconds: the time of each step: forward, backward and optimizer, without collating.
        tokens: the tokens of documents in each step.
        computed: the tokens that the model computed in each step, padding included.
        peak_bytes: the most memory that training took beyond the model's parameters and the libraries' code; None where
            it can't be measured.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    computed: tuple[int, ...]
    peak_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of documents per second after warm-up."""
        return sum(self.tokens[WARMUP_STEPS:]) / sum(self.seconds[WARMUP_STEPS:])

    @property
    def seconds_per_step(self) -> float:
        """The mean time of a step after warm-up."""
        return float(np.mean(self.seconds[WARMUP_STEPS:]))

    def gap(self, other: Measurements) -> float:
        """The largest difference between the training losses of two runs at one step; NaN if a loss is NaN."""
        return float(np.abs(np.subtract(self.losses, other.losses)).max())

    def memory(self) -> str:
        """The peak memory in words."""
        return "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.0f} MiB"


def measure(
    model: torch.nn.Module,
    handle: Patch | None,
    learning_rate: float,
    steps: Iterator[Step],
    loss_of: Callable[[torch.nn.Module, Step], Tensor],
    device: str,
) -> Generator[None, None, Measurements]:
    """Train a model by AdamW, one optimizer step per entry of `steps`.

    Args:
        handle: the patch of the model, which counts the tokens that it computes; None for a stock model.
        steps: collates the next batch when it is asked for it.

    Yields:
        None before the first step and after each, then returns the measurements.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    saved = None if handle is None else handle.saved
    losses, seconds, tokens, computed = [], [], [], []
    if device == "cpu":
        _load_attention(next(model.parameters()).dtype)
    before = _memory(device, reset=True)
    yield None
    for step in steps:
        counted = 0 if saved is None else saved.tokens_computed
        start = time.perf_counter()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        tokens.append(step.tokens)
        computed.append(step.inputs["input_ids"].numel() if saved is None else saved.tokens_computed - counted)
        yield None
    peak = _memory(device)
    taken = None if peak is None or before is None else peak - before
    return Measurements(tuple(losses), tuple(seconds), tuple(tokens), tuple(computed), taken)


def _load_attention(dtype: torch.dtype) -> None:
    """Let the first call of attention import and compile what it needs: neither memory nor time of training."""
    q = torch.zeros(1, 1, 16, dtype=dtype, requires_grad=True, device="cpu")
    varlen_attention(q, q, q, BlockDiagonalMask.from_seqlens([1])).sum().backward()


def in_turns(ways: Mapping[W, Callable[[], Iterator[Any]]], steps: int, threads: int) -> dict[W, Any]:
    """Train every way in a process of its own, and return what each yields last.

    Args:
        ways: a function for each way that can be pickled. Its iterator yields when the model is built, after each of
            the steps, and then the result.
        threads: CPU threads of each process.

    Raises:
        BrokenProcessPool: a process ended early, for example for lack of memory.
    """
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools: dict[W, ProcessPoolExecutor] = {
            way: stack.enter_context(ProcessPoolExecutor(1, context, initializer=_begin, initargs=(train, threads)))
            for way, train in ways.items()
        }
        for built in [pool.submit(_next, 1) for pool in pools.values()]:  # all processes start at once
            built.result()
        with tqdm(total=steps, desc=f"training {len(ways)} ways", unit="step", leave=False, disable=None) as bar:
            for begin in range(0, steps, TURN):
                taken = min(TURN, steps - begin)
                for pool in pools.values():
                    pool.submit(_next, taken).result()
                bar.update(taken)
        return {way: pool.submit(_next, 1).result() for way, pool in pools.items()}


_training: Iterator[Any]  # of this process


def _begin(train: Callable[[], Iterator[Any]], threads: int) -> None:
    global _training
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, which ends this process
    torch.set_num_threads(threads)
    _training = train()


def _next(steps: int) -> Any:
    """The result of training after this many steps."""
    *_, latest = islice(_training, steps)
    return latest


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
