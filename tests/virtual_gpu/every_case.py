"""Runs every case of attention, forward and backward, on the virtual GPU, and continues where it was ended.

    python -m tests.virtual_gpu.every_case every-case.tsv fp16:sm_90 fp32:sm_80 bf16:sm_90:gluon

Each case also runs with a longer document, which fills several tiles, and with slack and a window. A line of the file
says case, dtype and architecture, "right" or what is wrong, and seconds of the processor. The file beside it, with
`.lines` in place of `.tsv`, says which instructions of each kernel didn't run. At the end both are summed up.
"""

import argparse
import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.virtual_gpu.device import Executable, VirtualGPU, virtual_gpu
from tests.virtual_gpu.test_attention import CASES, DTYPES, check
from tritonpack import BlockDiagonalMask
from tritonpack.errors import BackendUnavailableError
from tritonpack.testing.cases import parents_of

TREE = "long tree"  # a case without attention


def long_tree(arch: str) -> VirtualGPU:
    """The mask of a tree in which thousands of subtrees end in the rows of one program."""
    parents = parents_of([(-1, 10), (0, 4090), (0, 50)])
    expected = BlockDiagonalMask.from_tree(parents)
    with virtual_gpu(arch) as gpu:
        mask = BlockDiagonalMask.from_tree(torch.tensor(parents))
    for name in ("key_start", "key_stop", "query_start", "query_stop", "diagonal"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    return gpu


def unreached(executable: Executable) -> Iterator[str]:
    """What didn't run: the number of each line of the PTX, and the line of the source that it stems from."""
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


def reached(gpu: VirtualGPU, case: str, kind: str) -> list[dict[str, Any]]:
    """Which lines of each kernel didn't run."""
    return [
        {
            "case": case,
            "kind": kind,
            "kernel": one.name,
            "ptx": hashlib.sha256(one.ptx.encode()).hexdigest()[:12],
            "lines": len(one.lines()),
            "unreached": list(unreached(one)),
        }
        for one in gpu.executables
    ]


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Of each kernel how many lines no case reached, and which lines of the source they stem from."""
    left: dict[tuple[str, ...], set[str]] = {}
    lines, cases = {}, defaultdict(list)
    for row in rows:
        key = row["kernel"], row["kind"], row["ptx"]
        left[key] = set(row["unreached"]) & left.get(key, set(row["unreached"]))
        lines[key] = row["lines"]
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
    done = given.file.read_text().splitlines() if given.file.exists() else []
    lines = given.file.with_suffix(".lines")
    for kind in given.kinds:
        dtype, arch, backend = (*kind.split(":"), "triton")[:3]
        for name in (*(case.name for case in CASES), TREE):
            key = f"{name}\t{kind}\t"
            if any(line.startswith(key) for line in done):
                continue
            torch.manual_seed(0)
            start, verdict = time.process_time(), "right"
            try:
                gpu = long_tree(arch) if name == TREE else check(name, arch, dtype, backend)
                found = reached(gpu, name, kind)
                with lines.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
            except BackendUnavailableError:
                verdict = "refused"
            except Exception as error:
                verdict = repr(error).replace("\t", " ")[:2000]
            with given.file.open("a") as file:
                file.write(f"{key}{verdict}\t{time.process_time() - start:.1f}\n")
    rows = [line.split("\t") for line in given.file.read_text().splitlines()]
    for kind, count in Counter(row[1] for row in rows).items():
        verdicts = Counter(row[2] for row in rows if row[1] == kind)
        print(
            f"{kind}: {count} cases, {verdicts.pop('right', 0)} right", *(f"{verdicts[one]} {one}" for one in verdicts)
        )
    print(*summary([json.loads(line) for line in lines.read_text().splitlines()]), sep="\n")


if __name__ == "__main__":
    main()
