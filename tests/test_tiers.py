"""Which cases of a test `make quick`, `make test` and `make nightly` run."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CASES = """
import pytest

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", "xy")
@pytest.mark.fast("x-1", "y-2")
def test_cases(a, b):
    pass

@pytest.mark.parametrize("a", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_values(a):
    pass

@pytest.mark.slow
def test_long():
    pass
"""


def test_tiers(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(CASES)
    pytester.makeini("[pytest]\nmarkers =\n    fast\n    slow\n")

    def run(*options: str) -> set[str]:
        lines = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
        return {line.partition("::")[2] for line in lines if "::" in line}

    test, nightly = run("-m", "not slow"), run("-m", "slow")
    assert test == {"test_cases[x-1]", "test_cases[y-2]", "test_values[0]", "test_values[1]"}
    assert nightly == run() - test
    assert len(nightly) == 4 + 1 + 1
    assert run("--quick", "-m", "not slow") == {"test_cases[x-1]", "test_values[0]"}
