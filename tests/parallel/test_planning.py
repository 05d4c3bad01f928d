"""Predictions of exchanges and layouts: counted by hand or brute force, in whole numbers; and sensible choices."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tritonpack import BlockDiagonalMask
from tritonpack.backends.schedule import tile_table
from tritonpack.parallel import Layout, make_layout, plan, timing, traffic
from tritonpack.parallel.call import rows_mask
from tritonpack.parallel.shape import AttentionShape
from tritonpack.parallel.tiles import cut

LLAMA = SimpleNamespace(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
SMALL = SimpleNamespace(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
NAMES = ("contiguous", "zigzag", "stripe", "balanced")


def spread(total, seed=0, median=200, sigma=1.2):
    """Lengths that sum to `total`."""
    draws = np.random.default_rng(seed).lognormal(np.log(median), sigma, total).astype(int) + 1
    count = int(np.searchsorted(draws.cumsum(), total))
    return [*draws[:count].tolist(), int(total - draws[:count].sum())]


MASKS = {
    "causal": lambda: BlockDiagonalMask.from_seqlens(spread(3000)),
    "both ways": lambda: BlockDiagonalMask.from_seqlens(spread(3000, 1), causal=False),
    "window": lambda: BlockDiagonalMask.from_seqlens(spread(3000, 2, median=900), window=(150, 0)),
    "fewer rows than ranks": lambda: BlockDiagonalMask.from_seqlens([3, 2]),
    "tiny": lambda: BlockDiagonalMask.from_seqlens([20] * 300),
    "padding": lambda: BlockDiagonalMask.from_padding_mask(torch.arange(800) < torch.tensor([[700], [0], [90], [800]])),
}


def tiles_of(mask, layout):
    order = torch.cat(layout.rows)
    return cut(mask.key_start[order].numpy(), mask.key_stop[order].numpy(), layout.lengths)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_work_is_the_blocks_that_the_kernels_visit(mask, name, ranks):
    mask = MASKS[mask]()
    layout = make_layout(name, mask, ranks)
    expected, pairs = [], []
    for rank in range(ranks):
        seen = rows_mask(mask, layout, rank)
        table = [(a, b) for a, b, _ in tile_table(seen, 128).tolist() if a < b]
        expected.append(sum(-(int(seen.key_start[a] - seen.key_stop[b - 1]) // 128) for a, b in table))
        pairs.append(int(seen.to_dense().sum()))
    tiles = tiles_of(mask, layout)
    assert tiles.blocks().tolist() == expected
    assert tiles.pairs.tolist() == pairs


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_work_on_each_ranks_keys(mask, name):
    mask = MASKS[mask]()
    layout = make_layout(name, mask, 4)
    tiles = tiles_of(mask, layout)
    expected = np.zeros((4, 4), int)
    for rank in range(4):
        for tile in range(tiles.begins[rank], tiles.begins[rank + 1]):
            for source, rows in enumerate(layout.rows):
                keys = int(((rows >= tiles.start[tile]) & (rows < tiles.stop[tile])).sum())
                expected[rank, source] += -(-keys // 128)
    assert tiles.blocks_by_source([rows.numpy() for rows in layout.rows]).tolist() == expected.tolist()


def test_blocks_by_hand():
    """Four tiles of one document visit 1, 2, 3 and 4 blocks."""
    mask = BlockDiagonalMask.from_seqlens([512])
    tiles = tiles_of(mask, make_layout("contiguous", mask, 2))
    assert tiles.blocks().tolist() == [3, 7]
    assert tiles.blocks_by_source([np.arange(256), np.arange(256, 512)]).tolist() == [[3, 0], [4, 3]]
    assert tiles_of(mask, make_layout("zigzag", mask, 2)).blocks().tolist() == [5, 5]


class TestTimes:
    def test_gathers_beside_work(self):
        """Three steps of work 4, 4 and 2; the second gather hides behind the first work, the third doesn't."""
        assert timing.all_gather(10, [0.4, 0.4, 0.2], [3, 3, 7], [0, 0, 0]) == 3 + 4 + 7 + 2
        assert timing.all_gather(10, [0.4, 0.4, 0.2], [3, 3, 7], [1, 5, 2]) == 3 + 4 + (1 + 7) + 5 + 2

    def test_even_ring(self):
        work = np.full((4, 4), 3.0)
        assert timing.ring(work, 2.0, 0.0) == 4 * 3
        assert timing.ring(work, 5.0, 0.0) == 3 * 5 + 3
        assert timing.ring(work, 2.0, 2.0) == 3 + 4 + 4 + 3 + 2  # sent beside work: 2, 4, 4, 2; then 2
        assert timing.ring(np.full((1, 1), 3.0), 0.0, 0.0) == 3

    @pytest.mark.parametrize("gradients", [0.0, 1.4])
    @pytest.mark.parametrize("seed", range(4))
    def test_uneven_ring(self, gradients, seed):
        """Each rank's steps one by one: what it computes, and its message, which its neighbour begins to send when it
        begins the step itself."""
        size, keys = 5, 1.4
        work = np.random.default_rng(seed).random((size, size)) * 3
        begin = [[0.0] * size]
        for step in range(size):
            message = keys * (step < size - 1) + gradients * (step > 0)
            ends = []
            for rank in range(size):
                computed = begin[-1][rank] + work[rank, rank - step]
                arrives = max(begin[-1][rank], begin[-1][rank - 1]) + message
                ends.append(max(computed, arrives) if message else computed)
            begin.append(ends)
        last = max(begin[-1]) + gradients
        assert last > work.sum(1).max() + gradients  # who waits for whom matters
        assert timing.ring(work, keys, gradients) == pytest.approx(last, rel=1e-12)


