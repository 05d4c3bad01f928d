"""The verdict: what became of each step, and the figures beside the targets, in Markdown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.first_day.runner import OK, SKIPPED, Day, Platform
from benchmarks.harness.peers import OURS, PEERS


class Place(NamedTuple):
    """The columns of attention.csv that name a shape, of documents without a window."""

    distribution: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        sizes = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{self.distribution}, {self.tokens} tokens, {sizes}" + ("" if self.causal else ", bidirectional")


class Target(NamedTuple):
    """TFLOP/s that a pass of an implementation is to reach at a shape (docs/figures.md)."""

    implementation: str
    place: Place
    op: str
    tflops: float

    def __str__(self) -> str:
        return f"{self.implementation}: {self.place}, {self.op}"


GLUON = "tritonpack, gluon"
FLASH_2 = "FlashAttention-2 (torch)"
HOPPER = "9.0"
AT_128, AT_64 = Place("one", 16384, 16, 16, 128, True), Place("one", 16384, 32, 32, 64, True)
TARGETS = (
    Target(OURS, AT_128, "forward", 480.0),
    Target(OURS, AT_64, "forward", 400.0),
    Target(OURS, AT_128, "backward", 400.0),
    Target(OURS, AT_64, "backward", 320.0),
    Target(GLUON, AT_128, "forward", 550.0),
    Target(GLUON, AT_128, "backward", 420.0),
    Target(GLUON, AT_64, "backward", 340.0),
)
PACKED = 1.5  # times the speed of FlashAttention-2, forward and backward of packed batches


class Figures:
    """The rows of attention.csv that a platform has: for each shape, implementation and pass the newest TFLOP/s, or why
    there are none.

    Attributes:
        commits: those of the rows, in the order of the file.
    """

    def __init__(self, path: Path, platform: Platform) -> None:
        self.tflops: dict[tuple[Place, str, str], float] = {}
        self.failed: dict[tuple[Place, str], str] = {}
        self.commits: list[str] = []
        for row in _rows(path):
            if row["window"] or row["trees"] == "True" or (row["device"], row["triton"]) != platform[:2]:
                continue
            tokens, heads, kv_heads, head_dim = (int(row[x]) for x in ("tokens", "heads", "kv_heads", "head_dim"))
            place = Place(row["distribution"], tokens, heads, kv_heads, head_dim, row["causal"] == "True")
            if row["status"] == OK:
                self.tflops[place, row["implementation"], row["op"]] = float(row["tflops"])
                self.failed.pop((place, row["implementation"]), None)
            else:
                self.tflops.pop((place, row["implementation"], row["op"]), None)
                self.failed[place, row["implementation"]] = row["status"]
            if row["commit"] not in self.commits:
                self.commits.append(row["commit"])

    @property
    def places(self) -> list[Place]:
        """The shapes that have a figure, in the order of the file."""
        return list(dict.fromkeys(place for place, *_ in self.tflops))

    def ratio(self, place: Place, other: str) -> float | None:
        """The speed of ours over another implementation's, forward and backward together."""
        ours, theirs = (self.tflops.get((place, name, "both")) for name in (OURS, other))
        return None if ours is None or theirs is None else ours / theirs


def report(day: Day) -> str:
    """The verdict of a day as Markdown."""
    results = [(step, day.journal.last(step)) for step in day.steps]
    rows = [
        (step.name, step.what, last.verdict if last else "pending", f"{day.journal.seconds(step):.0f}",
         (last.reason or last.last_line)[:160] if last else "")
        for step, last in results
    ]  # fmt: skip
    figures = Figures(day.out / "attention.csv", day.platform)
    parts = [
        f"# The first day on {day.platform}\n\nCommit {day.commit}. {summary(day)}",
        table(("step", "what it shows", "verdict", "seconds", "result"), rows),
    ]
    if figures.places:
        parts += ["## TFLOP/s, and how many times as fast as others", f"Commits: {', '.join(figures.commits)}."]
        parts += [compared(figures)]
        if day.platform.capability == HOPPER:
            judged = re.search(r"\bH200\b", day.platform.device) is not None
            parts += ["## Targets", targets(figures, judged=judged)]
    for step, last in results:
        if last is not None and last.verdict not in (OK, SKIPPED):
            parts.append(f"## The end of {step.name}\n\n```text\n{last.output[-4000:].strip()}\n```")
    return "\n\n".join(parts) + "\n"


def summary(day: Day) -> str:
    """One line: how many steps are ok, and which aren't."""
    verdicts: dict[str, list[str]] = {}
    for step in day.steps:
        last = day.journal.last(step)
        verdicts.setdefault(last.verdict if last else "pending", []).append(step.name)
    ok = len(verdicts.pop(OK, []))
    others = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in verdicts.items())
    minutes = day.journal.seconds() / 60
    return f"{ok} of {len(day.steps)} steps are ok, in {minutes:.1f} minutes. {others}".strip()


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def compared(figures: Figures) -> str:
    """Ours in TFLOP/s at each shape, and for each other implementation the ratio, or why it has none."""
    tried = {name for _, name, _ in figures.tflops} | {name for _, name in figures.failed}
    others = [peer.name for peer in PEERS if peer.name in tried - {OURS}]

    def cells(place: Place) -> list[str]:
        own = [_number(figures.tflops.get((place, OURS, op))) for op in ("forward", "backward")]
        ratios = [figures.ratio(place, name) for name in others]
        why = [figures.failed.get((place, name), "")[:40] for name in others]
        return [str(place), *own, *(f"{r:.2f}x" if r else reason for r, reason in zip(ratios, why, strict=True))]

    return table(("shape", "forward", "backward", *others), map(cells, figures.places))


def targets(figures: Figures, *, judged: bool) -> str:
    """Each target beside the figure; on another GPU than an H200 the share of the target is no verdict."""

    def verdict(value: float | None, wanted: float, why: str = "not measured") -> str:
        if value is None:
            return why
        return "met" if judged and value >= wanted else f"{value / wanted:.2f} of it"

    rows = []
    for target in TARGETS:
        rate = figures.tflops.get((target.place, target.implementation, target.op))
        why = figures.failed.get((target.place, target.implementation), "not measured")
        rows.append((str(target), f"{target.tflops:.0f} TFLOP/s", _number(rate), verdict(rate, target.tflops, why)))
    for place in figures.places:
        if place.distribution != "one" and place.tokens >= 32768 and place.head_dim == 128 and place.causal:
            ratio = figures.ratio(place, FLASH_2)
            got = f"{ratio:.2f}x" if ratio else ""
            rows.append((f"{OURS}: {place}, both", f"{PACKED} times {FLASH_2}", got, verdict(ratio, PACKED)))
    return table(("what", "target on one H200", "measured", ""), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
