"""The first day on a GPU: order, time limits, continuing, failing and hanging steps, the verdict, the dry run."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.first_day import runner
from benchmarks.first_day.__main__ import main
from benchmarks.first_day.runner import (
    BEGUN,
    FAILED,
    NO_PLATFORM,
    OK,
    ROOT,
    SKIPPED,
    TIMEOUT,
    UNFINISHED,
    Day,
    Journal,
    Platform,
    Result,
    Step,
    this_platform,
)
from benchmarks.first_day.steps import steps
from benchmarks.gpu.ledger import CONTINUE, environment

pytestmark = pytest.mark.usefixtures("still_clock")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FEWEST", 0.05)
    monkeypatch.setattr(runner, "NOTICE", 0.0)


def names(of: Day, again: Sequence[str] = ()) -> str:
    """The names of the steps that are pending, together."""
    return "".join(step.name for step in of.pending(again))


def python(name: str, program: str = "print('fine')", limit: float = 30.0, **fields: Any) -> Step:
    """A step that runs a program."""
    return Step(name, f"what {name} shows", ("python3", "-c", program), limit, fields.pop("expected", 0.0), **fields)


def day(out: Path, *todo: Step, commit: str = "abc1234", platform: Platform = NO_PLATFORM, **fields: Any) -> Day:
    return Day(todo, Journal(out / "steps.jsonl", platform), out, commit, platform=platform, **fields)


def last(of: Day, number: int = 0) -> Result:
    """The newest result of a step."""
    found = of.journal.last(of.steps[number])
    assert found
    return found


def verdicts(of: Day) -> dict[str, str]:
    return {step.name: found.verdict for step in of.steps if (found := of.journal.last(step))}


FAILS = "print('first'); raise SystemExit('broken')"


SHOWS = ("python3", "-c", "import os, sys; print(os.environ['X'], sys.argv[1:])", "{out}", "--minutes={minutes}")
# A step, and its verdict, reason and last line
ALONE: dict[str, tuple[Step, tuple[str, str, str]]] = {
    "fine": (python("a"), (OK, "", "fine")),
    "fails": (python("a", FAILS), (FAILED, "exit status 1", "broken")),
    "signal": (python("a", "import os; os.abort()"), (FAILED, "signal SIGABRT", "")),
    "missing": (Step("a", "", ("no-such-sanitizer", "x"), 9.0, 0.0), (SKIPPED, "no-such-sanitizer isn't on PATH", "")),
    "variables and folders": (
        Step("a", "", SHOWS, 30.0, 0.0, environment=(("X", "1"),)), (OK, "", "1 ['OUT', '--minutes=0.50']"),
    ),
}  # fmt: skip


class TestRun:
    @pytest.mark.parametrize("name", ALONE)
    def test_one_step(self, name: str, tmp_path: Path) -> None:
        step, (verdict, reason, line) = ALONE[name]
        done = day(tmp_path, step)
        assert done.run(60)
        found = last(done)
        assert (found.verdict, found.reason, found.commit) == (verdict, reason, "abc1234" * (verdict != SKIPPED))
        assert line in found.last_line.replace(str(tmp_path), "OUT")

    def test_steps_run_in_order_and_are_written_at_once(self, tmp_path: Path) -> None:
        show = f"print(open({str(tmp_path / 'steps.jsonl')!r}).read())"
        done = day(tmp_path, python("a"), python("b", show))
        done.run(60)
        assert '"step": "a", "verdict": "ok"' in last(done, 1).output
        assert '"step": "b", "verdict": "begun"' in last(done, 1).output

    def test_failure_ends_only_what_needs_it(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a", FAILS), python("b", after=("a",)), python("c", after=("b",)), python("d"))
        assert done.run(60)
        assert verdicts(done) == {"a": FAILED, "b": SKIPPED, "c": SKIPPED, "d": OK}
        assert last(done).output == "first\nbroken\n"
        assert last(done, 1).reason == "after a, which is failed"

    @pytest.mark.slow
    def test_hanging_step_is_ended_with_its_children(self, tmp_path: Path) -> None:
        child = f"import time; time.sleep(120); open({str(tmp_path / 'lived')!r}, 'w')"
        hang = (
            f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}]); "
            "print(child.pid, 'hangs', flush=True); child.wait()"
        )
        done = day(tmp_path, python("a", hang, limit=3.0), python("b"))
        assert done.run(60)
        assert verdicts(done) == {"a": TIMEOUT, "b": OK}
        assert last(done).reason == "ended after 3 s"
        process = Path("/proc", last(done).last_line.split()[0], "stat")
        while process.exists() and process.read_text().split()[2] != "Z":
            time.sleep(0.05)
        assert not (tmp_path / "lived").exists()

    def test_nothing_runs_on_a_device_that_does_not_answer(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a", FAILS), python("b"), probe=("python3", "-c", "raise SystemExit(1)"))
        assert not done.run(60)
        assert verdicts(done) == {"a": FAILED}
        assert day(tmp_path, python("a", FAILS), python("b"), probe=("python3", "-c", "")).run(60)


class TestContinue:
    def test_second_call_continues(self, tmp_path: Path) -> None:
        """The first call has no time for the second step. Half a line of a lost machine is ignored."""
        todo = (python("a"), python("b", expected=20.0), python("c"))
        assert not day(tmp_path, *todo).run(10)
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write('{"step": "b", "ver')
        second = day(tmp_path, *todo)
        assert names(second) == "bc"
        assert second.run(60)
        assert verdicts(day(tmp_path, *todo)) == dict.fromkeys("abc", OK)
        assert names(day(tmp_path, *todo)) == ""

    def test_failed_step_is_run_again_for_other_code_or_if_named(self, tmp_path: Path) -> None:
        todo = (python("a", FAILS), python("b", after=("a",)))
        day(tmp_path, *todo).run(60)
        assert names(day(tmp_path, *todo)) == "b"
        assert names(day(tmp_path, *todo, commit="abc1235")) == "ab"
        assert names(day(tmp_path, *todo), ["a"]) == "ab"
        mended = day(tmp_path, python("a"), todo[1])
        assert mended.run(60, again=["a"])
        assert verdicts(mended) == {"a": OK, "b": OK}

    def test_program_that_continues_is_called_until_it_is_done(self, tmp_path: Path) -> None:
        count = (
            "from pathlib import Path; p = Path('{out}', 'n'); n = int(p.read_text()) if p.exists() else 0; "
            f"p.write_text(str(n + 1)); raise SystemExit(0 if n == 2 else {CONTINUE})"
        )
        done = day(tmp_path, python("a", count, continues=True))
        assert done.run(60)
        assert [r.verdict for r in done.journal.results if r.verdict != BEGUN] == [UNFINISHED, UNFINISHED, OK]

    def test_program_that_continues_ends_with_its_own_limit(self, tmp_path: Path) -> None:
        slow = (
            "import time; from pathlib import Path; again = Path('{out}', 'again')\n"
            f"if not again.exists(): again.touch(); raise SystemExit({CONTINUE})\n"
            "print('hangs', flush=True); time.sleep(600)"
        )
        done = day(tmp_path, python("a", slow, limit=1.2, continues=True), python("b", after=("a",)), python("c"))
        assert done.run(60)
        assert verdicts(done) == {"a": UNFINISHED, "b": SKIPPED, "c": OK}
        assert names(day(tmp_path, *done.steps)) == "b"
        again = day(tmp_path, python("a", continues=True))
        assert again.run(60, again=["a"])
        assert verdicts(again) == {"a": OK}

    @pytest.mark.slow
    def test_step_that_the_end_of_the_call_cut_short_is_no_failure(self, tmp_path: Path) -> None:
        todo = (python("a"), python("b", "import time; print('hangs', flush=True); time.sleep(600)", limit=90.0))
        cut = day(tmp_path, *todo)
        assert not cut.run(3)
        assert verdicts(cut) == {"a": OK, "b": UNFINISHED}
        assert names(day(tmp_path, *todo)) == "b"

    def test_step_that_ended_the_call_is_tried_once_more(self, tmp_path: Path) -> None:
        """The machine was lost, so there is no result."""
        one = day(tmp_path, python("a"))
        for pending in ("a", ""):
            one.journal.write(Result("a", BEGUN, commit="abc1234"))
            assert names(day(tmp_path, python("a"))) == pending

    def test_preparation_is_done_again_in_each_call_that_needs_it(self, tmp_path: Path) -> None:
        todo = (python("a", serves=("b",)), python("b", expected=20.0), python("c", after=("a",)))
        assert not day(tmp_path, *todo).run(10)
        assert names(day(tmp_path, *todo)) == "abc"
        assert day(tmp_path, *todo).run(60)
        assert names(day(tmp_path, *todo)) == ""

    def test_step_that_starts_over_has_all_of_its_time(self, tmp_path: Path) -> None:
        """Only the time that is left serves a step that continues."""
        for continues, left in ((False, 30.0), (True, 1.0)):
            step = python("a", limit=30.0, continues=continues)
            cut = day(tmp_path / str(continues), step)
            cut.journal.write(Result("a", UNFINISHED, seconds=29.0))
            assert cut._left(step) == left
            assert cut.pending() == [step]


class TestPlatforms:
    def test_all_steps_run_again_on_another_device_or_triton(self, tmp_path: Path) -> None:
        first = Platform("NVIDIA H100", "3.6.0", "9.0")
        todo = (python("a", serves=("b",)), python("b"), python("c", FAILS))
        assert day(tmp_path, *todo, platform=first).run(60)
        for change in ({"device": "NVIDIA H200"}, {"triton": "3.9.0"}):
            again = day(tmp_path, *todo, platform=first._replace(**change))
            assert names(again) == "abc"
            assert (verdicts(again), again.journal.seconds()) == ({}, 0.0)
            assert again.run(60)
        assert verdicts(day(tmp_path, *todo, platform=first)) == {"a": OK, "b": OK, "c": FAILED}
        assert names(day(tmp_path, *todo, platform=first)) == ""

    def test_platforms_of_a_dry_run_and_of_a_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process that asks the GPU is replaced."""
        about = environment(torch.device("cpu"))
        assert this_platform(dry=True)[:2] == (about["device"], about["triton"])
        program = tmp_path / "python"
        monkeypatch.setattr(runner.sys, "executable", str(program))
        for line, found in (("echo NVIDIA H200; echo 9; echo 0", ("NVIDIA H200", "9.0")), ("exit 1", ("no GPU", ""))):
            program.write_text(f"#!/bin/sh\necho chatter; {line}\n")
            program.chmod(0o755)
            assert this_platform()[::2] == found