class TestByHand:
    """512 tokens on 2 ranks; a block of both heads is a second of attention, and 65,536 bytes a second of sending."""

    def predicted(self, exchange, **options):
        mask = BlockDiagonalMask.from_seqlens([512])
        rates = {"bandwidth": 65536.0, "flops": 2 * 128 * 128 * 2 * (64 + 64), "latency": 0.0}
        found = plan(mask, SMALL, 2, **rates | options, exchanges=[exchange], layouts=["contiguous"])
        return found.best

    def test_all_gather(self):
        """One key head, so one step: the slower rank's 7 blocks, 2.5 times that in backward, and nothing overlaps."""
        one = self.predicted("all_gather")
        assert (one.attention, one.exposed) == (7 + 17.5, 1 + 1 + 2)
        assert one.received_forward == (65536,) * 2
        assert one.received_backward == (3 * 65536,) * 2
        assert one.imbalance == pytest.approx((512 * 513 / 2 - 256 * 257 / 2) / (512 * 513 / 4))

    def test_ring(self):
        """Forward 3, then 4. Backward 7.5, then 10 while gradients travel, whose last message takes 2."""
        one = self.predicted("ring")
        assert (one.attention, one.exposed) == (7 + 17.5, 2)
        assert one.received_forward == (65536,) * 2
        assert one.received_backward == (5 * 65536,) * 2

    def test_ulysses(self):
        """A head of the whole batch each: 10 blocks of half a second."""
        one = self.predicted("ulysses")
        assert (one.attention, one.exposed) == (5 + 12.5, 2 + 2)
        assert one.received_forward == one.received_backward == (2 * 65536,) * 2
        assert one.imbalance == 1.0

    def test_latency(self):
        assert self.predicted("all_gather", latency=1.0).exposed == 4 + 3
        assert self.predicted("ulysses", latency=1.0).exposed == 4 + 4
        assert self.predicted("ring", latency=1.0).exposed == 3

    @pytest.mark.parametrize("exchange", ["all_gather", "ring", "ulysses"])
    def test_checkpointing_is_one_more_forward(self, exchange):
        once, twice = (self.predicted(exchange, checkpointing=again) for again in (False, True))
        forward = {"all_gather": 8, "ring": 7, "ulysses": 7}[exchange]
        assert twice.seconds - once.seconds == forward
        assert twice.received_forward == once.received_forward
        assert twice.received_backward[0] - once.received_backward[0] == once.received_forward[0]
        assert twice.memory == once.memory

    @pytest.mark.parametrize("exchange", ["all_gather", "ring", "ulysses"])
    def test_layers_add_up(self, exchange):
        """Also of masks that differ: half of the layers see a window."""
        masks = [BlockDiagonalMask.from_seqlens([400, 112], window=(window, 0)) for window in (-1, 64)]
        options = {"exchanges": [exchange], "layouts": ["contiguous"]}
        alone = [plan(mask, SMALL, 2, 1e5, 1e7, **options).best for mask in masks]
        mixed = plan({masks[0]: 3, masks[1]: 2}, SMALL, 2, 1e5, 1e7, **options).best
        assert mixed.seconds == pytest.approx(3 * alone[0].seconds + 2 * alone[1].seconds)
        assert mixed.received == 5 * alone[0].received
        assert mixed.memory == alone[0].memory
        deep = SimpleNamespace(**vars(SMALL) | {"num_hidden_layers": 7})
        assert plan(masks[0], deep, 2, 1e5, 1e7, **options).best.seconds == pytest.approx(7 * alone[0].seconds)


