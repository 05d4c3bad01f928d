"""Every class of transformers' auto mappings that takes text, packed in every form and compared with documents alone.

Rows go to `results/VERSION.jsonl` beside this file. A class that has rows isn't run again without `--again`, so an
interrupted run can be continued. `python -m tests.patches.table` makes docs/models.md and
tritonpack/patches/exact_classes.csv from them.
"""

import argparse
import dataclasses
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
import transformers

from tests.patches.sweep import results
from tests.patches.sweep.classes import Case, cases
from tests.patches.sweep.judging import hows_of, judge_case
from tests.patches.sweep.results import HOWS, NEVER, RESULTS, Row
from tritonpack.patches.measuring import quiet


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.sweep", description=__doc__)
    line = "'LlamaForCausalLM/llama CAUSAL_LM exact', with the verdicts so far"
    parser.add_argument("--only", nargs="+", default=[], metavar="REGEX", help=f"all found in a line such as {line}")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS)
    parser.add_argument("--again", action="store_true", help="forget the rows of the chosen classes first")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="that one class may take")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help=f"instead of {RESULTS.name}")
    return parser.parse_args()


def chosen_cases(patterns: list[str], before: list[Row]) -> list[Case]:
    verdicts: dict[str, set[str]] = {}
    for row in before:
        verdicts.setdefault(row.key, set()).add(row.verdict)
    lines = {case: " ".join([case.key, *case.mappings, *sorted(verdicts.get(case.key, ()))]) for case in cases()}
    return [case for case, line in lines.items() if all(re.search(pattern, line) for pattern in patterns)]


def _work(case: Case, hows: tuple[str, ...], pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # compilers and kernels print there
    with quiet():
        pipe.send([dataclasses.asdict(row) for row in judge_case(case, hows)])


def _rows_of(case: Case, limit: float, hows: tuple[str, ...]) -> list[Row]:
    """Return the rows of a class, which runs in a process of its own: a hang or a crash costs one class."""
    fork = multiprocessing.get_context("fork")  # so that nothing is imported twice
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(case, hows, theirs), daemon=True)
    process.start()
    theirs.close()
    why = f"it took more than {limit:.0f} seconds"
    try:
        if ours.poll(limit):
            return [Row(**row) for row in ours.recv()]
        process.kill()
    except EOFError:
        process.join()
        why = f"its process ended with {process.exitcode}"
    return [Row(case.key, HOWS[0], "error", why)]


def run(todo: list[Case], *, jobs: int = 1, limit: float = 60.0, hows: tuple[str, ...] = HOWS) -> Iterator[Row]:
    """Yield the rows of each class when it is done; `jobs` processes run at a time, each for `limit` seconds."""
    with ThreadPool(jobs) as pool:
        for rows in pool.imap_unordered(partial(_rows_of, limit=limit, hows=hows), todo):
            yield from rows


def main() -> None:
    options = parse()
    before = results.load(options.out, transformers.__version__)
    chosen = chosen_cases(options.only, before)
    if options.again:
        again = {case.key for case in chosen}
        before = [row for row in before if row.key not in again or row.how not in options.how]
        results.save(before, options.out, version=transformers.__version__)
    done = {(row.key, how) for row in before for how in (HOWS if row.verdict in NEVER else (row.how,))}
    left = [case for case in chosen if not all((case.key, how) in done for how in hows_of(case, options.how))]
    print(f"{len(left)} of {len(chosen)} classes to run")
    start, found = time.perf_counter(), dict[str, Counter[str]]()
    for row in run(left, jobs=options.jobs, limit=options.limit, hows=tuple(options.how)):
        found.setdefault(row.how, Counter())[row.verdict] += 1
        results.append(row, options.out)
        if row.verdict != "no text":
            told = f"{row.reason[:160]}{' (it says no remedy)' * row.bare}"
            print(f"{row.key:56} {row.how:5} {row.verdict:9} {row.worst:.0e} {row.seconds:5.2f}s  {told}", flush=True)
    for how, counts in found.items():
        print(f"{how}: " + ", ".join(f"{counts[v]} {v}" for v in results.VERDICTS if counts[v]))
    print(f"{time.perf_counter() - start:.0f}s")
    results.save(results.load(options.out, transformers.__version__), options.out)


if __name__ == "__main__":
    main()