class TestMain:
    @pytest.fixture
    def todo(self, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
        """The steps, in place of the real ones."""
        steps_here: list[Step] = []
        for name in ("steps", "dry_steps"):
            monkeypatch.setattr(f"benchmarks.first_day.steps.{name}", lambda commit: steps_here)
        monkeypatch.setattr("benchmarks.first_day.steps.PROBE", ())
        return steps_here

    @pytest.mark.slow
    def test_status_and_files(self, tmp_path: Path, todo: list[Step], capsys: Any) -> None:
        todo += [python("a"), python("b", FAILS), python("c", expected=20.0)]
        common = ["--out", str(tmp_path), "--commit", "abc1234"]
        for minutes, status in (("0.2", CONTINUE), ("1", 1)):
            with pytest.raises(SystemExit) as exit:
                main([*common, "--minutes", minutes])
            assert exit.value.code == status
        assert {path.name for path in tmp_path.iterdir()} == {"steps.jsonl", "verdict.md"}
        todo[1] = python("b")
        main([*common, "--again", "b"])
        assert "3 of 3 steps are ok" in capsys.readouterr().out
        todo[2] = python("d", after=("a", "b"))
        main(["--out", str(tmp_path / "other"), "--commit", "abc1234", "--only", "d"])
        assert "1 of 1 steps are ok" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("dry", "folder"),
        [pytest.param((), "first-day", marks=pytest.mark.slow), (("--dry-run",), "first-day/dry")],
        ids=str,
    )
    def test_folder_of_results(
        self, dry: tuple[str, ...], folder: str, tmp_path: Path, todo: list[Step], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        todo.append(python("a"))
        monkeypatch.chdir(tmp_path)
        main(["--commit", "abc1234", *dry])
        files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
        assert files == {f"{folder}/steps.jsonl", f"{folder}/verdict.md"}

    @pytest.mark.slow
    def test_step_ends_with_the_call(self, tmp_path: Path) -> None:
        """What a lost connection sends to the call."""
        program = "\n".join([
            "from benchmarks.first_day import __main__, steps",
            "from benchmarks.first_day.runner import Step",
            "slow = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'",
            "steps.steps = lambda commit: [Step('a', '', ('python3', '-c', slow), 600.0, 0.0)]",
            f"__main__.main(['--out', {str(tmp_path)!r}, '--commit', 'abc1234'])",
        ])  # fmt: skip
        call = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        log = tmp_path / "running.log"
        while not (log.exists() and log.read_text().endswith("\n")):
            assert call.poll() is None
            time.sleep(0.05)
        call.terminate()
        assert call.wait() == 1
        with pytest.raises(ProcessLookupError):
            os.kill(int(log.read_text()), 0)

    def test_unknown_step(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), "--commit", "abc1234", "--again", "x"])
        assert "the steps are machine, compile" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_code_without_a_commit(self, tmp_path: Path, todo: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
        """Its digest stands for it: the second call continues, and one of changed code repeats what failed."""
        todo.append(python("a", FAILS))
        monkeypatch.setattr("benchmarks.first_day.__main__.this_platform", lambda dry: NO_PLATFORM)
        for code in ("unknown+0123abcd", "unknown+0123abcd", "abc1234+4567cdef"):
            monkeypatch.setattr("benchmarks.first_day.__main__.commit_here", lambda code=code: code)
            with pytest.raises(SystemExit):
                main(["--out", str(tmp_path)])
        results = Journal(tmp_path / "steps.jsonl").results
        assert [r.commit for r in results if r.verdict == FAILED] == ["unknown+0123abcd", "abc1234+4567cdef"]

    def test_list(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["--out", str(tmp_path), "--commit", "abc1234", "--list"])
        listed = capsys.readouterr().out
        assert all(f"\n{step.name} " in f"\n{listed}" for step in steps("abc1234"))
        assert "benchmarks.tune --out {out}/tiles.json" in listed
