"""The CSV files of measurements, the facts of the environment that their rows hold, and the time that a run has."""

from __future__ import annotations

import csv
import hashlib
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path

import torch

from benchmarks.harness.batch import Shape
from benchmarks.harness.measure import FIGURES, LOST, OPS
from tritonpack.cli.machine import installed_version

ROOT = Path(__file__).parents[2]
CODE = ("tritonpack", "benchmarks")  # the folders that figures depend on
SHAPE = tuple(field.name for field in fields(Shape))
ABOUT = (
    "device", "driver", "python", "torch", "cuda", "triton", "tritonpack", "commit", "flash_attn_3", "flash_attn_4",
    "xformers",
)  # fmt: skip
CONTINUE = 3  # the exit status of a program that isn't done, and that the same command continues
COLUMNS = ("op", "implementation", *SHAPE, "documents", "status", *FIGURES, *ABOUT, "date")


class Budget:
    """Minutes that begin now. A piece of work may begin if the longest time of the last three pieces is left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.taken: list[float] = []

    def allows(self) -> bool:
        return time.monotonic() + max(self.taken[-3:], default=0.0) < self.end

    def spend(self, seconds: float) -> None:
        self.taken.append(seconds)


def append(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows to a CSV, which is made if it isn't there.

    Raises:
        SystemExit: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        header = next(csv.reader(file), None)
        if header is not None and tuple(header) != tuple(columns):
            raise SystemExit(f"{path} has other columns than this version writes; name another folder with --out.")
        writer = csv.DictWriter(file, columns, restval="")
        if header is None:
            writer.writeheader()
        writer.writerows(rows)


class Rows:
    """A CSV of measurements: appends rows to it, and knows which of them were measured before.

    A row was measured before if the columns of its key and of the environment agree.

    Args:
        path: of the file, which is made if it isn't there.
        about: columns that all rows of this run share.
        columns: of the file.
        key: the columns that name a measurement.
    """

    def __init__(self, path: Path, about: Mapping[str, str], columns: Sequence[str], key: Sequence[str]) -> None:
        self.path, self.about, self.columns, self.key = path, dict(about), columns, key
        self.known: dict[tuple[str, ...], Mapping[str, str]] = {}
        append(path, columns, [])
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if self.about.items() <= row.items():
                    self._note(row)

    def _note(self, row: Mapping[str, str]) -> None:
        self.known[tuple(row[name] for name in self.key)] = row

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row, with the environment and the time, to the file."""
        whole = {name: "" if value is None else str(value) for name, value in row.items()} | self.about
        append(self.path, self.columns, [whole | {"date": now()}])
        self._note(whole)

    def find(self, measurement: Mapping[str, str]) -> Mapping[str, str] | None:
        """The row of a measurement, given by the columns of the key; None if it wasn't made before."""
        return self.known.get(tuple(measurement[name] for name in self.key))


class Ledger(Rows):
    """The CSV of attention."""

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        super().__init__(path, about, COLUMNS, ("op", "implementation", *SHAPE))

    def _of(self, shape: Mapping[str, str], implementation: str) -> list[Mapping[str, str] | None]:
        return [self.find({**shape, "op": op, "implementation": implementation}) for op in OPS]

    def finished(self, shape: Mapping[str, str], implementations: Iterable[str]) -> bool:
        """Return whether every implementation has all of its rows at a shape."""
        return all(row is not None for name in implementations for row in self._of(shape, name))

    def lost(self, shape: Mapping[str, str], implementation: str) -> bool:
        """Return whether an implementation broke the device at a shape, so that it shouldn't be tried there again."""
        return any(row is not None and row["status"].startswith(LOST) for row in self._of(shape, implementation))


def now() -> str:
    """The time in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The device, every version and the code, as `commit_here` calls it."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "CPU, smoke run by the host's clock",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "triton": installed_version("triton") or "",
        "tritonpack": installed_version("tritonpack") or "source",
        "commit": commit or commit_here(),
        "flash_attn_3": installed_version("flash-attn-3") or "",
        "flash_attn_4": installed_version("flash-attn-4") or "",
        "xformers": installed_version("xformers") or "",
    }


def commit_here(root: Path = ROOT) -> str:
    """The commit of the code, or "unknown"; with a digest of the code where git doesn't say that this is all.

    The repository is named to git, which then accepts the clone of another user, and looks for none in folders above.
    """
    git = ("git", f"--git-dir={root / '.git'}", f"--work-tree={root}")
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--", *CODE, ":(exclude)benchmarks/results")
    if commit != "unknown" and changed == "":
        return commit
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(root) for folder in CODE for path in (root / folder).rglob("*.*")):
        hidden = any(part.startswith(".") for part in name.parts)  # an editor's, or Jupyter's
        if not hidden and not {"__pycache__", "results"}.intersection(name.parts) and (root / name).is_file():
            digest.update(f"{name}\0".encode() + (root / name).read_bytes())
    return f"{commit}+{digest.hexdigest()[:8]}"


def _output(*command: str) -> str:
    """The first line of a command's output, "unknown" if the command fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().partition("\n")[0]
