"""Measure the implementations of a case: each is checked, then they are timed in turn. Failures become rows too.

Times are taken by device events on a GPU, and by the host's clock on a CPU.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from benchmarks.harness.ledger import joined
from benchmarks.harness.registry import REPEATS, Call, Case

PATIENCE = 120.0  # seconds that an implementation may take to compile for a case and to be checked
LOST = "the device was lost"
NOT_INSTALLED = "not installed"

FEWEST, SECONDS = 5, 0.5
WARM_UP = 2

# Cycles that the device sleeps before each call, about a millisecond. The host enqueues the call in this time, so that
# events measure the work of the device and not how fast Python launches it.
HEAD_START = 2_000_000
FLUSHED_BYTES = 256 * 2**20  # larger than the L2 cache of any GPU

Write = Callable[[Mapping[str, object]], None]


class DeviceLostError(RuntimeError):
    """An implementation broke the device for this process: nothing runs on it any more."""


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
        """Return whether there are FEWEST repeats and SECONDS in all."""
        return len(self.device) >= FEWEST and sum(self.device) > 1000 * SECONDS


def measure(
    case: Case,
    write: Write,
    device: torch.device,
    *,
    begin: Callable[[str], None] = lambda name: None,
    without: Collection[str] = (),
    repeats: int | None = None,
) -> None:
    """Check every implementation of a case, and time those whose results are right.

    Args:
        case: what is measured.
        write: called with each row: "benchmark", "case", "implementation", "status" ("ok", or the reason why there is
            no figure), the percentiles of the time, and "figures": `host_ms`, the time to launch the call; `tflops`,
            over the visible pairs alone; `gb_per_s`; `extra_mib` and `launches` on a GPU.
        device: where it runs.
        begin: called with the name of each implementation before it is prepared.
        without: implementations that aren't tried.
        repeats: how often each call is timed at most, in place of the case's own.

    Raises:
        DeviceLostError: an implementation broke the device for this process; the row that says so is written.
    """
    calls: dict[str, dict[str, Call]] = {benchmark: {} for benchmark in case.benchmarks}

    def tell(benchmark: str, name: str, status: str, **columns: str) -> None:
        write({"benchmark": benchmark, "case": case.text, "implementation": name, "status": status, **columns})

    def fail(name: str, benchmarks: Iterable[str], error: Exception) -> None:
        broken = _broken(device)
        for benchmark in benchmarks:
            tell(benchmark, name, (LOST + ": " if broken else "") + reason(error))
        if broken:
            raise DeviceLostError(f"{name}: {reason(error)}") from error

    implementations = dict(case.prepare())
    for name in [name for name in implementations if name not in without]:
        begin(name)
        try:
            with time_limit(PATIENCE):
                made = case.calls(implementations.pop(name))
            for benchmark in case.benchmarks:
                with time_limit(PATIENCE):
                    calls[benchmark][name] = next(made)
        except Exception as error:  # whatever an implementation raises becomes a row
            fail(name, [benchmark for benchmark in case.benchmarks if name not in calls[benchmark]], error)
    implementations = made = None  # type: ignore[assignment]  # they hold tensors for checks

    for benchmark, of_benchmark in calls.items():
        for name, times in time_alternating(of_benchmark, device, repeats or case.repeats).items():
            try:
                if times.error is not None:
                    raise times.error
                columns = _columns(times, of_benchmark[name], device)
            except Exception as error:  # such as memory that runs out in a later call
                fail(name, [benchmark], error)
                continue
            tell(benchmark, name, "ok", **columns)


def _columns(times: Times, call: Call, device: torch.device) -> dict[str, str]:
    p20, p50, p80 = quantiles(times.device)
    figures: dict[str, object] = {}
    if device.type == "cuda":
        extra = extra_bytes(call)
        figures = {"host_ms": f"{quantiles(times.host)[1]:.4f}", "extra_mib": f"{extra / 2**20:.1f}"}
        figures["launches"] = launches(call)
    if call.flops:
        figures["tflops"] = f"{call.flops / p50 / 1e9:.4g}"
    if call.nbytes:
        figures["gb_per_s"] = round(call.nbytes / p50 / 1e6)
    return {"p20_ms": f"{p20:.4f}", "p50_ms": f"{p50:.4f}", "p80_ms": f"{p80:.4f}", "figures": joined(figures)}


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
                with call.around():
                    on_device, on_host = _time_on_host(call) if cold is None else _time_on_device(call, cold)
            except Exception as error:  # whatever an implementation raises; the others go on
                taken.error = error.with_traceback(None)  # frames of the traceback hold tensors
                continue
            if repeat >= 0:
                taken.device.append(on_device)
                taken.host.append(on_host)
    return times


def _time_on_host(call: Call) -> tuple[float, float]:
    gc.disable()
    try:
        begin = time.perf_counter()
        call.function()
        taken = 1000 * (time.perf_counter() - begin)
    finally:
        gc.enable()
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


def extra_bytes(call: Call) -> int:
    """The most memory of the GPU that a call holds beyond what was held before, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def launches(call: Call) -> int | None:
    """The number of kernels, copies and fills that a call starts on a GPU; None where the profiler doesn't run."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call.function()
            torch.cuda.synchronize()
        events = profile.events() or []
    except RuntimeError:
        return None
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events) or None
