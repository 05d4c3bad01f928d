"""The order of the GPU tests: those that say most come first. And a fixture."""

import re
from collections.abc import Iterator

import pytest
import torch

FIRST = (
    r"test_gpu\.py::test_small_cases\[causal-",  # results and gradients in each dtype
    r"test_gpu\.py::test_large_cases\[(long|ordinary|tiny)-",
    r"test_gpu\.py::test_a_change_in_a_document|test_models\.py::.*\[(llama|gemma2)-",  # isolation
    r"test_gpu\.py::test_pack_invariant",
    r"test_gpu\.py::test_large_cases",  # features
    r"test_gpu\.py::test_small_cases",
    r"test_models\.py|test_contract\.py|test_flash_attn\.py",
    r"test_gpu\.py",
    r"test_hopper\.py",
)


@pytest.hookimpl(trylast=True)  # after tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        ranks = (rank for rank, pattern in enumerate(FIRST) if re.search(pattern, item.nodeid))
        return next(ranks, len(FIRST))

    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    others = [item for item in items if not item.get_closest_marker("gpu")]
    items[:] = [*others, *sorted(of_gpu, key=place)]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
