"""The CSV files of measurements, all with the same columns, and the facts of the environment that their rows hold."""

from __future__ import annotations

import csv
import hashlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch

from tritonpack.cli.machine import installed_version

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")
CODE = ("tritonpack", "benchmarks")  # the folders that figures depend on
KEY = ("benchmark", "case", "implementation")  # what names a measurement
ABOUT = ("device", "versions", "commit")  # in which environment it was made
COLUMNS = (*KEY, "status", "p20_ms", "p50_ms", "p80_ms", "figures", *ABOUT, "date")
CONTINUE = 3  # the exit status of a program that isn't done, and that the same command continues
PACKAGES = ("torch", "triton", "transformers", "tritonpack", "flash-attn-3", "flash-attn-4", "xformers")

Row = dict[str, str]


def joined(values: Mapping[str, object]) -> str:
    """Names and values in a cell: "documents=flan; tokens=4096". A value that is None or "" is left out."""
    return "; ".join(f"{name}={value}" for name, value in values.items() if value not in (None, ""))


def parted(cell: str) -> Row:
    """The names and values of such a cell."""
    return dict(part.split("=", 1) for part in cell.split("; ")) if cell else {}


def read(path: Path) -> list[Row]:
    """The rows of a ledger; of a measurement that was repeated on a device only the last one.

    Raises:
        SystemExit: there is no such file, or it has other columns.
    """
    return list({tuple(row[name] for name in (*KEY, "device")): row for row in _rows(path)}.values())


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        raise SystemExit(f"{path} doesn't exist; `python -m benchmarks.gpu` and `benchmarks.cpu` write such files.")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path} isn't a ledger of this version: its columns aren't {', '.join(COLUMNS)}.")
        return list(reader)


class Ledger:
    """Appends rows to a CSV, and knows which measurements it has of this environment.

    Args:
        path: of the file, which is made if it isn't there.
        about: the columns ABOUT of all rows of this run.

    Raises:
        SystemExit: the file has other columns.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self.path, self.about = path, dict(about)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(dict(zip(COLUMNS, COLUMNS, strict=True)))
        here = [row for row in _rows(path) if self.about.items() <= row.items()]
        self._known = {tuple(row[name] for name in KEY): row for row in here}

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row, with the environment and the time."""
        whole = dict.fromkeys(COLUMNS, "") | {name: str(value) for name, value in row.items()} | self.about
        whole["date"] = now()
        self._append(whole)
        self._known[tuple(whole[name] for name in KEY)] = whole

    def find(self, benchmark: str, case: str, implementation: str = "") -> Row | None:
        """The row of a measurement; None if it wasn't made before in this environment."""
        return self._known.get((benchmark, case, implementation))

    def rows(self) -> list[Row]:
        """The rows of this environment."""
        return list(self._known.values())

    def _append(self, row: Mapping[str, str]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


def now() -> str:
    """The time in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """The device, every version and the code, as `commit_here` calls it."""
    versions: dict[str, object] = {}
    if device.type == "cuda":
        versions["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        versions["cuda"] = torch.version.cuda or torch.version.hip
    else:
        versions["threads"] = torch.get_num_threads()
    versions |= {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES}
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        "versions": joined(versions),
        "commit": commit or commit_here(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


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
