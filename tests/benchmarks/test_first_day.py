"""The first day on a GPU: order, time limits, continuing, failing and hanging steps, the verdict, the dry run."""

import os
import subprocess
import sys
import time
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


def python(name: str, program: str = "print('fine')", limit: float = 30.0, **fields: Any) -> Step:
    """A step that runs a program."""
    return Step(name, f"what {name} shows", ("python3", "-c", program), limit, fields.pop("expected", 0.0), **fields)


def day(out: Path, *todo: Step, commit: str = "abc1234", platform: Platform = NO_PLATFORM, **fields: Any) -> Day:
    return Day(todo, Journal(out / "steps.jsonl", platform), out, commit, platform=platform, **fields)


def verdicts(of: Day) -> dict[str, str]:
    return {step.name: last.verdict for step in of.steps if (last := of.journal.last(step))}


FAILS = "print('first'); raise SystemExit('broken')"


class TestRun:
    def test_steps_run_in_order_and_are_written_at_once(self, tmp_path: Path) -> None:
        show = f"print(open({str(tmp_path / 'steps.jsonl')!r}).read())"
        assert day(tmp_path, python("a"), python("b", show)).run(60)
        first, second = (Journal(tmp_path / "steps.jsonl").last(python(name)) for name in "ab")
        assert first
        assert second
        assert (first.verdict, first.last_line, first.commit) == (OK, "fine", "abc1234")
        assert '"step": "a", "verdict": "ok"' in second.output
        assert '"step": "b", "verdict": "begun"' in second.output

    def test_failure_ends_only_what_needs_it(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a", FAILS), python("b", after=("a",)), python("c", after=("b",)), python("d"))
        assert done.run(60)
        assert verdicts(done) == {"a": FAILED, "b": SKIPPED, "c": SKIPPED, "d": OK}
        a, b = (done.journal.last(step) for step in done.steps[:2])
        assert a
        assert b
        assert (a.reason, a.output) == ("exit status 1", "first\nbroken\n")
        assert b.reason == "after a, which is failed"

    def test_signal_is_named(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a", "import os; os.abort()"))
        done.run(60)
        last = done.journal.last(done.steps[0])
        assert last
        assert last.reason == "signal SIGABRT"

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
        last = done.journal.last(done.steps[0])
        assert last
        assert last.reason == "ended after 3 s"
        process = Path("/proc", last.last_line.split()[0], "stat")
        while process.exists() and process.read_text().split()[2] != "Z":
            time.sleep(0.05)
        assert not (tmp_path / "lived").exists()

    def test_program_that_is_missing(self, tmp_path: Path) -> None:
        done = day(tmp_path, Step("a", "", ("no-such-sanitizer", "python3"), 9.0, 0.0))
        assert done.run(60)
        last = done.journal.last(done.steps[0])
        assert last
        assert (last.verdict, last.reason) == (SKIPPED, "no-such-sanitizer isn't on PATH")

    def test_nothing_runs_on_a_device_that_does_not_answer(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a", FAILS), python("b"), probe=("python3", "-c", "raise SystemExit(1)"))
        assert not done.run(60)
        assert verdicts(done) == {"a": FAILED}
        assert day(tmp_path, python("a", FAILS), python("b"), probe=("python3", "-c", "")).run(60)

    def test_environment_and_folders(self, tmp_path: Path) -> None:
        program = "import os, sys; print(os.environ['X'], sys.argv[1:])"
        step = Step("a", "", ("python3", "-c", program, "{out}", "--minutes={minutes}"), 30.0, 0.0,
                    environment=(("X", "1"),))  # fmt: skip
        done = day(tmp_path, step)
        done.run(60)
        last = done.journal.last(step)
        assert last
        assert last.last_line == f"1 ['{tmp_path}', '--minutes=0.50']"


class TestContinue:
    def test_second_call_continues(self, tmp_path: Path) -> None:
        """The first call has no time for the second step."""
        todo = (python("a"), python("b", expected=20.0), python("c"))
        assert not day(tmp_path, *todo).run(10)
        second = day(tmp_path, *todo)
        assert [step.name for step in second.pending()] == ["b", "c"]
        assert second.run(60)
        assert verdicts(second) == dict.fromkeys("abc", OK)
        assert day(tmp_path, *todo).pending() == []

    def test_failed_step_is_run_again_for_other_code_or_if_named(self, tmp_path: Path) -> None:
        todo = (python("a", FAILS), python("b", after=("a",)))
        day(tmp_path, *todo).run(60)
        assert [step.name for step in day(tmp_path, *todo).pending()] == ["b"]
        assert [step.name for step in day(tmp_path, *todo, commit="abc1235").pending()] == ["a", "b"]
        assert [step.name for step in day(tmp_path, *todo).pending(["a"])] == ["a", "b"]
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
        assert not day(tmp_path, python("b", f"raise SystemExit({CONTINUE})")).pending()[0].continues

    def test_program_that_continues_ends_with_its_own_limit(self, tmp_path: Path) -> None:
        slow = (
            "import time; from pathlib import Path; again = Path('{out}', 'again')\n"
            f"if not again.exists(): again.touch(); raise SystemExit({CONTINUE})\n"
            "print('hangs', flush=True); time.sleep(600)"
        )
        done = day(tmp_path, python("a", slow, limit=1.2, continues=True), python("b", after=("a",)), python("c"))
        assert done.run(60)
        assert verdicts(done) == {"a": UNFINISHED, "b": SKIPPED, "c": OK}
        assert [step.name for step in day(tmp_path, *done.steps).pending()] == ["b"]
        again = day(tmp_path, python("a", continues=True))
        assert again.run(60, again=["a"])
        assert verdicts(again) == {"a": OK}

    @pytest.mark.slow
    def test_step_that_the_end_of_the_call_cut_short_is_no_failure(self, tmp_path: Path) -> None:
        todo = (python("a"), python("b", "import time; print('hangs', flush=True); time.sleep(600)", limit=90.0))
        cut = day(tmp_path, *todo)
        assert not cut.run(3)
        assert verdicts(cut) == {"a": OK, "b": UNFINISHED}
        assert [step.name for step in day(tmp_path, *todo).pending()] == ["b"]

    def test_step_that_ended_the_call_is_tried_once_more(self, tmp_path: Path) -> None:
        """The machine was lost, so there is no result."""
        one = day(tmp_path, python("a"))
        one.journal.write(Result("a", BEGUN, commit="abc1234"))
        assert day(tmp_path, python("a")).pending()
        one.journal.write(Result("a", BEGUN, commit="abc1234"))
        assert not day(tmp_path, python("a")).pending()

    def test_preparation_is_done_again_in_each_call_that_needs_it(self, tmp_path: Path) -> None:
        todo = (python("a", serves=("b",)), python("b", expected=20.0), python("c", after=("a",)))
        assert not day(tmp_path, *todo).run(10)
        assert [step.name for step in day(tmp_path, *todo).pending()] == ["a", "b", "c"]
        assert day(tmp_path, *todo).run(60)
        assert day(tmp_path, *todo).pending() == []

    def test_step_that_starts_over_has_all_of_its_time(self, tmp_path: Path) -> None:
        """Only the time that is left serves a step that continues."""
        for continues, left in ((False, 30.0), (True, 1.0)):
            step = python("a", limit=30.0, continues=continues)
            cut = day(tmp_path / str(continues), step)
            cut.journal.write(Result("a", UNFINISHED, seconds=29.0))
            assert cut._left(step) == left
            assert cut.pending() == [step]

    def test_half_a_line_is_ignored(self, tmp_path: Path) -> None:
        day(tmp_path, python("a")).run(60)
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write('{"step": "b", "ver')
        day(tmp_path, python("c")).run(60)
        assert [r.step for r in Journal(tmp_path / "steps.jsonl").results] == ["a", "a", "c", "c"]


class TestDevices:
    first, second = Platform("NVIDIA H100", "3.6.0", "9.0"), Platform("NVIDIA H200", "3.6.0", "9.0")

    def test_all_steps_run_again_on_another_device(self, tmp_path: Path) -> None:
        todo = (python("a", serves=("b",)), python("b"), python("c", FAILS))
        assert day(tmp_path, *todo, platform=self.first).run(60)
        again = day(tmp_path, *todo, platform=self.second)
        assert [step.name for step in again.pending()] == ["a", "b", "c"]
        assert (verdicts(again), again.journal.seconds()) == ({}, 0.0)
        assert again.run(60)
        assert verdicts(day(tmp_path, *todo, platform=self.first)) == {"a": OK, "b": OK, "c": FAILED}
        assert day(tmp_path, *todo, platform=self.first).pending() == []

    def test_another_triton_is_another_platform(self, tmp_path: Path) -> None:
        assert day(tmp_path, python("a"), platform=self.first).run(60)
        assert day(tmp_path, python("a"), platform=self.first._replace(triton="3.9.0")).pending()

    def test_platform_of_a_dry_run_is_that_of_its_rows(self) -> None:
        about = environment(torch.device("cpu"))
        assert this_platform(dry=True)[:2] == (about["device"], about["triton"])

    def test_platform_of_a_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The process that asks the GPU is replaced."""
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\necho chatter; echo NVIDIA H200; echo 9; echo 0\n")
        program.chmod(0o755)
        monkeypatch.setattr(runner.sys, "executable", str(program))
        assert this_platform()[::2] == ("NVIDIA H200", "9.0")
        program.write_text("#!/bin/sh\nexit 1\n")
        assert this_platform()[::2] == ("no GPU", "")


class TestMain:
    @pytest.mark.slow
    def test_status_and_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        from benchmarks.first_day import steps as module

        todo = [python("a"), python("b", FAILS), python("c", expected=20.0)]
        monkeypatch.setattr(module, "steps", lambda commit: todo)
        monkeypatch.setattr(module, "PROBE", ())
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
        self, dry: tuple[str, ...], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from benchmarks.first_day import steps as module

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(module, "dry_steps" if dry else "steps", lambda commit: [python("a")])
        monkeypatch.setattr(module, "PROBE", ())
        main(["--commit", "abc1234", *dry])
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == {
            f"{folder}/steps.jsonl", f"{folder}/verdict.md",
        }  # fmt: skip

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

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--again", "x"], "the steps are machine, compile"),
        ],
        ids=["step"],
    )
    def test_wrong_arguments(self, arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), "--commit", "abc1234", *arguments])
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_code_without_a_commit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its digest stands for it: the second call continues, and one of changed code repeats what failed."""
        from benchmarks.first_day import steps as module

        monkeypatch.setattr(module, "steps", lambda commit: [python("a", FAILS)])
        monkeypatch.setattr(module, "PROBE", ())
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