def test_heads_per_step():
    """More steps hide more of the gather; a step's share of the memory is what it is."""
    mask = BlockDiagonalMask.from_seqlens([32768])
    few, many = (
        plan(mask, LLAMA, 4, 100e9, 400e12, exchanges=["all_gather"], layouts=["zigzag"], heads_k_stride=stride).best
        for stride in (8, 1)
    )
    assert many.exposed < few.exposed / 4
    assert many.memory * 8 == few.memory
    default = plan(mask, LLAMA, 4, 100e9, 400e12, exchanges=["all_gather"], layouts=["zigzag"]).best
    assert (
        default
        == plan(mask, LLAMA, 4, 100e9, 400e12, exchanges=["all_gather"], layouts=["zigzag"], heads_k_stride=2).best
    )


class TestChoices:
    @pytest.mark.parametrize("exchange", ["all_gather", "ring"])
    @pytest.mark.parametrize("bandwidth", [350e9, 45e9])
    def test_a_long_document_wants_balance(self, exchange, bandwidth):
        mask = BlockDiagonalMask.from_seqlens([131072])
        found = plan(mask, LLAMA, 8, bandwidth, 400e12, exchanges=[exchange]).predictions
        assert found[-1].layout == "contiguous"
        assert found[-1].seconds > 1.4 * found[0].seconds
        assert found[0].imbalance < 1.02 < 1.8 < found[-1].imbalance

    @pytest.mark.parametrize("exchange", ["all_gather", "ring"])
    @pytest.mark.parametrize("bandwidth", [350e9, 45e9])
    def test_tiny_documents_want_contiguous_shards(self, exchange, bandwidth):
        mask = BlockDiagonalMask.from_seqlens([20] * 6553)
        found = plan(mask, LLAMA, 8, bandwidth, 400e12, exchanges=[exchange])
        assert found.best.layout == "contiguous"
        work = {one.layout: one.attention for one in found.predictions}
        assert work["stripe"] > 2 * work["contiguous"]  # a tile's rows are of 8 times as many documents

    def test_balance_costs_few_blocks(self):
        """Chunks that share tiles would have ranks visit 7 times as many blocks as their share; 4 whole tiles don't."""
        mask = BlockDiagonalMask.from_seqlens(spread(32768, median=700, sigma=1.0))
        tiles, undivided = (
            tiles_of(mask, make_layout("balanced", mask, 64)),
            tiles_of(mask, make_layout("stripe", mask, 1)),
        )
        assert tiles.blocks().max() * 64 < 3 * undivided.blocks()[0]

    def test_few_bytes_want_ulysses_where_there_are_heads(self):
        mask = BlockDiagonalMask.from_seqlens(spread(131072, median=700))
        assert plan(mask, LLAMA, 16, 45e9, 400e12).best.exchange == "ulysses"
        assert plan(mask, SMALL, 16, 45e9, 400e12).best.exchange == "all_gather"

    def test_little_memory_is_the_rings(self):
        """It holds two blocks, not the whole batch."""
        mask = BlockDiagonalMask.from_seqlens([131072])
        held = {one.exchange: one.memory for one in plan(mask, LLAMA, 64, 45e9, 400e12, layouts=["zigzag"]).predictions}
        assert held["ring"] < held["all_gather"] / 10

    def test_equal_ones_in_order(self):
        """A single rank has nothing to exchange, and layouts mean nothing to Ulysses."""
        mask = BlockDiagonalMask.from_seqlens(spread(4096))
        found = plan(mask, LLAMA, 1, 45e9, 400e12, exchanges=("ulysses", "ring", "all_gather"), layouts=NAMES[::-1])
        order = [(exchange, name) for exchange in ("all_gather", "ring", "ulysses") for name in NAMES]
        assert [(one.exchange, one.layout) for one in found.predictions] == order
        assert {(one.received, one.memory, one.imbalance) for one in found.predictions} == {(0, 0, 1.0)}
        assert max(one.exposed for one in found.predictions) < 1e-12
        found = plan(mask, LLAMA, 4, 45e9, 400e12, exchanges=["ulysses"])
        assert [one.layout for one in found.predictions] == list(NAMES)


