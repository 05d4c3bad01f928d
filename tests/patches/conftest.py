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
    """Models are patched without evidence, for what happens in calls of those that would be refused."""
    monkeypatch.setattr("tritonpack.patches.patching.require_evidence", lambda *_: None)


@pytest.fixture
def packed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What packed rows can't be told to is refused, and doesn't get rows of its own."""
    monkeypatch.setattr("tritonpack.patches.patching.LAYOUTS", ("packed",))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trials that a test holds: what others have found doesn't count."""
    probe = pytest.importorskip("tritonpack.patches.probe")
    held: list[Any] = []
    run = probe.undisturbed

    def count(trial: Any) -> Any:
        held.append(trial)
        return run(trial)

    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(probe, "undisturbed", count)
    return held
