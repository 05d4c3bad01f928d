"""Which rank computes each document in layers that mix along the row, and how rows travel there and back."""

import pytest
import torch

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel import whole_documents
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import make_layout
from tritonpack.parallel.whole_documents import WholeDocuments
from tritonpack.patches.packed_batch import PackedBatch, Serving


def divide(lengths, ranks, name="contiguous"):
    """The layout, and the documents of each rank."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = PackedBatch(None, positions, None, positions.shape, positions.device, Serving("tritonpack", "auto"))
    layout = make_layout(name, BlockDiagonalMask.from_seqlens(lengths), ranks)
    return layout, [WholeDocuments(batch, layout, Ranks(None, rank, ranks)) for rank in range(ranks)]


def documents_of(one):
    return one.packed_batch.lengths()[1].tolist()


@pytest.mark.parametrize(
    ("lengths", "ranks", "documents"),
    [
        ([4, 5, 3, 4], 2, [[4, 5], [3, 4]]),  # the first rank owns four of five rows of the document that is cut
        ([3] * 4, 5, [[3], [3], [3], [3], [2]]),  # a rank without documents gets one of zeros
        ([62, 38], 2, [[62], [38]]),
    ],
)
def test_documents_of_each_rank(lengths, ranks, documents):
    assert sorted(map(documents_of, divide(lengths, ranks)[1])) == sorted(documents)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_get_about_equally_many_tokens(ranks):
    """And few rows travel in the layout "documents"."""
    lengths = torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    stay = {}
    for name in ("documents", "stripe"):
        _, found = divide(lengths, ranks, name)
        shares = [sum(documents_of(one)) for one in found]
        assert sum(shares) == sum(lengths)
        assert max(shares) * ranks < 1.1 * sum(lengths)
        stay[name] = sum(one.sent[rank] for rank, one in enumerate(found)) / sum(lengths)
    assert stay["documents"] > 0.9 > 0.6 > stay["stripe"]


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "stripe", "documents"])
def test_rows_travel_to_their_documents_and_back(monkeypatch, name):
    lengths, ranks = [4, 1, 6, 3, 5, 2], 3
    x = torch.arange(10, 10 + sum(lengths))[:, None]
    layout, found = divide(lengths, ranks, name)

    def travel(tensors, there):
        sent = []

        def record(message, counts, received, _):
            sent.append(message.split(counts))
            return lambda: message.new_zeros(sum(received), 1)

        def deliver(message, counts, received, own):
            arrived = [parts[own.rank] for parts in sent]
            assert list(map(len, arrived)) == received
            return lambda: torch.cat(arrived)

        for collective in (record, deliver):
            monkeypatch.setattr(whole_documents, "all_to_all", collective)
            done = [one.travel(mine, there) for one, mine in zip(found, tensors, strict=True)]
        return done

    own = [layout.shard(x, rank) for rank in range(ranks)]
    fetched = travel(own, True)
    pieces = [piece for one, mine in zip(found, fetched, strict=True) for piece in mine.split(documents_of(one))]
    assert sorted(map(torch.Tensor.tolist, pieces)) == sorted(map(torch.Tensor.tolist, x.split(lengths)))
    assert all(map(torch.equal, travel(fetched, False), own))


def test_a_document_longer_than_a_rank_can_compute_is_refused():
    with pytest.raises(ValueError, match=r"a document has 63 of the batch's 100 tokens, .*here 62\. Put more"):
        divide([63, 37], 2)
