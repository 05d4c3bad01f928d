"""What was measured: rows, as a table and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tritonpack.cli.bench.measure import Times
from tritonpack.cli.bench.peers import OURS


@dataclass(frozen=True)
class Row:
    """One implementation on one batch.

    Attributes:
        distribution: what the documents' lengths are like; how many `documents` there are.
        implementation: who computed.
        forward, backward: times; None where there are none.
        reason: why there are none: it was wrong, or couldn't.
    """

    distribution: str
    documents: int
    implementation: str
    forward: Times | None = None
    backward: Times | None = None
    reason: str = ""

    @property
    def both(self) -> float:
        """Milliseconds of forward and backward, the sum of their medians."""
        assert self.forward is not None
        assert self.backward is not None
        return self.forward.p50 + self.backward.p50


def table(rows: Sequence[Row]) -> Table:
    """Medians with the 20th and 80th percentiles, and how long each takes beside ours."""
    result = Table("documents", "implementation")
    for name in ("forward, ms", "backward, ms", "both", "beside ours"):
        result.add_column(name, justify="right")
    previous = ""
    for row in rows:
        if row.distribution != previous and previous:
            result.add_section()
        label = f"{row.distribution} ({row.documents:,})" if row.distribution != previous else ""
        previous = row.distribution
        if row.forward is None or row.backward is None:
            result.add_row(label, row.implementation, "[dim]not timed[/]", "[dim]not timed[/]")
            continue
        ours = our_time(rows, row.distribution)
        beside = f"{row.both / ours:.2f}x" if ours else ""
        result.add_row(label, row.implementation, _spread(row.forward), _spread(row.backward), short(row.both), beside)
    return result


def reasons(rows: Sequence[Row]) -> list[str]:
    """Why rows have no times, a line each."""
    return [f"{row.implementation}, {row.distribution}: {row.reason}" for row in rows if row.forward is None]


def our_time(rows: Sequence[Row], distribution: str) -> float | None:
    """Our milliseconds on a batch, None where there are none."""
    for row in rows:
        if (row.distribution, row.implementation) == (distribution, OURS) and row.forward is not None:
            return row.both
    return None


def write_csv(rows: Sequence[Row], facts: dict[str, object], path: Path) -> None:
    """A line for each direction of each row, with everything that the numbers depend on."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        measured = ("distribution", "documents", "implementation", "op", "p20_ms", "p50_ms", "p80_ms", "status")
        writer.writerow([*measured, *facts])
        for row in rows:
            for op, times in (("forward", row.forward), ("backward", row.backward)):
                figures = [round(x, 4) for x in (times.p20, times.p50, times.p80)] if times else ["", "", ""]
                status = row.reason or "ok"
                about = [row.distribution, row.documents, row.implementation, op]
                writer.writerow([*about, *figures, status, *facts.values()])


def _spread(times: Times) -> str:
    return f"{short(times.p50)} [dim]({short(times.p20)}-{short(times.p80)})[/]"


def short(milliseconds: float) -> str:
    """Three digits or more."""
    return f"{milliseconds:.{max(0, 2 - len(str(int(milliseconds))) + 1)}f}"
