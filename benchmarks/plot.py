"""Draw the ledger of attention on GPUs: tritonpack beside its peers, by distribution and direction.

    python -m benchmarks.plot [CSV] [--out DIR]

Each kind of attention (device, heads, head dimension, causal or not, window) has one picture per number of tokens. Bars
are medians of useful TFLOP/s with the 20th and 80th percentile. A cross is a peer without a figure; the CSV has the
reason. The figure above tritonpack is its speed divided by that of FlashAttention-2 in torch. If a CSV has a
measurement twice, the later one counts. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT = Path("benchmarks/results/attention.csv")
OPS = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
KIND = ("device", "heads", "kv_heads", "head_dim", "causal", "window", "dtype", "tokens")  # what a picture shows
NEEDED = {*KIND, "op", "implementation", "distribution", "status", "p20_ms", "p50_ms", "p80_ms", "tflops", "torch",
          "triton", "commit"}  # fmt: skip

# In the order of the legend. Tritonpack has strong colours; all differ in grey, too.
COLOURS = {
    "tritonpack": "#c2410c",
    "tritonpack, gluon": "#7f1d1d",
    "FlashAttention-4": "#1e3a5f",
    "FlashAttention-3": "#5b8db8",
    "FlashAttention-2 (torch)": "#3b76af",
    "xformers": "#2f6b4f",
    "FlexAttention": "#6d5a9c",
    "FlexAttention, mask built": "#a99bc9",
    "sdpa, padded": "#6b7280",
    "sdpa, dense mask": "#c3c7cd",
}
OTHERS = "#8a8a8a"
OURS, BASELINE = "tritonpack", "FlashAttention-2 (torch)"
OUR_BARS = (OURS, "tritonpack, gluon")

Row = dict[str, str]


def read(path: Path) -> dict[tuple[str, ...], list[Row]]:
    """The rows that have a figure, by KIND; if a measurement was repeated, its last row.

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
        latest = {tuple(row[name] for name in (*KIND, "distribution", "op", "implementation")): row for row in reader}
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for key, row in latest.items():
        if row["status"] == "ok":
            kinds.setdefault(key[: len(KIND)], []).append(row)
    if not kinds:
        raise SystemExit(f"{path} has no figure to draw: no row of it has the status 'ok'.")
    return kinds


def file_name(row: Row, devices: Sequence[str]) -> str:
    """The name of the picture that a row is in; with a number for the device if there are several."""
    causal = "causal" if row["causal"] == "True" else "bidirectional"
    window = "-window-" + row["window"].replace(" ", "-") if row["window"] else ""
    device = f"-{devices.index(row['device']) + 1}" if len(devices) > 1 else ""
    sizes = f"{row['heads']}-{row['kv_heads']}-{row['head_dim']}"
    return f"attention-{sizes}-{causal}{window}{device}-{row['tokens']}.png"


def bars(rows: Sequence[Row]) -> Figure:
    """Draw the rows of one kind: a panel per direction, with a group of bars per distribution."""
    from matplotlib.figure import Figure

    present = dict.fromkeys(row["implementation"] for row in rows)
    names = [name for name in COLOURS if name in present] + [name for name in present if name not in COLOURS]
    distributions = list(dict.fromkeys(row["distribution"] for row in rows))
    ops = [op for op in OPS if any(row["op"] == op for row in rows)]
    figure = Figure(figsize=(max(6.5, 1.9 * len(distributions) + 2.5), 2.7 * len(ops) + 1.2), layout="constrained")
    panels = figure.subplots(len(ops), 1, squeeze=False)[:, 0]
    width = 0.84 / len(names)
    slow = all(float(row["tflops"]) < 1 for row in rows)  # a run that tries the program out
    factor, unit = (1000, "GFLOP/s") if slow else (1, "TFLOP/s")
    for op, panel in zip(ops, panels, strict=True):
        _style(panel, OPS[op], f"useful {unit}")
        for group, distribution in enumerate(distributions):
            found = {r["implementation"]: r for r in rows if r["op"] == op and r["distribution"] == distribution}
            for place, name in enumerate(names):
                x, colour = group + (place - (len(names) - 1) / 2) * width, COLOURS.get(name, OTHERS)
                if name not in found:
                    panel.plot(x, 0, marker="x", color=colour, markersize=3.5, clip_on=False)
                    continue
                height = factor * float(found[name]["tflops"])
                low, high = (factor * rate for rate in _spread(found[name]))
                panel.bar(x, height, width * 0.94, color=colour, zorder=2)
                error = [[height - low], [high - height]]
                panel.errorbar(x, height, error, color="#1f2937", linewidth=0.8, capsize=1.2, zorder=3)
            if {OURS, BASELINE} <= found.keys():
                faster = float(found[BASELINE]["p50_ms"]) / float(found[OURS]["p50_ms"])
                top = factor * max(_spread(found[name])[1] for name in OUR_BARS if name in found)
                panel.annotate(
                    f"{faster:.2f}\u00d7", (group - 0.42, top), (0, 2), textcoords="offset points", va="bottom",
                    fontsize=7.5, color=COLOURS[OURS], fontweight="bold",
                )  # fmt: skip
        panel.set_xticks(range(len(distributions)), distributions)
        panel.tick_params(axis="x", length=0)
        panel.set_xlim(-0.55, len(distributions) - 0.45)
        panel.set_ylim(bottom=0)
    _head(figure, rows, names)
    return figure


def _spread(row: Row) -> tuple[float, float]:
    """TFLOP/s at the 80th and at the 20th percentile of the time."""
    work = float(row["tflops"]) * float(row["p50_ms"])
    return work / float(row["p80_ms"]), work / float(row["p20_ms"])


def _style(panel: Axes, title: str, unit: str) -> None:
    panel.set_title(title, fontsize=9.5, loc="left")
    panel.set_ylabel(unit, fontsize=8.5)
    panel.margins(y=0.12)
    panel.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8.5)
    panel.spines[["top", "right"]].set_visible(False)


def _head(figure: Figure, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Write the title, the versions and the legend."""
    from matplotlib.patches import Patch

    def all_of(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))

    row = rows[0]
    heads = f"{row['heads']} heads" + (f" over {row['kv_heads']}" if row["heads"] != row["kv_heads"] else "")
    window = f", window {row['window'].split()[0]}" if row["window"] else ""
    causal = "causal" if row["causal"] == "True" else "bidirectional"
    title = f"{heads} of {row['head_dim']}, {causal}{window}, {row['dtype']}, {int(row['tokens']):,} tokens"
    about = f"{all_of('device')}; torch {all_of('torch')}, Triton {all_of('triton')}; commit {all_of('commit')}"
    note = "; figures: speed divided by that of FlashAttention-2 in torch" if {OURS, BASELINE} <= set(names) else ""
    figure.suptitle(f"{title}\n", fontsize=11, fontweight="bold", x=0.01, ha="left")
    figure.text(0.01, 0.985, f"\n{about}{note}", fontsize=7.5, color="#4b5563", va="top")
    handles = [Patch(color=COLOURS.get(name, OTHERS), label=name) for name in names]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=min(3, len(handles)), fontsize=8, frameon=False,
        handlelength=1.1, columnspacing=1.4,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: the folder of the CSV)")
    options = parser.parse_args(arguments)
    kinds = read(options.csv)
    folder = options.out or options.csv.parent
    folder.mkdir(parents=True, exist_ok=True)
    devices = sorted({rows[0]["device"] for rows in kinds.values()})
    for rows in kinds.values():
        path = folder / file_name(rows[0], devices)
        bars(rows).savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
