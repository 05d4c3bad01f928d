"""Masks of every kind against dense masks that are computed pair by pair, in every form."""

import copy
import pickle
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.masks.forests import forests, visible
from tests.masks.random_masks import WINDOWS, distances, random_intervals, random_multimodal_document
from tests.trees import mask_of_ends
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.masks.intervals import document_starts

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
CHUNKS = st.sampled_from([None, None, 1, 2, 5, 99])
REACHES = st.fixed_dictionaries({"window": st.sampled_from(WINDOWS), "causal": st.booleans(), "chunk_size": CHUNKS})
LENGTHS = st.lists(st.integers(0, 9), max_size=6)


class Token(NamedTuple):
    """The document of a token, None outside of all, its place on the diagonal, and its span, None outside of all."""

    document: Any
    place: int
    span: Any = None


def pairs(queries: Sequence[Token], keys: Sequence[Token], reach: dict[str, Any]) -> Tensor:
    """The rules of windows, chunks and spans, pair by pair."""
    left, right = reach["window"]
    seen = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            if query.document is None or query.document != key.document:
                continue
            near = (left < 0 or key.place >= query.place - left) and (right < 0 or key.place <= query.place + right)
            if reach["causal"]:
                near = near and key.place <= query.place
            if reach["chunk_size"]:
                near = near and key.place // reach["chunk_size"] == query.place // reach["chunk_size"]
            seen[i, j] = near or (query.span is not None and query.span == key.span)
    return seen


def with_spans(tokens: list[Token], spans: list[int], row_length: int) -> list[Token]:
    """Neighbours in one document of one row with the same id other than 0 are a span."""
    found: list[Token] = []
    for n, (token, span) in enumerate(zip(tokens, spans, strict=True)):
        goes_on = n % row_length and found[-1].document == token.document and spans[n - 1] == span
        found.append(token._replace(span=(found[-1].span if goes_on else n) if span else None))
    return found


def labelled(rows: Sequence[Sequence[Any]]) -> list[Token]:
    """Tokens of rows that are given by labels of documents, None for padding; rows share no document."""
    tokens = [(row, label) for row, labels in enumerate(rows) for label in labels]
    return [
        Token(None if one[1] is None else one, sum(other == one for other in tokens[:n]))
        for n, one in enumerate(tokens)
    ]


@st.composite
def of_lengths(draw: st.DrawFn) -> tuple[BlockDiagonalMask, Tensor]:
    reach, lens_q = draw(REACHES), draw(LENGTHS)
    cross = draw(st.booleans())
    lens_k = [draw(st.integers(0, 9)) for _ in lens_q] if cross else lens_q
    slack = [Token(None, 0)] * draw(st.integers(0, 3))
    queries = [Token(b, i + k - q) for b, (q, k) in enumerate(zip(lens_q, lens_k, strict=True)) for i in range(q)]
    queries, keys = queries + slack, [Token(b, j) for b, k in enumerate(lens_k) for j in range(k)] + slack
    spans = None
    if not cross and draw(st.booleans()):
        spans = [draw(st.integers(0, 2)) for _ in queries]
        queries = keys = with_spans(queries, spans, len(spans) or 1)
        spans = torch.tensor(spans, dtype=torch.int64)
    if slack or draw(st.booleans()):
        kind = draw(st.sampled_from([torch.int32, torch.int64]))
        cu = [torch.tensor([0, *lengths]).cumsum(0).to(kind) for lengths in ((lens_q, lens_k) if cross else (lens_q,))]
        mask = BlockDiagonalMask.from_cu_seqlens(*cu, spans=spans, total_q=len(queries), total_k=len(keys), **reach)
    else:
        mask = BlockDiagonalMask.from_seqlens(lens_q, lens_k if cross else None, spans=spans, **reach)
    return mask, pairs(queries, keys, reach)


