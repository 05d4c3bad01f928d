"""The tables of keys and evenness in the guide to sequence parallelism are what the benchmark counts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.layouts import batches, measure
from tritonpack.parallel import make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges.auto import few_keys
from tritonpack.parallel.exchanges.call import Call

GUIDE = Path(__file__).parents[2] / "docs/sequence-parallelism.md"


@pytest.mark.slow
def test_table_of_the_guide():
    guide = GUIDE.read_text(encoding="utf-8")
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


@pytest.mark.slow
def test_table_of_what_auto_takes():
    guide = GUIDE.read_text(encoding="utf-8")
    for name, mask in batches(1 << 20, 1):
        if name in ("prompts with 8 completions", "median 8,000, window 1,024"):
            continue
        cells = []
        for ranks in (8, 16):
            layout = make_layout("documents", mask, ranks)
            longest = max(layout.lengths)
            cells += [f"{(ranks - 1) * longest:,}", f"{max(layout.remote_keys(mask)):,}"]
            if ranks == 16:
                nodes = [torch.cat(half).sort().values for half in (layout.rows[:8], layout.rows[8:])]
                seen = layout.seen_by_ranks(mask)
                into = [sum(seen[8 * n + r].among(nodes[1 - n]).shape[0] for r in range(8)) for n in range(2)]
                cells += [f"{8 * longest:,}", f"{max(into):,}"]
            few = few_keys(Call(Ranks(None, 0, ranks), layout, mask, None, "reference", 1))
            cells.append("group cast" if few else "all-gather")
        assert f"| {name} | {' | '.join(cells)} |" in guide


@pytest.mark.slow
def test_table_of_keys_that_a_node_receives():
    """By "group_cast" between all ranks, and between nodes whose ranks divide heads."""
    guide, nodes, gpus = GUIDE.read_text(encoding="utf-8"), 2, 8
    for name, mask in batches(1 << 20, 1):
        if name not in ("short (median 700)", "long tail (median 2,000)", "median 8,000", "one document"):
            continue
        every, most = make_layout("documents", mask, nodes * gpus), 0
        for node in np.split(np.arange(nodes * gpus), nodes):
            far = torch.cat([rows for rank, rows in enumerate(every.rows) if rank not in node]).sort().values
            most = max(most, sum(every.seen_by_ranks(mask)[rank].among(far).shape[0] for rank in node))
        pair = max(make_layout("documents", mask, nodes).remote_keys(mask))
        assert f"| {name} | {most:,} | {pair:,} |" in guide
