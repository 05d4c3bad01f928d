"""`tritonpack bench`: measure every peer on every batch, print a table, write a CSV and a picture."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import tritonpack
from tritonpack.attention import MAX_HEAD_DIM
from tritonpack.backends import resolve_backend
from tritonpack.cli.bench.batch import Shape, distributions, make_batch
from tritonpack.cli.bench.measure import FIGURES, NOT_INSTALLED, OPS, DeviceLostError, measure
from tritonpack.cli.bench.peers import OURS, peers_for
from tritonpack.cli.files import make_folder, write_figure, write_whole
from tritonpack.cli.machine import installed_version, resolve_device
from tritonpack.cli.words import count

ABOUT = ("distribution", "documents", "op", "implementation", "status")

Row = dict[str, object]  # ABOUT, and FIGURES where the status is "ok"


def examine(
    tokens: int | None,
    heads: int | None,
    head_dim: int | None,
    dtype: str,
    device: str,
    repeats: int | None,
    threads: int,
    out: Path,
) -> bool:
    """Measure, print the table, write the CSV, draw the picture. The arguments are the command's options.

    Returns:
        Whether tritonpack's results were right, and timed, on every batch.

    Raises:
        ValueError: the device isn't there, attention doesn't take the shape, or the results can't be written.
    """
    where = resolve_device(device)
    on_gpu = where.type == "cuda"
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"--head-dim must be from 1 to {MAX_HEAD_DIM}; got {head_dim}")
    heads, repeats = heads or (32 if on_gpu else 8), repeats or (20 if on_gpu else 5)
    shape = Shape(
        "",
        tokens or (16384 if on_gpu else 2048),
        heads,
        heads // 4 if heads % 4 == 0 else heads,
        head_dim or (128 if on_gpu else 64),
        dtype=("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype,
    )
    make_folder(out, "bench.csv", "bench.png")
    torch.set_num_threads(threads)
    facts = {
        "backend": resolve_backend("auto", torch.empty(1, 1, 16, dtype=getattr(torch, shape.dtype), device=where)),
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "threads": threads,
        "repeats": repeats,
        "torch": torch.__version__,
        "triton": installed_version("triton") or NOT_INSTALLED,
        "tritonpack": tritonpack.__version__,
    }
    title = (
        f"{count(shape.tokens, 'token')}, {count(heads, 'query head')} and {count(shape.kv_heads, 'key head')} of "
        f"{shape.head_dim}, {shape.dtype}, causal; {facts['device']}, {count(threads, 'thread')}, torch "
        f"{torch.__version__}, backend {facts['backend']}"
    )
    console, progress, rows = Console(), Console(stderr=True), list[Row]()
    console.print(escape(title))
    for name, lengths in distributions(shape.tokens).items():
        measured: list[Mapping[str, object]] = []
        try:
            with progress.status(name):
                batch = make_batch(replace(shape, distribution=name), lengths, where)
                measure(batch, peers_for(shape, where), measured.append, repeats)
        except DeviceLostError as error:
            console.print(escape(f"The GPU is lost to this process: {error}"))
            break
        finally:
            rows += [{"distribution": name, "documents": len(lengths), **row} for row in measured]
    console.print(table(rows))
    for line in dict.fromkeys(not_timed(row) for row in rows if row["status"] != "ok"):
        console.print(escape(line))
    clock = "device events, with a cold L2 cache" if on_gpu else "the host's clock"
    console.print(
        f"Medians of up to {count(repeats, 'call')} in turn (20th to 80th percentile), by {clock}, each implementation "
        "in its own layout; masks and padded rows are made once, as for all layers of a model. Results were compared "
        "with float64 attention before they were timed."
    )
    csv_path, picture = out / "bench.csv", out / "bench.png"
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys((*ABOUT, *FIGURES, *shape.columns(), *facts))])
    writer.writeheader()
    writer.writerows(shape.columns() | facts | row for row in rows)
    write_whole(csv_path, text.getvalue())
    draw(rows, title, picture)
    console.print(f"{csv_path}\n{picture}", style="dim", soft_wrap=True)
    right = sum(row["implementation"] == OURS and row["status"] == "ok" for row in rows)
    return right == len(OPS) * len(distributions(shape.tokens))


def not_timed(row: Row) -> str:
    """The reason why a row has no figure, in one line."""
    if str(row["status"]).startswith(NOT_INSTALLED):
        return f"Not installed: {row['implementation']}"
    return f"Not timed: {row['implementation']}, {row['distribution']}: {row['status']}"


def table(rows: Sequence[Row]) -> Table:
    """Medians with the 20th and 80th percentile, and the time of each implementation relative to tritonpack's."""
    headers = (*(f"{op}, ms" for op in OPS), f"times {OURS}")
    figures = (Column(header, justify="right", overflow="fold") for header in headers)
    result = Table("documents", Column("implementation", overflow="fold"), *figures)
    found = _by_place(rows)
    installed = [row for row in rows if not str(row["status"]).startswith(NOT_INSTALLED)]
    for distribution, documents in dict.fromkeys((row["distribution"], row["documents"]) for row in rows):
        label = f"{distribution} ({documents:,})"
        for name in dict.fromkeys(row["implementation"] for row in installed):
            times = [found.get((distribution, name, op)) for op in OPS]
            cells = [
                f"{short(t[1])} [dim]({short(t[0])}-{short(t[2])})[/]" if t else "[dim]not timed[/]" for t in times
            ]
            ours = found.get((distribution, OURS, "both"))
            ratio = f"{times[-1][1] / ours[1]:.2f}x" if times[-1] and ours else ""
            result.add_row(label, str(name), *cells, ratio)
            label = ""
        result.add_section()
    return result


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw two bars for each batch: the time of forward and backward together (pale), and the time of forward on it."""
    from matplotlib.figure import Figure

    found = _by_place(rows)
    batches = {row["distribution"]: row["documents"] for row in rows}
    names = list(dict.fromkeys(name for _, name, _ in found))
    figure = Figure(figsize=(1.8 + 2.4 * max(len(batches), 2), 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(len(names), 1)
    for number, name in enumerate(names):
        for op, alpha in (("both", 0.5), ("forward", 1.0)):
            shown = [(place, found.get((batch, name, op))) for place, batch in enumerate(batches)]
            times = [time for _, time in shown if time]
            bars = axes.bar(
                [place + (number - (len(names) - 1) / 2) * width for place, time in shown if time],
                [p50 for _, p50, _ in times],
                width * 0.92,
                color=f"C{number}",
                alpha=alpha,
                yerr=[[p50 - p20 for p20, p50, _ in times], [p80 - p50 for _, p50, p80 in times]],
                error_kw={"lw": 0.8, "ecolor": "#444444"},
                label=str(name) if op == "forward" else None,
            )
            if op == "both":
                axes.bar_label(bars, [short(p50) for _, p50, _ in times], padding=2, fontsize=8)
    axes.set_xticks(range(len(batches)), [f"{name}\n({documents:,})" for name, documents in batches.items()])
    axes.set_xlabel("documents: their lengths, and how many there are")
    axes.set_ylabel("ms: forward, and forward with backward (pale)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.set_title(title, fontsize=10)
    if names:
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    write_figure(path, figure)


def _by_place(rows: Sequence[Mapping[str, object]]) -> dict[tuple[object, object, object], tuple[float, ...]]:
    """(distribution, implementation, op) -> the 20th, 50th and 80th percentile, where there are figures."""
    return {
        (row["distribution"], row["implementation"], row["op"]): tuple(float(str(row[name])) for name in FIGURES[:3])
        for row in rows
        if row["status"] == "ok"
    }


def short(milliseconds: float) -> str:
    """A time with three digits or more."""
    return f"{milliseconds:.{max(0, 2 - len(str(int(milliseconds))) + 1)}f}"