@st.composite
def of_rows(draw: st.DrawFn) -> tuple[BlockDiagonalMask, Tensor]:
    """Segment ids, padding masks and position ids, of one and of several rows, with spans."""
    reach, tokens = draw(REACHES), draw(st.integers(1, 14))
    kind = draw(st.sampled_from(["segment_ids", "padding_mask", "position_ids"]))
    rows, labels = [], []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        names = draw(st.permutations(range(1, 15)))
        if kind == "padding_mask":
            left, live = draw(st.integers(0, tokens)), draw(st.integers(0, tokens))
            row = [0] * left + [1] * live + [0] * tokens
        while len(row) < tokens:
            length = draw(st.integers(1, 5))
            begin = draw(st.sampled_from([0, 0, 3, 20]))
            padding = kind == "segment_ids" and draw(st.booleans())
            row += range(begin, begin + length) if kind == "position_ids" else [0 if padding else names.pop()] * length
        rows.append(row[:tokens])
        numbers: list[int] = []
        for n, value in enumerate(rows[-1]):
            goes_on = kind == "position_ids" and n > 0 and value == rows[-1][n - 1] + 1
            numbers.append(numbers[-1] if goes_on else n)
        labels.append(numbers if kind == "position_ids" else [value or None for value in rows[-1]])
    spans = [draw(st.integers(0, 2)) for _ in range(tokens * len(rows))] if draw(st.booleans()) else None
    found = labelled(labels) if spans is None else with_spans(labelled(labels), spans, tokens)
    given = None if spans is None else torch.tensor(spans).view(draw(st.sampled_from([(-1,), (len(rows), tokens)])))
    mask = getattr(BlockDiagonalMask, f"from_{kind}")(torch.tensor(rows), spans=given, **reach)
    return mask, pairs(found, found, reach)


@st.composite
def of_images(draw: st.DrawFn) -> tuple[BlockDiagonalMask, Tensor]:
    rng = random.Random(draw(st.integers(0, 2**31)))
    documents = [random_multimodal_document(rng) for _ in range(draw(st.integers(1, 4)))]
    found = labelled([[n for n, document in enumerate(documents) for _ in document]])
    ids = torch.tensor([token for document in documents for token in document]).T[:, None]
    reach = {"window": (-1, -1), "causal": True, "chunk_size": None}
    return BlockDiagonalMask.from_position_ids(ids), pairs(found, found, reach)


@st.composite
def of_bounds(draw: st.DrawFn) -> tuple[BlockDiagonalMask, Tensor]:
    mask = random_intervals(random.Random(draw(st.integers(0, 2**31))), 70)
    bounds = zip(mask.key_start.tolist(), mask.key_stop.tolist(), strict=True)
    seen = [[begin <= j < end for j in range(mask.num_keys)] for begin, end in bounds]
    return mask, torch.tensor(seen, dtype=torch.bool).view(mask.num_queries, mask.num_keys)


@st.composite
def of_trees(draw: st.DrawFn) -> tuple[BlockDiagonalMask, Tensor]:
    """Rows of parents or of ends; rows of a batch are apart."""
    left, chunk = draw(st.sampled_from([None, None, 0, 3])), draw(st.sampled_from([None, None, 4, 5]))
    rows = draw(st.lists(forests(), min_size=1, max_size=2))
    length = max(map(len, rows))
    rows = [row + (-2,) * (length - len(row)) for row in rows]
    reach = {"window": (-1 if left is None else left, -1), "chunk_size": chunk}
    expected = torch.block_diag(*(visible(row, left, chunk) for row in rows)).bool()
    if draw(st.booleans()):
        ends = torch.stack([BlockDiagonalMask.from_tree(row).query_stop.long() for row in rows])
        return mask_of_ends(ends, **reach), expected
    return BlockDiagonalMask.from_tree(torch.tensor(rows), **reach), expected


ANY = st.one_of(of_lengths(), of_rows(), of_images(), of_bounds(), of_trees())


@settings(max_examples=200)
@given(ANY, st.data())
def test_every_form(made: tuple[BlockDiagonalMask, Tensor], data: st.DataObject) -> None:
    mask, expected = made
    assert torch.equal(mask.validate().to_dense(), expected)
    assert torch.equal(mask.key_start < mask.key_stop, expected.any(1))
    dtype = data.draw(st.sampled_from(FLOATS))
    added = mask.to_dense(dtype, additive=True)
    assert torch.equal(mask.to_dense(dtype), expected.to(dtype))
    assert torch.equal(added, torch.where(expected, 0.0, torch.finfo(dtype).min).to(dtype))
    for form in (mask.to_dense(), added):  # rows begin at multiples of 16 bytes
        assert not form.numel() or (form.stride(0) * form.element_size() % 16, form.stride(1)) == (0, 1)
    transposed = mask.transpose().validate()
    assert torch.equal(transposed.to_dense(), expected.T)
    assert torch.equal(transposed.transpose().validate().to_dense(), expected)
    assert mask.transpose() is transposed
    kept = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in expected.shape]
    rows, keys = (torch.tensor(one, dtype=torch.bool).nonzero().flatten() for one in kept)
    part, picked = mask.restrict(rows, keys.int()), expected[rows][:, keys]
    for one, dense in (
        (part, picked),
        (part.transpose(), picked.T),
        (mask.restrict(rows).restrict(None, keys), picked),
    ):
        assert torch.equal(one.validate().to_dense(), dense)
    for one in (
        mask.restrict(),
        mask.to("cpu"),
        copy.deepcopy(mask),
        copy.copy(mask),
        pickle.loads(pickle.dumps(mask)),
    ):
        assert torch.equal(one.validate().to_dense(), expected)
    if mask.diagonal is not None:
        assert torch.equal(distances(part), distances(mask)[rows][:, keys])


