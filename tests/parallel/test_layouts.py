"""Layouts: each row has one owner, rows ascend, work is even, ranks need few keys, unsharding inverts sharding."""

import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from tests.lengths import distributions, fill, packs
from tests.parallel.attention_cases import padded, trees
from tritonpack import BlockDiagonalMask
from tritonpack.parallel import Layout, make_layout
from tritonpack.parallel.comm import pad_to
from tritonpack.parallel.exchanges.keys import CastKeys, GatheredKeys
from tritonpack.parallel.layouts import LayoutName, host_bounds

NAMES = get_args(LayoutName)
MILLION, RANKS = 1 << 20, 8
GUIDE = Path(__file__).parents[2] / "docs/sequence-parallelism.md"


def of(lengths, **options):
    return BlockDiagonalMask.from_seqlens(lengths, **options)


def drawn(median, tokens=MILLION, seed=0):
    rng = np.random.default_rng(seed)
    return fill(np.maximum(rng.lognormal(np.log(median), 1.0, 64 + 8 * tokens // median), 1), tokens)


def imbalance(layout, mask):
    """The visible pairs of the rank that has most, over the mean."""
    start, stop = host_bounds(mask)
    shares = [int((stop - start)[rows].sum()) for rows in layout.rows]
    return max(shares) * layout.ranks / sum(shares) if sum(shares) else 1.0


def row_imbalance(layout):
    return max(layout.lengths) * layout.ranks / layout.num_rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 64, 1000])
def test_every_row_has_one_owner_and_unsharding_inverts_sharding(name, ranks, total):
    layout = make_layout(name, of([total // 3, total - total // 3]), ranks)
    assert layout.ranks == ranks
    assert torch.cat(layout.rows).sort().values.tolist() == list(range(total))
    assert all(bool((rows[1:] > rows[:-1]).all()) for rows in layout.rows)
    assert layout.lengths == [len(rows) for rows in layout.rows]
    allowed = {"contiguous": 1, "stripe": 1, "zigzag": 2, "documents": 2 + 0.03 * total}
    assert max(layout.lengths) - min(layout.lengths) <= allowed[name]
    assert min(layout.lengths) >= min(total // ranks, 1)
    x = torch.randn(2, total, 2)
    shards = [layout.shard(x, rank, 1) for rank in range(ranks)]
    assert torch.equal(layout.unshard(torch.cat(shards, -2), -2), x)


KEYS = {  # lengths, options, most keys of other ranks
    "700": (drawn(700), {}, 91_750),  # a tenth of all keys of the others
    "8k": (drawn(8000), {}, 294_459),
    "one, window": ([MILLION], {"window": (1023, 0)}, 1100),
    "8k, window": (drawn(8000), {"window": (1023, 0)}, 1100),
    "chunks": ([MILLION], {"chunk_size": 8192}, 0),
    "tiny": ([20] * 50_000, {}, 0),
    "one": ([MILLION], {}, 917_504),
    "three": ([MILLION // 3] * 3, {}, MILLION // 2),
}


@pytest.mark.parametrize("case", KEYS.values(), ids=KEYS)
def test_few_keys_and_even_work_for_a_million_tokens(case):
    lengths, options, most = case
    mask = of(lengths, **options)
    host_bounds(mask)
    began = time.process_time()
    layout = make_layout("documents", mask, RANKS)
    part = CastKeys.of(mask, layout, 5)
    assert time.process_time() - began < 2.0
    keys = layout.remote_keys(mask)
    assert max(keys) <= most
    assert imbalance(layout, mask) <= 1.02
    assert row_imbalance(layout) <= 1.03
    assert part is None or sum(part.received_counts) == keys[5] == part.mask.num_keys


@pytest.mark.parametrize("ranks", [2, 3, 8, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_work_is_even_on_other_numbers_of_ranks(ranks):
    lengths = [lengths for _, lengths in packs(131072, 1)]
    lengths += [distributions(32768)[name] for name in ("one", "skewed", "stdlib", "flan", "tiny") if ranks < 64]
    for mask in map(of, lengths):
        layout = make_layout("documents", mask, ranks)
        assert imbalance(layout, mask) <= 1.02
        assert row_imbalance(layout) <= 1.03


def test_all_masks_of_the_layers_count():
    """Windows in most layers of a long document, and chunks in some layers."""
    full, windows = of([60000]), of([60000], window=(1023, 0))
    of_full, of_windows = (stop - start for start, stop in map(host_bounds, (full, windows)))
    pairs = of_full + 20 * of_windows
    work = [int(pairs[rows].sum()) for rows in make_layout("documents", [full, *[windows] * 20], 4).rows]
    assert max(work) * 4 / sum(work) <= 1.02
    chunks, whole = of([4096] * 2, chunk_size=512), of([4096] * 2)
    assert make_layout("documents", [chunks], 2).remote_keys(whole) != [0, 0]
    assert make_layout("documents", [chunks, whole], 2).remote_keys(whole) == [0, 0]


MASKS = {
    "causal": of([13, 1, 30, 6]),
    "window": of([13, 1, 30, 6], window=(9, 0)),
    "both sides": of([13, 1, 30, 6], window=(2, 3), causal=False),
    "chunks": of([13, 1, 30, 6], chunk_size=8),
    "bidirectional": of([13, 1, 30, 6], causal=False),
    "padded": padded(),
    "empty": of([]),
}


def distances(mask):
    """From each key to each query, which ALiBi multiplies."""
    return mask.diagonal[:, None] - (torch.arange(mask.num_keys) if mask.key_places is None else mask.key_places)


def require_part(part, mask, rows, arrived, expected):
    """Rows that arrive are the expected keys, in the order of the batch, and the part's mask is that of these keys."""
    keys = arrived[part.places]
    assert keys.tolist() == expected.nonzero()[:, 0].tolist()
    assert torch.equal(part.mask.to_dense(), mask.to_dense()[rows][:, keys])
    assert torch.equal(distances(part.mask), distances(mask)[rows][:, keys])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_remote_keys_are_those_that_rows_see(name, mask):
    """Compared with the dense mask, pair by pair, and so are the rows that travel in parts, and the masks of parts."""
    dense = mask.to_dense()
    start, stop = host_bounds(mask)
    assert (stop - start).tolist() == dense.sum(1).tolist()
    layout = make_layout(name, mask, 3)
    needed = [dense[rows].any(0) for rows in layout.rows]
    for rank, rows in enumerate(layout.rows):
        needed[rank][rows] = False
    assert layout.remote_keys(mask) == [int(one.sum()) for one in needed]
    for rank, rows in enumerate(layout.rows):
        cast, every = (kind.of(mask, layout, rank) for kind in (CastKeys, GatheredKeys))
        assert (cast is None) == (not any(layout.remote_keys(mask)))
        assert (every is None) == (not mask.num_keys)
        if cast is not None:
            sent = [needed[other][rows].nonzero()[:, 0] for other in range(3)]
            received = [other[needed[rank][other]] for other in layout.rows]
            assert cast.sent.tolist() == torch.cat(sent).tolist()
            assert (cast.sent_counts, cast.received_counts) == (list(map(len, sent)), list(map(len, received)))
            require_part(cast, mask, rows, torch.cat(received), needed[rank])
        if every is not None:
            shards = torch.stack([pad_to(other, 0, every.length) for other in layout.rows])
            require_part(every, mask, rows, shards.flatten(), torch.ones(mask.num_keys).index_fill(0, rows, 0))


FIFTY = of([50])
REFUSALS = [
    (lambda: make_layout("spiral", FIFTY, 2), "layout must be one of 'contiguous', 'zigzag'.*got 'spiral'"),
    (lambda: make_layout("zigzag", FIFTY, 0), "ranks must be an integer of at least 1; got 0"),
    (lambda: make_layout("zigzag", FIFTY.restrict(torch.arange(5)), 2), "5 queries and 50 keys"),
    (lambda: make_layout("documents", [], 2), r"equally many rows, on one device; got \[\]"),
    (lambda: make_layout("stripe", [of([5]), of([6])], 2), "equally many rows, .*num_queries=5.*num_queries=6"),
    (lambda: make_layout("stripe", [of([5]), None], 2), "mask must be a BlockDiagonalMask, .* of them; got NoneType"),
    (lambda: make_layout("documents", trees(), 2), "For a mask of trees use the layout 'contiguous', 'zigzag'"),
    (lambda: make_layout("zigzag", FIFTY, 2).shard(torch.zeros(50), 2), "rank must be an integer from 0 to 1; got"),
    (lambda: make_layout("zigzag", FIFTY, 2).shard(torch.zeros(49), 0), r"50 rows.*dim=0; got shape \(49,\)"),
    (lambda: make_layout("zigzag", FIFTY, 2).unshard(torch.zeros(50), 1), r"50 rows.*dim=1; got shape \(50,\)"),
    (lambda: make_layout("zigzag", FIFTY, 2).divide(0), "parts must be an integer of at least 1; got 0"),
    (lambda: Layout(()), "got none, and every rank needs one"),
    (lambda: Layout((torch.tensor([0, 1], dtype=torch.int32),)), r"got \(2,\) int32 on cpu"),
    *(
        (lambda rows=rows: Layout(tuple(map(torch.tensor, rows))), "must ascend, and .* exactly one rank")
        for rows in ([[1, 0]], [[0, 1], [1]], [[0, 3], [1]], [[-1, 0], [1]])
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def rows_of_table():
    batches = [(name, of(lengths)) for name, lengths in packs(MILLION, 1)]
    windows = {"one document": [MILLION], "median 8,000": drawn(8000)}
    batches += [(f"{name}, window 1,024", of(lengths, window=(1023, 0))) for name, lengths in windows.items()]
    batches.append(("median 8,000", of(drawn(8000))))
    for name, mask in batches:
        contiguous, documents = (make_layout(one, mask, 8) for one in ("contiguous", "documents"))
        yield (
            f"| {name} | {max(contiguous.remote_keys(mask)):,} (pairs {imbalance(contiguous, mask):.2f}) | "
            f"{max(documents.remote_keys(mask)):,} | {imbalance(documents, mask):.2f} | "
            f"{row_imbalance(documents):.2f} |"
        )


@pytest.mark.slow
def test_table_of_the_guide():
    """`python -m tests.parallel.test_layouts` prints its rows."""
    guide = GUIDE.read_text(encoding="utf-8")
    assert [row for row in rows_of_table() if row not in guide] == []


if __name__ == "__main__":
    print("\n".join(rows_of_table()))
