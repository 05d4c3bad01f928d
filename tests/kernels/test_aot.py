"""Kernels that are compiled ahead of time get what Triton's launcher says of their arguments."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import driver

from tests.kernels.aot import TARGETS, Configuration, source
from tests.virtual_gpu.driver import questions
from tritonpack.kernels.tile_shapes import Kernel
from tritonpack.testing import Case, Inputs, make_inputs
from tritonpack.testing.tolerance import run

pytestmark = pytest.mark.compile

GPU = "gfx942"
KERNELS: dict[Kernel, tuple[str, ...]] = {"forward": (), "dkdv": (), "dq": ("dlse",)}  # and their features


class AmdDriver:
    """A driver that Triton asks for its target before it compiles."""

    get_current_target = staticmethod(lambda: TARGETS[GPU])
    get_current_device = staticmethod(lambda: 942)
    get_current_stream = staticmethod(lambda device: 0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    """What the launcher would compile for gfx942, by kernel: its signature, and attributes of its arguments."""
    found: dict[str, dict[str, Any]] = {}

    def record(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        found[fn.name.split(".")[-1]] = compile
        return True  # don't compile

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(driver, "_active", AmdDriver())
    for owner, name, answer in questions(GPU):
        monkeypatch.setattr(owner, name, answer)
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = record
        yield found


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    """Four query heads per key head, and a number of tokens that isn't a multiple of 16."""
    return make_inputs(Case("", (333,), heads=32, kv_heads=8, head_dim=64), torch.bfloat16)


@pytest.mark.parametrize("large", [False, True])
def test_amd_binaries_are_those_that_the_launcher_compiles(
    large: bool, launched: dict[str, dict[str, Any]], inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of storages up to 2 GiB, Triton knows that 32 bits hold every offset."""
    if large:
        monkeypatch.setattr(torch.UntypedStorage, "size", lambda self: 2**31)
    run(inputs, "triton")
    for kernel, features in KERNELS.items():
        compiled = launched[f"{kernel}_kernel"]
        ours = source(Configuration(kernel, GPU, 64, torch.bfloat16, features=features, large=large))
        used = {name: kind for name, kind in compiled["signature"].items() if kind != "constexpr"}
        assert used == {name: ours.signature[name] for name in used}
        assert {place: said for place, said in compiled["configs"][0].items() if said} == ours.attrs
        assert (["tt.pointer_range", 32] in ours.attrs[(0, 0)]) is not large
