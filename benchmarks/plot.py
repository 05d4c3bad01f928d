"""Draw a ledger: tritonpack beside other implementations.

    python -m benchmarks.plot [CSV] [--out DIR]

Each picture has the cases that differ in their first parameter alone, such as the lengths of documents, as groups of
bars, and a panel for each benchmark. Bars are useful TFLOP/s, else tokens per second, else milliseconds; medians, with
the 20th and 80th percentile where the row has them. A cross is an implementation without a figure; the CSV has the
reason. The number above tritonpack is its speed divided by the baseline's. If a CSV has a measurement twice, the later
one counts. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.ledger import RESULTS, Row, joined, parted, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
OTHERS = ("#8a8a8a", "#b8860b", "#4b7f52", "#8b5e83")
OURS = "tritonpack"
BASELINES = ("FlashAttention-2 (torch)", "sdpa, padded", "stock, sdpa", "stock")  # the first that a group has
UNITS = {"tflops": "useful TFLOP/s", "tokens_per_second": "tokens per second", "ms": "milliseconds"}

Picture = tuple[str, str, str]  # the device, the first word of the benchmarks, the parameters but the first


def pictures(rows: Iterable[Row]) -> dict[Picture, list[Row]]:
    """The rows of each picture, each with the `group` of bars that it is in.

    Raises:
        SystemExit: no row has a figure.
    """
    found: dict[Picture, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            (first, *others) = parted(row["case"]).items() or [("", "")]
            kind = re.split(r"\W", row["benchmark"])[0]
            found.setdefault((row["device"], kind, joined(dict(others))), []).append(row | {"group": first[1]})
    if not found:
        raise SystemExit("there is no figure to draw: no row has the status 'ok'.")
    return found


def file_name(picture: Picture, devices: Sequence[str]) -> str:
    """The name of a picture; with a number for the device if there are several."""
    device, kind, parameters = picture
    number = f"{devices.index(device) + 1}" if len(devices) > 1 else ""
    return "-".join(filter(None, [kind, re.sub(r"\W+", "-", parameters).strip("-"), number])) + ".png"


def heights(row: Row, unit: str) -> tuple[float, float, float]:
    """Return the height of a bar, and its ends at the 80th and 20th percentile of the time."""
    if unit == "ms":
        low, middle, high = (float(row[f"p{n}_ms"] or row["p50_ms"]) for n in (20, 50, 80))
        return middle, low, high
    value = float(parted(row["figures"])[unit])
    if not row["p20_ms"]:
        return value, value, value
    return value, *(value * float(row["p50_ms"]) / float(row[f"p{n}_ms"]) for n in (80, 20))  # type: ignore[return-value]


def bars(picture: Picture, rows: Sequence[Row]) -> Figure:
    """Draw a panel for each benchmark, with a group of bars for each value of the first parameter."""
    from matplotlib.figure import Figure

    present = dict.fromkeys(row["implementation"] for row in rows)
    names = [name for name in COLOURS if name in present] + [name for name in present if name not in COLOURS]
    colours = dict(zip([name for name in names if name not in COLOURS], OTHERS * len(names), strict=False)) | COLOURS
    groups, benchmarks = (list(dict.fromkeys(row[name] for row in rows)) for name in ("group", "benchmark"))
    figure = Figure(figsize=(max(6.5, 1.9 * len(groups) + 2.5), 2.7 * len(benchmarks) + 1.2), layout="constrained")
    width = 0.84 / len(names)
    for benchmark, panel in zip(benchmarks, figure.subplots(len(benchmarks), 1, squeeze=False)[:, 0], strict=True):
        of_panel = [row for row in rows if row["benchmark"] == benchmark]
        unit = next(name for name in UNITS if name == "ms" or all(name in parted(row["figures"]) for row in of_panel))
        _style(panel, benchmark, UNITS[unit])
        for number, group in enumerate(groups):
            found = {row["implementation"]: heights(row, unit) for row in of_panel if row["group"] == group}
            for place, name in enumerate(names):
                x = number + (place - (len(names) - 1) / 2) * width
                if name not in found:
                    panel.plot(x, 0, marker="x", color=colours[name], markersize=3.5, clip_on=False)
                    continue
                height, low, high = found[name]
                panel.bar(x, height, width * 0.94, color=colours[name], zorder=2)
                error = [[height - low], [high - height]]
                panel.errorbar(x, height, error, color="#1f2937", linewidth=0.8, capsize=1.2, zorder=3)
            baseline = next((name for name in BASELINES if name in found), None)
            if OURS in found and baseline:
                ours, others = found[OURS], found[baseline]
                faster = others[0] / ours[0] if unit == "ms" else ours[0] / others[0]
                panel.annotate(
                    f"{faster:.2f}\u00d7", (number - 0.42, ours[2]), (0, 2), textcoords="offset points", va="bottom",
                    fontsize=7.5, color=colours[OURS], fontweight="bold",
                )  # fmt: skip
        panel.set_xticks(range(len(groups)), groups)
        panel.set_xlim(-0.55, len(groups) - 0.45)
        panel.set_ylim(bottom=0)
    _head(figure, picture, rows, {name: colours[name] for name in names})
    return figure


def _style(panel: Axes, title: str, unit: str) -> None:
    panel.set_title(title, fontsize=9.5, loc="left")
    panel.set_ylabel(unit, fontsize=8.5)
    panel.margins(y=0.12)
    panel.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=8.5)
    panel.tick_params(axis="x", length=0)
    panel.spines[["top", "right"]].set_visible(False)


def _head(figure: Figure, picture: Picture, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Write the title, the versions and the legend."""
    from matplotlib.patches import Patch

    versions, commits = (" / ".join(dict.fromkeys(row[name] for row in rows)) for name in ("versions", "commit"))
    device, kind, parameters = picture
    figure.suptitle(
        ": ".join(filter(None, (kind, parameters))) + "\n", fontsize=11, fontweight="bold", x=0.01, ha="left"
    )
    figure.text(0.01, 0.985, f"\n{device}; {versions}; commit {commits}", fontsize=7.5, color="#4b5563", va="top")
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=min(3, len(handles)), fontsize=8, frameon=False,
        handlelength=1.1, columnspacing=1.4,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=RESULTS / "attention.csv")
    parser.add_argument("--out", type=Path, help="folder of the pictures (default: the folder of the CSV)")
    options = parser.parse_args(arguments)
    found = pictures(read(options.csv))
    folder = options.out or options.csv.parent
    folder.mkdir(parents=True, exist_ok=True)
    devices = sorted({device for device, *_ in found})
    for picture, rows in found.items():
        path = folder / file_name(picture, devices)
        bars(picture, rows).savefig(path, dpi=150)
        print(path)


if __name__ == "__main__":
    main()
