"""Which rank computes each document in layers that mix along the row, and how rows travel there and back."""

from typing import Any

import pytest
import torch

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel import whole_documents
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import Layout, make_layout
from tritonpack.parallel.whole_documents import LONGEST, WholeDocuments
from tritonpack.patches.packed_batch import PackedBatch, Serving

NO_GROUP: Any = None  # planning exchanges nothing


def divide(lengths: list[int], ranks: int, layout: Layout | None = None) -> list[WholeDocuments]:
    """The documents of each rank."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    serving = Serving("tritonpack", "auto")
    batch = PackedBatch(None, positions, None, positions.shape, positions.device, serving)
    if layout is None:
        mask = batch.document_mask().mask
        layout = make_layout("contiguous", mask, ranks)
    return [WholeDocuments(batch, layout, Ranks(NO_GROUP, rank, ranks)) for rank in range(ranks)]


def documents_of(one: WholeDocuments) -> list[int]:
    return one.packed_batch.lengths()[1].tolist()


def test_documents_stay_where_most_of_their_rows_lie() -> None:
    first, second = divide([4, 5, 3, 4], 2)  # cut within the second document, of which the first rank owns four rows
    assert documents_of(first) == [4, 5]
    assert documents_of(second) == [3, 4]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_get_about_equally_many_tokens(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (100,), generator=generator).tolist()
    shares = [sum(documents_of(one)) for one in divide(lengths, ranks)]
    assert sum(shares) == sum(lengths)
    assert max(shares) <= -(-sum(lengths) // ranks) + max(lengths)
    assert max(shares) * ranks < 1.1 * sum(lengths)


def test_few_rows_travel_in_the_layout_documents() -> None:
    lengths = torch.randint(1, 400, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    mask = BlockDiagonalMask.from_seqlens(lengths)
    stay = {}
    for name in ("documents", "stripe"):
        found = divide(lengths, 4, make_layout(name, mask, 4))
        stay[name] = sum(one.sent[rank] for rank, one in enumerate(found)) / sum(lengths)
    assert stay["documents"] > 0.95 > 0.5 > stay["stripe"]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "stripe", "documents"])
def test_rows_travel_to_their_documents_and_back(monkeypatch: pytest.MonkeyPatch, layout: Any) -> None:
    lengths, ranks = [4, 1, 6, 3, 5, 2], 3
    x = torch.arange(10, 10 + sum(lengths))[:, None]
    rows = make_layout(layout, BlockDiagonalMask.from_seqlens(lengths), ranks)
    found = divide(lengths, ranks, rows)
    sent: list[tuple[torch.Tensor, ...]] = []

    def record(message: torch.Tensor, counts: list[int], received: list[int], _: Ranks) -> Any:
        sent.append(message.split(counts))
        return lambda: message.new_zeros(sum(received), 1)

    def deliver(message: torch.Tensor, counts: list[int], received: list[int], own: Ranks) -> Any:
        arrived = [parts[own.rank] for parts in sent]
        assert list(map(len, arrived)) == received
        return lambda: torch.cat(arrived)

    def travel(tensors: list[torch.Tensor], there: bool) -> list[torch.Tensor]:
        sent.clear()
        for collective in (record, deliver):
            monkeypatch.setattr(whole_documents, "all_to_all", collective)
            done = [one.travel(mine, there) for one, mine in zip(found, tensors, strict=True)]
        return done

    own = [rows.shard(x, rank) for rank in range(ranks)]
    fetched = travel(own, True)
    documents = {tuple(document.flatten().tolist()) for document in x.split(lengths)}
    for one, mine in zip(found, fetched, strict=True):
        documents -= {tuple(document.flatten().tolist()) for document in mine.split(documents_of(one))}
    assert not documents
    assert all(map(torch.equal, travel(fetched, False), own))


def test_a_rank_without_documents_gets_one_of_zeros() -> None:
    assert sorted(documents_of(one) for one in divide([3] * 4, 5)) == [[2], [3], [3], [3], [3]]


def test_a_document_longer_than_a_rank_can_compute_is_refused() -> None:
    assert LONGEST == 1.25
    divide([62, 38], 2)
    with pytest.raises(ValueError, match=r"a document has 63 of the batch's 100 tokens, .*here 62\. Put more"):
        divide([63, 37], 2)
