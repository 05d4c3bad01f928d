"""Runs cases in processes of their own, one for each model type, so that a hang or a crash costs one class."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.patches.sweep import build
from tests.patches.sweep.classes import Case, cases, mappings
from tests.patches.sweep.judging import ALL_FORMS, HOWS, Row, judge_case


def _work(group: list[Case], options: dict[str, Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    with build.quiet():
        for case in group:
            pipe.send([asdict(row) for row in judge_case(case, **options)])
    pipe.close()


def run(
    chosen: Iterable[Case], *, jobs: int = 1, limit: float = 60.0, hows: Iterable[str] = HOWS, **options: Any
) -> Iterator[Row]:
    """Rows of all chosen cases, as they are done.

    Args:
        jobs: processes at a time.
        limit: seconds that one class may take.
        hows, options: of `judge_case`.
    """
    hows = tuple(hows)
    groups: dict[str, list[Case]] = {}
    for case in chosen:
        groups.setdefault(case.model_type, []).append(case)
    waiting = list(groups.values())[::-1]
    fork = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[Any, list[Case], float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            group = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(group, {"hows": hows, **options}, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = process, group, time.monotonic() + limit
        ready = wait(list(running), timeout=1.0)
        for pipe, (process, group, end) in list(running.items()):
            why = ""
            if pipe in ready:
                try:
                    for row in pipe.recv():
                        yield Row(**row)
                    running[pipe] = process, group[1:], time.monotonic() + limit
                    continue
                except EOFError:
                    process.join()
                    why = f"its process ended with {process.exitcode}"
            elif time.monotonic() > end:
                process.kill()
                why = f"took more than {limit:.0f} seconds"
            if why:
                del running[pipe]
                process.join()
                pipe.close()
                if group:
                    for how in hows:
                        yield Row(group[0].key, how, "error", why)
                    if group[1:]:
                        waiting.append(group[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.sweep")
    parser.add_argument("--mapping", nargs="+", choices=sorted(mappings()))
    parser.add_argument("--classes", nargs="+")
    parser.add_argument("--types", nargs="+")
    parser.add_argument("--forms", nargs="+", choices=ALL_FORMS, default=ALL_FORMS)
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--no-gradients", action="store_true")
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    chosen = [
        c
        for c in cases()
        if (not o.mapping or {*o.mapping} & {*c.mappings})
        and (not o.classes or c.name in o.classes)
        and (not o.types or c.model_type in o.types)
    ]
    torch.set_num_threads(1)
    found: dict[str, Counter[str]] = {how: Counter() for how in o.how}
    out = o.out.open("a") if o.out else None
    start = time.perf_counter()
    for row in run(chosen, jobs=o.jobs, limit=o.limit, hows=o.how, forms=o.forms, with_gradients=not o.no_gradients):
        found[row.how][row.verdict] += 1
        if out:
            out.write(json.dumps(asdict(row)) + "\n")
            out.flush()
        if row.verdict != "no text":
            print(
                f"{row.key:60} {row.how:6} {row.verdict:9} {row.worst:.0e} {row.seconds:5.2f}s {row.reason[:200]}",
                flush=True,
            )
    for how, counts in found.items():
        print(how, dict(counts))
    print(f"{time.perf_counter() - start:.0f}s")
