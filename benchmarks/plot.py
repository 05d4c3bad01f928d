"""Pictures of the ledger of attention: tritonpack beside its peers, by distribution, direction and number of tokens.

    python -m benchmarks.plot [CSV] [--out DIR] [--device NAME]

Each kind of attention (heads, head dimension, causal or not, window) has one picture per number of tokens, with bars
for each distribution. If there are several numbers of tokens, it also has a picture with lines over them. Bars are
medians of useful TFLOP/s with the 20th and 80th percentile. A cross is a peer without a figure; the CSV has the reason.
The figure above tritonpack is its speed divided by that of FlashAttention-2 in torch. If a CSV has a measurement twice,
the later one counts. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT = Path("benchmarks/results/attention.csv")
OPS = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
NEEDED = {
    "op", "implementation", "distribution", "tokens", "heads", "kv_heads", "head_dim", "causal", "window", "dtype",
    "status", "p20_ms", "p50_ms", "p80_ms", "tflops", "device", "torch", "triton", "commit",
}  # fmt: skip

# In the order of the legend. Tritonpack has strong colours; all differ in grey, too.
COLOURS = {
    "tritonpack": "#c2410c",
    "tritonpack, gluon": "#7f1d1d",
    "FlashAttention-4": "#1e3a5f",
    "FlashAttention-2 (torch)": "#3b76af",
    "xformers": "#2f6b4f",
    "FlexAttention": "#6d5a9c",
    "sdpa, padded": "#6b7280",
    "sdpa, dense mask": "#c3c7cd",
}
OTHERS = "#8a8a8a"
OURS, BASELINE = "tritonpack", "FlashAttention-2 (torch)"
OUR_BARS = (OURS, "tritonpack, gluon")

Row = dict[str, str]


@dataclass(frozen=True, order=True)
class Kind:
    """One kind of attention on one device, which has pictures of its own."""

    device: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: str
    dtype: str

    @classmethod
    def of(cls, row: Row) -> Kind:
        return cls(
            row["device"], int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"]), row["causal"] == "True",
            row["window"], row["dtype"],
        )  # fmt: skip

    def title(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} heads over {self.kv_heads}"
        window = f", window {self.window.split()[0]}" if self.window else ""
        causal = "causal" if self.causal else "bidirectional"
        return f"{heads} of {self.head_dim}, {causal}{window}, {self.dtype}"

    def file_stem(self) -> str:
        window = "-window-" + self.window.replace(" ", "-") if self.window else ""
        causal = "causal" if self.causal else "bidirectional"
        return f"attention-{self.heads}-{self.kv_heads}-{self.head_dim}-{causal}{window}"


def read(path: Path) -> list[Row]:
    """The rows that have a figure; of repeated measurements the last one.

    Raises:
        SystemExit: there is no such file, it lacks columns, or it has no figure.
    """
    if not path.exists():
        raise SystemExit(f"{path} doesn't exist; `python -m benchmarks.gpu` writes it on a machine with a GPU.")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = NEEDED - set(reader.fieldnames or ())
        if missing:
            raise SystemExit(f"{path} isn't a ledger of attention: it lacks {', '.join(sorted(missing))}.")
        latest: dict[tuple[Any, ...], Row] = {}
        for row in reader:
            key = (Kind.of(row), row["distribution"], row["tokens"], row["op"], row["implementation"])
            latest.pop(key, None)
            if row["status"] == "ok":
                latest[key] = row
    if not latest:
        raise SystemExit(f"{path} has no figure to draw: no row of it has the status 'ok'.")
    return list(latest.values())


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw all pictures of the rows; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    devices = sorted({row["device"] for row in rows})
    written = []
    for kind, of_kind in _grouped(rows, Kind.of).items():
        stem = kind.file_stem() + (f"-{devices.index(kind.device) + 1}" if len(devices) > 1 else "")
        by_tokens = dict(sorted(_grouped(of_kind, lambda row: int(row["tokens"])).items()))
        for tokens, at_tokens in by_tokens.items():
            written.append(_save(bars(kind, tokens, at_tokens), folder / f"{stem}-{tokens}.png"))
        several = _of_several_sizes(of_kind)
        if several:
            written.append(_save(lines(kind, several), folder / f"{stem}-by-tokens.png"))
    return written


def bars(kind: Kind, tokens: int, rows: Sequence[Row]) -> Figure:
    """Draw a panel per direction, with a group of bars per distribution."""
    from matplotlib.figure import Figure

    names, distributions = _implementations(rows), list(dict.fromkeys(row["distribution"] for row in rows))
    ops = [op for op in OPS if any(row["op"] == op for row in rows)]
    figure = Figure(figsize=(max(6.5, 1.9 * len(distributions) + 2.5), 2.7 * len(ops) + 1.2), layout="constrained")
    panels = figure.subplots(len(ops), 1, squeeze=False)[:, 0]
    width = 0.84 / len(names)
    for op, panel in zip(ops, panels, strict=True):
        found = {(r["distribution"], r["implementation"]): r for r in rows if r["op"] == op}
        for place, name in enumerate(names):
            for group, distribution in enumerate(distributions):
                row = found.get((distribution, name))
                x = group + (place - (len(names) - 1) / 2) * width
                if row is None:
                    panel.plot(x, 0, marker="x", color=COLOURS.get(name, OTHERS), markersize=3.5, clip_on=False)
                    continue
                _bar(panel, x, width, row)
        for group, distribution in enumerate(distributions):
            _write_ratio(panel, group, {name: row for (d, name), row in found.items() if d == distribution})
        _style(panel, OPS[op])
        panel.set_xticks(range(len(distributions)), distributions)
        panel.tick_params(axis="x", length=0)
        panel.set_xlim(-0.55, len(distributions) - 0.45)
    note = "; figures: speed divided by that of FlashAttention-2 in torch" if {OURS, BASELINE} <= set(names) else ""
    _head(figure, f"{kind.title()}, {tokens:,} tokens", rows, names, note)
    return figure


def lines(kind: Kind, rows: Sequence[Row]) -> Figure:
    """Draw a row of panels per direction, a column per distribution, and in each a line per implementation."""
    from matplotlib.figure import Figure

    names, distributions = _implementations(rows), list(dict.fromkeys(row["distribution"] for row in rows))
    ops = [op for op in OPS if any(row["op"] == op for row in rows)]
    size = (max(6.5, 2.6 * len(distributions) + 1), 2.5 * len(ops) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(ops), len(distributions), squeeze=False, sharex=True, sharey="row")
    for line, op in enumerate(ops):
        for column, distribution in enumerate(distributions):
            panel = panels[line, column]
            here = [row for row in rows if row["op"] == op and row["distribution"] == distribution]
            for name in names:
                points = sorted((int(r["tokens"]), float(r["tflops"])) for r in here if r["implementation"] == name)
                strong = name == OURS
                panel.plot(
                    *zip(*points, strict=True) if points else ([], []), color=COLOURS.get(name, OTHERS), marker="o",
                    markersize=4 if strong else 3, linewidth=2.2 if strong else 1.2, zorder=3 if strong else 2,
                )  # fmt: skip
            _style(panel, f"{distribution}, {OPS[op]}" if line == 0 or len(ops) == 1 else OPS[op])
            panel.set_xscale("log", base=2)
            ticks = sorted({int(row["tokens"]) for row in rows})
            panel.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
            panel.minorticks_off()
            if column:
                panel.set_ylabel("")
    _head(figure, f"{kind.title()}, by tokens", rows, names)
    return figure


def _bar(panel: Axes, x: float, width: float, row: Row) -> None:
    height = float(row["tflops"])
    low, high = _spread(row)
    panel.bar(x, height, width * 0.94, color=COLOURS.get(row["implementation"], OTHERS), zorder=2)
    panel.errorbar(x, height, [[height - low], [high - height]], color="#1f2937", linewidth=0.8, capsize=1.2, zorder=3)


def _spread(row: Row) -> tuple[float, float]:
    """TFLOP/s at the 80th and at the 20th percentile of the time."""
    work = float(row["tflops"]) * float(row["p50_ms"])
    return work / float(row["p80_ms"]), work / float(row["p20_ms"])


def _write_ratio(panel: Axes, group: int, of_group: dict[str, Row]) -> None:
    """Write the time of FlashAttention-2 divided by that of tritonpack above the bars of tritonpack."""
    if not {OURS, BASELINE} <= of_group.keys():
        return
    faster = float(of_group[BASELINE]["p50_ms"]) / float(of_group[OURS]["p50_ms"])
    top = max(_spread(of_group[name])[1] for name in OUR_BARS if name in of_group)
    panel.annotate(
        f"{faster:.2f}\u00d7", (group - 0.42, top), (0, 2), textcoords="offset points", va="bottom", fontsize=7.5,
        color=COLOURS[OURS], fontweight="bold",
    )  # fmt: skip


def _style(panel: Axes, title: str) -> None:
    panel.set_title(title, fontsize=9.5, loc="left")
    panel.set_ylabel("useful TFLOP/s", fontsize=8.5)
    panel.set_ylim(bottom=0)
    panel.margins(y=0.12)
    panel.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8.5)
    panel.spines[["top", "right"]].set_visible(False)


def _head(figure: Figure, title: str, rows: Sequence[Row], names: Sequence[str], note: str = "") -> None:
    from matplotlib.patches import Patch

    def all_of(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))

    about = f"{all_of('device')}; torch {all_of('torch')}, Triton {all_of('triton')}; commit {all_of('commit')}"
    figure.suptitle(f"{title}\n", fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 0.985, f"\n{about}{note}", fontsize=7.5, color="#4b5563", va="top")
    handles = [Patch(color=COLOURS.get(name, OTHERS), label=name) for name in names]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=min(3, len(handles)), fontsize=8, frameon=False,
        handlelength=1.1, columnspacing=1.4,
    )  # fmt: skip


def _implementations(rows: Iterable[Row]) -> list[str]:
    """The implementations in the rows: known ones in the order of COLOURS, then others."""
    present = dict.fromkeys(row["implementation"] for row in rows)
    return [name for name in COLOURS if name in present] + [name for name in present if name not in COLOURS]


def _of_several_sizes(rows: Sequence[Row]) -> list[Row]:
    sizes = {d: len({r["tokens"] for r in rs}) for d, rs in _grouped(rows, lambda row: row["distribution"]).items()}
    return [row for row in rows if sizes[row["distribution"]] > 1]


def _grouped(rows: Iterable[Row], key: Any) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: the folder of the CSV)")
    parser.add_argument("--device", help="draw only rows whose device has this in its name")
    options = parser.parse_args(arguments)
    rows = read(options.csv)
    if options.device is not None:
        rows = [row for row in rows if options.device in row["device"]]
        if not rows:
            raise SystemExit(f"{options.csv} has no row whose device has {options.device!r} in its name.")
    for path in draw_all(rows, options.out or options.csv.parent):
        print(path)


if __name__ == "__main__":
    main()
