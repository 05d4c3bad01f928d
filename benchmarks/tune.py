"""Search for the fastest tiles on this machine's GPU, and write a file that `tritonpack.load_tiles` reads.

    python -m benchmarks.tune --out tiles.json [--head-dims 64 128] [--kernels forward dq] [--minutes 8] [--most 32]

The package never tunes by itself, because lengths change with every step, and a search would stop the training. The
candidates are the legal tiles of each kernel, those most like the shipped one first. Each is compiled, checked and
timed in a process of its own, so that a tile that breaks the device for its process ends no other. Processes compile at
the same time, one on each core, and take turns on the device. The time is by device events, on a packed batch of
documents like the standard library's functions. A tile counts if its results are right.

Each candidate's row is appended to tiles.csv, beside tiles.json, so the same command continues where the last one
ended; its exit status is 3 if candidates are left. tiles.json has the fastest tiles so far.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from benchmarks.gpu.compile_ahead import compile_only
from benchmarks.harness.ledger import CONTINUE, Ledger, environment, joined
from benchmarks.harness.run import Budget
from tests.lengths import distributions
from tritonpack import BlockDiagonalMask
from tritonpack.backends import triton as triton_backend
from tritonpack.kernels import tile_shapes as tiles
from tritonpack.kernels.tile_shapes import Kernel, TileShape
from tritonpack.options import make_options
from tritonpack.testing import Case, check_backend, make_inputs

HEADS, KV_HEADS = 16, 4
PATIENCE = 180.0  # seconds that a candidate may take, with its turn on the device
TURN = 30  # seconds that a candidate may have the device


class Candidate(NamedTuple):
    """A tile that is tried for a kernel at a padded head dimension."""

    kernel: Kernel
    block_d: int
    tile: TileShape

    def text(self, tokens: int) -> str:
        """The candidate as the case of a row."""
        return joined({"kernel": self.kernel, "head_dim": self.block_d, **asdict(self.tile), "tokens": tokens})


def candidates(kernel: Kernel, block_d: int, arch: str) -> Iterator[TileShape]:
    """All legal tiles in the sizes that are worth a trial; operands as in the shipped tile."""
    own, sizes = shipped(kernel, block_d, arch), (16, 32, 64, 128)
    heads = {"forward": (1, 8), "dq": (1, 4)}.get(kernel, (1,))
    for m, n, warps, stages, together in itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4), heads):
        for deferred in (False, True) if kernel == "forward" and arch == "sm_90" else (False,):
            tile = TileShape(m, n, warps, stages, together, deferred, own.queries_left, own.by_pointers)
            if 512 <= m * n <= 128 * 128 and not tiles.why_illegal(kernel, tile, block_d, arch):
                yield tile


def shipped(kernel: Kernel, block_d: int, arch: str) -> TileShape:
    """The tile of the table."""
    return tiles.select_tile(kernel, block_d, torch.bfloat16, arch)


def in_order(kernel: Kernel, block_d: int, arch: str) -> list[TileShape]:
    """The shipped tile, and then the candidates, those that differ less from it first."""
    own = shipped(kernel, block_d, arch)

    def difference(tile: TileShape) -> float:
        sizes = {name: size for name, size in asdict(own).items() if not isinstance(size, bool)}
        steps = sum(abs(math.log2(getattr(tile, name) / size)) for name, size in sizes.items())
        return steps + (tile.deferred != own.deferred)

    return [own, *sorted((t for t in candidates(kernel, block_d, arch) if t != own), key=difference)]


def fastest(
    choice: Iterable[TileShape], times: Mapping[TileShape, float], *, block_n: int | None = None
) -> TileShape | None:
    """The fastest of the tiles that have a time, or None; `block_n` restricts them to tiles of that many keys."""
    timed = [tile for tile in choice if tile in times and block_n in (None, tile.block_n)]
    return min(timed, key=times.__getitem__, default=None)


def times_of(ledger: Ledger, todo: Iterable[Candidate], tokens: int) -> dict[TileShape, float]:
    """The milliseconds of the tiles that ran with right results."""
    found = {candidate.tile: ledger.find("tile", candidate.text(tokens)) for candidate in todo}
    return {tile: float(row["p50_ms"]) for tile, row in found.items() if row is not None and row["p50_ms"]}


def try_in_process(candidate: Candidate, tokens: int, lock: Path) -> tuple[str, float | None]:
    """The status of a candidate, "ok" or why it has no time, and its milliseconds, from a process of its own."""
    sizes = json.dumps([candidate.kernel, candidate.block_d, asdict(candidate.tile)])
    options = {"--candidate": sizes, "--tokens": str(tokens), "--out": str(lock)}
    command = [sys.executable, "-m", "benchmarks.tune", *(part for option in options.items() for part in option)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"not ready after {PATIENCE:.0f} seconds", None
    answer = (result.stdout.strip().splitlines() or [""])[-1]
    if result.returncode == 0:
        return "ok", float(answer)
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1][:240], None


def try_here(candidate: Candidate, tokens: int, lock: Path, device: str = "cuda") -> float:
    """Compile, check and time a candidate in this process: the median milliseconds of the pass that it is a part of.

    Raises:
        Exception: it doesn't compile, doesn't fit the device, or its results are wrong.
    """
    kernel, block_d, tile = candidate
    tiles._loaded[tiles.current_arch(torch.device(device)), kernel, block_d] = tile
    case = Case("tuned", (300, 1, 0, 77, 500), heads=HEADS, kv_heads=KV_HEADS, head_dim=block_d, slack=9)
    small = make_inputs(case, torch.bfloat16, device)  # its mask's bounds are checked, so they must have values
    with compile_only():
        _passes(kernel, small.q, small.k, small.v, small.dout, small.mask)
    with turn(lock):
        check_backend(make_inputs(case, torch.bfloat16, device), "triton")  # a new mask: the other has no tables
        lengths = distributions(tokens)["stdlib"]
        q, dout = (torch.randn(tokens, HEADS, block_d, device=device, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(tokens, KV_HEADS, block_d, device=device, dtype=torch.bfloat16) for _ in range(2))
        run = _passes(kernel, q, k, v, dout, BlockDiagonalMask.from_seqlens(lengths, device=device))
        with torch.no_grad():
            return float(triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median"))


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Have the device alone. A signal ends the process after TURN seconds, so that the others get their turns."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(TURN)
        try:
            yield
        finally:
            signal.alarm(0)


def _passes(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: BlockDiagonalMask
) -> Callable[[], object]:
    """Run forward and backward once; returns the pass that the kernel is a part of."""
    options = make_options(q, mask)
    plan = triton_backend.plan_tiles(q, k, v, mask, options, backward=True)
    out, lse = triton_backend.forward(q, k, v, mask, options, plan)

    def backward() -> object:
        return triton_backend.backward(dout, None, q, k, v, out, lse, mask, options, plan)

    backward()
    return partial(triton_backend.forward, q, k, v, mask, options, plan) if kernel == "forward" else backward


def try_all(todo: Sequence[Candidate], ledger: Ledger, tokens: int, jobs: int, budget: Budget) -> int:
    """Try what the ledger doesn't have, until the time is up. Returns how many are left."""
    left = [candidate for candidate in todo if ledger.find("tile", candidate.text(tokens)) is None]
    lock = ledger.path.with_suffix(".lock")

    def run(candidate: Candidate) -> tuple[str, float | None] | None:
        if not budget.allows():
            return None
        began = time.monotonic()
        outcome = try_in_process(candidate, tokens, lock)
        budget.spend(time.monotonic() - began)
        return outcome

    tried = 0
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, candidate): candidate for candidate in left}
        for future in as_completed(futures):
            candidate, outcome = futures[future], future.result()
            if outcome is not None:
                tried += 1
                status, ms = outcome
                time_of = {} if ms is None else {"p50_ms": f"{ms:.4f}"}
                ledger.write({"benchmark": "tile", "case": candidate.text(tokens), "status": status} | time_of)
                print(candidate.kernel, candidate.block_d, candidate.tile, f"{ms} ms" if ms else status, flush=True)
    lock.unlink(missing_ok=True)
    return len(left) - tried


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], choices=(64, 128, 256, 512))
    parser.add_argument("--kernels", nargs="+", default=["forward", "dkdv", "dk", "dv", "dq"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--most", type=int, help="candidates of each kernel and head dimension (default: all)")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="processes at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to begin no further candidate")
    parser.add_argument("--commit", help="a name of the code (default: its commit, or a digest)")
    parser.add_argument("--candidate", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are tuned on the GPU that they are for; there is none here.")
    if options.candidate:
        kernel, block_d, sizes = json.loads(options.candidate)
        print(try_here(Candidate(kernel, block_d, TileShape(**sizes)), options.tokens, options.out))
        return
    device = torch.device("cuda", torch.cuda.current_device())
    arch, budget = tiles.current_arch(device), Budget(options.minutes)
    ledger = Ledger(options.out.with_suffix(".csv"), environment(device, options.commit))
    best: dict[tuple[str, Kernel, int], TileShape] = {}
    left = 0
    for head_dim in options.head_dims:
        offered = ("forward", *tiles.key_gradient_kernels(head_dim, torch.bfloat16, arch), "dq")
        for kernel in (name for name in offered if name in options.kernels):
            choice = in_order(kernel, head_dim, arch)[: options.most]
            todo = [Candidate(kernel, head_dim, tile) for tile in choice]
            left += try_all(todo, ledger, options.tokens, options.jobs, budget)
            fixed = best.get((arch, "dk", head_dim)) if kernel == "dv" else None
            times = times_of(ledger, todo, options.tokens)
            tile = fastest(choice, times, block_n=None if fixed is None else fixed.block_n)
            if tile is not None:
                best[arch, kernel, head_dim] = tile
                own = times.get(choice[0])
                print(f"{kernel} {head_dim}: {tile} {times[tile]} ms; shipped {own} ms", flush=True)
    tiles.save_tiles(options.out, best, device=torch.cuda.get_device_name(), triton=triton.__version__)
    print(f"{tiles.load_tiles(options.out)} tiles in {options.out}; {left} candidates are left")
    if left:
        raise SystemExit(CONTINUE)


if __name__ == "__main__":
    main()
