"""Clocks (device events on a GPU, the host's clock on a CPU), and counts of memory and launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

REPEATS, FEWEST, SECONDS = 20, 5, 0.5
WARM_UP = 2

# Cycles that the device sleeps before each call, about a millisecond. The host enqueues the call in this time, so that
# events measure the work of the device and not how fast Python launches it.
HEAD_START = 2_000_000
FLUSHED_BYTES = 256 * 2**20  # larger than the L2 cache of any GPU

Call = Callable[[], object]


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


def time_alternating(calls: Mapping[str, Call], device: torch.device, repeats: int = REPEATS) -> dict[str, Times]:
    """Time calls in turn, each with a cold L2 cache, so that a disturbance of the machine meets all of them.

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
    p20, p50, p80 = torch.tensor(values).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
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
    """How many kernels, copies and fills a call starts; None on a CPU, and where the profiler doesn't run."""
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
