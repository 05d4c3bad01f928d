"""Shared by the tests of patches."""

from importlib.util import find_spec
from typing import Any

import pytest

import tritonpack


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    if find_spec("transformers"):
        tritonpack.register()


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch models without a trial, to test calls of models that would be refused."""
    monkeypatch.setattr("tritonpack.patches.choose_modules.require_evidence", lambda *_: [])


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trials of one test, without the results of earlier tests."""
    probe = pytest.importorskip("tritonpack.patches.probe")
    held: list[Any] = []
    run = probe.undisturbed

    def count(trial: Any) -> Any:
        held.append(trial)
        return run(trial)

    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(probe, "undisturbed", count)
    return held
