"""Every class of transformers' auto mappings that takes text, packed in every form and compared with documents alone.

Rows go to `results/VERSION.jsonl` beside this file. A class that has rows isn't run again without `--again`, so an
interrupted run can be continued. `python -m tests.patches.table` makes docs/models.md and
tritonpack/patches/exact_classes.csv from them.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.patches.sweep import forms, results
from tests.patches.sweep.classes import Case, cases, mappings
from tests.patches.sweep.results import ANY, HOWS, RESULTS, Row
from tests.patches.sweep.running import hows_of, run


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.sweep", description=__doc__)
    parser.add_argument("--mapping", nargs="+", choices=sorted(mappings()), metavar="MAPPING", help="such as CAUSAL_LM")
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="names, such as LlamaForCausalLM")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types, such as llama")
    parser.add_argument("--verdicts", nargs="+", metavar="VERDICT", help="those that have one of these verdicts so far")
    parser.add_argument("--forms", nargs="+", choices=forms.NAMES, default=forms.NAMES, metavar="FORM",
                        help=f"of {', '.join(forms.NAMES)}; fewer than all are kept with --out alone")  # fmt: skip
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS)
    parser.add_argument("--no-gradients", action="store_true", help="compare only outputs; losses still with gradients")
    parser.add_argument("--again", action="store_true", help="forget the rows of the chosen classes first")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="that one class may take")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"instead of {RESULTS.name}")
    options = parser.parse_args()
    known = {"classes": {case.name for case in cases()}, "types": {case.model_type for case in cases()},
             "verdicts": set(results.VERDICTS)}  # fmt: skip
    for name, allowed in known.items():
        if wrong := {*(getattr(options, name) or ())} - allowed:
            parser.error(f"--{name} knows no {', '.join(sorted(wrong))}.")
    return options


def chosen_cases(options: argparse.Namespace, before: list[Row]) -> list[Case]:
    found = list(cases())
    if options.mapping:
        found = [case for case in found if {*options.mapping} & {*case.mappings}]
    if options.classes:
        found = [case for case in found if case.name in options.classes]
    if options.types:
        found = [case for case in found if case.model_type in options.types]
    if options.verdicts:
        keys = {row.key for row in before if row.verdict in options.verdicts}
        found = [case for case in found if case.key in keys]
    return found


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    whole = options.forms == forms.NAMES and not options.no_gradients
    path = options.out or (RESULTS if whole else None)
    before = results.load(path, transformers.__version__) if path else []
    chosen = chosen_cases(options, before)
    if options.again and path:
        again = {case.key for case in chosen}
        hows = {*options.how} | ({ANY} if "patch" in options.how else set())
        before = [row for row in before if row.key not in again or row.how not in hows]
        results.save(before, path, version=transformers.__version__)
    done = {(row.key, row.how) for row in before}
    left = [
        case for case in chosen
        if (case.key, ANY) not in done and not all((case.key, how) in done for how in hows_of(case, options.how))
    ]  # fmt: skip
    print(f"{len(left)} of {len(chosen)} classes to run")
    start = time.perf_counter()
    found: dict[str, Counter[str]] = {}
    bare = []
    rows = run(left, jobs=options.jobs, limit=options.limit, hows=tuple(options.how), chosen=options.forms,
               with_gradients=not options.no_gradients)  # fmt: skip
    for row in rows:
        found.setdefault(row.how, Counter())[row.verdict] += 1
        bare += [f"{row.key} {row.how}"] if row.bare else []
        if path:
            results.append(row, path)
        if row.verdict != "no text":
            print(f"{row.key:56} {row.how:5} {row.verdict:9} {row.worst:.0e} {row.seconds:5.2f}s  {row.reason[:160]}",
                  flush=True)  # fmt: skip
    for how, counts in found.items():
        print(f"{how}: " + ", ".join(f"{counts[v]} {v}" for v in results.VERDICTS if counts[v]))
    if bare:
        print(f"{len(bare)} refusals don't say what to do: {', '.join(bare[:8])}{', ...' if bare[8:] else ''}")
    print(f"{time.perf_counter() - start:.0f}s")
    if path:
        results.save(results.load(path, transformers.__version__), path)


if __name__ == "__main__":
    main()
