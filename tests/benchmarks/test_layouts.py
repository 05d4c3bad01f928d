"""The table of keys and evenness in the guide to sequence parallelism is what the benchmark counts."""

from pathlib import Path

import pytest

from benchmarks.layouts import measure


@pytest.mark.slow
def test_table_of_the_guide():
    guide = (Path(__file__).parents[2] / "docs/sequence-parallelism.md").read_text(encoding="utf-8")
    for name, measures in measure(1 << 20, 8, 1).items():
        keys, pairs, rows = (
            {layout: numbers[0] for layout, numbers in measures[what].items()} for what in ("keys", "pairs", "rows")
        )
        row = (
            f"| {name} | {keys['contiguous']:,} (pairs {pairs['contiguous']:.2f}) | {keys['balanced']:,} | "
            f"{keys['documents']:,} | {pairs['documents']:.2f} | {rows['documents']:.2f} |"
        )
        assert row in guide
        assert keys["documents"] <= 917_504
