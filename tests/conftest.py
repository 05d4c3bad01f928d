"""Shared by all tests. Imports only what a bare GPU machine has: torch and pytest."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fresh import FreshInterpreters
from tests.gpu.worker import CHANNEL, SECONDS, Worker

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure() -> None:
    torch.set_num_threads(1)  # the tensors are tiny, and pytest-xdist gives every core a process


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `-m gpu`, say why no test runs where torch sees no GPU."""
    if config.getoption("-m").startswith("gpu") and not torch.cuda.is_available():
        built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda},"
        terminalreporter.write_line(f"{built} sees no GPU, so no GPU test can run.")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the first case of each test alone")
    parser.addoption("--one-process", action="store_true", help="run GPU tests in this process, without time limits")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` or `-m interpreter`, leave out files without such tests.

    To import all files takes 10 seconds, and packages that a GPU machine may lack.
    """
    tier = re.match(r"(gpu|interpreter)( and |$)", config.getoption("-m"))
    if tier is None or collection_path.suffix != ".py":
        return None
    return None if f"mark.{tier[1]}" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what `fast` doesn't name; deselect what can't run here and what --quick omits."""
    for item in items:
        mark = item.get_closest_marker("fast")
        if mark and item.callspec.id not in mark.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    runnable = {
        "gpu": (torch.cuda.is_available() or config.getoption("collectonly")) and not INTERPRETED,
        "interpreter": INTERPRETED,
        "compile": not INTERPRETED,
    }
    dropped = {item for item in items if any(item.get_closest_marker(m) and not ok for m, ok in runnable.items())}
    if config.getoption("--quick"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                first.setdefault(_test_of(item), item)
        dropped |= {item for item in items if first.get(_test_of(item)) is not item}
    if dropped:
        config.hook.pytest_deselected(items=[*dropped])
        items[:] = [item for item in items if item not in dropped]


WORKER = Worker()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run the tests that need a GPU in another process, with a time limit each."""
    mark, here = item.get_closest_marker("gpu"), item.config.option
    if mark is None or here.one_process or here.usepdb or CHANNEL in os.environ:
        return None
    WORKER.run(item, mark.kwargs.get("seconds", SECONDS))
    return True


def pytest_unconfigure() -> None:
    WORKER.close()


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


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
