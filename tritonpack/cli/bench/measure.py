"""Measure all peers on one batch: each is checked, then they are timed in turn. Failures become rows too."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from tritonpack.cli.bench.batch import Batch
from tritonpack.cli.bench.peers import Peer, Prepared
from tritonpack.cli.bench.timing import REPEATS, Call, Times, extra_bytes, launches, quantiles, time_alternating
from tritonpack.cli.bench.verify import Judge

# Work relative to a forward pass: backward has five matrix products, forward has two.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
OPS = tuple(WORK)
FIGURES = ("p20_ms", "p50_ms", "p80_ms", "host_ms", "tflops", "extra_mib", "launches")

PATIENCE = 120.0  # seconds that a peer may take to compile for a shape and to be checked
LOST = "the device was lost"
NOT_INSTALLED = "not installed"

Write = Callable[[Mapping[str, object]], None]


class DeviceLostError(RuntimeError):
    """A peer broke the device for this process: nothing runs on it any more."""


def measure(batch: Batch, peers: Sequence[Peer], write: Write, repeats: int = REPEATS) -> None:
    """Check every peer on a batch, and time those whose results are right.

    Args:
        batch: the tensors.
        peers: the implementations.
        write: called with each row: "op", "implementation", "status" ("ok", or the reason why there is no figure), and
            FIGURES where it is "ok". `host_ms` is the time to launch the call; `tflops` counts visible pairs alone.
        repeats: how often each call is timed at most.

    Raises:
        DeviceLostError: a peer broke the device for this process; the row that says so is written.
    """
    judge, device = Judge(batch), batch.q.device
    calls: dict[str, dict[str, Call]] = {op: {} for op in OPS}

    def fail(name: str, ops: Sequence[str], error: Exception) -> None:
        broken = _broken(device)
        for op in ops:
            write({"op": op, "implementation": name, "status": (LOST + ": " if broken else "") + reason(error)})
        if broken:
            raise DeviceLostError(f"{name}: {reason(error)}") from error

    for peer in peers:
        try:
            with time_limit(PATIENCE):
                prepared = Prepared(peer, batch)
                out = prepared.forward()
                judge.check_forward(prepared.leave(out))
            calls["forward"][peer.name] = prepared.forward
            with time_limit(PATIENCE):
                judge.check_backward(out, prepared)
            calls["backward"][peer.name] = partial(prepared.backward, out)
            calls["both"][peer.name] = prepared.both
        except Exception as error:  # whatever a peer raises becomes a row
            fail(peer.name, [op for op in OPS if peer.name not in calls[op]], error)
    del judge

    for op, of_op in calls.items():
        for name, times in time_alternating(of_op, device, repeats).items():
            try:
                if times.error is not None:
                    raise times.error
                figures = _figures(times, of_op[name], WORK[op] * batch.flops(), device)
            except Exception as error:  # such as memory that runs out in a later call
                fail(name, [op], error)
                continue
            write({"op": op, "implementation": name, "status": "ok"} | figures)


def _figures(times: Times, call: Call, flops: float, device: torch.device) -> dict[str, object]:
    p20, p50, p80 = quantiles(times.device)
    extra = extra_bytes(call, device)
    return {
        "p20_ms": f"{p20:.4f}",
        "p50_ms": f"{p50:.4f}",
        "p80_ms": f"{p80:.4f}",
        "host_ms": f"{quantiles(times.host)[1]:.4f}",
        "tflops": f"{flops / p50 / 1e9:.4g}",
        "extra_mib": None if extra is None else f"{extra / 2**20:.1f}",
        "launches": launches(call, device),
    }


def reason(error: Exception) -> str:
    """An exception in one short line."""
    kind = NOT_INSTALLED if isinstance(error, ModuleNotFoundError) else type(error).__name__
    return " ".join(f"{kind}: {error}".split())[:240]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer; a compiler in C++ stops when it returns to Python."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _broken(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