@settings(max_examples=100)
@given(ANY, st.sampled_from([1, 7, (8, 16), (3, 2), 128]))
def test_block_mask(made: tuple[BlockDiagonalMask, Tensor], size: Any) -> None:
    """The blocks that torch finds by evaluating the mask function on all pairs; for trees also some without a pair."""
    mask, expected = made
    if 0 in expected.shape:
        return
    ours = mask.to_block_mask(size)
    queries, keys = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
    assert torch.equal(ours.mask_mod(0, 0, queries, keys), expected)  # type: ignore[arg-type]
    theirs = create_block_mask(ours.mask_mod, None, None, *expected.shape, "cpu", size)
    assert (ours.shape, ours.BLOCK_SIZE) == (theirs.shape, theirs.BLOCK_SIZE)
    kinds = ("full_",) if mask.is_tree else ("", "full_")
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for kind in kinds:
            assert torch.equal(getattr(ours, kind + name), getattr(theirs, kind + name)), kind + name
    assert (ours.to_dense() >= theirs.to_dense()).all()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_and_sdpa_compute_what_we_do() -> None:
    mask = BlockDiagonalMask.from_seqlens([13, 1, 18], window=(9, 0))
    q, k, v = torch.randn(3, mask.num_queries, 2, 16)
    ours = varlen_attention(q, k, v, mask, backend="reference").transpose(0, 1)
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    torch.testing.assert_close(flex_attention(*rows, block_mask=mask.to_block_mask(16))[0], ours)
    for dense in (mask.to_dense(), mask.to_dense(q.dtype, additive=True)):
        torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=dense)[0], ours)


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [
        ([(0, 0, 0), (1, 1, 1), (7, 7, 7), (8, 8, 8)], [0, 2]),  # positions ascend, but words step by one
        ([(3, 3, 3), (3, 3, 3), (4, 4, 4)], [0, 1]),
        ([(2, 2, 3), (2, 2, 3), (2, 3, 2)], [0, 1]),  # a repeated patch begins another image
        ([(2, 3, 2), (2, 2, 9)], [0, 1]),
        ([(2, 2, 2), (2, 2, 3), (9, 9, 9)], [0]),  # after an image, the size of the image is skipped
        ([(2**31 - 2,) * 3, (2**31 - 1,) * 3, (-(2**31),) * 3, (1 - 2**31,) * 3], [0, 2]),  # steps back don't wrap
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_steps_that_end_a_document(tokens: list[tuple[int, ...]], starts: list[int], dtype: torch.dtype) -> None:
    ids = torch.tensor(tokens).to(dtype).T[:, None]
    assert document_starts(ids)[0].nonzero().flatten().tolist() == starts
    if all(len({*token}) == 1 for token in tokens):  # words alone: the text positions decide in the form with four rows
        four = torch.cat([ids[:1], torch.randint(0, 9, ids.shape)])
        assert document_starts(four)[0].nonzero().flatten().tolist() == starts


def test_documents_depths_and_names() -> None:
    """The numbers of documents, the diagonal of a tree, totals, repeated offsets and what is shown, by hand."""
    tree, documents = BlockDiagonalMask.from_tree([-1, 0, 1, 2, -1, -1, 5]), BlockDiagonalMask.from_seqlens([4, 1, 2])
    assert tree.document.tolist() == documents.document.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert tree.diagonal.tolist() == [0, 1, 2, 3, 0, 0, 1]
    padded = BlockDiagonalMask.from_cu_seqlens(torch.tensor([0, 3, 3, 7, 7, 7]), total_q=9)
    assert padded.key_stop.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    mask = BlockDiagonalMask.from_cu_seqlens([0, 2, 5], [0, 4, 4])
    assert (mask.num_queries, mask.num_keys, mask.max_documents) == (5, 4, 2)
    assert BlockDiagonalMask.from_cu_seqlens([0, 2, 5], total_q=8).num_keys == 8
    for made, is_tree in ((documents, False), (tree, True)):
        moved = made.to("meta")
        assert repr(moved) == f"BlockDiagonalMask(num_queries=7, num_keys=7, is_tree={is_tree}, device=meta)"
        assert moved.origin is made
        assert moved.document.device == moved.device
        assert len({made, moved, made}) == 2
    for shape in ((0,), (0, 4), (2, 0), (3, 2, 0)):
        mask = BlockDiagonalMask.from_position_ids(torch.zeros(shape, dtype=torch.int64))
        assert (mask.num_queries, mask.num_keys) == (0, 0)
