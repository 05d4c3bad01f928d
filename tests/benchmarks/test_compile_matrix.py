"""Kernels, compiled for their GPUs without the hardware, and the committed rows of the compile report.

`make test` compiles a few, `make nightly` more, `make compile-matrix` everything. That its rows are
those of the present code and tiles, under both versions of Triton, is checked without compiling.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton

from benchmarks.compile_matrix import PAGE, VERSIONS, is_common, page
from benchmarks.compile_report import Row, make_row, read_rows, stale
from tests.kernels.aot import Configuration, compile_configuration
from tests.kernels.lint import launchable
from tritonpack.kernels.tile_shapes import FLOAT32_KIB, TILES

ROWS = {(row["triton"], row["configuration"]): row for row in read_rows()}

# Common rows that may spill in loops, with the version of Triton: tiles without spills would cost more than they save
# (docs/decisions/kernel-forms.md). RDNA has more of them.
OPEN = {
    *(("3.6.0", f"dkdv-{gpu}-d128-bf16-group1-alibi") for gpu in ("sm_100", "sm_103")),
    *(("3.6.0", f"dkdv-{gpu}-d128-bf16-tree") for gpu in ("sm_100", "sm_103")),
    *(("3.6.0", f"dkdv-{gpu}-d128-bf16-group2-softcap-tree") for gpu in ("sm_86", "sm_89", "sm_100", "sm_103")),
    *(("3.9.0", f"dkdv-{gpu}-d128-bf16-group2-softcap-tree") for gpu in ("sm_86", "sm_89")),
    *(("3.6.0", f"dkdv-{gpu}-d128-bf16-group1-alibi-tree") for gpu in ("sm_100", "sm_103")),
    ("3.9.0", "dq-sm_90-d128-bf16-group2-softcap-tree"),
    ("3.9.0", "dq-gfx942-d128-bf16-group2-softcap"),
}  # fmt: skip

# What differs from process to process in binaries for AMD, by a few instructions: LLVM may add terms in another order.
VARYING = {"registers", "instructions", "loop_instructions", "loop_waits"}

QUICK = {
    "dkdv-sm_80-d128-bf16", "dq-sm_100-d64-bf16", "dkdv-gfx942-d64-bf16",
    "forward-sm_90-d128-bf16-group2-softcap", "dkdv-sm_90-d128-bf16-group1-dropout", "forward-sm_90-d128-bf16-tree",
}  # fmt: skip


TAKES_MOST = (("dropout",), ("tree",))


def _is_quick(configuration: Configuration) -> bool:
    """Whether a configuration is compiled in every run: Hopper at 128, and a kernel for some GPUs and features."""
    return str(configuration) in QUICK | {f"{kernel}-sm_90-d128-bf16" for kernel in ("forward", "dkdv", "dq")}


def _is_compiled(configuration: Configuration) -> bool:
    """Whether a test compiles a configuration: plain attention on each GPU, and at 128 the features that take most
    registers, on Hopper all; on GPUs that use others' tiles only 128, and large storages on gfx942 alone."""
    if configuration.backend == "gluon":
        return False  # below
    if configuration.large:
        return configuration.gpu == "gfx942"
    gpu, head_dim, features = configuration.gpu, configuration.head_dim, configuration.features
    if configuration.dtype != torch.bfloat16:
        return configuration.dtype == torch.float32 and gpu == "sm_80" and head_dim == 128
    if not features and configuration.group == 4:
        return head_dim == 128 or (gpu in TILES and (gpu == "sm_90" or head_dim in (64, 256)))
    return gpu in TILES and head_dim == 128 and len(features) < 2 and (gpu == "sm_90" or features in TAKES_MOST)


@pytest.mark.fast("dkdv-gfx942-d64-bf16", "dkdv-sm_80-d128-bf16")
@pytest.mark.compile
@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(c, id=str(c), marks=() if _is_quick(c) else pytest.mark.slow)
        for c in launchable()
        if _is_compiled(c)
    ],
)
def test_binary_is_that_of_the_report(configuration: Configuration) -> None:
    row = make_row(configuration, compile_configuration(configuration))
    committed = ROWS.get((triton.__version__, str(configuration)))
    if committed is None:  # another version of Triton
        assert not row["findings"] or not is_common(str(configuration))
    elif committed["key"] == row["key"]:
        assert _facts(committed) == _facts(row)
    else:  # test_report_is_up_to_date fails, too
        assert (row["findings"], row["minor"]) == (committed["findings"], committed["minor"])


def _facts(row: Row) -> Row:
    left_out = VARYING if "-gfx" in row["configuration"] else set()
    return {name: value for name, value in row.items() if value and name not in left_out}


@pytest.mark.parametrize("version", VERSIONS)
def test_report_is_up_to_date(version: str) -> None:
    """Run `make compile-matrix` if this fails. It compiles the rows that are listed."""
    configurations = launchable()
    assert [str(c) for c in stale(ROWS.values(), configurations, version)] == []
    assert {name for of, name in ROWS if of == version} == {*map(str, configurations)}


def test_page_names_every_row_that_is_not_clean() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(ROWS.values())
    for row in ROWS.values():
        assert (f"| {row['configuration']} |" in text) or not row["findings"] + row["minor"]


def test_shared_memory_of_float32() -> None:
    """What a call needs is what its kernels take on NVIDIA GPUs."""
    taken: dict[tuple[int, str], int] = {}
    for row in ROWS.values():
        kernel, gpu, head_dim, dtype = row["configuration"].split("-")[:4]
        if dtype == "fp32" and gpu.startswith("sm_"):
            place = int(head_dim[1:]), "forward" if kernel == "forward" else "backward"
            taken[place] = max(taken.get(place, 0), -(-int(row["shared_bytes"]) // 1024))
    assert taken == {(row, direction): kib for row, needed in FLOAT32_KIB.items() for direction, kib in needed.items()}


def test_common_rows_are_clean_in_loops() -> None:
    """16-bit types at head dimensions 64 and 128, and all kernels for Hopper."""
    found = {of for of, row in ROWS.items() if row["findings"] and (is_common(of[1]) or of[1].startswith("gluon"))}
    assert {row for row in found if "-gfx1" not in row[1]} == OPEN
