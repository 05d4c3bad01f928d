"""The tables of the pages on the kernels for Hopper have the figures of the compile report."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.compile_matrix import VERSIONS
from benchmarks.compile_report import read_rows
from tests.kernels.aot import HopperConfiguration, hopper_configurations

PAGES = Path(__file__).parents[2] / "docs" / "decisions"
ROWS = {(row["triton"], row["configuration"]): row for row in read_rows()}
BF16 = [c for c in hopper_configurations() if str(c).endswith("bf16")]
NAMES = {"dq": "dQ, ", "dkdv": "dK and dV, ", "forward": ""}


def _join(values: list[int]) -> str:
    return ", ".join(map(str, values if any(values) else [0]))


def table_row(configuration: HopperConfiguration) -> str:
    """The row of a kernel: its name, tile and shared memory; loops and spills under both versions."""
    loops, spills, elsewhere = [], [], []
    newest_first = [ROWS[version, str(configuration)] for version in sorted(VERSIONS, reverse=True)]
    for row in newest_first:
        sizes, spilled = ([int(x) for x in row[name].split()] for name in ("loop_instructions", "loop_spills"))
        half = len(sizes) // 2
        if configuration.kernel == "forward":  # of both halves the longer one: before the full blocks, full, after them
            before, full, after = (max(pair) for pair in zip(sizes[:half], sizes[half:], strict=True))
            loops.append(f"{full} / {before}, {after}")
            spills.append(str(sum(spilled)))
        else:
            ordered = sorted(zip(sizes, spilled, strict=True))
            loops.append(f"{_join([x for x, _ in ordered[:half]])} / {_join([x for x, _ in ordered[half:]])}")
            assert not any(x for _, x in ordered[:half]), "loops over full blocks don't spill"
            spills.append(_join([x for _, x in ordered[half:]]))
        elsewhere.append(str(int(row["spills"]) - sum(spilled)))
    block = configuration.tile.block_m if configuration.kernel == "dkdv" else configuration.tile.block_n
    kib = int(newest_first[0]["shared_bytes"]) / 1024
    first = f"{NAMES[configuration.kernel]}{configuration.head_dim}, {block}, {configuration.tile.num_stages}"
    return f"| {first} | {kib:.1f} | {' | '.join(loops)} | {' / '.join(spills)} | {' / '.join(elsewhere)} |"


@pytest.mark.parametrize("configuration", BF16, ids=str)
def test_figures_of_the_compiler(configuration: HopperConfiguration) -> None:
    page = "hopper-forward.md" if configuration.kernel == "forward" else "hopper-backward.md"
    assert table_row(configuration) in (PAGES / page).read_text(encoding="utf-8").splitlines()
