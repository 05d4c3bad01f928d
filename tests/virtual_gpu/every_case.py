"""Runs every case of attention, forward and backward, on the virtual GPU, and continues where it was ended.

    python -m tests.virtual_gpu.every_case every-case.tsv fp16:sm_90 fp32:sm_80 bf16:sm_90:gluon

Each case also runs with a longer document, which fills several tiles, and with slack and a window. A line of the file
says case, dtype and architecture, "right" or what is wrong, and seconds of the processor. At the end it is summed up.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch

from tests.virtual_gpu.device import virtual_gpu
from tests.virtual_gpu.test_attention import CASES, DTYPES, check
from tritonpack import BlockDiagonalMask
from tritonpack.errors import BackendUnavailableError
from tritonpack.testing.cases import parents_of

TREE = "long tree"  # a case without attention


def long_tree(arch: str) -> None:
    """The mask of a tree in which thousands of subtrees end in the rows of one program."""
    parents = parents_of([(-1, 10), (0, 4090), (0, 50)])
    expected = BlockDiagonalMask.from_tree(parents)
    with virtual_gpu(arch):
        mask = BlockDiagonalMask.from_tree(torch.tensor(parents))
    for name in ("key_start", "key_stop", "query_start", "query_stop", "diagonal"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name


def main() -> None:
    """Run what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("kinds", nargs="*", metavar="DTYPE:ARCH[:BACKEND]", help=f"{', '.join(DTYPES)}; sm_80, ...")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = given.file.read_text().splitlines() if given.file.exists() else []
    for kind in given.kinds:
        dtype, arch, backend = (*kind.split(":"), "triton")[:3]
        for name in (*(case.name for case in CASES), TREE):
            key = f"{name}\t{kind}\t"
            if any(line.startswith(key) for line in done):
                continue
            torch.manual_seed(0)
            start, verdict = time.process_time(), "right"
            try:
                if name == TREE:
                    long_tree(arch)
                else:
                    check(name, arch, dtype, backend)
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


if __name__ == "__main__":
    main()
