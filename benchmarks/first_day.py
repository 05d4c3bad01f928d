"""All that is to be done on the first day with a GPU, the most valuable first: tests, benchmarks, tuning.

    python3 -m benchmarks.first_day [--out DIR] [--minutes 9] [--only STEP ...]

Each step is a command in a process of its own with a time limit. Its result is written to DIR/steps.jsonl at once, so
the same command continues where the last call ended: after --minutes, or after a machine was lost with only DIR saved.
A call runs the first step, which says what is there, and then the steps that aren't ok as far as their limits fit into
its minutes: first those that never failed, then the others. A step that fails or hangs ends no other, but is needed by
those that name it in the last column of `STEPS`.

DIR (default: first-day) also gets verdict.md, attention.csv, masks.csv, training.csv, tiles.csv with the tiles that
were tried, and tiles.json with the fastest, which `tritonpack.load_tiles` reads. For another device or version of
Triton name another DIR. `--list` prints the steps.

The exit status is 0 if all steps are ok, 3 if the same command has more to run, and otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.ledger import CONTINUE, commit_here, now

ROOT = Path(__file__).parents[1]
KEPT = 64_000  # characters of a step's output that are kept with its result
NOTICE = 10  # seconds between the time that a program is given and the time at which it is ended
FEWEST = 30  # seconds that a program with {minutes} needs at least

PYTEST = "python3 -m pytest -q -p no:cacheprovider -m gpu"
GPU, HOPPER = f"{PYTEST} tests/gpu/test_gpu.py", f"{PYTEST} tests/gpu/test_hopper.py"
COMPARE = "python3 -m benchmarks.gpu --out {out} --minutes {minutes} --commit {commit}"
AHEAD = "python3 -m benchmarks.gpu.compile_ahead --minutes {minutes}"
SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"
# compute-sanitizer sees the tests in its own process, and every allocation if torch doesn't pool them.
MEMORY = f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 {SANITIZER} memcheck {PYTEST} --one-process"
RACES = f"{SANITIZER} racecheck --kernel-name kns=hopper_ {PYTEST} --one-process"


class Step(NamedTuple):
    """A step.

    Attributes:
        name: unique.
        limit: seconds after which it is ended, of all calls together if its command has {minutes}.
        what: it shows.
        command: {out} is the folder of results, {minutes} the time that it is given, {commit} a name of the code.
        after: the step that must be ok before.
    """

    name: str
    limit: float
    what: str
    command: str
    after: str = "machine"


STEPS = (
    Step("machine", 90, "the device and the versions", "python3 -m benchmarks.gpu.machine", ""),
    Step("compile", 240, "the kernels of the next steps compile, on all cores, before any runs",
         f"{AHEAD} --only causal-bf16 'large-*-bf16' 'gluon-*-bf16' shape- offsets ids transpose parents ends tables "
         "dense"),
    Step("launch", 90, "one small case, forward and backward",
         f"{PYTEST} 'tests/gpu/test_gpu.py::test_small_cases[causal-bf16]'"),
    Step("quick", 120, "cases of models' sizes in bfloat16; documents stay apart",
         f"{GPU} -k 'test_large_cases and bf16 or a_change_in_a_document or a_patched_model'", "launch"),
    Step("gluon", 90, "one small and some large cases of the kernels for Hopper",
         f"{HOPPER} -x -k 'bf16 and (test_large_cases or (test_small_cases and causal and 128))'", "launch"),
    Step("ceilings", 60, "the rates of a copy and of a matrix product", "python3 -m benchmarks.gpu.machine ceilings"),
    Step("targets", 330, "ours beside the others at the shapes of the targets, each after a check of its results",
         f"{COMPARE} --first 3 --without xformers 'sdpa, dense mask'", "launch"),
    Step("tune", 240, "the fastest tiles at head dimension 128",
         "python3 -m benchmarks.tune --out {out}/tiles.json --minutes {minutes} --commit {commit} --head-dims 128 "
         "--most 10", "launch"),
    Step("compile-rest", 300, "all other kernels compile", AHEAD),
    Step("small", 240, "small cases in three dtypes", f"{GPU} -k test_small_cases", "launch"),
    Step("rest", 240, "memory, waiting, offsets beyond 2**31, pack_invariant, FlashAttention's functions",
         f"{GPU} tests/gpu/test_flash_attn.py tests/gpu/test_benchmark.py -k 'not test_small_cases and not "
         "test_large_cases and not test_repeats and not graph'", "launch"),
    Step("models", 240, "documents of patched models stay apart", f"{PYTEST} tests/gpu/test_models.py", "launch"),
    Step("repeats", 150, "200 equal results of the same call", f"{GPU} -k test_repeats", "launch"),
    Step("gluon-tests", 240, "results, gradients and 200 equal repeats of the kernels for Hopper", HOPPER, "gluon"),
    Step("large", 120, "cases of models' sizes in float16", f"{GPU} -k 'test_large_cases and fp16'", "launch"),
    Step("graphs", 120, "one CUDA graph serves other documents, too",
         f"{GPU} tests/gpu/test_flash_attn.py -k graph", "launch"),
    Step("memory", 240, "no access outside of memory, in small cases",
         f"{MEMORY} tests/gpu/test_gpu.py -k 'test_small_cases and bf16 and (slack or tree-forest)'", "launch"),
    Step("gluon-races", 180, "no race in shared memory, in the kernels for Hopper",
         f"{RACES} tests/gpu/test_hopper.py -k 'test_small_cases and bf16 and 128 and (slack or multi-query)'",
         "gluon"),
    Step("gluon-memory", 180, "no access outside of memory, with the kernels for Hopper",
         f"{MEMORY} tests/gpu/test_hopper.py -k 'test_small_cases and bf16 and 128 and (slack or multi-query)'",
         "gluon"),
    Step("compare", 300, "ours beside the others at more shapes",
         f"{COMPARE} --first 6 --without xformers 'sdpa, dense mask'", "launch"),
    Step("training", 300, "steps of a model on padded and packed batches",
         "python3 -m benchmarks.training --model llama-2-7b --layers 2 --steps 12 --lengths flan --out {out} "
         "--commit {commit}", "launch"),
    Step("masks", 120, "how long masks take to build and to write out",
         "python3 -m benchmarks.gpu.masks --out {out} --commit {commit}", "launch"),
)  # fmt: skip


class Day:
    """The results of all calls in a folder.

    Attributes:
        steps: of this call.
        again: whether those that are ok run again, too.
        results: in order, as in steps.jsonl: step, verdict (ok, failed or unfinished), seconds, reason, output, date.
    """

    def __init__(self, out: Path, steps: Sequence[Step], commit: str, *, again: bool = False) -> None:
        self.out, self.steps, self.commit, self.again = out.resolve(), steps, commit, again
        self.out.mkdir(parents=True, exist_ok=True)
        self._path = self.out / "steps.jsonl"
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a machine may be lost while it writes a line
        self._path.write_text(whole, encoding="utf-8")
        self.results: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]

    def last(self, name: str) -> dict[str, Any]:
        """The newest result of a step; "pending" if there is none."""
        return next((one for one in reversed(self.results) if one["step"] == name), {"verdict": "pending"})

    def left(self, step: Step) -> float:
        """The seconds that a step may take: of a program that continues, what its calls before have left."""
        if self.again or "{minutes}" not in step.command:
            return step.limit
        return step.limit - sum(one["seconds"] for one in self.results if one["step"] == step.name)

    def pending(self) -> list[Step]:
        """The first step, the steps that have no end yet, and those that failed or had their time."""
        if self.again:
            return list(self.steps)
        first, *others = self.steps
        others = [step for step in others if self.last(step.name)["verdict"] != "ok"]
        late = [s for s in others if self.last(s.name)["verdict"] == "failed" or self.left(s) < FEWEST]
        return [first, *(step for step in others if step not in late), *late]

    def run(self, seconds: float) -> bool:
        """Run what is pending and fits; returns False if a step is left for the next call."""
        end, done = time.monotonic() + seconds, True
        for step in self.pending():
            left, limit = end - time.monotonic(), self.left(step)
            known = any(one.name == step.after for one in self.steps)
            if known and self.last(step.after)["verdict"] != "ok":
                print(f"{step.name:12} needs {step.after}, which isn't ok", flush=True)
            elif "{minutes}" in step.command and limit < FEWEST:
                print(f"{step.name:12} had its time", flush=True)
            elif left < (FEWEST if "{minutes}" in step.command else limit):
                done = False
            else:
                self._run(step, min(left, limit))
                done = done and self.last(step.name)["verdict"] != "unfinished"
        return done

    def _run(self, step: Step, limit: float) -> None:
        given = {"out": self.out, "minutes": f"{max(limit - NOTICE, 1) / 60:.2f}", "commit": self.commit}
        command = [sys.executable if x == "python3" else x.format(**given) for x in shlex.split(step.command)]
        log, began, status = self.out / "running.log", time.monotonic(), 1
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH", ""))))
        with log.open("wb") as file:
            try:  # a group of its own, to end its children, too
                process = subprocess.Popen(
                    command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT, env=variables,
                    preexec_fn=os.setpgrp,
                )  # fmt: skip
            except OSError as error:
                file.write(str(error).encode())
            else:
                try:
                    status = process.wait(limit)
                except subprocess.TimeoutExpired:
                    status = CONTINUE if "{minutes}" in step.command else -signal.SIGKILL
                finally:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        taken = time.monotonic() - began
        verdict = {0: "ok", CONTINUE: "unfinished"}.get(status, "failed")
        reason = "" if status == 0 else f"exit status {status}" if taken < limit else f"ended after {limit:.0f} s"
        output = log.read_text(encoding="utf-8", errors="replace")[-KEPT:]
        result = {"step": step.name, "verdict": verdict, "seconds": round(taken, 1), "reason": reason,
                  "output": output, "commit": self.commit, "date": now()}  # fmt: skip
        self.results.append(result)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
            file.flush()
            os.fsync(file.fileno())
        log.unlink()
        print(f"{step.name:12} {verdict:10} {taken:6.1f} s  {reason} {last_line(output)}", flush=True)

    def verdict(self) -> str:
        """A table of all steps in Markdown, and the end of what those printed that aren't ok."""
        lines = [f"# The first day\n\nCommit {self.commit}.\n", "| step | what it shows | verdict | seconds | result |"]
        lines.append("|---" * 5 + "|")
        ends = []
        for step in self.steps:
            last = self.last(step.name)
            output = last.get("output", "")
            result = f"{last.get('reason', '')} {last_line(output)}".strip()[:160].replace("|", "\\|")
            lines.append(f"| {step.name} | {step.what} | {last['verdict']} | {last.get('seconds', '')} | {result} |")
            if last["verdict"] in ("failed", "unfinished"):
                ends.append(f"\n## The end of {step.name}\n\n```text\n{output[-4000:].strip()}\n```")
        return "\n".join([*lines, *ends]) + "\n"


def last_line(output: str) -> str:
    """The last line of an output."""
    return output.strip().rpartition("\n")[2].strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first-day"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call (default: %(default)g)")
    parser.add_argument("--commit", help="a name of the code (default: its commit, or a digest)")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[s.name for s in STEPS], help="only these, again")
    parser.add_argument("--list", action="store_true", help="print the steps with their time limits and stop")
    options = parser.parse_args(arguments)
    steps = [step for step in STEPS if step.name in (options.only or [s.name for s in STEPS])]
    if options.list:
        for step in steps:
            print(f"{step.name:12} at most {step.limit:3.0f} s  {step.what}\n{'':13}{step.command}")
        return
    day = Day(options.out, steps, options.commit or commit_here(), again=options.only is not None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the step that runs is ended, too
    done = day.run(60 * options.minutes)
    (options.out / "verdict.md").write_text(day.verdict(), encoding="utf-8")
    print(f"\n{options.out / 'verdict.md'}", flush=True)
    if not done:
        raise SystemExit(CONTINUE)
    if any(day.last(step.name)["verdict"] != "ok" for step in steps):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