def test_digits_beyond_the_model_decide_nothing():
    """Where the network takes nearly all of the time, layouts differ by less than the model can tell."""
    found = plan(BlockDiagonalMask.from_seqlens(spread(32768)), SMALL, 8, 1e9, 400e12, exchanges=["all_gather"])
    assert [one.layout for one in found.predictions] == list(NAMES)
    assert sorted(found.predictions, key=lambda one: one.seconds) != list(found.predictions)


def test_the_same_on_every_rank():
    plans = [plan(MASKS["causal"](), LLAMA, 8, 45e9, 400e12) for _ in range(2)]
    assert plans[0].predictions == plans[1].predictions
    assert [rows.tolist() for rows in plans[0].layout.rows] == [rows.tolist() for rows in plans[1].layout.rows]


def test_the_layout_is_that_of_make_layout():
    mask = MASKS["causal"]()
    for name in NAMES:
        found = plan(mask, LLAMA, 3, 45e9, 400e12, layouts=[name])
        assert isinstance(found.layout, Layout)
        expected = make_layout(name, mask, 3)
        assert all(torch.equal(a, b) for a, b in zip(found.layout.rows, expected.rows, strict=True))
        assert found.best.layout == name
        ring = next(one for one in found.predictions if one.exchange == "ring")
        assert ring.imbalance == pytest.approx(expected.imbalance(mask))


@pytest.mark.parametrize("total", [0, 1, 5])
def test_fewer_rows_than_ranks(total):
    mask = BlockDiagonalMask.from_seqlens([total])
    found = plan(mask, LLAMA, 8, 45e9, 400e12)
    assert len(found.predictions) == 12
    assert all(np.isfinite(one.seconds) and one.imbalance >= 1 for one in found.predictions)


def test_a_table():
    mask = BlockDiagonalMask.from_seqlens([4096])
    lines = str(plan(mask, LLAMA, 64, 45e9, 400e12, layouts=["contiguous", "zigzag"])).splitlines()
    assert lines[0].startswith("4,096 tokens on 64 ranks")
    assert lines[0].endswith("predicted, not measured")
    assert [line.split()[0] for line in lines[1:]] == ["exchange", *["all_gather"] * 2, *["ring"] * 2, "ulysses"]
    assert "there are 32 for 64 ranks" in lines[-1]


class TestSizes:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, AttentionShape(32, 32, 8, 128, 128)),
            ({"head_dim": None, "hidden_size": 2048}, AttentionShape(32, 32, 8, 64, 64)),
            ({"num_key_value_heads": None}, AttentionShape(32, 32, 32, 128, 128)),
            ({"dtype": torch.float32}, AttentionShape(32, 32, 8, 128, 128, 4)),
            ({"dtype": "float64"}, AttentionShape(32, 32, 8, 128, 128, 8)),
            ({"multi_query": True}, AttentionShape(32, 32, 1, 128, 128)),
            ({"alibi": True}, AttentionShape(32, 32, 8, 128, 128, alibi=True)),
            ({"layer_types": ["full_attention", "linear_attention"] * 4}, AttentionShape(4, 32, 8, 128, 128)),
            (
                {"head_dim": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
                AttentionShape(32, 32, 8, 192, 128),
            ),
        ],
        ids=str,
    )
    def test_are_read(self, fields, expected):
        assert AttentionShape.from_config(SimpleNamespace(**vars(LLAMA) | fields)) == expected

    def test_of_the_text_part(self):
        whole = SimpleNamespace(get_text_config=lambda: LLAMA, num_attention_heads=3)
        assert AttentionShape.from_config(whole) == AttentionShape.from_config(LLAMA)

    def test_bytes_of_ones_own(self):
        assert AttentionShape.from_config(LLAMA, 1) == replace(AttentionShape.from_config(LLAMA), bytes_per_number=1)

    def test_of_transformers(self):
        transformers = pytest.importorskip("transformers")
        read = AttentionShape.from_config
        assert read(transformers.LlamaConfig()) == AttentionShape(32, 32, 32, 128, 128)
        assert read(transformers.GPT2Config()) == AttentionShape(12, 12, 12, 64, 64)
        assert read(transformers.BloomConfig()).alibi
        deepseek = read(transformers.DeepseekV3Config())
        assert (deepseek.heads, deepseek.kv_heads, deepseek.dim, deepseek.dim_v) == (128, 128, 192, 128)
        assert read(transformers.FalconConfig()).kv_heads == 1


