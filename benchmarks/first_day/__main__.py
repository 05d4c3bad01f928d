"""All that is to be done on the first day with a GPU, in safe order, and a verdict.

    python3 -m benchmarks.first_day [--out DIR] [--minutes 9] [--commit NAME] [--again STEP ...]

The first steps check a few results, compare attention at the shapes of the targets, and tune. Those after them check,
compare and tune the rest, and train. Each runs in a process of its own with a time limit. Its result is written to
DIR/steps.jsonl at once, so that the same command continues where the last call ended: after --minutes, or after a
machine was lost with only DIR saved. A step that fails or hangs ends no other; those that need it are skipped with the
reason. A step that failed is run again if the code has another commit, or if --again names it.

Results belong to a device and a version of Triton. On another device all steps run again, and its minutes are its own.

DIR is first-day, or first-day/dry of a dry run, unless --out names another folder. It gets verdict.md, steps.jsonl
(each result with the end of its output), attention.csv, masks.csv, training.csv, tiles.csv with the tiles that were
tried, and tiles.json with the fastest, which `tritonpack.load_tiles` reads.

--dry-run needs no GPU: it runs each step's command in a form that does, with all kernels compiled and launched on
Triton's own driver over a libcuda that runs nothing.

The exit status is 0 if all steps are ok, 3 if steps are left for the next call, and otherwise 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.first_day import steps as list_of_steps
from benchmarks.first_day import verdict
from benchmarks.first_day.runner import OK, Day, Journal, this_platform
from benchmarks.gpu.ledger import CONTINUE, commit_here


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.first_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of results; a second call continues it")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: %(default)g)")
    parser.add_argument("--commit", help="a name of the code (default: its commit, or a digest)")
    parser.add_argument("--again", nargs="+", default=[], metavar="STEP", help="steps to run although they are done")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="no steps but these, whatever they need")
    parser.add_argument("--list", action="store_true", help="print the steps with their time limits and stop")
    parser.add_argument("--dry-run", action="store_true", help="try the commands on a machine without a GPU")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    commit = options.commit or commit_here()
    todo = list_of_steps.dry_steps(commit) if options.dry_run else list_of_steps.steps(commit)
    unknown = {*options.again, *(options.only or [])} - {step.name for step in todo}
    if unknown:
        parser.error(f"the steps are {', '.join(step.name for step in todo)}; got {', '.join(sorted(unknown))}.")
    if options.only:
        chosen = [step for step in todo if step.name in options.only]
        todo = [replace(step, after=tuple(x for x in step.after if x in options.only), serves=()) for step in chosen]
    if options.list:
        for step in todo:
            print(f"{step.name:12} at most {step.limit:3.0f} s  {step.what}\n{'':20}{' '.join(step.command)}")
        return
    # Steps that were only tried mustn't count as done on a GPU.
    out = options.out or (Path("first-day", "dry") if options.dry_run else Path("first-day"))
    platform = this_platform(dry=options.dry_run)
    day = Day(
        todo,
        Journal(out / "steps.jsonl", platform),
        out.resolve(),
        commit,
        () if options.dry_run else list_of_steps.PROBE,
        platform,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the step that runs is ended, too
    done = day.run(60 * options.minutes, options.again)
    (out / "verdict.md").write_text(verdict.report(day), encoding="utf-8")
    print(f"\n{verdict.summary(day)}\n{out / 'verdict.md'}", flush=True)
    if not done:
        raise SystemExit(CONTINUE)
    if any(last is None or last.verdict != OK for last in map(day.journal.last, todo)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
