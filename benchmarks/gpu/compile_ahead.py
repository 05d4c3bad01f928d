"""Compile the kernels of the tests and benchmarks in parallel, without running them.

    python3 -m benchmarks.gpu.compile_ahead [--jobs 16] [--minutes 5] [--only PATTERN ...] [--without-gpu sm_90]

Triton keeps the binaries in its cache, where later processes find them. With --without-gpu the kernels are launched,
too, by Triton's own driver over a libcuda that runs nothing: so signatures, specialisations, descriptors and launches
are tried on a machine without a GPU. The calls are those of tests/kernels/launches.py, and more for the heads that
benchmarks/gpu/shapes.py and tests/gpu/test_hopper.py have. The kernels for Hopper are left out on other GPUs.

The exit status is 1 if a call failed, and 3 if calls are left.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from multiprocessing import get_context
from typing import Any

import torch
import triton

from benchmarks.gpu.ledger import CONTINUE
from benchmarks.gpu.shapes import shapes
from tests.gpu.cases import HOPPER_HEAD_DIMS, LARGE, is_plain
from tests.kernels.launches import Call, attention, calls, hopper_attention
from tritonpack.backends import launch as launching
from tritonpack.testing import CASES, Case
from tritonpack.testing.cases import TREES

HOPPER = "sm_90"
DONE = "compiled"  # the first word of the answer to a call that didn't fail


class _Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextmanager
def compile_only() -> Iterator[None]:
    """Let launches compile their kernels without running them. Results are whatever memory held.

    Make masks before: a mask whose bounds have no values may fail an assertion on the device.
    """
    from triton.runtime.jit import JITFunction

    original, kept = JITFunction.run, launching._binaries

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        return original(self, *arguments, grid=grid, warmup=True, **keywords)

    JITFunction.run, launching._binaries = run, _Forgetful()  # a binary that is kept would be run
    try:
        yield
    finally:
        JITFunction.run, launching._binaries = original, kept


def calls_for(arch: str) -> list[Call]:
    """The calls that an architecture has kernels for."""
    every = (*calls(), *calls_of_shapes(), *calls_of_groups())
    return [call for call in every if arch == HOPPER or not call.for_hopper]


def calls_of_groups() -> list[Call]:
    """Calls of the kernels for Hopper with the numbers of query heads per key head that their tests have."""
    cases = [case for case in CASES if is_plain(case)]
    groups = sorted({case.heads // case.kv_heads for case in cases} - {LARGE[1].heads // LARGE[1].kv_heads})
    return [
        hopper_attention(
            f"gluon-group-{group}-{head_dim}-{dtype}",
            replace(LARGE[1], heads=2 * group, kv_heads=2, head_dim=head_dim),
            dtype,
        )
        for group in groups
        for head_dim in HOPPER_HEAD_DIMS
        for dtype in ("bf16", "fp16")
    ]


def calls_of_shapes() -> list[Call]:
    """A call for each combination of heads and of documents or trees among the shapes that are measured."""
    found: dict[str, Call] = {}
    for shape in shapes():
        name = f"{shape.heads}/{shape.kv_heads}x{shape.head_dim}" + "-tree" * shape.trees
        documents = TREES[0] if shape.trees else Case("", (300, 20))
        case = replace(documents, name=name, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        found[f"shape-{name}"] = attention(f"shape-{name}-bf16", case, "bf16", {})
        if shape.head_dim in HOPPER_HEAD_DIMS and not shape.trees:
            found[f"gluon-shape-{name}"] = hopper_attention(f"gluon-shape-{name}-bf16", case, "bf16")
    return list(found.values())


def this_arch() -> str:
    """The architecture of the GPU, as --without-gpu takes it."""
    return "" if torch.version.hip else "sm_{}{}".format(*torch.cuda.get_device_capability())


def compile_call(name: str, arch: str | None, end: float) -> str:
    """Compile a call; returns the seconds, or the error. "" if the time `end` (of `time.time`) has come."""
    from tests.virtual_gpu.driver import fake_gpu

    began = time.time()
    if began >= end:
        return ""
    try:
        call = next(call for call in calls_for(arch or this_arch()) if call.name == name)
        given = call.prepare("cuda" if arch is None else "cpu")
        with compile_only() if arch is None else fake_gpu(arch):
            call.launch(given)
    except Exception as error:  # a compiler fails in many ways
        traceback.print_exc()
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"{DONE} {time.time() - began:.1f} s"


def compile_all(names: list[str], jobs: int, minutes: float, arch: str | None) -> dict[str, str]:
    """The answer of each call that was begun in time. A compiler that ends its process ends all."""
    answers: dict[str, str] = {}
    pool, end = ProcessPoolExecutor(jobs, mp_context=get_context("spawn")), time.time() + 60 * minutes
    try:
        futures = {pool.submit(compile_call, name, arch, end): name for name in names}
        for future in as_completed(futures):
            error = future.exception()
            if answer := str(error) if error else future.result():
                answers[futures[future]] = answer
                print(f"{futures[future]:40} {answer}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16), help="processes")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to begin no further call")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="PATTERN", help="names of calls begin so; * is any text"
    )
    parser.add_argument("--without-gpu", metavar="ARCH", help="launch for this architecture on a machine without a GPU")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the processes, too
    if options.without_gpu is None and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu.compile_ahead needs a GPU, or --without-gpu sm_90.")
    offered = [call.name for call in calls_for(options.without_gpu or this_arch())]
    names = [name for name in offered if any(fnmatchcase(name, f"{pattern}*") for pattern in options.only)]
    answers = compile_all(names, min(options.jobs, len(names)), options.minutes, options.without_gpu)
    failed = [name for name, answer in answers.items() if not answer.startswith(DONE)]
    print(f"{len(answers) - len(failed)} of {len(names)} calls compile under Triton {triton.__version__}", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    if failed:
        raise SystemExit(1)
    if len(answers) < len(names):
        raise SystemExit(CONTINUE)


if __name__ == "__main__":
    main()
