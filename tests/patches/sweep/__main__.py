"""Every class of transformers' auto mappings that takes text, packed in every form and compared with documents alone.

Rows go to `results/VERSION.jsonl` beside this file. A class that has rows isn't run again without `--again`, so an
interrupted run can be continued. `python -m tests.patches.table` makes docs/models.md and
tritonpack/patches/exact_classes.csv from them.
"""

import argparse
import re
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.patches.sweep import results
from tests.patches.sweep.classes import Case, cases
from tests.patches.sweep.results import HOWS, NEVER, RESULTS, Row
from tests.patches.sweep.running import hows_of, run


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


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    before = results.load(options.out, transformers.__version__)
    chosen = chosen_cases(options.only, before)
    if options.again:
        again = {case.key for case in chosen}
        before = [row for row in before if row.key not in again or row.how not in options.how]
        results.save(before, options.out, version=transformers.__version__)
    done = {(row.key, row.how) for row in before}
    never = {row.key for row in before if row.verdict in NEVER}
    left = [
        case for case in chosen
        if case.key not in never and not all((case.key, how) in done for how in hows_of(case, options.how))
    ]  # fmt: skip
    print(f"{len(left)} of {len(chosen)} classes to run")
    start = time.perf_counter()
    found: dict[str, Counter[str]] = {}
    bare = []
    for row in run(left, jobs=options.jobs, limit=options.limit, hows=tuple(options.how)):
        found.setdefault(row.how, Counter())[row.verdict] += 1
        bare += [f"{row.key} {row.how}"] if row.bare else []
        results.append(row, options.out)
        if row.verdict != "no text":
            print(f"{row.key:56} {row.how:5} {row.verdict:9} {row.worst:.0e} {row.seconds:5.2f}s  {row.reason[:160]}",
                  flush=True)  # fmt: skip
    for how, counts in found.items():
        print(f"{how}: " + ", ".join(f"{counts[v]} {v}" for v in results.VERDICTS if counts[v]))
    if bare:
        print(f"{len(bare)} refusals don't say what to do: {', '.join(bare[:8])}{', ...' if bare[8:] else ''}")
    print(f"{time.perf_counter() - start:.0f}s")
    results.save(results.load(options.out, transformers.__version__), options.out)


if __name__ == "__main__":
    main()
