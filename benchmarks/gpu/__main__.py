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

Columns: `p20_ms`, `p50_ms`, `p80_ms` by device events, with a cold cache; `status`: "ok", or why there is no time.
`figures` has `host_ms`: the median time until the launch returns; `tflops`: over the visible pairs alone, backward
counted as 2.5 forwards; `extra_mib`: the most memory beyond the inputs, results included; `launches`: kernels, copies
and fills.

The exit status is 3 if shapes are left, or if a peer hung or broke the device for the process. The next run leaves that
peer out at that shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import plot
from benchmarks.gpu.machine import ceilings
from benchmarks.gpu.shapes import case_of, own_shapes, quick_shapes, shapes, smoke_shapes
from benchmarks.harness.ledger import CONTINUE, RESULTS, Ledger, environment
from benchmarks.harness.measure import DeviceLostError
from benchmarks.harness.peers import PEERS
from benchmarks.harness.registry import REPEATS
from benchmarks.harness.run import Budget, run, table
from tritonpack.attention import MAX_HEAD_DIM

QUICK = Path("gpu-quick")


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
    parser.add_argument("--tokens", type=int, help="measure batches of this many tokens instead of the list of shapes")
    parser.add_argument("--heads", type=int, help="query heads, with --tokens (default: 32)")
    parser.add_argument("--head-dim", type=int, help="with --tokens (default: 128)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="with --tokens (default: bfloat16)")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="most repeats of a call")
    parser.add_argument("--list", action="store_true", help="print the shapes and stop")
    options = parser.parse_args(arguments)
    unknown = set(options.without) - {peer.name for peer in PEERS}
    if unknown:
        parser.error(f"--without knows {', '.join(repr(p.name) for p in PEERS)}; got {', '.join(sorted(unknown))}.")
    on_cpu = options.device == "cpu"
    for name, most in (("tokens", 2**31 - 1), ("heads", 2**16), ("head_dim", MAX_HEAD_DIM), ("repeats", 2**31 - 1)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name.replace('_', '-')} must be from 1 to {most}; got {value}.")
    own = {name: getattr(options, name) for name in ("tokens", "heads", "head_dim", "dtype")}
    own = {name: value for name, value in own.items() if value is not None}
    if own and (options.quick or options.tokens is None):
        which = "--quick has its own shapes" if options.quick else "the list has its own shapes without --tokens"
        parser.error(f"{which}; leave out {', '.join('--' + name.replace('_', '-') for name in own)}.")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} isn't a folder; name another.")
    todo = own_shapes(**own) if own else smoke_shapes() if on_cpu else quick_shapes() if options.quick else shapes()
    todo = todo[: options.first]
    if options.list:
        print("\n".join(map(str, todo)))
        return
    if on_cpu and options.out is None:
        parser.error("--device cpu needs --out: rows of a CPU don't belong beside rows of a GPU.")
    if not on_cpu and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu needs a GPU, and torch sees none here. --device cpu --out DIR tries it without one."
        )

    minutes = options.minutes if options.minutes is not None else 5.0 if options.quick else 8.0
    budget, device = Budget(minutes), torch.device(options.device)
    about = environment(device, options.commit)
    folder: Path = options.out or (QUICK if options.quick else RESULTS)
    ledger = Ledger(folder / "attention.csv", about)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    ceiling = None
    if not on_cpu:
        copy, ceiling = ceilings()
        print(f"copy {copy:.2f} TB/s, bf16 matrix product {ceiling:.0f} TFLOP/s", flush=True)
    every = not (on_cpu and own)  # tiny shapes try all peers on a CPU, too
    peers = [peer for peer in PEERS if peer.name not in options.without and (every or peer.on_cpu)]
    cases = [case_of(shape, peers, device) for shape in todo]
    try:
        left = run(cases, ledger, budget, device, options.repeats)
    except DeviceLostError as error:
        print(f"\nThe device is lost to this process: {error}\nThe same command continues.", file=sys.stderr)
        raise SystemExit(CONTINUE) from error
    if options.quick and len(left) < len(cases):
        shown = [row for row in ledger.rows() if row["case"] in {case.text for case in cases}]
        said = "Useful TFLOP/s: visible pairs alone; backward is 2.5 forwards"
        said += f"; beside ours the share of a bf16 matrix product's {ceiling:.0f}" if ceiling else ""
        text = "\n".join([", ".join(about.values()), "", said, "", *table(shown, ceiling)])
        (folder / "table.md").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n", flush=True)
        try:
            plot.main([str(ledger.path)])
        except ImportError as error:
            print(f"No picture: {error}. pip install matplotlib, then python3 -m benchmarks.plot {ledger.path}")
    print(f"\n{len(cases) - len(left)} of {len(cases)} shapes in {ledger.path}", flush=True)
    if left:
        print("Time is up; the same command continues with:", *map(str, todo[-len(left) :]), sep="\n  ")
        raise SystemExit(CONTINUE)


if __name__ == "__main__":
    main()
