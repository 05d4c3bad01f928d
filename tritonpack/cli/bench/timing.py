"""Clocks: device events where there is a GPU, the host's clock on a CPU; memory; launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

REPEATS, FEWEST, SECONDS = 20, 5, 0.5
WARM_UP = 2

# A head start for the host, in cycles of the device (about a millisecond): what is timed is then the device's work, not
# how fast Python enqueues it. That is a column of its own.
HEAD_START = 2_000_000

Call = Callable[[], object]


@dataclass
class Times:
    """Of one call, in milliseconds.

    Attributes:
        device: by device events, one per repeat; on a CPU by the host's clock.
        host: until the call came back to the host, which on a GPU is what launching it costs.
        error: what ended it, if anything did.
    """

    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    error: Exception | None = None

    @property
    def enough(self) -> bool:
        return len(self.device) >= FEWEST and sum(self.device) > 1000 * SECONDS


def time_alternating(calls: Mapping[str, Call], device: torch.device, repeats: int = REPEATS) -> dict[str, Times]:
    """The calls one after the other in turn, each with a cold L2 cache.

    A call that has run five times and for half a second in all leaves the round, as does one that raises.
    """
    times = {name: Times() for name in calls}
    cold = torch.empty(256 * 2**20, dtype=torch.int8, device=device) if device.type == "cuda" else None
    for round_ in range(-WARM_UP, repeats):
        for name, call in calls.items():
            taken = times[name]
            if taken.error is not None or taken.enough:
                continue
            try:
                on_device, on_host = _time_on_host(call) if cold is None else _time_on_device(call, cold)
            except Exception as error:  # the others go on
                taken.error = error.with_traceback(None)  # whose frames hold tensors
                continue
            if round_ >= 0:
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
    """The most memory that a call holds at once beyond what was held before, its results included."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def launches(call: Call, device: torch.device) -> int | None:
    """How many kernels, copies and fills a call starts; None where the profiler sees nothing."""
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


def ceilings() -> str:
    """This machine's own limits: a device-to-device copy and a bf16 matrix product."""
    x, y = (torch.empty(2**31, dtype=torch.int8, device="cuda") for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = time_alternating({"copy": lambda: y.copy_(x), "matmul": lambda: a @ b}, torch.device("cuda"))
    copy, matmul = (quantiles(times[name].device)[1] for name in ("copy", "matmul"))
    return f"copy {2 * x.numel() / copy / 1e9:.2f} TB/s, bf16 matrix product {2 * 8192**3 / matmul / 1e9:.0f} TFLOP/s"
