"""The picture: forward and backward of every implementation, stacked, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tritonpack.cli.bench.peers import OURS
from tritonpack.cli.bench.report import Row, short

_COLORS = ("#3b6fb6", "#b9b4ab", "#d9a441", "#7b9e6b", "#a4689c")  # ours first


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw all rows that have times; backward is drawn paler, on top of forward."""
    timed = [row for row in rows if row.forward is not None and row.backward is not None]
    batches = list(dict.fromkeys(row.distribution for row in rows))
    names = list(dict.fromkeys(row.implementation for row in timed))
    figure = Figure(figsize=(1.8 + 2.4 * max(len(batches), 2), 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(len(names), 1)
    for row in timed:
        assert row.forward is not None
        assert row.backward is not None
        number = names.index(row.implementation)
        color = _COLORS[number % len(_COLORS)]
        x = batches.index(row.distribution) + (number - (len(names) - 1) / 2) * width
        for times, base, alpha in ((row.forward, 0.0, 1.0), (row.backward, row.forward.p50, 0.55)):
            spread = [[times.p50 - times.p20], [times.p80 - times.p50]]
            axes.bar(
                x, times.p50, width * 0.92, base, color=color, alpha=alpha, yerr=spread, ecolor="#444444",
                error_kw={"lw": 0.8},
            )  # fmt: skip
        top = row.forward.p50 + row.backward.p80
        axes.annotate(short(row.both), (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    counts = {row.distribution: row.documents for row in rows}
    labels = [f"{name}\n({counts[name]:,})" for name in batches]
    axes.set_xticks(range(len(batches)), labels)
    axes.set_xlabel("documents: their lengths, and how many there are")
    axes.set_ylabel("milliseconds: forward, and backward on it (paler)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.set_title(title, fontsize=10)
    patches = [
        Patch(color=_COLORS[i % len(_COLORS)], label=f"{name} (ours)" if name == OURS else name)
        for i, name in enumerate(names)
    ]
    if patches:
        axes.legend(handles=patches, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
