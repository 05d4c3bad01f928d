"""Right first, then timed: what a peer computes is held against float64 before its time counts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from tritonpack.cli.bench.batch import Batch
from tritonpack.cli.bench.peers import Prepared
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.testing import Inputs, check_outputs

_CHECKED_ROWS = 512  # of a document: its last ones, which see all of it
_FLUSHED_BYTES = 256 * 2**20  # more than any GPU's L2 holds


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call, over its repeats: the 20th percentile, the median, the 80th."""

    p20: float
    p50: float
    p80: float


def verify(batch: Batch, peer: Prepared) -> None:
    """Hold a peer's output and gradients against float64, by the tolerance rule of `tritonpack.testing`.

    Of the longest, the median and the shortest document the last rows are compared, for the last key head and its
    query heads. These queries see every key of the document, and they alone see the keys beside them, so that all
    that is compared, gradients of keys included, can be computed from them.

    Raises:
        AssertionError: an error beyond twice that of plain attention in the same dtype.
    """
    out = peer.forward()
    dq, dk, dv = peer.gradients(out, batch.dout)
    out = peer.layout.leave(out.detach())
    group = batch.q.shape[1] // batch.k.shape[1]
    order = np.argsort(batch.lengths, kind="stable")
    ends = np.cumsum(batch.lengths)
    for document in {int(order[-1]), int(order[len(order) // 2]), int(order[0])}:
        end, length = int(ends[document]), batch.lengths[document]
        count = min(length, _CHECKED_ROWS)
        keys, rows = slice(end - length, end), slice(end - count, end)
        inputs = Inputs(
            batch.q[rows, -group:],
            batch.k[keys, -1:],
            batch.v[keys, -1:],
            batch.dout[rows, -group:],
            torch.zeros(group, count, device=out.device),
            BlockDiagonalMask.from_seqlens([count], [length], device=out.device),
        )
        actual = {"out": out[rows, -group:], "dq": dq[rows, -group:], "dk": dk[rows, -1:], "dv": dv[rows, -1:]}
        check_outputs(inputs, actual, last_keys=count)


def time_alternating(calls: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Times]:
    """Time every call in turn, so that whatever disturbs the machine disturbs all of them alike.

    By the host's clock on a CPU, after one call to warm up; by device events on a GPU, after three, from a cold L2.
    """
    for call in calls.values():
        for _ in range(3 if device.type == "cuda" else 1):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    with _uncollected():
        for _ in range(repeats):
            for name, call in calls.items():
                times[name].append(_on_gpu(call) if device.type == "cuda" else _on_cpu(call))
    return {name: Times(*np.quantile(taken, (0.2, 0.5, 0.8)).tolist()) for name, taken in times.items()}


def backward_of(peer: Prepared) -> Callable[[], Sequence[torch.Tensor]]:
    """A call that computes all gradients, of a forward pass that is computed now."""
    out = peer.forward()
    return lambda: torch.autograd.grad(out, peer.leaves, peer.dout, retain_graph=True)


def _on_cpu(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def _on_gpu(call: Callable[[], object]) -> float:
    torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda").zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector, which would run in the middle of somebody's turn."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
