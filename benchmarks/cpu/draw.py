"""Draw the rows of attention in the CPU ledger: forward and backward, tritonpack beside sdpa.

python -m benchmarks.cpu.draw [--out docs/images/cpu-attention.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.cpu.__main__ import OURS, Row, latest
from benchmarks.plot import COLOURS, OTHERS

# Labels of the distributions; `tests.lengths.distributions` describes them.
CASES = {
    "flan": "FLAN-like", "orca": "OrcaMath-like", "stdlib": "like the standard\nlibrary's functions",
    "openchat": "OpenChat-like", "skewed": "2,048 beside\nmany of 256", "tiny": "20 tokens\neach",
    "short": "16 to 32\ntokens", "medium": "96 to 192\ntokens", "one": "one\ndocument",
}  # fmt: skip


def milliseconds(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Implementation -> case -> milliseconds of forward and backward together, for cases that have both."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["group"].startswith("attention "):
            found.setdefault((row["implementation"], row["case"]), []).append(float(row["median_ms"]))
    both: dict[str, dict[str, float]] = {}
    for (implementation, case), times in found.items():
        if len(times) == 2:
            both.setdefault(implementation, {})[case] = sum(times)
    return both


def draw(rows: Sequence[Row]) -> Figure:
    """Draw bars per case on a logarithmic axis, and above them the times of others relative to tritonpack's.

    Raises:
        SystemExit: the ledger has no rows of attention.
    """
    times = milliseconds(rows)
    if OURS not in times:
        raise SystemExit("The ledger has no rows of attention; `python -m benchmarks.cpu` writes them.")
    names = [OURS, *(name for name in times if name != OURS)]
    cases = [case for case in CASES if case in times[OURS]]
    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=130)
    axes = figure.subplots()
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        shown = [case for case in cases if case in times[name]]
        x = [cases.index(case) + (place - (len(names) - 1) / 2) * width for case in shown]
        heights = [times[name][case] for case in shown]
        axes.bar(x, heights, width * 0.94, color=COLOURS.get(name, OTHERS), label=name, zorder=2)
        if name == OURS:
            continue
        for position, case, height in zip(x, shown, heights, strict=True):
            ratio = height / times[OURS][case]
            shown_ratio = f"{ratio:.0f}" if ratio > 9.5 else f"{ratio:.2g}"
            axes.annotate(
                f"{shown_ratio}\u00d7", (position, height), (0, 2), textcoords="offset points", ha="center", fontsize=8,
                color="#4b5563",
            )  # fmt: skip
    axes.set_xticks(range(len(cases)), [CASES[case] for case in cases], fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.set_yscale("log")
    axes.set_ylabel("ms, forward and backward")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(names), loc="upper right", bbox_to_anchor=(1, 1.02), fontsize=9)
    axes.margins(y=0.22)
    about = {name: rows[-1][name] for name in ("device", "threads", "torch", "commit")}
    axes.set_title(
        f"Attention on a CPU, 4,096 tokens, 8 heads over 2 of 64, float32 \u2014 {about['device']}, {about['threads']} "
        f"threads, torch {about['torch']}, commit {about['commit']}",
        fontsize=9, loc="left", color="#374151",
    )  # fmt: skip
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ledger", nargs="?", type=Path, default=Path("benchmarks/results/cpu.csv"))
    parser.add_argument("--out", type=Path, default=Path("docs/images/cpu-attention.png"))
    options = parser.parse_args()
    if not options.ledger.exists():
        parser.error(f"{options.ledger} doesn't exist; `python -m benchmarks.cpu` writes it.")
    draw(latest(options.ledger)).savefig(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
