"""What `tritonpack bench` does: every peer on every batch, a table, a CSV and a picture."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

import tritonpack
from tritonpack.attention import MAX_HEAD_DIM, resolve_backend
from tritonpack.cli.bench.batch import Batch, Shape, distributions, make_batch
from tritonpack.cli.bench.measure import backward_of, time_alternating, verify
from tritonpack.cli.bench.peers import OURS, Peer, Prepared, peers_for
from tritonpack.cli.bench.report import Row, reasons, table, write_csv
from tritonpack.cli.machine import installed_version, resolve_device


@dataclass(frozen=True)
class Options:
    """What is to be measured; None leaves the choice to the device.

    Attributes:
        device, dtype: "auto", or a name.
        repeats: how often each call is timed.
        threads: of the CPU.
        out: the folder of the CSV and the picture.
    """

    tokens: int | None
    heads: int | None
    head_dim: int | None
    dtype: str
    device: str
    repeats: int | None
    threads: int
    out: Path


def examine(options: Options) -> bool:
    """Measure, print the table, write the CSV, draw the picture.

    Returns:
        Whether our results were right on every batch.

    Raises:
        ValueError: a device that isn't there, a shape that attention doesn't take.
        OSError: results that can't be written.
    """
    from tritonpack.cli.bench.figure import draw

    shape, repeats = shape_for(options), options.repeats or (20 if resolve_device(options.device).type == "cuda" else 5)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    console = Console()
    facts = facts_of(shape, repeats)
    console.print(escape(describe(facts)))
    rows = []
    with console.status("") as status:
        for name, lengths in distributions(shape.tokens).items():
            status.update(name)
            rows += compare(name, make_batch(lengths, shape), peers_for(shape.device), repeats)
    console.print(table(rows))
    for reason in reasons(rows):
        console.print(escape(f"Not timed: {reason}"))
    clock = "device events, cold L2" if shape.device.type == "cuda" else "the host's clock"
    console.print(
        f"Medians of {repeats} calls in alternation by {clock} (20th to 80th percentile), each implementation in its "
        "own layout; masks and padded rows are made once, as for all layers of a model. What is timed was held "
        "against float64 first."
    )
    csv_path, picture = options.out / "bench.csv", options.out / "bench.png"
    write_csv(rows, facts, csv_path)
    draw(rows, describe(facts), picture)
    console.print(f"{csv_path}\n{picture}", style="dim", soft_wrap=True)
    return all(row.forward is not None for row in rows if row.implementation == OURS)


def compare(name: str, batch: Batch, peers: Sequence[Peer], repeats: int) -> list[Row]:
    """Every peer on one batch, in the order of `peers`: times, or why there are none."""
    ready: dict[str, Prepared] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        try:
            prepared = Prepared(peer, batch)
            verify(batch, prepared)
        except Exception as error:  # a peer may fail in any way, memory included; its row says how
            reasons[peer.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        ready[peer.name] = prepared
    device = batch.q.device
    forward = time_alternating({peer: prepared.forward for peer, prepared in ready.items()}, repeats, device)
    backward = time_alternating({peer: backward_of(prepared) for peer, prepared in ready.items()}, repeats, device)
    return [
        Row(name, len(batch.lengths), peer, forward.get(peer), backward.get(peer), reasons.get(peer, ""))
        for peer in (peer.name for peer in peers)
    ]


def shape_for(options: Options) -> Shape:
    """The shape that was asked for, sized to the device where nothing was.

    Raises:
        ValueError: as `examine`.
    """
    device = resolve_device(options.device)
    on_gpu = device.type == "cuda"
    heads = options.heads or (32 if on_gpu else 8)
    head_dim = options.head_dim or (128 if on_gpu else 64)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"--head-dim must be from 1 to {MAX_HEAD_DIM}; got {head_dim}")
    dtype = getattr(torch, ("bfloat16" if on_gpu else "float32") if options.dtype == "auto" else options.dtype)
    tokens = options.tokens or (16384 if on_gpu else 2048)
    return Shape(tokens, heads, heads // 4 if heads % 4 == 0 else heads, head_dim, dtype, device)


def facts_of(shape: Shape, repeats: int) -> dict[str, object]:
    """Everything that the numbers depend on."""
    on_gpu = shape.device.type == "cuda"
    return {
        "tokens": shape.tokens,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "backend": resolve_backend("auto", torch.empty(1, 1, 16, dtype=shape.dtype, device=shape.device)),
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "torch": torch.__version__,
        "triton": installed_version("triton") or "not installed",
        "tritonpack": tritonpack.__version__,
    }


def describe(facts: dict[str, object]) -> str:
    """The facts in a line."""
    where = facts["device"] if facts["device"] != f"{platform.machine()} CPU" else f"CPU, threads: {facts['threads']}"
    return (
        f"{facts['tokens']:,} tokens, {facts['heads']} query heads and {facts['kv_heads']} key heads of "
        f"{facts['head_dim']}, {facts['dtype']}, causal; {where}, torch {facts['torch']}, backend {facts['backend']}"
    )
