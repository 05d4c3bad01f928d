"""Measure all peers on one batch: each is checked, then they are timed in turn. Failures become rows too.

Times are taken by device events on a GPU, and by the host's clock on a CPU.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.harness.batch import Batch
from benchmarks.harness.peers import Peer, Prepared
from benchmarks.harness.verify import ResultCheck

# Work relative to a forward pass: backward has five matrix products, forward has two.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
OPS = tuple(WORK)
FIGURES = ("p20_ms", "p50_ms", "p80_ms", "host_ms", "tflops", "extra_mib", "launches")

PATIENCE = 120.0  # seconds that a peer may take to compile for a shape and to be checked
LOST = "the device was lost"
NOT_INSTALLED = "not installed"

REPEATS, FEWEST, SECONDS = 20, 5, 0.5
WARM_UP = 2

# Cycles that the device sleeps before each call, about a millisecond. The host enqueues the call in this time, so that
# events measure the work of the device and not how fast Python launches it.
HEAD_START = 2_000_000
FLUSHED_BYTES = 256 * 2**20  # larger than the L2 cache of any GPU

Call = Callable[[], object]
Write = Callable[[Mapping[str, object]], None]


class DeviceLostError(RuntimeError):
    """A peer broke the device for this process: nothing runs on it any more."""


@dataclass
class Times:
    """The milliseconds of each repeat of a call.

    Attributes:
        device: by device events; on a CPU by the host's clock.
        host: until the call returned to the host, which on a GPU is the time to launch it.
        error: the exception that ended the repeats, if one did.
    """

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    error: Exception | None = None

    @property
    def enough(self) -> bool:
        """Whether there are FEWEST repeats and SECONDS in all."""
        return len(self.device) >= FEWEST and sum(self.device) > 1000 * SECONDS


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
    check, device = ResultCheck(batch), batch.q.device
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
                check.check_forward(prepared.leave(out))
            calls["forward"][peer.name] = prepared.forward
            with time_limit(PATIENCE):
                check.check_backward(out, prepared)
            calls["backward"][peer.name] = partial(prepared.backward, out)
            calls["both"][peer.name] = prepared.both
        except Exception as error:  # whatever a peer raises becomes a row
            fail(peer.name, [op for op in OPS if peer.name not in calls[op]], error)
    del check

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


def time_alternating(calls: Mapping[str, Call], device: torch.device, repeats: int = REPEATS) -> dict[str, Times]:
    """Time calls in turn, each with a cold L2 cache, so that other load on the machine slows all of them down alike.

    A call is left out once it has enough repeats, or has raised an exception.
    """
    times = {name: Times() for name in calls}
    cold = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None
    for repeat in range(-WARM_UP, repeats):
        for name, call in calls.items():
            taken = times[name]
            if taken.error is not None or taken.enough:
                continue
            try:
                on_device, on_host = _time_on_host(call) if cold is None else _time_on_device(call, cold)
            except Exception as error:  # whatever a peer raises; the others go on
                taken.error = error.with_traceback(None)  # frames of the traceback hold tensors
                continue
            if repeat >= 0:
                taken.device.append(on_device)
                taken.host.append(on_host)
    return times


def _time_on_host(call: Call) -> tuple[float, float]:
    begin = time.perf_counter()
    call()
    taken = 1000 * (time.perf_counter() - begin)
    return taken, taken


def _time_on_device(call: Call, cold: torch.Tensor) -> tuple[float, float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cold.zero_()
    torch.cuda._sleep(HEAD_START)
    begin.record()
    _, on_host = _time_on_host(call)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), on_host


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    p20, p50, p80 = torch.tensor(values, device="cpu").quantile(torch.tensor([0.2, 0.5, 0.8], device="cpu")).tolist()
    return p20, p50, p80


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """The most memory that a call holds beyond what was held before, its results included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def launches(call: Call, device: torch.device) -> int | None:
    """The number of kernels, copies and fills that a call starts; None on a CPU, and where the profiler doesn't run."""
    if device.type != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = profile.events() or []
    except RuntimeError:
        return None
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events) or None
