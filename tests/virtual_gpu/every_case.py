"""Runs every case of attention, forward and backward, on the virtual GPU, and continues where it was ended.

    python -m tests.virtual_gpu.every_case every-case.jsonl fp16:sm_90 fp32:sm_80 bf16:sm_90:gluon

Each case also runs with a longer document, which fills several tiles, and with slack and a window. A line of the file
says case, dtype and architecture, "right" or what is wrong, and which instructions of each kernel didn't run. At the
end they are summed up.
"""

import argparse
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.virtual_gpu.device import Executable
from tests.virtual_gpu.test_attention import DTYPES, check
from tritonpack.errors import BackendUnavailableError
from tritonpack.testing import CASES


def unreached(executable: Executable) -> Iterator[str]:
    """The lines of the PTX that didn't run: the number of each, and the line of the source that it stems from."""
    text = executable.ptx.splitlines()
    files = dict(re.findall(r'\.file\s+(\d+) ".*?([^/"]*)"', executable.ptx))
    source, sources = "", []
    for line in text:
        if found := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            source = f"{files[found[1]]}:{found[2]}"
        sources.append(source)
    for line in executable.lines():
        if line.number and not line.runs and "$L__func_end" not in text[line.number - 1]:
            yield f"{line.number} {sources[line.number - 1]}"


def reached(executable: Executable) -> dict[str, Any]:
    """A kernel, how many instructions it has, and which of them didn't run."""
    digest = hashlib.sha256(executable.ptx.encode()).hexdigest()[:12]
    lines = len(executable.lines())
    return {"kernel": executable.name, "ptx": digest, "lines": lines, "unreached": list(unreached(executable))}


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The verdicts, and of each kernel how many lines no case reached, by the lines of the source they stem from."""
    for kind in sorted({row["kind"] for row in rows}):
        verdicts = Counter(row["verdict"] for row in rows if row["kind"] == kind)
        yield f"{kind}: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.most_common())}"
    left: dict[tuple[str, ...], set[str]] = {}
    lines, cases = {}, defaultdict(list)
    for row, one in ((each, kernel) for each in rows for kernel in each["kernels"]):
        key = one["kernel"], row["kind"], one["ptx"]
        left[key] = set(one["unreached"]) & left.get(key, set(one["unreached"]))
        lines[key] = one["lines"]
        cases[key].append(row["case"])
    for kernel in sorted({key[:2] for key in left}):
        variants = [key for key in left if key[:2] == kernel]
        whole, missed = sum(lines[key] for key in variants), sum(len(left[key]) for key in variants)
        share = f"{missed} not reached ({missed / whole:.1%})"
        yield f"{' '.join(kernel)}: {len(variants)} variants, {whole} lines, {share}"
        sources = Counter(line.split(" ")[1] for key in variants for line in left[key])
        for source, count in sources.most_common():
            where = sorted({name for key in variants if any(source in one for one in left[key]) for name in cases[key]})
            yield f"    {count:6} {source:24} {len(where)} cases: {' '.join(where[:4])}"


def main() -> None:
    """Run what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("kinds", nargs="*", metavar="DTYPE:ARCH[:BACKEND]", help=f"{', '.join(DTYPES)}; sm_80, ...")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    done = {(row["case"], row["kind"]) for row in rows}
    for name, kind in ((case.name, kind) for kind in given.kinds for case in CASES if (case.name, kind) not in done):
        dtype, arch, backend = (*kind.split(":"), "triton")[:3]
        torch.manual_seed(0)
        row: dict[str, Any] = {"case": name, "kind": kind, "verdict": "right", "kernels": []}
        try:
            row["kernels"] = [*map(reached, check(name, arch, dtype, backend).executables)]
        except BackendUnavailableError:
            row["verdict"] = "refused"
        except Exception as error:
            row["verdict"] = repr(error)[:2000]
        rows.append(row)
        with given.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
