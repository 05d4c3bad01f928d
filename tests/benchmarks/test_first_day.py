"""The first day on a GPU: order, time limits, continuing, failing and hanging steps, the verdict, the dry run."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.first_day import runner
from benchmarks.first_day.__main__ import main
from benchmarks.first_day.runner import (
    BEGUN,
    FAILED,
    OK,
    ROOT,
    SKIPPED,
    TIMEOUT,
    UNFINISHED,
    Day,
    Journal,
    Result,
    Step,
)
from benchmarks.first_day.steps import dry_steps, steps
from benchmarks.first_day.verdict import (
    FLASH_2,
    GLUON,
    MODELS,
    TARGETS,
    Figures,
    Place,
    Target,
    report,
    summary,
    targets,
)
from benchmarks.gpu.ledger import ABOUT, CONTINUE, Ledger
from benchmarks.gpu.shapes import shapes
from tritonpack.cli.bench.batch import Shape
from tritonpack.cli.bench.peers import OURS, PEERS


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FEWEST", 0.05)
    monkeypatch.setattr(runner, "NOTICE", 0.0)


def python(name: str, program: str = "print('fine')", limit: float = 30.0, **fields: Any) -> Step:
    """A step that runs a program."""
    return Step(name, f"what {name} shows", ("python3", "-c", program), limit, fields.pop("expected", 0.0), **fields)


def day(out: Path, *todo: Step, commit: str = "abc1234", **fields: Any) -> Day:
    return Day(todo, Journal(out / "steps.jsonl"), out, commit, **fields)


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

    @pytest.mark.heavy
    @pytest.mark.slow
    def test_hanging_step_is_ended_with_its_children(self, tmp_path: Path) -> None:
        hang = (
            "import subprocess, sys; "
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
            "print(child.pid, flush=True); child.wait()"
        )
        done = day(tmp_path, python("a", hang, limit=3.0), python("b"))
        began = time.monotonic()
        assert done.run(60)
        assert time.monotonic() - began < 20
        assert verdicts(done) == {"a": TIMEOUT, "b": OK}
        last = done.journal.last(done.steps[0])
        assert last
        assert last.reason == "ended after 3 s"
        child = Path("/proc", last.last_line, "stat")
        while child.exists() and child.read_text().split()[2] != "Z":
            assert time.monotonic() - began < 40
            time.sleep(0.05)

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
        program = "import os, sys; print(os.environ['X'], sys.argv[1:], os.environ['PYTHONPATH'].split(':')[1:2])"
        step = Step("a", "", ("python3", "-c", program, "{out}", "--minutes={minutes}"), 30.0, 0.0, peers=True,
                    environment=(("X", "1"),))  # fmt: skip
        done = day(tmp_path, step, peers=tmp_path / "peers")
        done.run(60)
        last = done.journal.last(step)
        assert last
        assert last.last_line == f"1 ['{tmp_path}', '--minutes=0.50'] ['{tmp_path / 'peers'}']"


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

    @pytest.mark.heavy
    def test_program_that_continues_ends_with_its_own_limit(self, tmp_path: Path) -> None:
        slow = f"import time; time.sleep(0.3); raise SystemExit({CONTINUE})"
        done = day(tmp_path, python("a", slow, limit=1.2, continues=True), python("b", after=("a",)), python("c"))
        assert done.run(60)
        assert verdicts(done) == {"a": UNFINISHED, "b": SKIPPED, "c": OK}
        assert [step.name for step in day(tmp_path, *done.steps).pending()] == ["b"]
        again = day(tmp_path, python("a", continues=True))
        assert again.run(60, again=["a"])
        assert verdicts(again) == {"a": OK}

    @pytest.mark.slow
    def test_step_that_the_end_of_the_call_cut_short_is_no_failure(self, tmp_path: Path) -> None:
        todo = (python("a"), python("b", "import time; time.sleep(60)", limit=90.0))
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

    def test_preparation_is_done_again_for_another_machine_or_code(self, tmp_path: Path) -> None:
        todo = (python("a", serves=("b",)), python("b", expected=20.0))
        assert not day(tmp_path, *todo, machine="x").run(10)
        for fields, names in (
            ({"machine": "x"}, "b"),
            ({"machine": "y"}, "ab"),
            ({"machine": "x", "commit": "d"}, "ab"),
        ):
            assert [step.name for step in day(tmp_path, *todo, **fields).pending()] == list(names)
        assert day(tmp_path, *todo, machine="x").run(60)
        assert day(tmp_path, *todo, machine="y").pending() == []

    def test_half_a_line_is_ignored(self, tmp_path: Path) -> None:
        day(tmp_path, python("a")).run(60)
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write('{"step": "b", "ver')
        day(tmp_path, python("c")).run(60)
        assert [r.step for r in Journal(tmp_path / "steps.jsonl").results] == ["a", "a", "c", "c"]


class TestSteps:
    def test_correct_before_fast(self) -> None:
        names = [step.name for step in steps("abc1234")]
        assert names[:3] == ["machine", "compile", "launch"]
        for checked in ("memory", "small", "large", "repeats", "graphs", "gluon-races", "gluon-tests"):
            for timed in ("ceilings", "compare", "tune", "training"):
                assert names.index(checked) < names.index(timed)

    @pytest.mark.parametrize("todo", [steps("abc1234"), dry_steps("abc1234")], ids=["real", "dry"])
    def test_steps_need_earlier_ones(self, todo: list[Step]) -> None:
        seen: set[str] = set()
        for step in todo:
            assert seen.issuperset(step.after)
            assert step.name not in seen
            assert step.expected <= step.limit
            seen.add(step.name)

    def test_each_machine_is_looked_at(self, tmp_path: Path) -> None:
        """So a machine without a GPU doesn't keep the steps from running on another one."""
        todo = steps("abc1234")
        first = day(tmp_path, *todo, machine="x")
        first.journal.write(Result("machine", FAILED, commit="abc1234", machine="x"))
        assert "machine" not in {step.name for step in first.pending()}
        assert [step.name for step in day(tmp_path, *todo, machine="y").pending()] == [step.name for step in todo]
        for step in todo[1:]:
            first.journal.write(Result(step.name, OK, commit="abc1234", machine="x"))
        assert day(tmp_path, *todo, machine="y").pending() == []

    def test_targets_are_compared(self) -> None:
        (first,) = (int(s.command[s.command.index("--first") + 1]) for s in steps("abc1234") if s.name == "compare")
        compared = shapes()[:first]
        for target in TARGETS:
            assert any(Place(s.distribution, s.tokens, s.heads, s.kv_heads, s.head_dim, s.causal) == target.place
                       for s in compared)  # fmt: skip

    def test_no_step_needs_more_than_a_call(self) -> None:
        assert max(step.limit for step in steps("abc1234") if not step.continues) < 9 * 60
        assert sum(min(step.expected, step.limit) for step in steps("abc1234") if not step.continues) < 25 * 60

    @pytest.mark.slow
    @pytest.mark.parametrize("step", [s for s in dry_steps("abc1234") if s.name != "compile"], ids=lambda s: s.name)
    @pytest.mark.swept(every=3)
    def test_dry_run(self, step: Step, tmp_path: Path) -> None:
        """Each command finds its tests, and accepts its options."""
        done = day(tmp_path, replace(step, after=(), serves=()))
        assert done.run(600)
        last = done.journal.last(step)
        assert last
        assert last.verdict == OK, last.output


