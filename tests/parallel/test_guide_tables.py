"""The tables of keys and evenness in the guide to sequence parallelism."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lengths import fill, packs
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.keys import few_keys
from tritonpack.testing.cases import parents_of

GUIDE = Path(__file__).parents[2] / "docs/sequence-parallelism.md"


def batches(tokens: int) -> Iterator[tuple[str, BlockDiagonalMask]]:
    """Batches by name."""
    for name, lengths in packs(tokens, 1):
        yield name, BlockDiagonalMask.from_seqlens(lengths)
    yield "one document, window 1,024", BlockDiagonalMask.from_seqlens([tokens], window=(1023, 0))
    rng = np.random.default_rng(0)
    lengths = fill(np.maximum(rng.lognormal(np.log(8000), 1.0, 64 + tokens // 1000), 1), tokens)
    yield "median 8,000", BlockDiagonalMask.from_seqlens(lengths)
    yield "median 8,000, window 1,024", BlockDiagonalMask.from_seqlens(lengths, window=(1023, 0))
    trees: list[list[tuple[int, int]]] = []
    while sum(length for tree in trees for _, length in tree) < tokens:
        prompt, *completions = rng.integers(100, 1500, 9).tolist()
        trees.append([(-1, prompt), *((0, length) for length in completions)])
    yield "prompts with 8 completions", BlockDiagonalMask.from_tree(parents_of(*trees)[:tokens])


@pytest.mark.slow
def test_table_of_the_guide():
    guide = GUIDE.read_text(encoding="utf-8")
    for name, mask in batches(1 << 20):
        layouts = {one: make_layout(one, mask, 8) for one in ("contiguous", "balanced", "documents")}
        keys = {one: max(layout.remote_keys(mask)) for one, layout in layouts.items()}
        documents = layouts["documents"]
        rows = max(documents.lengths) * 8 / documents.num_rows
        row = (
            f"| {name} | {keys['contiguous']:,} (pairs {layouts['contiguous'].imbalance(mask):.2f}) | "
            f"{keys['balanced']:,} | {keys['documents']:,} | {documents.imbalance(mask):.2f} | {rows:.2f} |"
        )
        assert row in guide
        assert keys["documents"] <= 917_504


@pytest.mark.slow
def test_table_of_what_auto_takes():
    guide = GUIDE.read_text(encoding="utf-8")
    for name, mask in batches(1 << 20):
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
        cells.append(f"{max(make_layout('documents', mask, 2).remote_keys(mask)):,}")  # nodes whose ranks divide heads
        assert f"| {name} | {' | '.join(cells)} |" in guide
