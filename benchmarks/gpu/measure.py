"""One shape, all peers: checked first, then timed in turn; a row for everything, also for what can't be done."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.ledger import LOST, OPS
from benchmarks.gpu.peers import Peer
from tritonpack.cli.bench.batch import Batch
from tritonpack.cli.bench.peers import Prepared
from tritonpack.cli.bench.timing import Call, Times, extra_bytes, launches, quantiles, time_alternating
from tritonpack.cli.bench.verify import Judge

# Work relative to a forward pass: backward has five matrix products to its two.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}

# What a peer may take to compile for a shape and be checked.
PATIENCE = 120.0

Write = Callable[[Mapping[str, object]], None]


class DeviceLostError(RuntimeError):
    """Nothing runs on the device any more in this process."""


def measure(batch: Batch, peers: Sequence[Peer], write: Write) -> None:
    """Check every peer on a batch and time those that compute what they should.

    Args:
        batch: the tensors.
        peers: the implementations.
        write: takes a row: "op", "implementation", "status" ("ok" or the reason), and the results.

    Raises:
        DeviceLostError: a peer has broken the device for this process; its row is written.
    """
    judge, device = Judge(batch), batch.q.device
    ready: dict[str, Prepared] = {}
    outputs: dict[str, Tensor] = {}

    def give_up(name: str, ops: Sequence[str], error: Exception) -> None:
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
                judge.check_forward(prepared.layout.leave(out))
        except Exception as error:  # a peer may fail in any way; the row says how
            give_up(peer.name, OPS, error)
            continue
        ready[peer.name] = prepared
        try:
            with time_limit(PATIENCE):
                judge.check_backward(out, prepared)
        except Exception as error:
            give_up(peer.name, OPS[1:], error)
            continue
        outputs[peer.name] = out
    del judge

    def backward(peer: Prepared, out: Tensor) -> object:
        return torch.autograd.grad(out, peer.leaves, peer.dout, retain_graph=True)

    def both(peer: Prepared) -> object:
        return torch.autograd.grad(peer.forward(), peer.leaves, peer.dout)

    rounds: dict[str, dict[str, Call]] = {
        "forward": {name: peer.forward for name, peer in ready.items()},
        "backward": {name: partial(backward, ready[name], out) for name, out in outputs.items()},
        "both": {name: partial(both, ready[name]) for name in outputs},
    }
    for op, calls in rounds.items():
        for name, times in time_alternating(calls, device).items():
            if times.error is not None:
                give_up(name, [op], times.error)
                continue
            try:
                figures = results(times, calls[name], WORK[op] * batch.flops(), device)
            except Exception as error:  # one more call was too much for it
                give_up(name, [op], error)
                continue
            write({"op": op, "implementation": name} | figures)


def results(times: Times, call: Call, flops: float, device: torch.device) -> dict[str, object]:
    """The columns of a call that ran."""
    p20, p50, p80 = quantiles(times.device)
    extra = extra_bytes(call, device)
    return {
        "status": "ok",
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
    kind = "not installed" if isinstance(error, ModuleNotFoundError) else type(error).__name__
    return " ".join(f"{kind}: {error}".split())[:240]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the block takes longer; a compiler in C++ notices when it comes back to Python."""

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
