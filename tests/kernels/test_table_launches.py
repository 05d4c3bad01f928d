"""The launches that build tile tables, without a GPU: each kernel compiles once for masks of all lengths."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.test_hopper_launch import _Hopper
from tritonpack import BlockDiagonalMask, kernels
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.testing.cases import parents_of

pytestmark = pytest.mark.compile


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that launches compile; they aren't run."""
    found: list[Any] = []

    def launcher(self: JITFunction[Any], grid: tuple[int, ...]) -> Any:
        return lambda **arguments: found.append(self.warmup(grid=(*grid, 1)[:3], **arguments))

    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(driver, "_active", _Hopper())  # without a GPU its setter can't restore the old driver
    monkeypatch.setattr(kernels, "serve", lambda x: True)
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["shared", "whole"])
def test_tables(whole: bool, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for lengths in ([300], [16, 17], [1], [1000, 24]):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "serve", lambda x: False)
            mask = BlockDiagonalMask.from_seqlens(lengths)
            if whole:  # the documents of the keys are read from the transpose, whose kernel isn't run
                mask.transpose()
        tile_tables(mask, Cut(32, 64, 128), Cut(128, of_keys=True), whole_documents=whole)
    launches = 3 if whole else 4
    assert len(compiled) == 4 * launches
    assert len({id(kernel) for kernel in compiled}) == launches


def test_tables_of_trees(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for trees in ([(-1, 300)], [(-1, 16), (0, 1)], [(-1, 1)], [(-1, 512), (0, 33), (0, 300)]):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "serve", lambda x: False)
            mask = replace(BlockDiagonalMask.from_tree(parents_of(trees)), trusted=True)
        tree_tables(mask, Cut(32, 64, 128), Cut(128, 64, 128, of_keys=True))
    assert len(compiled) == 4 * 5
    assert len({id(kernel) for kernel in compiled}) == 5
