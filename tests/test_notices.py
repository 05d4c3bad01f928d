"""Warnings appear once per process and key, also with threads, and name the user's line and their remedy."""

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info

import tritonpack
from tritonpack import notices


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "said", {})


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield heard


def test_one_warning_per_key_names_the_line_and_the_filter_that_silences_it(
    heard: list[warnings.WarningMessage],
) -> None:
    for key in ("a-key", "another-key", "a-key"):
        notices.say_once(key, "Facts.")
    assert [str(warning.message).partition(" ")[0] for warning in heard] == ["a-key:", "another-key:"]
    assert str(heard[0].message).startswith("a-key: Facts.")
    assert all(issubclass(warning.category, tritonpack.PackingWarning) for warning in heard)
    assert heard[0].filename == __file__

    notices.said.clear()
    exec(str(heard[0].message).partition("To silence this warning: ")[2])
    notices.say_once("a-key", "Facts.")
    notices.say_once("another-key", "Facts.")
    assert len(heard) == 3


def test_nothing_is_said_while_unheard(heard: list[warnings.WarningMessage]) -> None:
    """In this thread alone, and the key is left to a later call."""
    with notices.silenced():
        with notices.silenced():
            pass
        notices.say_once("a-key", "Facts.")
        other = threading.Thread(target=notices.say_once, args=("another-key", "Facts."))
        other.start()
        other.join()
    notices.say_once("a-key", "Facts.")
    assert [str(warning.message).partition(":")[0] for warning in heard] == ["another-key", "a-key"]


def test_one_of_many_threads_warns(heard: list[warnings.WarningMessage]) -> None:
    barrier = threading.Barrier(16)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: (barrier.wait(), notices.say_once("a-key", "Facts.")), range(16)))
    assert len(heard) == 1


def what_a_worker_knows(_: object) -> tuple[int, bool]:
    return get_worker_info().id, notices.knows_patched_models()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.fast("fork")
def test_forked_workers_know_patched_models_and_spawned_ones_do_not(method: str) -> None:
    assert notices.knows_patched_models()
    given: dict[str, Any] = {"collate_fn": what_a_worker_knows, "multiprocessing_context": method}
    assert sorted(DataLoader(range(2), num_workers=2, **given)) == [(0, method == "fork"), (1, False)]  # type: ignore[arg-type]
