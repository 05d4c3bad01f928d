"""The first day on a GPU: the order of steps, their limits, what a second call does, and that each command is valid."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.first_day import ROOT, STEPS, Day, Step
from benchmarks.gpu.compile_ahead import calls_for
from benchmarks.gpu.shapes import shapes
from benchmarks.harness.ledger import CONTINUE

FINE, FAILS = "print('fine')", "print('first'); raise SystemExit('broken')"
HANGS = "import time; print('begun', flush=True); time.sleep(600)"


def python(name: str, program: str = FINE, limit: float = 30.0, after: str = "", minutes: bool = False) -> Step:
    """A step that runs a program."""
    command = f"python3 -c {shlex.quote(program)} {{out}}" + " {minutes}" * minutes
    return Step(name, limit, f"what {name} shows", command, after)


def day(out: Path, *steps: Step, **options: Any) -> Day:
    return Day(out, steps, "abc1234", **options)


def verdicts(of: Day) -> dict[str, str]:
    return {step.name: of.last(step.name)["verdict"] for step in of.steps}


# A program and its limit -> verdict, reason, last line
ALONE = [
    (FINE, 30, ("ok", "", "fine")),
    (FAILS, 30, ("failed", "exit status 1", "broken")),
    ("import os; os.abort()", 30, ("failed", "exit status -6", "")),
    (HANGS, 1, ("failed", "ended after 1 s", "begun")),
]


@pytest.mark.parametrize(("program", "limit", "expected"), ALONE)
def test_one_step(program: str, limit: float, expected: tuple[str, str, str], tmp_path: Path) -> None:
    done = day(tmp_path, python("a", program, limit))
    assert done.run(60)
    last = done.last("a")
    assert (last["verdict"], last["reason"], last["output"].strip().rpartition("\n")[2]) == expected


def test_a_failure_ends_only_what_needs_it(tmp_path: Path) -> None:
    missing = Step("e", 9, "", "no-such-sanitizer x", "")
    steps = (python("a", FAILS), python("b", after="a"), python("c"), python("d", after="c"), missing)
    done = day(tmp_path, *steps)
    assert done.run(60)
    assert verdicts(done) == {"a": "failed", "b": "pending", "c": "ok", "d": "ok", "e": "failed"}
    assert "no-such-sanitizer" in done.last("e")["output"]
    text = done.verdict()
    assert "| a | what a shows | failed |" in text
    assert "## The end of a\n\n```text\nfirst\nbroken\n```" in text


def test_a_second_call_continues(tmp_path: Path) -> None:
    """The first call has no time for c. Half a line of a lost machine is ignored."""
    steps = (python("a"), python("b", FAILS), python("c", limit=90), python("d"))
    assert not day(tmp_path, *steps).run(60)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": "c", "ver')
    second = day(tmp_path, *steps)
    assert verdicts(second) == {"a": "ok", "b": "failed", "c": "pending", "d": "ok"}
    assert [step.name for step in second.pending()] == ["a", "c", "b"]  # the first step shows that the GPU answers
    assert second.run(200)
    assert verdicts(day(tmp_path, *steps))["c"] == "ok"
    assert [step.name for step in day(tmp_path, *steps, again=True).pending()] == list("abcd")


def test_a_program_that_continues_has_its_limit_once(tmp_path: Path) -> None:
    again = f"import sys; raise SystemExit({CONTINUE} if len(sys.argv) == 3 else 1)"
    done = day(tmp_path, python("a"), python("b", again, 40, minutes=True), python("c"))
    assert not done.run(60)
    assert verdicts(done) == {"a": "ok", "b": "unfinished", "c": "ok"}
    done.results.append({"step": "b", "verdict": "unfinished", "seconds": 39.0})
    assert done.left(done.steps[1]) < 2
    assert done.run(60)  # it isn't begun again


def test_steps_come_in_order_and_fit_a_call() -> None:
    names = [step.name for step in STEPS]
    assert names[:8] == ["machine", "compile", "launch", "quick", "gluon", "ceilings", "targets", "tune"]
    assert len(set(names)) == len(names)
    assert all(step.after in ["", *names[: names.index(step.name)]] for step in STEPS)
    assert max(step.limit for step in STEPS) < 9 * 60
    assert [shape.distribution for shape in shapes()[:3]] == ["one", "one", "stdlib"]  # those of "targets"


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_commands_are_valid(step: Step) -> None:
    """Tests are found, programs accept their options; patterns of compile-ahead name calls."""
    command = shlex.split(step.command.format(out="out", minutes="1", commit="abc1234"))
    command = [sys.executable, *command[command.index("python3") + 1 :]]
    if "pytest" in command:
        done = subprocess.run([*command, "--collect-only"], cwd=ROOT, capture_output=True, text=True)
        assert "::test_" in done.stdout, done.stdout + done.stderr
    else:
        done = subprocess.run([*command[:3], "--help", *command[3:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "--only" in command:
        patterns = [pattern.partition("*")[0] for pattern in command[command.index("--only") + 1 :]]
        assert all(any(call.name.startswith(pattern) for call in calls_for("sm_90")) for pattern in patterns)
