"""Time attention and other implementations by device events, in one process, in turn, after a check of results.

    python3 -m benchmarks.gpu --quick [--out DIR]
    python3 -m benchmarks.gpu [--out DIR] [--minutes 8] [--first 10] [--commit NAME] [--without NAME ...]
    python3 -m benchmarks.gpu --tokens 16384 [--heads 32] [--head-dim 128] [--dtype bfloat16] [--repeats 20] [--out DIR]

Each row is appended to DIR/attention.csv as soon as it is measured. The shapes come in order of importance
(benchmarks/gpu/shapes.py). A shape is begun only if the time suffices. Rows that the file has from the same commit in
the same environment aren't measured again, so the same command continues where the last one ended. `--list` prints the
shapes. `--device cpu` tries the program on tiny shapes where there is no GPU; its times mean nothing.

With `--quick` it takes five minutes: shapes that others publish, in DIR (default: gpu-quick). At the end it prints a
table for an issue, beside what a matrix product reaches on this GPU, writes it to DIR/table.md, and draws DIR/*.png.

With `--tokens` it measures your shape instead, causal, on four distributions of lengths. A quarter as many key heads as
query heads, if that divides, share them. On a CPU the host's clock measures it.

Columns: `p20_ms`, `p50_ms`, `p80_ms` by device events, with a cold cache; `host_ms`: the median time until the launch
returns; `tflops`: over the visible pairs alone, backward counted as 2.5 forwards; `extra_mib`: the most memory beyond
the inputs, results included; `launches`: kernels, copies and fills; `status`: "ok", or why there is no figure.

The exit status is 3 if shapes are left, or if a peer hung or broke the device for the process. The next run leaves that
peer out at that shape.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import plot
from benchmarks.gpu.machine import ceilings
from benchmarks.gpu.shapes import documents_of, own_shapes, quick_shapes, shapes, smoke_shapes
from benchmarks.gpu.table import table
from benchmarks.harness.batch import Batch, Shape, make_batch
from benchmarks.harness.ledger import CONTINUE, Budget, Ledger, environment
from benchmarks.harness.measure import LOST, OPS, REPEATS, DeviceLostError, measure
from benchmarks.harness.peers import PEERS, Attention, Peer
from tritonpack.attention import MAX_HEAD_DIM

RESULTS, QUICK = Path("benchmarks/results"), Path("gpu-quick")
HUNG = 300.0  # seconds without a row and without another peer after which a peer hangs; more than twice PATIENCE
PRINTED = ("op", "implementation", "p50_ms", "host_ms", "tflops", "extra_mib", "launches", "status")


class Watch:
    """Ends the process if a peer hangs, which no exception does, and writes rows that say so.

    Attributes:
        checked: the peer that is being checked.
    """

    def __init__(self, write: Callable[[Mapping[str, object]], None]) -> None:
        self._write, self.checked = write, ""
        self._timer = self._start()

    def _start(self) -> threading.Timer:
        timer = threading.Timer(HUNG, self.end)
        timer.daemon = True
        timer.start()
        return timer

    def _begin_again(self) -> None:
        self._timer.cancel()
        self._timer = self._start()

    def noting(self, peer: Peer) -> Peer:
        """The peer, whose preparation is noted here."""

        def prepare(batch: Batch) -> Attention:
            self.checked = peer.name
            self._begin_again()
            return peer.prepare(batch)

        return replace(peer, prepare=prepare)

    def write(self, row: Mapping[str, object]) -> None:
        """Write a row, which shows that nothing hangs."""
        self._begin_again()
        self._write(row)

    def end(self) -> None:
        """End the process."""
        for op in OPS:
            self._write({"op": op, "implementation": self.checked, "status": f"{LOST}: it hung for {HUNG:.0f} seconds"})
        os._exit(CONTINUE)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def run(
    todo: Sequence[Shape],
    ledger: Ledger,
    budget: Budget,
    device: torch.device,
    *,
    peers: Sequence[Peer] = PEERS,
    repeats: int = REPEATS,
) -> list[Shape]:
    """Measure the shapes that the ledger doesn't have, until the time is up; returns the shapes that are left."""
    for number, shape in enumerate(todo):
        columns = shape.columns()
        fit = [peer for peer in peers if peer.fits(shape)]
        if ledger.finished(columns, [peer.name for peer in fit]):
            continue
        if not budget.allows():
            return list(todo[number:])
        begin = time.monotonic()
        lengths, parents = documents_of(shape)
        print(f"\n{shape}, documents: {len(lengths)}", flush=True)

        def write(row: Mapping[str, object], known: Mapping[str, object] = columns, many: int = len(lengths)) -> None:
            ledger.write({**known, "documents": many, **row})
            print("  ".join(str(row.get(name) or "-")[:100] for name in PRINTED), flush=True)

        batch = make_batch(shape, lengths, device, parents=parents)
        with Watch(write) as watch:
            noted = [watch.noting(peer) for peer in fit if not ledger.lost(columns, peer.name)]
            measure(batch, noted, watch.write, repeats)
        del batch
        if device.type == "cuda":
            torch.cuda.empty_cache()
        budget.spend(time.monotonic() - begin)
    return []


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help=f"folder of the CSV (default: {RESULTS})")
    parser.add_argument("--quick", action="store_true", help="five minutes, a table and a picture")
    parser.add_argument("--minutes", type=float, help="when to begin no further shape (default: 8, 5 with --quick)")
    parser.add_argument("--first", type=int, help="how many of the shapes (default: all)")
    parser.add_argument("--commit", help="a name of the code (default: its commit, or a digest)")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="implementations to leave out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, help="measure batches of so many tokens instead of the list of shapes")
    parser.add_argument("--heads", type=int, default=32, help="query heads, with --tokens")
    parser.add_argument("--head-dim", type=int, default=128, help="with --tokens")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="with --tokens")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="most repeats of a call")
    parser.add_argument("--list", action="store_true", help="print the shapes and stop")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = 5.0 if options.quick else 8.0
    unknown = set(options.without) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"--without knows {', '.join(repr(p.name) for p in PEERS)}; got {', '.join(sorted(unknown))}.")
    on_cpu = options.device == "cpu"
    for name, most in (("tokens", 2**31 - 1), ("heads", 2**16), ("head_dim", MAX_HEAD_DIM), ("repeats", 2**31 - 1)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name.replace('_', '-')} must be from 1 to {most}; got {value}.")
    for name, usual in (("tokens", None), ("heads", 32), ("head_dim", 128), ("dtype", "bfloat16")):
        if getattr(options, name) != usual and (options.quick or options.tokens is None):
            own = "--quick has its own shapes" if options.quick else "the list has its own shapes without --tokens"
            parser.error(f"{own}; leave out --{name.replace('_', '-')}.")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} isn't a folder; name another.")
    if options.tokens is not None:
        todo = own_shapes(options.tokens, options.heads, options.head_dim, options.dtype)[: options.first]
    else:
        todo = (smoke_shapes() if on_cpu else quick_shapes() if options.quick else shapes())[: options.first]
    if options.list:
        print("\n".join(map(str, todo)))
        return
    if on_cpu and options.out is None:
        parser.error("--device cpu needs --out: rows of a CPU don't belong beside those of a GPU.")
    if not on_cpu and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu needs a GPU, and torch sees none here. --device cpu --out DIR tries it without one."
        )

    budget, device = Budget(options.minutes), torch.device(options.device)
    about = environment(device, options.commit)
    folder: Path = options.out or (QUICK if options.quick else RESULTS)
    ledger = Ledger(folder / "attention.csv", about)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value), flush=True)
    ceiling = None
    if not on_cpu:
        copy, ceiling = ceilings()
        print(f"copy {copy:.2f} TB/s, bf16 matrix product {ceiling:.0f} TFLOP/s", flush=True)
    smoke = options.tokens is None  # which tries all of them on a CPU, too
    peers = [peer for peer in PEERS if peer.name not in options.without and (smoke or not on_cpu or peer.on_cpu)]
    try:
        left = run(todo, ledger, budget, device, peers=peers, repeats=options.repeats)
    except DeviceLostError as error:
        print(f"\nThe device is lost to this process: {error}\nThe same command continues.", file=sys.stderr)
        raise SystemExit(CONTINUE) from error
    if options.quick and len(left) < len(todo):
        text = table(ledger.path, about, todo, ceiling)
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n", flush=True)
        try:
            plot.main([str(ledger.path)])
        except ImportError as error:
            print(f"No picture: {error}. pip install matplotlib, then python3 -m benchmarks.plot {ledger.path}")
    print(f"\n{len(todo) - len(left)} of {len(todo)} shapes in {ledger.path}", flush=True)
    if left:
        print("Time is up; the same command continues with:", *map(str, left), sep="\n  ")
        raise SystemExit(CONTINUE)


if __name__ == "__main__":
    main()
