"""The steps of the first day: their order, their minutes, what they import; the dry run."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.first_day.__main__ import make_parser
from benchmarks.first_day.runner import OK, ROOT, Step
from benchmarks.first_day.steps import dry_steps, steps
from benchmarks.first_day.verdict import TARGETS, Place
from benchmarks.gpu.compile_ahead import calls_for
from benchmarks.gpu.shapes import shapes
from tests.benchmarks.test_first_day import day, last
from tests.gpu.cases import LARGE

pytestmark = pytest.mark.usefixtures("still_clock")

HIDDEN = ("accelerate", "matplotlib", "numba", "pytest_benchmark", "rich", "typer", "xdist")
HIDES = f"""
from importlib.machinery import PathFinder
original = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.split(".")[0] in {HIDDEN} else original(name, *more)
)
"""


class TestSteps:
    def test_most_valuable_first(self) -> None:
        """A result, then the figures of the targets and tiles; then the rest."""
        todo = steps("abc1234")
        names = [step.name for step in todo]
        first = names[: names.index("tune") + 1]
        assert first == ["machine", "compile", "launch", "quick", "gluon", "ceilings", "targets", "tune"]
        for checked in ("memory", "small", "large", "repeats", "graphs", "gluon-races", "gluon-tests"):
            for timed in ("compare", "masks", "training"):
                assert names.index(checked) < names.index(timed)
        limits = {step.name: step.limit for step in todo}
        assert sum(limits[name] for name in first) < 28 * 60 - 3 * 60

    def test_page_has_all_steps_with_their_minutes(self) -> None:
        page = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
        _, *rows = re.findall(r"^\| ([a-z, -]+) \| ([0-9.]+|minutes) \|", page, re.M)
        todo = {step.name: step.expected / 60 for step in steps("abc1234")}
        assert [name for names, _ in rows for name in names.split(", ")] == list(todo)
        for names, minutes in rows:
            assert float(minutes) == pytest.approx(sum(todo[name] for name in names.split(", ")), abs=0.3)
        assert "steps take 28 minutes by estimate" in page

    def test_kernels_compile_before_the_steps_that_launch_them(self) -> None:
        todo = steps("abc1234")
        served = {name for step in todo if step.name.startswith("compile") for name in step.serves}
        tests = {s.name for s in todo if "pytest" in s.command and s.name != "models"}
        assert served == tests | {"targets"}
        (first,) = (step for step in todo if step.name == "compile")
        patterns = first.command[first.command.index("--only") + 1 :]
        names = [c.name for c in calls_for("sm_90") if any(fnmatchcase(c.name, f"{p}*") for p in patterns)]
        assert "causal-bf16" in names
        assert {"shape-16/16x128-bf16", "gluon-shape-32/8x128-bf16", "gluon-128-bf16"} <= set(names)
        assert {f"large-{case}-bf16" for case in LARGE} & {c.name for c in calls_for("sm_90")} <= set(names)
        assert not any(name.endswith(("fp16", "fp32")) for name in names if name.startswith(("large-", "gluon-")))

    @pytest.mark.parametrize("todo", [steps("abc1234"), dry_steps("abc1234")], ids=["real", "dry"])
    def test_steps_need_earlier_ones(self, todo: list[Step]) -> None:
        seen: set[str] = set()
        for step in todo:
            assert seen.issuperset(step.after)
            assert step.name not in seen
            assert step.expected <= step.limit
            seen.add(step.name)

    def test_targets_are_compared(self) -> None:
        (first,) = (int(s.command[s.command.index("--first") + 1]) for s in steps("abc1234") if s.name == "targets")
        compared = shapes()[:first]
        assert [shape.distribution for shape in compared] == ["one", "one", "stdlib"]
        for target in TARGETS:
            assert any(Place(s.distribution, s.tokens, s.heads, s.kv_heads, s.head_dim, s.causal) == target.place
                       for s in compared)  # fmt: skip

    def test_steps_fit_a_call_and_the_minutes_of_the_page(self) -> None:
        assert make_parser().get_default("minutes") <= 9
        assert max(step.limit for step in steps("abc1234")) < 9 * 60
        assert sum(step.expected for step in steps("abc1234")) <= 60 * 28

    @pytest.mark.slow
    def test_modules_of_steps_need_few_packages(self, tmp_path: Path) -> None:
        """Such as on a machine with torch, Triton, transformers and pytest alone."""
        modules = {"benchmarks.first_day.__main__"}
        for step in steps("abc1234"):
            names = [part for part in step.command if part.startswith(("benchmarks.", "tests/"))]
            modules |= {name.split("::")[0].removesuffix(".py").replace("/", ".") for name in names}
        modules = {f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name for name in modules}
        assert {"benchmarks.gpu.__main__", "benchmarks.training", "tests.gpu.test_models"} < modules
        program = "\n".join(f"import {name}" for name in sorted(modules))
        (tmp_path / "sitecustomize.py").write_text(HIDES)
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("step", [s for s in dry_steps("abc1234") if not s.serves], ids=lambda s: s.name)
    def test_dry_run(self, step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each command finds its tests, and accepts its options, without packages that a machine may lack."""
        (tmp_path / "sitecustomize.py").write_text(HIDES)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        done = day(tmp_path, replace(step, after=(), serves=()))
        assert done.run(600)
        assert last(done).verdict == OK, last(done).output
