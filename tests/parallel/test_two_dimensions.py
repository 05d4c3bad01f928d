"""Meshes of two dimensions: 2 x 2 ranks agree with one process, and send the bytes of the formulas."""

from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.parallel.pool import Pool, cases_of
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.parallel import attend, comm, make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.dimensions import dimensions_of
from tritonpack.parallel.exchanges.ulysses import divide_heads
from tritonpack.parallel.layouts import Layout

KEYS = ("all_gather", "group_cast", "ring")
HEAD_DIM, HEAD_DIM_V = 8, 4


SAMPLE = (
    *("all_gather, one key head", "group_cast, windows", "ring, sinks"),
    *("group_cast, along group_cast", "ring, along ulysses"),
)


def each_case(module):
    return pytest.mark.parametrize("name", cases_of(module, 4))


@pytest.mark.slow
def test_four_ranks_agree_with_one_process():
    """A sample, in processes that don't import what models need."""
    with closing(Pool(4, "two_dimensions_cases")) as pool:
        for name in SAMPLE:
            pool.run("two_dimensions_cases", name)


@pytest.mark.slow
@each_case("two_dimensions_cases")
def test_attention_on_four_ranks(run_on, name):
    run_on(4, "two_dimensions_cases", name)


@pytest.mark.slow
@each_case("two_dimensions_model_cases")
def test_models_on_four_ranks(run_on, name):
    run_on(4, "two_dimensions_model_cases", name)


@pytest.fixture
def group(monkeypatch):
    """A function that makes a fake group: (ranks, rank) -> bytes that this rank receives from others, by group."""
    counts, done = Counter(), SimpleNamespace(wait=lambda: None)

    def count(group, number):
        counts[group.group_name] += number
        return done

    def all_to_all(target, source, taken, given, group, **_):
        assert (target.numel(), source.numel()) == (sum(taken), sum(given))
        return count(group, (sum(taken) - taken[dist.get_rank(group)]) * target.itemsize)

    def batch(operations):
        return [count(one.group, one.tensor.nbytes * (one.op is dist.irecv)) for one in operations]

    monkeypatch.setattr(comm, "_all_gather", lambda x, y, group, **_: count(group, x.nbytes - y.nbytes))
    monkeypatch.setattr(comm, "_reduce_scatter", lambda x, y, group, **_: count(group, y.nbytes - x.nbytes))
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)

    def make(ranks, rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        return counts

    yield make
    dist.destroy_process_group()


def bytes_of_heads(lengths, place, heads, kv_heads, dtype):
    """Forward and backward, along the dimension that divides heads among ranks with rows of these lengths."""
    rows, others, b = lengths[place], sum(lengths) - lengths[place], dtype.itemsize
    own, keys = (
        np.array([one.stop - one.start for one in side]) for side in divide_heads(heads, kv_heads, len(lengths))
    )
    inputs = own * HEAD_DIM + keys * (HEAD_DIM + HEAD_DIM_V)
    forward = others * inputs[place] + rows * (heads - own[place]) * HEAD_DIM_V
    backward = others * own[place] * HEAD_DIM_V + rows * (inputs.sum() - inputs[place])
    return forward * b, backward * b


def bytes_of_keys(exchange, lengths, place, kv_heads, dtype, seen, shown):
    """Forward and backward, along the dimension in which `kv_heads` of sets of ranks with rows of these lengths travel.

    The set `place` sees `seen` keys of others; `shown` of its keys are seen by others, counted for each set.
    """
    b, wide, width = dtype.itemsize, max(dtype.itemsize, 4), kv_heads * (HEAD_DIM + HEAD_DIM_V)
    numbers = (
        width
        * {
            "all_gather": (len(lengths) - 1) * max(lengths),
            "group_cast": seen,
            "ring": sum(lengths) - lengths[place],
        }[exchange]
    )
    back = {"all_gather": numbers, "group_cast": shown * width, "ring": (sum(lengths) - lengths[place - 1]) * width}[
        exchange
    ]
    return numbers * b, numbers * b + back * wide


@pytest.mark.fast("0-shape0-12-4", "1-shape1-12-4")
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (16, 8), (12, 4), (20, 10)])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
@pytest.mark.parametrize("along", [0, 1])
def test_bytes_along_each_dimension_follow_the_formulas(group, along, shape, heads, kv_heads):
    """Also if rows or heads don't divide by ranks, or if ranks share key heads. Ulysses is `along` a dimension."""
    rank, tokens, dtype = 5, 139, torch.bfloat16 if heads == 16 else torch.float64
    counts = group(8, rank)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("first", "second"))
    mask = BlockDiagonalMask.from_seqlens([tokens - 50, 50], window=(40, 0))
    layout = make_layout("zigzag", mask, 8)
    ranks = np.moveaxis(np.arange(8).reshape(shape), along, -1)
    ((place, own),) = np.argwhere(ranks == rank)
    lengths = [layout.lengths[one] for one in ranks[place]]
    sets = Layout(tuple(torch.cat([layout.rows[one] for one in some]).sort().values for some in ranks))
    seen = mask.to_dense()[sets.rows[place]].any(0)
    seen[sets.rows[place]] = False
    shown = [mask.to_dense()[one].any(0)[sets.rows[place]].sum() for n, one in enumerate(sets.rows) if n != place]
    keys = divide_heads(heads, kv_heads, shape[along])[1][own]
    for exchange in KEYS:
        pair = (exchange, "ulysses") if along else ("ulysses", exchange)
        expected = (
            bytes_of_heads(lengths, own, heads, kv_heads, dtype),
            bytes_of_keys(
                exchange, sets.lengths, place, keys.stop - keys.start, dtype, int(seen.sum()), int(sum(shown))
            ),
        )
        widths = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, HEAD_DIM_V))
        q, k, v = (torch.zeros(layout.lengths[rank], *width, dtype=dtype, requires_grad=True) for width in widths)
        names = [mesh.get_group(one).group_name for one in (along, 1 - along)]
        for direction in range(2):
            counts.clear()
            if direction == 0:
                out = attend(q, k, v, mask, layout, mesh, exchange=pair)
            else:
                out.backward(torch.zeros_like(out))
            assert [counts[name] for name in names] == [both[direction] for both in expected]
            assert counts.total() == sum(both[direction] for both in expected)


@pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
def test_nothing_travels_along_a_dimension_of_one_rank(group, shape):
    counts = group(8, 5)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("first", "second"))
    mask = BlockDiagonalMask.from_seqlens([40])
    q = torch.zeros(5, 8, HEAD_DIM)
    for exchange in KEYS:
        for pair in ((exchange, "ulysses"), ("ulysses", exchange)):
            attend(q, q, q, mask, make_layout("stripe", mask, 8), mesh, exchange=pair)
    assert counts.keys() == {mesh.get_group(shape.index(8)).group_name}


def test_a_mesh_of_one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("first", "second"))
        mask, q = BlockDiagonalMask.from_seqlens([5, 2]), torch.randn(7, 2, 8)
        out = attend(q, q, q, mask, make_layout("stripe", mask, 1), mesh, exchange=("ring", "ulysses"))
        assert torch.equal(out, varlen_attention(q, q, q, mask))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "stripe", "balanced", "documents"])
def test_every_rank_of_a_mesh_gets_rows(name):
    """Of batches with two rows for each rank, the shortest that SequenceParallel shares."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        first, second = rng.integers(1, 5, 2).tolist()
        tokens = 2 * first * second + rng.integers(3)
        cuts = np.unique(rng.integers(1, tokens, rng.integers(1, 5)))
        mask = BlockDiagonalMask.from_seqlens([b - a for a, b in pairwise([0, *cuts.tolist(), tokens])])
        ranks = Ranks(None, 0, first * second, (Ranks(None, 0, first), Ranks(None, 0, second)))
        layout = dimensions_of(ranks, ("ring", "ulysses")).make_layout(name, [mask])
        assert min(layout.lengths) > 0
        assert max(layout.lengths) - min(layout.lengths) <= 2


def test_guide_has_the_megabytes_from_other_nodes():
    """Of one document, whose last rank needs all keys."""
    tokens, heads, kv_heads, size, gpus, bytes_per_number = 1 << 20, 32, 8, 128, 8, 2
    rows: dict[str, list[str]] = {"alone": [], "ulysses": [], "pair": []}
    for nodes in (2, 4, 8):
        ranks, node = nodes * gpus, tokens // nodes

        def share(ranks):
            return tuple(spans[0].stop - spans[0].start for spans in divide_heads(heads, kv_heads, ranks))

        rows["alone"].append((tokens - node) * kv_heads * 2 * size)
        rows["pair"].append((nodes - 1) * node * share(gpus)[1] * 2 * size)
        if ranks <= heads:
            own, keys = share(ranks)
            outputs = tokens // ranks * (heads - own * gpus) * size
            rows["ulysses"].append((tokens - node) * (own + 2 * keys) * size + outputs)
    cells = {name: " | ".join(f"{x * bytes_per_number / 1e6:,.0f}" for x in row) for name, row in rows.items()}
    text = (Path(__file__).parents[2] / "docs/sequence-parallelism.md").read_text(encoding="utf-8")
    assert f'| `"group_cast"` alone, the rank that receives most | {cells["alone"]} |' in text
    assert f'| `"ulysses"` alone | {cells["ulysses"]} | impossible: fewer heads than ranks |' in text
    assert f'| `("group_cast", "ulysses")` | {cells["pair"]} |' in text
