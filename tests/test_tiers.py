"""Which cases of a test `make test`, `make test-slow` and `make test-all` run."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CASES = """
import pytest

@pytest.mark.parametrize("a", range(6))
@pytest.mark.parametrize("b", "xy")
@pytest.mark.sampled("x-0")
@pytest.mark.swept("y-5", every=4)
def test_swept(a, b):
    pass

@pytest.mark.parametrize("a", range(6))
@pytest.mark.sampled(every=3)
def test_sampled(a):
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    """The cases that a command runs."""
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(CASES)
    pytester.makeini("[pytest]\nmarkers =\n    swept\n    sampled\n    slow\n")

    def run(*options: str) -> set[str]:
        lines = pytester.runpytest_inprocess("--collect-only", "-q", *options).outlines
        return {line.partition("::")[2] for line in lines if "::" in line}

    return run


def test_tiers(run) -> None:
    test, slow, every = run("-m", "not slow"), run("-m", "slow"), run("--all")
    assert "test_swept[x-0]" in test
    assert len([name for name in test if "sampled" in name]) == 2  # a third of 6
    assert len([name for name in slow if "sampled" in name]) == 4
    assert not test & slow
    assert run("--quick", "-m", "not slow") == {"test_swept[x-0]", min(name for name in test if "sampled" in name)}
    swept = {name for name in slow if "swept" in name}
    assert "test_swept[y-5]" in swept
    assert len(swept - {"test_swept[y-5]"}) in (2, 3)  # a fourth of 11; the named case may be among them
    assert slow == run("-m", "slow")
    assert every == {f"test_swept[{b}-{a}]" for a in range(6) for b in "xy"} | {f"test_sampled[{a}]" for a in range(6)}
    assert run("-m", "slow", "--all") == every - test


def test_a_case_that_is_named_runs(run, pytester: pytest.Pytester) -> None:
    (left_out, *_) = sorted(run("--all") - run())
    (file,) = pytester.path.glob("test_*.py")
    assert run(f"{file.name}::{left_out}") == {left_out}
