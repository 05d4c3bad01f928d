"""The bound of the device's time for a mask and its tables: its value, and that its counts are those of the kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.mask_model import CUTS, REGISTERS, SOURCES, TARGET_US, main, microseconds, offsets, runs, tile_tables
from tests.lengths import distributions
from tests.virtual_gpu.driver import fake_gpu
from tritonpack import BlockDiagonalMask
from tritonpack.backends import triton as triton_backend
from tritonpack.kernels import intervals, tables
from tritonpack.options import make_options

BATCHES = distributions(131072)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.sampled("one", "flan")
def test_the_bound_is_within_the_target(name: str) -> None:
    for head_dim in CUTS:
        found = microseconds(BATCHES[name], head_dim)
        assert found.keys() == SOURCES.keys()
        assert max(found.values()) <= TARGET_US, (head_dim, found)


def test_the_page_has_these_figures() -> None:
    page = (Path(__file__).parents[2] / "docs/decisions/host-time.md").read_text()
    for head_dim in CUTS:
        found = [microseconds(lengths, head_dim) for lengths in BATCHES.values()]
        spans = (f"{min(x[name] for x in found):.1f} to {max(x[name] for x in found):.1f}" for name in SOURCES)
        assert f"| {head_dim} | {' | '.join(spans)} |" in page


@pytest.mark.parametrize("head_dim", CUTS)
@pytest.mark.compile
def test_cuts_are_those_of_the_kernels(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        triton_backend, "tile_tables", lambda mask, *cuts, whole_documents: seen.extend(cuts) or [None] * len(cuts)
    )
    mask = BlockDiagonalMask.from_seqlens([100, 28])
    q, k = (torch.empty(128, heads, head_dim, dtype=torch.bfloat16) for heads in (8, 2))
    with fake_gpu():
        triton_backend.plan_tiles(q, k, k, mask, make_options(q, mask), backward=True)
    assert tuple(dict.fromkeys(seen)) == CUTS[head_dim]


@pytest.mark.compile
def test_programs_are_those_of_the_launches() -> None:
    lengths = [700, 30, 3000, 366]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    reach = (2**31 - 1, 0, 2**31 - 1)
    mask = BlockDiagonalMask.from_seqlens(lengths)
    with fake_gpu() as launched:
        intervals.intervals_of_offsets(cu, cu, 4096, 4096, *reach)
        intervals.intervals_of_ids(torch.arange(4096)[None], "positions", *reach)
        triton_backend.tile_tables(mask, *CUTS[128])
        found = {x.kernel: (x.grid, x.threads) for x in launched}
    counted = {f"{x.kernel}_kernel": x for x in [offsets(lengths), *runs(lengths, checked=False)]}
    counted |= {f"{x.kernel}_kernel": x for x in tile_tables(lengths, CUTS[128])}
    for name in ("offsets_kernel", "edges_kernel", "runs_kernel", "chunks_kernel", "begins_kernel"):
        grid, threads = found[name]
        assert grid[0] * grid[1] == counted[name].programs, name
        assert threads == counted[name].threads, name
    grid, _ = found["order_kernel"]
    assert grid[0] * grid[1] >= counted["order_kernel"].programs >= 4096 / 32 / tables.TILES  # without empty entries


@pytest.mark.parametrize("kernel", ["offsets", "edges", "runs", "transpose", "chunks", "begins", "order"])
@pytest.mark.sampled("order")
@pytest.mark.compile
def test_registers(kernel: str) -> None:
    from tests.kernels.test_mask_kernels_compile import compile_kernel

    for name in ("positions", "segments") if kernel == "runs" else (kernel,):
        assert compile_kernel(name, "sm_90").registers <= REGISTERS[kernel]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tokens", "4096", "--head-dim", "256"])
    printed = capsys.readouterr().out
    assert "position ids" in printed
    assert "orca" in printed
