"""Run cases: rows into a ledger, a limit of time, an end to calls that hang, and the table of the rows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten

import torch

from benchmarks.harness.ledger import CONTINUE, Ledger, Row, parted
from benchmarks.harness.measure import LOST, NOT_INSTALLED, Write, measure
from benchmarks.harness.registry import OURS, Case

HUNG = 300.0  # seconds without a row and without another implementation after which one hangs; above twice PATIENCE


class Budget:
    """Minutes that begin now. A piece of work may begin if the longest time of the last three pieces is left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.taken: list[float] = []

    def allows(self) -> bool:
        return time.monotonic() + max(self.taken[-3:], default=0.0) < self.end

    def spend(self, seconds: float) -> None:
        self.taken.append(seconds)


class Watchdog:
    """Ends the process if an implementation hangs, which no exception does, and writes rows that say so."""

    def __init__(self, case: Case, write: Write) -> None:
        self._case, self._write, self._checked = case, write, ""
        self._timer = threading.Timer(HUNG, self._end)
        self.begin("")

    def begin(self, implementation: str) -> None:
        """Note which implementation is prepared from now on, and begin to wait again."""
        self._checked = implementation or self._checked
        self._timer.cancel()
        self._timer = threading.Timer(HUNG, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        status = f"{LOST}: it hung for {HUNG:.0f} seconds"
        for benchmark in self._case.benchmarks:
            row = {"benchmark": benchmark, "case": self._case.text, "implementation": self._checked, "status": status}
            self._write(row)
        os._exit(CONTINUE)

    def stop(self) -> None:
        self._timer.cancel()


def run(
    cases: Sequence[Case], ledger: Ledger, budget: Budget, device: torch.device, repeats: int | None = None
) -> list[Case]:
    """Measure the cases that the ledger doesn't have, until the time is up; returns the cases that are left.

    A case whose implementations aren't known before is measured again. An implementation that broke the device in a
    case isn't tried there again.
    """
    for number, case in enumerate(cases):
        rows = {name: [ledger.find(b, case.text, name) for b in case.benchmarks] for name in case.implementations}
        if rows and all(row is not None for found in rows.values() for row in found):
            continue
        if not budget.allows():
            return list(cases[number:])
        lost = {name for name, found in rows.items() if any(row and row["status"].startswith(LOST) for row in found)}
        began = time.monotonic()
        print(f"\n{case}", flush=True)
        watchdog = Watchdog(case, ledger.write)

        def write(row: Row, watchdog: Watchdog = watchdog) -> None:
            watchdog.begin("")
            ledger.write(row)
            shown = (row["benchmark"], row["implementation"], row.get("p50_ms"), row.get("figures"), row["status"])
            print("  ".join(str(cell or "-")[:100] for cell in shown), flush=True)

        try:
            measure(case, write, device, begin=watchdog.begin, without=lost, repeats=repeats)  # type: ignore[arg-type]
        finally:
            watchdog.stop()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        budget.spend(time.monotonic() - began)
    return []


def table(rows: Iterable[Row], ceiling: float | None = None) -> Iterator[str]:
    """The rows as a table in Markdown: for each benchmark and case tritonpack, and the others beside it.

    Args:
        rows: of one ledger.
        ceiling: TFLOP/s of a matrix product on this GPU, of which the table says tritonpack's share.
    """
    lines: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if not row["status"].startswith(NOT_INSTALLED):
            lines.setdefault((row["device"], row["benchmark"], row["case"]), {})[row["implementation"]] = row
    yield "| benchmark | case | tritonpack | others, and their time divided by tritonpack's |"
    yield "|---|---|---|---|"
    for (_, benchmark, case), found in lines.items():
        ours = found.pop(OURS, None)
        base = float(ours["p50_ms"]) if ours and ours["p50_ms"] else None
        others = "; ".join(f"{name} {_cell(row, None, base)}" for name, row in found.items())
        yield f"| {benchmark} | {case} | {_cell(ours, ceiling)} | {others} |"


def _cell(row: Row | None, ceiling: float | None, base: float | None = None) -> str:
    """Useful TFLOP/s where the row has them, else the median; what follows is a share or a ratio. Or a short reason."""
    if row is None:
        return ""
    if row["status"] != "ok":
        return f"({shorten(row['status'], 60, placeholder=' ...').replace('|', '/')})"
    figures = parted(row["figures"])
    if not row["p50_ms"]:
        return row["figures"]
    median = float(row["p50_ms"])
    beside = f" ({median / base:.2f})" if base else ""
    if "tflops" not in figures:
        return f"{median:.4g} ms{beside}"
    rate = float(figures["tflops"])
    return f"{rate:.3g} TFLOP/s" + (f" ({rate / ceiling:.0%})" if ceiling else beside)