def call(mask=None, config=LLAMA, ranks=4, bandwidth=45e9, flops=400e12, **options):
    mask = BlockDiagonalMask.from_seqlens([64]) if mask is None else mask
    return plan(mask, config, ranks, bandwidth, flops, **options)


def config(**fields):
    return SimpleNamespace(**vars(LLAMA) | fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": [3, 5]}, r"a tritonpack.BlockDiagonalMask of the whole batch, or a mapping.*got list \[3, 5\]"),
        ({"mask": {}}, "or a mapping from such masks"),
        ({"mask": {BlockDiagonalMask.from_seqlens([5]): 0}}, "one layer or more; got 0 layers"),
        (
            {"mask": {BlockDiagonalMask.from_seqlens([n]): 1 for n in (5, 6)}},
            "all masks must be of the same batch.*num_queries=5.*num_queries=6",
        ),
        ({"mask": BlockDiagonalMask.from_seqlens([5], [6])}, "5 queries and 6 keys"),
        ({"ranks": 0}, "group_size must be an integer of at least 1; got 0"),
        ({"ranks": 2.0}, "group_size must be an integer of at least 1; got 2.0"),
        ({"bandwidth": 0}, "bandwidth must be a number above 0, of one rank in a second; got 0"),
        ({"flops": float("nan")}, "flops must be a number above 0.*got nan"),
        ({"latency": -1.0}, "latency must be a number of seconds, 0 or more; got -1.0"),
        ({"bytes_per_number": 0}, "bytes_per_number must be an integer of at least 1, or None; got 0"),
        ({"heads_k_stride": 9}, "heads_k_stride must be an integer from 1 to the number of key heads, 8; got 9"),
        ({"exchanges": ["gather"]}, r"exchanges must be some of 'all_gather', 'ring', 'ulysses'; got \['gather'\]"),
        ({"layouts": []}, r"layouts must be some of 'contiguous', 'zigzag'.*got \[\]"),
        ({"config": None}, "NoneType has no num_attention_heads or n_head"),
        ({"config": config(num_attention_heads=None)}, "SimpleNamespace has no num_attention_heads or n_head"),
        ({"config": config(head_dim=None)}, "SimpleNamespace has no hidden_size or n_embd or d_model"),
        ({"config": config(num_hidden_layers=None)}, "SimpleNamespace has no num_hidden_layers or n_layer"),
        ({"config": config(num_key_value_heads=[8, 4])}, r"num_key_value_heads must be a positive.*got \[8, 4\]"),
        ({"config": config(num_key_value_heads=5)}, "32 query heads, which its 5 key heads must divide"),
        ({"exchanges": ["ulysses"], "ranks": 64}, "none of the exchanges can compute this.*32 for 64 ranks"),
        (
            {"exchanges": ["ulysses", "ring"], "ranks": 64, "config": config(alibi=True)},
            "alibi_slopes need each key's distance.*32 for 64 ranks",
        ),
    ],
    ids=str,
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_what_cant_work_is_told():
    found = call(config=config(alibi=True), ranks=64)
    assert {one.exchange for one in found.predictions} == {"all_gather"}
    assert set(found.refused) == {"ring", "ulysses"}
    assert "visiting block" in found.refused["ring"]
    assert not call().refused


def test_sent_is_received():
    """Of uneven shards: what all ranks receive of the ring and of Ulysses is every block, as often as it travels."""
    shape, lengths = AttentionShape(1, 12, 4, 8, 6), [5, 0, 9, 2, 2]
    forward, backward = traffic.received("ring", lengths, shape)
    row = 4 * 14
    assert forward.sum() == 4 * 18 * row * 2
    assert backward.sum() == 4 * 18 * row * 2 + 5 * 18 * row * 4
    assert traffic.received("all_gather", lengths, shape)[0].tolist() == [4 * 9 * row * 2] * 5
