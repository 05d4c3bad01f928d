"""Shared by all tests. Imports only what a bare GPU machine has: torch and pytest."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.fresh import FreshInterpreters

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the tensors are tiny, and pytest-xdist gives every core a process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the first case of each test alone")
    parser.addoption(
        "--all", action="store_true", help="run every case of sweeps, also those that make test-slow omits"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m interpreter`, leave out files without such tests: to import all of them takes 10 seconds."""
    if not (INTERPRETED and config.getoption("-m").startswith("interpreter") and collection_path.suffix == ".py"):
        return None
    return None if "mark.interpreter" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases outside of a sample as slow; deselect what can't run here, what --quick omits, what needs --all."""
    cases: Counter[str] = Counter()  # by test
    for item in items:
        if sample := item.get_closest_marker("sampled"):
            test = item.nodeid.split("[")[0]
            if not _in_sample(item, cases[test], sample):
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    runnable = {
        "gpu": (torch.cuda.is_available() or config.getoption("collectonly")) and not INTERPRETED,
        "interpreter": INTERPRETED,
        "compile": not INTERPRETED,
    }
    dropped = [item for item in items if any(item.get_closest_marker(m) and not ok for m, ok in runnable.items())]
    if config.getoption("--quick"):
        seen: set[str] = set()
        for item in items:
            test = item.nodeid.split("[")[0]
            if test in seen:
                dropped.append(item)
            seen.add(test)
    if not config.getoption("--all"):
        dropped += _outside_of_sweeps(items, named=set(config.args))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def _in_sample(item: pytest.Item, number: int, sample: pytest.Mark) -> bool:
    """Whether the case with this number of its test is quick."""
    if "every" in sample.kwargs:
        return number % sample.kwargs["every"] == 0
    return item.callspec.id in sample.args  # type: ignore[attr-defined]


def _outside_of_sweeps(items: list[pytest.Item], named: set[str]) -> list[pytest.Item]:
    """The slow cases of swept tests that aren't among their `every`th part, nor named in the command.

    Which ones these are is drawn by a hash of their ids: the same ones in each run, whatever the order of parameters.
    """
    swept: dict[str, list[pytest.Item]] = {}  # by test
    for item in items:
        if item.get_closest_marker("swept") and item.get_closest_marker("slow"):
            swept.setdefault(item.nodeid.split("[")[0], []).append(item)
    dropped = []
    for cases in swept.values():
        mark = cases[0].get_closest_marker("swept")
        assert mark is not None
        drawn = sorted((crc32(item.nodeid.encode()), item.nodeid) for item in cases)
        kept = {name for _, name in drawn[: -(-len(cases) // mark.kwargs["every"])]} | named
        callspecs = {item.nodeid: item.callspec.id for item in cases}  # type: ignore[attr-defined]
        dropped += [item for item in cases if item.nodeid not in kept and callspecs[item.nodeid] not in mark.args]
    return dropped


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised floating-point memory with NaN, so that reading it before writing shows."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _original=original, **k: poison(_original(*a, **k)))


@pytest.fixture(scope="session")
def fresh() -> Iterator[FreshInterpreters]:
    with FreshInterpreters() as interpreters:
        yield interpreters
