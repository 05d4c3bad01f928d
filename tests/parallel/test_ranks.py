"""What needs several ranks, in groups of 2 and 4 processes; the modules of cases say what each checks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel import world


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_with_one_process(size, tmp_path):
    modules = ["collectives_cases", "exchange_cases", "context_cases", "lifecycle_cases", "composition_cases"]
    world.run([*modules, "trainer_cases"], size, tmp_path)


@pytest.mark.slow
def test_ranks_agree_with_what_wraps_models(tmp_path):
    world.run(["library_cases", "every_type_cases"], 2, tmp_path)


@pytest.mark.slow
def test_every_type_is_shared_or_refused_as_the_readme_says():
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-m", "tests.parallel.every_type_cases"], capture_output=True, text=True, cwd=root, timeout=300
    )
    assert result.returncode == 0, result.stdout[-2000:]
    exact, refused = map(int, re.search(r"\{'exact': (\d+), 'refused:': (\d+)\}", result.stdout).groups())
    said = f"Of the {exact + refused} types that are packed exactly, {exact} can be shared by ranks, and {refused} are"
    assert said in " ".join((root / "README.md").read_text(encoding="utf-8").split())


@pytest.mark.interpreter
def test_ranks_agree_with_the_kernels(tmp_path):
    world.run(["kernel_cases"], 2, tmp_path)


def test_a_failure_on_one_rank_is_seen(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)on the last rank alone failed:.*ValueError: as it should"):
        world.run(["failing_cases"], 2, tmp_path)
