"""Every launch of the package without a GPU: kernels are specialised, compiled, loaded and launched for sm_90."""

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from tests.kernels.launches import Call, calls
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask, kernels
from tritonpack.backends import launch as launching
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.testing import Case, Inputs, make_inputs
from tritonpack.testing.cases import parents_of
from tritonpack.testing.tolerance import run

pytestmark = NEEDS
# A sample for other GPUs, because kernels compile for long
ELSEWHERE = (*(f"large-{name}" for name in ("long", "ordinary", "s", "alibi", "dropout")), "tree-bf16", "tables-tree")


def launched() -> list[tuple[str, Call]]:
    """Calls in bfloat16 and of the largest cases; `benchmarks.gpu.compile_ahead --without-gpu sm_90` launches all."""
    plain = [c for c in calls() if not c.name.endswith(("fp16", "fp32"))]
    large = [c for c in calls() if c.name.startswith(("large-", "gluon-")) and c.name.endswith(("fp16", "fp32"))]
    others = [c for c in plain if c.name.startswith(ELSEWHERE)]
    return [("sm_90", c) for c in plain + large] + [(arch, c) for arch in ("sm_80", "sm_100", "sm_120") for c in others]


@pytest.mark.fast(
    *(f"sm_90-{name}" for name in ("large-long-bf16", "tables-tree", "parents", "ids-codes", "dense-bool"))
)
@pytest.mark.parametrize(("arch", "call"), launched(), ids=str)
def test_call(arch: str, call: Call) -> None:
    given = call.prepare("cpu")
    with fake_gpu(arch) as launches:
        call.launch(given)
        assert call.kernels <= set(launches.kernels)


def test_every_kernel_is_in_a_call() -> None:
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        names = vars(importlib.import_module(f"tritonpack.kernels.{module.name}"))
        found |= {name for name, x in names.items() if isinstance(x, JITFunction) and name.endswith("_kernel")}
    assert len(found) > 10
    assert found == set().union(*(call.kernels for call in calls()))


LENGTHS = ((300,), (333,), (512,), (1,), (16, 17), (1000, 24))
FORESTS = ([(-1, 300)], [(-1, 16), (0, 1)], [(-1, 1)], [(-1, 512), (0, 33), (0, 300)])
CUTS = (Cut(32, 64, 128), Cut(128, of_keys=True))


def inputs_of(head_dim: int, lengths: tuple[int, ...], *, head_major: bool = False) -> Inputs:
    """With `head_major` the rows of a head lie side by side, so the distance of heads depends on the tokens."""
    made = make_inputs(Case("", lengths, heads=8, kv_heads=2, head_dim=head_dim), torch.bfloat16)
    moved = {name: getattr(made, name).transpose(0, 1).contiguous().transpose(0, 1) for name in ("q", "k", "v")}
    return replace(made, **moved) if head_major else made  # type: ignore[arg-type]


def tree_of(forest: list[tuple[int, int]]) -> BlockDiagonalMask:
    return replace(BlockDiagonalMask.from_tree(parents_of(forest)), trusted=True)


def transposed(lengths: tuple[int, ...]) -> BlockDiagonalMask:
    mask = BlockDiagonalMask.from_seqlens(list(lengths))
    mask.transpose()  # which is kept, so that its kernel isn't launched again
    return mask


# What -> architecture, of what, what is prepared, what launches, and how many launches there are at least
LAUNCHES: dict[str, tuple[str, Any, Callable[[Any], Any], Callable[[Any], object], int]] = {
    "triton": ("sm_90", LENGTHS, partial(inputs_of, 128), lambda x: run(x, "triton"), 3),
    "gluon": ("sm_90", LENGTHS, partial(inputs_of, 128), lambda x: run(x, "gluon"), 3),
    "pointers": ("sm_80", LENGTHS, partial(inputs_of, 24, head_major=True), lambda x: run(x, "triton"), 3),
    "whole documents": ("sm_90", LENGTHS, transposed, lambda x: tile_tables(x, *CUTS, whole_documents=True), 1),
    "trees": ("sm_90", FORESTS, tree_of, lambda x: tree_tables(x, CUTS[0], Cut(128, 64, 128, of_keys=True)), 4),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n == "gluon" else ()) for n in LAUNCHES])
def test_one_binary_for_all_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, lengths, prepare, launch, fewest = LAUNCHES[name]
    given = [*map(prepare, lengths)]
    monkeypatch.setattr(launching, "_binaries", {})
    binaries: dict[str, set[int]] = defaultdict(set)
    with fake_gpu(arch) as launches:
        for x in given:
            launch(x)
        assert len(launches) >= fewest * len(given)
        assert len(launches) % len(given) == 0  # as many for each
        for one in launches:
            binaries[one.kernel].add(one.binary)
            assert one.threads == 384 or not one.kernel.startswith("hopper_")  # 288 were requested
    assert {kernel: len(found) for kernel, found in binaries.items() if len(found) > 1} == {}
    for binary, _ in launching._binaries.values():
        assert arch != "sm_80" or "cp.async.c" in binary.asm["ptx"]  # it copies 4 bytes or more
