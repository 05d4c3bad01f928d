"""Pieces of documents: who computes them, and the bytes that their rows and states take."""

from math import ceil, log2
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from tests.parallel.fake_collectives import RANK, RANKS, fake_collectives
from tests.parallel.models import positions
from tests.patches import zoo
from tritonpack.parallel import make_layout
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.long_documents import MOST_CUT, LongDocuments
from tritonpack.parallel.pieces import PieceTable
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.parallel.state_scan import StateScan
from tritonpack.patches.packed_batch import PackedBatch, Serving

NO_GROUP: Any = None
LENGTHS = (5, 1200, 1, 30, 164)


@pytest.fixture
def traffic(monkeypatch):
    with fake_collectives(monkeypatch) as traffic:
        yield traffic


def batch_of(lengths):
    places = positions(lengths)[None]
    return PackedBatch(None, places, None, places.shape, places.device, Serving("tritonpack", "auto"))


def documents_on(rank, ranks, layout, lengths=LENGTHS, group=NO_GROUP):
    batch = batch_of(lengths)
    made = make_layout(layout, batch.document_mask().mask, ranks, chunk=16)
    sharding = Sharding(Ranks(group, rank, ranks), made, batch.tokens, 0, "all_gather", None, "mean")
    return LongDocuments(batch, sharding)


def test_pieces_are_runs_of_one_document_on_one_rank():
    batch = batch_of((3, 8, 5))
    layout = make_layout("zigzag", batch.document_mask().mask, 2)  # rows 0-3 and 12-15, rows 4-11
    table = PieceTable.of(batch, layout)
    assert table.first.tolist() == [0, 3, 4, 11, 12]
    assert table.place.tolist() == [0, 0, 1, 0, 1]
    assert table.length.tolist() == [3, 1, 7, 1, 4]
    assert table.owner.tolist() == [0, 0, 1, 1, 0]
    assert table.cut.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "documents", "balanced", "stripe"])
def test_rows_travel_from_layouts_with_many_pieces_alone(layout):
    own = make_layout(layout, batch_of(LENGTHS).document_mask().mask, 8, chunk=16)
    shares = []
    for rank in range(8):
        pieces = documents_on(rank, 8, layout)._at(0)
        assert pieces._there.moves == (layout in ("balanced", "stripe"))
        assert len(pieces.cut) <= {"zigzag": 4, "documents": MOST_CUT}.get(layout, 2)
        shares.append(int(sum(one.inside.sum() for one in [*pieces.whole, *pieces.cut])))
    assert sum(shares) == sum(LENGTHS)
    assert shares == own.lengths or max(shares) - min(shares) <= 1


def test_runs_have_equally_many_tokens_beside_padding():
    batch = batch_of((40, 40))
    mask = torch.ones(2, 40, dtype=torch.int32)
    mask[1, :35] = 0
    batch = batch.replace(attention_mask=mask, position_ids=None, tokens=mask.shape)
    layout = make_layout("stripe", batch.document_mask().mask, 3)
    sharding = Sharding(Ranks(NO_GROUP, 0, 3), layout, batch.tokens, 0, "all_gather", None, "mean")
    table = LongDocuments(batch, sharding).table
    assert table.owner.bincount(weights=table.length).tolist() == [15, 15, 15]


class CallsParts(torch.nn.Module):
    """A layer that calls its functions as attributes, as in earlier versions of transformers."""

    def __init__(self):
        super().__init__()
        self.causal_conv1d_fn, self.torch_chunk_gated_delta_rule = causal_conv1d_fn, torch_chunk_gated_delta_rule

    def forward(self, hidden_states):
        return self.torch_chunk_gated_delta_rule(self.causal_conv1d_fn(hidden_states))


def test_layers_that_call_a_recurrence_otherwise_are_left_to_whole_documents():
    long = documents_on(0, 2, "contiguous")
    assert long.forward_of(SimpleNamespace(module=CallsParts(), own=None)) is None
    known = next(m for m in zoo.tiny_model("qwen3_next").modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet")
    assert long.forward_of(SimpleNamespace(module=known, own=None)) is not None
    assert long.forward_of(SimpleNamespace(module=known, own=known.forward)) is None  # another library's forward


@pytest.mark.parametrize("pieces", range(2, 12))
def test_a_scan_takes_as_many_messages_as_the_docs_say(pieces):
    begins = torch.zeros(pieces + 2, dtype=torch.bool)
    begins[[0, pieces]] = True  # and a document of two pieces
    scan = StateScan(begins, torch.arange(pieces + 2), Ranks(NO_GROUP, 0, pieces + 2), torch.device("cpu"))
    assert len(scan._rounds) == 1 + ceil(log2(pieces - 1))


def messages(owners):
    """(giver, taker) of each element of the scan over a document's pieces, by docs/sequence-parallelism.md."""
    for piece, taker in enumerate(owners):
        for distance in [1, *(1 << k for k in range(10) if 1 << k < piece)] if piece else []:
            yield owners[piece - distance], taker


def first_pieces(table):
    """Where cut documents begin among the cut pieces."""
    return (table.place[table.cut] == 0).nonzero()[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "stripe"])
def test_bytes_received_follow_the_formula(traffic, layout, dtype):
    module = next(m for m in zoo.tiny_model("qwen3_next").modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet")
    module, width, reach = module.to(dtype), module.hidden_size, module.conv_kernel_size - 1
    long = documents_on(RANK, RANKS, layout, group=dist.group.WORLD)
    table, owned = long.table, torch.zeros(sum(LENGTHS), dtype=torch.int64)
    for rank, rows in enumerate(long.sharding.layout.rows):
        owned[rows] = rank
    runs = [
        (owner, torch.arange(first, first + n), torch.arange(first - min(place, reach), first))
        for owner, first, n, place in torch.stack([table.owner, table.first, table.length, table.place], 1).tolist()
    ]
    came = sum(int((owned[rows] != RANK).sum()) for owner, *both in runs if owner == RANK for rows in both)
    went = sum(int((owned[rows] == RANK).sum()) for owner, *both in runs if owner != RANK for rows in both)
    back = sum(int((owned[rows] == RANK).sum()) for owner, rows, _ in runs if owner != RANK)
    gone = sum(int((owned[rows] != RANK).sum()) for owner, rows, _ in runs if owner == RANK)
    cut = [group for group in torch.arange(len(runs))[table.cut].tensor_split(first_pieces(table)) if len(group)]
    pairs = [pair for group in cut for pair in messages(table.owner[group].tolist())]
    received, sent = (sum(pair[i] == RANK != pair[1 - i] for pair in pairs) for i in (1, 0))
    state = module.num_v_heads * module.head_k_dim * (module.head_k_dim + module.head_v_dim)
    assert min(received, sent, came) > 0

    hidden = torch.zeros(1, long.sharding.rows, width, dtype=dtype, requires_grad=True)
    out = long.forward_of(SimpleNamespace(module=module, own=None))(hidden_states=hidden, attention_mask=None)
    assert traffic.received.total() == (came + back) * width * dtype.itemsize + received * state * 4
    traffic.forget()
    out.backward(torch.zeros_like(out))
    assert traffic.received.total() == (went + gone) * width * dtype.itemsize + sent * state * 4