class TestVerdict:
    def test_report(self, tmp_path: Path) -> None:
        done = day(tmp_path, python("a"), python("b", FAILS), python("c", after=("b",)), python("d"))
        done.run(60)
        text = report(done)
        assert summary(done).startswith("2 of 4 steps are ok, in 0.")
        assert summary(done).endswith("failed: b; skipped: c")
        assert "| a | what a shows | ok | 0 | fine |" in text
        assert "| c | what c shows | skipped | 0 | after b, which is failed |" in text
        assert text.endswith("## The end of b\n\n```text\nfirst\nbroken\n```\n")
        assert "TFLOP/s" not in text

    def test_figures_beside_targets_and_predictions(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "attention.csv", dict.fromkeys(ABOUT, "x"))
        rates = {OURS: 500, GLUON: 525, FLASH_2: 250}
        for shape in (Shape("one", 16384), Shape("stdlib", 32768), Shape("one", 16384, heads=16, kv_heads=16)):
            for name, tflops in rates.items():
                for op in ("forward", "backward", "both"):
                    about = {"documents": 1, "op": op, "implementation": name}
                    ledger.write({**shape.columns(), **about, "status": "ok", "tflops": tflops})
            missing = {"op": "forward", "implementation": "xformers", "status": "not installed: xformers"}
            ledger.write({**shape.columns(), "documents": 1, **missing})
        (tmp_path / "predicted.csv").write_text(
            "kernel,head_dim,one 16k slow,one 16k fast\nforward,128,400,600\ndq,128,600,900\ndkdv,128,400,800\n"
            "gluon forward,128,530,700\ngluon dq,128,400,500\ngluon dkdv,128,400,500\n"
        )
        text = report(day(tmp_path, python("a")))
        assert "| stdlib, 32768 tokens, 32/8x128 | 500 | 500 | 0.95x | 2.00x | not installed: xformers |" in text
        at_128 = "one, 16384 tokens, 16/16x128"
        assert f"| {OURS}: {at_128}, forward | 480 TFLOP/s | 500 | met |" in text
        assert f"| {GLUON}: {at_128}, forward | 550 TFLOP/s | 525 | 0.95 of it |" in text
        assert f"| {GLUON}: {at_128}, backward | 420 TFLOP/s | 525 | met |" in text
        assert f"| {OURS}: stdlib, 32768 tokens, 32/8x128, both | 1.5 times {FLASH_2} | 2.00x | met |" in text
        assert f"| {OURS}: one, 16384 tokens, 32/32x64, forward | 400 TFLOP/s |  | not measured |" in text
        assert f"| {GLUON}: one, 16384 tokens, 32/32x64, backward | 340 TFLOP/s |  | not measured |" in text
        place = "one, 16384 tokens, 32/8x128"
        assert f"| {OURS}: {place}, forward | 400 to 600 | 500 | within |" in text
        assert f"| {GLUON}: {place}, forward | 530 to 700 | 525 | below |" in text
        # 5 useful products in the time of 3 at one rate and 4 at another.
        low, high = 5 / (3 / 600 + 4 / 400), 5 / (3 / 900 + 4 / 800)
        assert f"| {OURS}: {place}, backward | {low:.0f} to {high:.0f} | 500 | within |" in text
        low, high = 5 / (7 / 400), 5 / (7 / 500)
        assert f"| {GLUON}: {place}, backward | {low:.0f} to {high:.0f} | 525 | above |" in text

    def test_why_a_target_has_no_figure(self, tmp_path: Path) -> None:
        shape = Shape("one", 16384, heads=16, kv_heads=16)
        wrong = {"documents": 1, "op": "forward", "implementation": GLUON, "status": "wrong results: dq"}
        Ledger(tmp_path / "attention.csv", dict.fromkeys(ABOUT, "x")).write({**shape.columns(), **wrong})
        line = f"| {GLUON}: one, 16384 tokens, 16/16x128, forward | 550 TFLOP/s |  | wrong results: dq |"
        assert line in targets(Figures(tmp_path / "attention.csv"))

    def test_names_are_those_of_the_peers(self) -> None:
        names = {peer.name for peer in PEERS}
        assert {target.implementation for target in TARGETS} == MODELS.keys() == {OURS, GLUON}
        assert names.issuperset({*MODELS, FLASH_2})

    @pytest.mark.parametrize("target", TARGETS, ids=str)
    def test_targets_are_those_of_the_page(self, target: Target) -> None:
        """docs/figures.md has a row for each implementation."""
        kernels = {OURS: "Triton's kernels", GLUON: "kernels in Gluon"}[target.implementation]
        page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
        (row,) = re.findall(rf"^\| one causal document of 16k, {kernels}: (.*?) \|", page, re.M)
        (of_op,) = (part for part in row.split("; ") if part.startswith(target.op))
        assert re.search(rf"\b{target.tflops:.0f}( TFLOP/s)? at (head dimension )?{target.place.head_dim}\b", of_op)


