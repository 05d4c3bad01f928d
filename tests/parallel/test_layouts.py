"""Layouts: each row has one owner, rows ascend, work is even, unsharding inverts sharding."""

import pytest
import torch

from tests.lengths import distributions, packs
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import Layout, make_layout

NAMES = ("contiguous", "zigzag", "stripe", "balanced", "documents")


def mask_of(total):
    return BlockDiagonalMask.from_seqlens([total // 3, total - total // 3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 64, 1000])
def test_every_row_has_one_owner(name, ranks, total):
    layout = make_layout(name, mask_of(total), ranks, chunk=16)
    assert layout.ranks == ranks
    assert torch.cat(layout.rows).sort().values.tolist() == list(range(total))
    assert all(bool((rows[1:] > rows[:-1]).all()) for rows in layout.rows)
    assert layout.lengths == [len(rows) for rows in layout.rows]
    runs = max(int((rows.diff() != 1).sum()) + 1 for rows in layout.rows)
    spread = max(layout.lengths) - min(layout.lengths)
    allowed = {"contiguous": 1, "stripe": 1, "zigzag": 2, "balanced": runs, "documents": 2 + 0.03 * total}
    assert spread <= allowed[name]
    assert min(layout.lengths) >= min(total // ranks, 1)


def test_rows_of_each_rank():
    mask = BlockDiagonalMask.from_seqlens([8])
    rows = {name: [rows.tolist() for rows in make_layout(name, mask, 2, chunk=1).rows] for name in NAMES}
    assert rows == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "stripe": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "balanced": [[0, 3, 4, 7], [1, 2, 5, 6]],
        "documents": [[0, 1, 2, 3], [4, 5, 6, 7]],  # so short that keys cost more than pairs
    }


def test_chunks_have_the_default_length():
    layout = make_layout("balanced", BlockDiagonalMask.from_seqlens([256 * 64]), 2)
    for rows in layout.rows:
        chunks = rows.view(-1, 256)
        assert (chunks == chunks[:, :1] + torch.arange(256)).all()
        assert (chunks[:, 0] % 256 == 0).all()


def test_chunks_are_not_shorter_than_tiles():
    """If 16 chunks per rank were shorter than a tile of 128 rows, there are fewer: 15 for 2,000 rows per rank."""
    for tokens, ranks, chunks in ((32768, 64, 4), (32000, 16, 15), (32768, 256, 1)):
        layout = make_layout("balanced", BlockDiagonalMask.from_seqlens([tokens]), ranks)
        bounds = {tokens * chunk // (ranks * chunks) for chunk in range(ranks * chunks)}
        assert all(int(rows[0]) in bounds for rows in layout.rows)
        jumps = [rows[1:][rows.diff() != 1].tolist() for rows in layout.rows]
        assert all(set(one) <= bounds and len(one) < chunks for one in jumps)
        assert layout.in_order == (chunks == 1)


@pytest.mark.parametrize("tokens", [32768, 131072])
@pytest.mark.parametrize("lengths", ["one", "skewed", "stdlib", "flan", "tiny"])
def test_balanced_work_is_even(tokens, lengths):
    mask = BlockDiagonalMask.from_seqlens(distributions(tokens)[lengths])
    for ranks in (2, 4, 8, 16):
        assert make_layout("balanced", mask, ranks).imbalance(mask) <= 1.02


def test_balanced_work_is_even_for_drawn_packs():
    """Ten batches each of short documents, of a long tail and of conversations."""
    for _, lengths in packs(32768, 10):
        mask = BlockDiagonalMask.from_seqlens(lengths)
        assert mask.num_queries == 32768
        assert max(make_layout("balanced", mask, ranks).imbalance(mask) for ranks in (4, 8, 16)) <= 1.02


def test_balanced_work_is_even_with_windows_and_padding():
    lengths = distributions(32768)["stdlib"]
    padded = BlockDiagonalMask.from_cu_seqlens(
        torch.tensor([0, *lengths]).cumsum(0), window=(512, 0), total_q=40000, total_k=40000
    )
    assert make_layout("balanced", padded, 8).imbalance(padded) <= 1.02
    assert make_layout("contiguous", padded, 8).imbalance(padded) > 1.15


def test_imbalance_counts_visible_pairs():
    """In a document of 8 tokens, the first four see 10 keys and the others 26."""
    mask = BlockDiagonalMask.from_seqlens([8])
    assert make_layout("contiguous", mask, 2).imbalance(mask) == 26 / 18
    assert make_layout("zigzag", mask, 2).imbalance(mask) == 1.0
    nothing = BlockDiagonalMask.from_cu_seqlens([0], total_q=8)
    assert make_layout("balanced", nothing, 2).imbalance(nothing) == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unsharding_inverts_sharding(name, dim):
    layout = make_layout(name, mask_of(50), 4, chunk=4)
    x = torch.randn(50, 50, 50)
    shards = [layout.shard(x, rank, dim) for rank in range(4)]
    assert [shard.shape[dim] for shard in shards] == layout.lengths
    assert torch.equal(layout.unshard(torch.cat(shards, dim), dim), x)


def test_in_order_is_whether_shards_follow_each_other():
    assert make_layout("contiguous", mask_of(50), 4).in_order
    assert not make_layout("zigzag", mask_of(50), 4).in_order
    assert make_layout("zigzag", mask_of(50), 1).in_order


def test_ties_are_broken_by_number():
    """So that all ranks make the same layout of chunks with equal work."""
    mask = BlockDiagonalMask.from_seqlens([10] * 64, causal=False)
    layouts = [make_layout("balanced", mask, 4, chunk=10) for _ in range(2)]
    assert [a.tolist() for a in layouts[0].rows] == [b.tolist() for b in layouts[1].rows]
    assert layouts[0].rows[0].tolist()[:10] == list(range(10))


def test_restricted_masks_are_rows_of_the_mask():
    mask = BlockDiagonalMask.from_seqlens([13, 1, 30, 6], window=(9, 0))
    for name in NAMES:
        for rows in make_layout(name, mask, 3, chunk=4).rows:
            assert torch.equal(mask.restrict(rows).validate().to_dense(), mask.to_dense()[rows])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: make_layout("ring", m, 2), "layout must be one of 'contiguous', 'zigzag'.*got 'ring'"),
        (lambda m: make_layout("zigzag", m, 0), "ranks must be an integer of at least 1; got 0"),
        (lambda m: make_layout("zigzag", m, True), "ranks must be an integer of at least 1; got True"),
        (lambda m: make_layout("balanced", m, 2, chunk=0), "chunk must be an integer of at least 1; got 0"),
        (lambda m: make_layout("zigzag", m.restrict(torch.arange(5)), 2), "5 queries and 50 keys"),
        (lambda m: make_layout("zigzag", m, 2).shard(torch.zeros(50), 2), "rank must be an integer from 0 to 1; got 2"),
        (lambda m: make_layout("zigzag", m, 2).shard(torch.zeros(49), 0), r"50 rows.*dim=0; got shape \(49,\)"),
        (lambda m: make_layout("zigzag", m, 2).unshard(torch.zeros(50), 1), r"50 rows.*dim=1; got shape \(50,\)"),
    ],
)
def test_refuses_malformed_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(mask_of(50))


def test_layout_from_rows():
    layout = Layout((torch.tensor([1, 2]), torch.tensor([0])))
    assert (layout.num_rows, layout.lengths, layout.inverse.tolist()) == (3, [2, 1], [2, 0, 1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "one at least; got none"),
        (([0, 1],), r"int64 tensors on one device; got list \[0, 1\]"),
        ((torch.tensor([0, 1], dtype=torch.int32),), r"got \(2,\) int32 on cpu"),
        ((torch.tensor([1, 0]),), "must ascend"),
        ((torch.tensor([0, 1]), torch.tensor([1])), "exactly one rank"),
        ((torch.tensor([0, 3]), torch.tensor([1])), "exactly one rank"),
        ((torch.tensor([-1, 0]), torch.tensor([1])), "exactly one rank"),
    ],
)
def test_refuses_malformed_rows(rows, message):
    with pytest.raises(ValueError, match=message):
        Layout(rows)
