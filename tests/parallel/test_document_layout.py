"""The layout "documents", and the keys that ranks need of each other."""

import time

import numpy as np
import pytest
import torch

from tests.lengths import distributions, fill, packs
from tests.parallel.attention_cases import padded, trees
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import layouts, make_layout
from tritonpack.parallel.exchanges.keys import cast_parts
from tritonpack.parallel.layouts import LayoutName
from tritonpack.parallel.seen_keys import host_bounds
from tritonpack.testing.cases import parents_of

MILLION, RANKS = 1 << 20, 8
ALL_GATHERED = MILLION * (RANKS - 1) // RANKS


def drawn(median, sigma=1.0, tokens=MILLION, seed=0):
    rng = np.random.default_rng(seed)
    return fill(np.maximum(rng.lognormal(np.log(median), sigma, 64 + 8 * tokens // median), 1), tokens)


def of(lengths, **options):
    return BlockDiagonalMask.from_seqlens(lengths, **options)


def completions(tokens):
    """Prompts with eight completions each, which fill the batch."""
    rng, found, held = np.random.default_rng(0), [], 0
    while held < tokens:
        lengths = [int(n) for n in rng.integers(100, 1500, 9)]
        found.append([(-1, lengths[0]), *((0, n) for n in lengths[1:])])
        held += sum(lengths)
    return parents_of(*found)[:tokens]


def row_imbalance(layout):
    return max(layout.lengths) * layout.ranks / layout.num_rows


@pytest.mark.parametrize("seed", range(2))
def test_few_keys_and_even_work_for_a_million_tokens_of_short_documents(seed):
    """At least 10 times fewer than all keys of the others, which are 917,504."""
    mask = of(drawn(700, seed=seed))
    layout = make_layout("documents", mask, RANKS)
    assert max(layout.remote_keys(mask)) <= ALL_GATHERED // 10
    assert layout.imbalance(mask) <= 1.02
    assert row_imbalance(layout) <= 1.03


@pytest.mark.fast("chunks")
@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda: of(drawn(8000)), 294_459),
        (lambda: of([MILLION], window=(1023, 0)), 1100),
        (lambda: of(drawn(8000), window=(1023, 0)), 1100),
        (lambda: of([MILLION], chunk_size=8192), 0),
        (lambda: of([20] * 50_000), 0),
        (lambda: of(drawn(8000), causal=False), 294_459),
        (lambda: of([MILLION]), ALL_GATHERED),
        (lambda: of([MILLION // 3] * 3), MILLION // 2),
        (lambda: BlockDiagonalMask.from_tree(completions(200_000)), 10_000),
    ],
    ids=["8k", "window", "8k, window", "chunks", "tiny", "8k, bidirectional", "one", "three", "trees"],
)
def test_few_keys_and_even_work_for_other_masks(make, most):
    mask = make()
    layout = make_layout("documents", mask, RANKS)
    keys = layout.remote_keys(mask)
    assert max(keys) <= most
    assert layout.imbalance(mask) <= 1.02
    assert row_imbalance(layout) <= 1.03
    parts = cast_parts(mask, layout, 5, 4)
    assert sum(sum(part.received_counts) for part in parts) == keys[5] == sum(part.mask.num_keys for part in parts)


@pytest.mark.parametrize("ranks", [2, 3, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_work_is_even_on_other_numbers_of_ranks(ranks):
    for _, lengths in packs(131072, 1):
        mask = of(lengths)
        layout = make_layout("documents", mask, ranks)
        assert layout.imbalance(mask) <= 1.02
        assert row_imbalance(layout) <= 1.03


def test_work_is_even_beside_long_documents():
    for lengths in (distributions(32768)[name] for name in ("one", "skewed", "stdlib", "flan", "tiny")):
        mask = of(lengths)
        layout = make_layout("documents", mask, 8)
        assert layout.imbalance(mask) <= 1.02
        assert row_imbalance(layout) <= 1.03


@pytest.mark.slow
def test_a_million_tokens_take_less_than_a_second():
    """Of the processor's time, which is 0.1 seconds for the layout, and again for the plan."""
    masks = [of(drawn(700)), of([MILLION]), of([1] * MILLION)]
    for mask, ranks in zip(masks, (64, 8, 8), strict=True):
        host_bounds(mask)
        began = time.process_time()
        make_layout("documents", mask, ranks)
        assert time.process_time() - began < 1.0
    layout = make_layout("balanced", masks[0], 8)
    began = time.process_time()
    cast_parts(masks[0], layout, 3, 4)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("window", [1024, 4096])
def test_windows_and_trees_as_long_as_a_share_are_nearly_even(window):
    """A rank's share is 4,096 tokens, and trees have about 8,000."""
    for mask in (
        of(drawn(8000, tokens=32768), window=(window - 1, 0)),
        BlockDiagonalMask.from_tree(completions(32768)),
    ):
        layout = make_layout("documents", mask, RANKS)
        assert layout.imbalance(mask) <= 1.1
        assert row_imbalance(layout) <= 1.03


def test_padding_is_divided_evenly():
    """Rows that see nothing are rows, too."""
    mask = BlockDiagonalMask.from_cu_seqlens(torch.tensor([0, 5000, 9000]), total_q=20000)
    layout = make_layout("documents", mask, 4)
    assert row_imbalance(layout) <= 1.03
    assert layout.imbalance(mask) <= 1.02
    nothing = BlockDiagonalMask.from_cu_seqlens([0], total_q=64)
    assert row_imbalance(make_layout("documents", nothing, 4)) <= 1.25


def test_all_masks_of_the_layers_count():
    """A document of 60,000 tokens needs a zigzag for a full layer, and runs for layers with windows of 1,024."""
    full, windows = of([60000]), of([60000], window=(1023, 0))

    def runs(masks):
        return max(int((rows.diff() != 1).sum()) + 1 for rows in make_layout("documents", masks, 4).rows)

    assert runs(full) == runs([full]) == 2
    assert runs(windows) == runs([windows, windows]) == 1
    assert runs([full, windows, windows]) > 1

    pairs = host_bounds(full).counts + 20 * host_bounds(windows).counts
    for name in ("balanced", "documents"):
        work = [int(pairs[rows].sum()) for rows in make_layout(name, [full, *[windows] * 20], 4).rows]
        assert max(work) * 4 / sum(work) <= 1.02


def test_repeated_masks_count_as_often():
    causal, alone = of([4]), of([1] * 4)
    assert layouts._work([causal, alone, alone]).tolist() == [3, 4, 5, 6]
    assert layouts._work([alone, causal, causal]).tolist() == [3, 5, 7, 9]


def test_chunks_keep_a_document_together_if_another_layer_has_none():
    chunks, full = of([4096] * 2, chunk_size=512), of([4096] * 2)
    assert make_layout("documents", [chunks], 2).remote_keys(full) != [0, 0]
    assert make_layout("documents", [chunks, full], 2).remote_keys(full) == [0, 0]


def test_pieces_follow_the_fractions_of_a_document():
    """Three documents for eight ranks: each rank has rows of at most two documents, of each at most two runs."""
    mask = of([30000] * 3)
    for rows in make_layout("documents", mask, 8).rows:
        assert len(set((rows // 30000).tolist())) <= 2
        assert int((rows.diff() != 1).sum()) + 1 <= 4


@pytest.mark.parametrize("name", LayoutName.__args__)
@pytest.mark.parametrize(
    "make",
    [
        lambda: of([13, 1, 30, 6]),
        lambda: of([13, 1, 30, 6], window=(9, 0)),
        lambda: of([13, 1, 30, 6], window=(2, 3), causal=False),
        lambda: of([13, 1, 30, 6], chunk_size=8),
        lambda: of([13, 1, 30, 6], causal=False),
        padded,
        trees,
        lambda: trees(window=(4, 0)),
        lambda: trees(chunk_size=5),
        lambda: of([]),
    ],
)
def test_remote_keys_are_those_that_rows_see(name, make):
    """Compared with the dense mask, pair by pair, and so are the rows that travel in parts, and the masks of parts."""
    mask = make()
    dense = mask.to_dense()
    assert host_bounds(mask).counts.tolist() == dense.sum(1).tolist()
    layout = make_layout(name, mask, 3, chunk=4)
    needed = [dense[rows].any(0) for rows in layout.rows]
    for rank, rows in enumerate(layout.rows):
        needed[rank][rows] = False
    assert layout.remote_keys(mask) == [int(one.sum()) for one in needed]
    for rank, rows in enumerate(layout.rows):
        sent = torch.cat([needed[other][rows].nonzero()[:, 0] for other in range(3)])
        received = [other[needed[rank][other]] for other in layout.rows]
        for whole in cast_parts(mask, layout, rank, 1):
            assert whole.sent.tolist() == sent.tolist()
            assert whole.received_counts == [int(needed[rank][other].sum()) for other in layout.rows]
        parts = cast_parts(mask, layout, rank, 3)
        assert len(parts) == min(3, max(layout.remote_keys(mask)))
        taken = [0, 0, 0]
        for part in parts:
            counts = part.received_counts
            pieces = [one[n : n + more] for one, n, more in zip(received, taken, counts, strict=True)]
            taken = [n + more for n, more in zip(taken, counts, strict=True)]
            keys = torch.cat(pieces)[part.order]
            assert torch.equal(part.mask.to_dense(), dense[rows][:, keys])
            assert torch.equal(part.mask.distances(), mask.distances()[rows][:, keys])
        assert taken == [len(one) for one in received] if parts else not sum(map(len, received))
        assert sorted(torch.cat([part.sent for part in parts]).tolist() if parts else []) == sorted(sent.tolist())


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], r"equally many rows, on one device; got \[\]"),
        ([of([5]), of([6])], "equally many rows, on one device; got .*num_queries=5.*num_queries=6"),
        (None, "mask must be a BlockDiagonalMask, or a sequence of them; got NoneType"),
        ([of([5]), None], "mask must be a BlockDiagonalMask, or a sequence of them; got NoneType"),
        ([BlockDiagonalMask.from_seqlens([5], [6])], "5 queries and 6 keys"),
    ],
)
def test_refuses_masks_that_do_not_fit(masks, message):
    with pytest.raises(ValueError, match=message):
        make_layout("documents", masks, 2)