class TestMain:
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

    @pytest.mark.parametrize(("dry", "folder"), [((), "first-day"), (("--dry-run",), "first-day/dry")], ids=str)
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

    def test_total_time_bounds_all_calls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from benchmarks.first_day import steps as module

        monkeypatch.setattr(module, "steps", lambda commit: [python("a"), python("b")])
        Journal(tmp_path / "steps.jsonl").write(Result("a", OK, seconds=44.9999 * 60, commit="abc1234"))
        with pytest.raises(SystemExit) as exit:
            main(["--out", str(tmp_path), "--commit", "abc1234"])
        assert exit.value.code == CONTINUE

    @pytest.mark.slow
    def test_step_ends_with_the_call(self, tmp_path: Path) -> None:
        """What a lost connection sends to the call."""
        program = "\n".join([
            "from benchmarks.first_day import __main__, steps",
            "from benchmarks.first_day.runner import Step",
            "slow = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'",
            "steps.steps = lambda commit: [Step('a', '', ('python3', '-c', slow), 60.0, 0.0)]",
            f"__main__.main(['--out', {str(tmp_path)!r}, '--commit', 'abc1234'])",
        ])  # fmt: skip
        call = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        log = tmp_path / "running.log"
        while not (log.exists() and log.read_text().endswith("\n")):
            assert call.poll() is None
            time.sleep(0.05)
        call.terminate()
        assert call.wait(30) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(int(log.read_text()), 0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--again", "x"], "the steps are machine, compile"),
            (["--peers", "/nowhere"], "--peers must be a folder of packages; /nowhere holds none"),
        ],
        ids=["step", "peers"],
    )
    def test_wrong_arguments(self, arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path), "--commit", "abc1234", *arguments])
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("commit", ["unknown", "abc1234+"])
    def test_unknown_code_needs_a_name(
        self, commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        monkeypatch.setattr("benchmarks.first_day.__main__.commit_here", lambda: commit)
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path)])
        assert "Name it with --commit." in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_list(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main(["--out", str(tmp_path), "--commit", "abc1234", "--list"])
        listed = capsys.readouterr().out
        assert all(f"\n{step.name} " in f"\n{listed}" for step in steps("abc1234"))
        assert "benchmarks.tune --out {out}/tiles.json" in listed
