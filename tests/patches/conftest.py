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
    """Call models without a proof, to test calls of models that would be refused."""
    monkeypatch.setattr("tritonpack.patches.proof.Proof.require", lambda *_: None)


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The proofs of a test."""
    proof = pytest.importorskip("tritonpack.patches.proof")
    held, run = list[Any](), proof._run_trial
    monkeypatch.setattr(proof, "_run_trial", lambda *args: (held.append(args), run(*args))[1])
    return held
