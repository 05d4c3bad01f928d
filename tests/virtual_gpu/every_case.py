"""Runs every case of attention, forward and backward, on the virtual GPU, and continues where it was ended.

    python -m tests.virtual_gpu.every_case every-case.tsv fp16:sm_90 fp32:sm_80

A line of the file says case, dtype, architecture, "right" or what is wrong, and seconds of the processor.
"""

import argparse
import time
from pathlib import Path

import torch

from tests.virtual_gpu.test_attention import CASES, DTYPES, check


def main() -> None:
    """Run what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("kinds", nargs="+", metavar="DTYPE:ARCH", help=f"{', '.join(DTYPES)}; sm_80, sm_90, ...")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = given.file.read_text().splitlines() if given.file.exists() else []
    for dtype, arch in (kind.split(":") for kind in given.kinds):
        for case in CASES:
            key = f"{case.name}\t{dtype}\t{arch}\t"
            if any(line.startswith(key) for line in done):
                continue
            torch.manual_seed(0)
            start, verdict = time.process_time(), "right"
            try:
                check(case.name, arch, dtype)
            except Exception as error:
                verdict = repr(error).replace("\t", " ")[:2000]
            with given.file.open("a") as file:
                file.write(f"{key}{verdict}\t{time.process_time() - start:.1f}\n")


if __name__ == "__main__":
    main()
