"""The interval mask against dense masks that are computed pair by pair."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tritonpack.checks import Window
from tritonpack.masks.block_diagonal import BlockDiagonalMask, document_starts

SEEDS = range(40)
WINDOWS: tuple[Window, ...] = ((-1, -1), (0, 0), (3, 0), (0, 2), (2, 1), (-1, 1), (4, -1), (100, 100))
DIAGONALS = [(window, causal) for window in WINDOWS for causal in (True, False)]


def in_window(distance: int, window: Window, causal: bool) -> bool:
    """Whether FlashAttention's rule shows a key `distance` after the diagonal (before it, if negative)."""
    left, right = window
    if causal and distance > 0:
        return False
    return (left == -1 or distance >= -left) and (right == -1 or distance <= right)


def dense_of_documents(
    seqlens: Sequence[int], seqlens_k: Sequence[int], window: Window, causal: bool, total_q: int, total_k: int
) -> Tensor:
    dense = torch.zeros(total_q, total_k, dtype=torch.bool)
    begin_q = begin_k = 0
    for len_q, len_k in zip(seqlens, seqlens_k, strict=True):
        for i in range(len_q):
            for j in range(len_k):
                dense[begin_q + i, begin_k + j] = in_window(j - i - (len_k - len_q), window, causal)
        begin_q, begin_k = begin_q + len_q, begin_k + len_k
    return dense


def dense_of_labels(labels: Sequence[Sequence[object]], window: Window, causal: bool) -> Tensor:
    """The dense mask of rows of tokens with their document's label, None for padding; rows share no document."""
    tokens = [(row, label) for row, labels_of_row in enumerate(labels) for label in labels_of_row]
    dense = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, one in enumerate(tokens):
        for j, other in enumerate(tokens):
            dense[i, j] = one == other and one[1] is not None and in_window(j - i, window, causal)
    return dense


def assert_is(mask: BlockDiagonalMask, dense: Tensor) -> None:
    """Check that the mask and its transpose are valid and have exactly the pairs of `dense`."""
    assert torch.equal(mask.validate().to_dense(), dense)
    assert torch.equal(mask.transpose().validate().to_dense(), dense.T)


def random_lengths(rng: random.Random, documents: int) -> list[int]:
    """Random lengths, about a third of them 0."""
    return [rng.choice((0, rng.randint(1, 3), rng.randint(1, 9))) for _ in range(documents)]


class TestDocuments:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_same_lengths_on_both_sides(self, seed: int) -> None:
        rng = random.Random(seed)
        seqlens, (window, causal) = random_lengths(rng, rng.randint(0, 6)), rng.choice(DIAGONALS)
        total = sum(seqlens)
        mask = BlockDiagonalMask.from_seqlens(seqlens, window=window, causal=causal)
        assert_is(mask, dense_of_documents(seqlens, seqlens, window, causal, total, total))

    @pytest.mark.parametrize("seed", SEEDS)
    def test_other_key_lengths_and_slack(self, seed: int) -> None:
        rng = random.Random(seed)
        documents, (window, causal) = rng.randint(0, 6), rng.choice(DIAGONALS)
        seqlens, seqlens_k = random_lengths(rng, documents), random_lengths(rng, documents)
        total_q, total_k = sum(seqlens) + rng.randint(0, 5), sum(seqlens_k) + rng.randint(0, 5)
        dtype = rng.choice((torch.int32, torch.int64))
        mask = BlockDiagonalMask.from_cu_seqlens(
            torch.tensor([0, *seqlens]).cumsum(0).to(dtype),
            torch.tensor([0, *seqlens_k]).cumsum(0).to(dtype),
            window=window,
            causal=causal,
            total_q=total_q,
            total_k=total_k,
        )
        assert_is(mask, dense_of_documents(seqlens, seqlens_k, window, causal, total_q, total_k))

    @pytest.mark.parametrize(("window", "causal"), DIAGONALS)
    @pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (4, 0), (0, 4), (1, 6), (6, 1)])
    def test_every_window_on_every_shape(self, lengths: tuple[int, int], window: Window, causal: bool) -> None:
        seqlens, seqlens_k = (2, lengths[0], 1), (2, lengths[1], 1)
        mask = BlockDiagonalMask.from_seqlens(seqlens, seqlens_k, window=window, causal=causal)
        assert_is(mask, dense_of_documents(seqlens, seqlens_k, window, causal, sum(seqlens), sum(seqlens_k)))

    def test_repeated_last_offset_is_an_empty_document(self) -> None:
        """So a tensor of fixed capacity can hold any number of documents."""
        exact = BlockDiagonalMask.from_cu_seqlens([0, 3, 3, 7], total_q=9)
        padded = BlockDiagonalMask.from_cu_seqlens(torch.tensor([0, 3, 3, 7, 7, 7, 7]), total_q=9)
        assert torch.equal(exact.key_start, padded.key_start)
        assert torch.equal(exact.key_stop, padded.key_stop)

    def test_totals_default_to_the_last_offset_of_their_side(self) -> None:
        mask = BlockDiagonalMask.from_cu_seqlens([0, 2, 5], [0, 4, 4])
        assert (mask.num_queries, mask.num_keys) == (5, 4)
        slack = BlockDiagonalMask.from_cu_seqlens([0, 2, 5], total_q=8)
        assert (slack.num_queries, slack.num_keys) == (8, 8)

    def test_lists_and_tensors_of_offsets_agree(self) -> None:
        for offsets in ([0, 2, 5], (0, 2, 5), torch.tensor([0, 2, 5], dtype=torch.int32)):
            assert BlockDiagonalMask.from_cu_seqlens(offsets).key_start.tolist() == [0, 0, 2, 2, 2]


class TestPositionIds:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_documents_begin_where_positions_do_not_step_by_one(self, seed: int) -> None:
        rng = random.Random(seed)
        (window, causal), tokens = rng.choice(DIAGONALS), rng.randint(1, 14)
        rows = []
        for _ in range(rng.randint(1, 3)):
            row: list[int] = []
            while len(row) < tokens:
                begin = rng.choice((0, 0, rng.randint(0, 20)))
                row += range(begin, begin + rng.randint(1, 6))
            rows.append(row[:tokens])
        mask = BlockDiagonalMask.from_position_ids(torch.tensor(rows), window=window, causal=causal)
        assert_is(mask, dense_of_labels([runs_of_one_step(row) for row in rows], window, causal))

    def test_positions_may_start_anywhere(self) -> None:
        mask = BlockDiagonalMask.from_position_ids(torch.tensor([5, 6, 7, 100, 101, 0, 0]))
        assert mask.key_start.tolist() == [0, 0, 0, 3, 3, 5, 6]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_steps_back_do_not_wrap(self, dtype: torch.dtype) -> None:
        """In int32, the smallest number less the largest is 1."""
        text = torch.tensor([[2**31 - 2, 2**31 - 1, -(2**31), 1 - 2**31]]).to(dtype)
        for ids in (text, text.expand(3, 1, 4), text.expand(4, 1, 4)):
            assert document_starts(ids).tolist() == [[True, False, True, False]]

    def test_each_row_begins_a_document(self) -> None:
        mask = BlockDiagonalMask.from_position_ids(torch.tensor([[0, 1], [2, 3]]))
        assert mask.key_start.tolist() == [0, 0, 2, 2]

    @pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0), (3, 2, 0)])
    def test_no_tokens(self, shape: tuple[int, ...]) -> None:
        mask = BlockDiagonalMask.from_position_ids(torch.zeros(shape, dtype=torch.int64))
        assert (mask.num_queries, mask.num_keys) == (0, 0)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_images_and_videos_do_not_end_a_document(self, seed: int) -> None:
        rng = random.Random(seed)
        rows = [[random_multimodal_document(rng) for _ in range(rng.randint(1, 4))] for _ in range(2)]
        tokens = min(sum(map(len, row)) for row in rows)
        labels = [[n for n, document in enumerate(row) for _ in document][:tokens] for row in rows]
        ids = [[token for document in row for token in document][:tokens] for row in rows]
        mask = BlockDiagonalMask.from_position_ids(torch.tensor(ids).permute(2, 0, 1))
        assert_is(mask, dense_of_labels(labels, (-1, -1), True))

    def test_image_and_video_by_hand(self) -> None:
        """Two words, an image of 2 x 2 patches, a word; then a video of 2 frames of 1 x 2 patches."""
        time = [0, 1, 2, 2, 2, 2, 4, 0, 0, 1, 1, 2]
        height = [0, 1, 2, 2, 3, 3, 4, 0, 0, 0, 0, 2]
        width = [0, 1, 2, 3, 2, 3, 4, 0, 1, 0, 1, 2]
        starts = document_starts(torch.tensor([time, height, width])[:, None])
        assert starts[0].nonzero().flatten().tolist() == [0, 7]

    @pytest.mark.parametrize(
        ("tokens", "starts"),
        [
            ([(0, 0, 0), (1, 1, 1), (7, 7, 7), (8, 8, 8)], [0, 2]),  # positions ascend, but words step by one
            ([(3, 3, 3), (3, 3, 3), (4, 4, 4)], [0, 1]),
            ([(2, 2, 3), (2, 2, 3), (2, 3, 2)], [0, 1]),  # a repeated patch begins another image
            ([(2, 3, 2), (2, 2, 9)], [0, 1]),
            ([(2, 2, 2), (2, 2, 3), (9, 9, 9)], [0]),  # after an image, the size of the image is skipped
        ],
    )
    def test_steps_that_end_a_document(self, tokens: list[tuple[int, int, int]], starts: list[int]) -> None:
        found = document_starts(torch.tensor(tokens).T[:, None])
        assert found[0].nonzero().flatten().tolist() == starts

    def test_four_rows_use_the_text_positions(self) -> None:
        text = torch.tensor([[0, 1, 2, 0, 1]])
        grid = torch.randint(0, 9, (3, 1, 5))
        mask = BlockDiagonalMask.from_position_ids(torch.cat([text[None], grid]))
        assert mask.key_start.tolist() == [0, 0, 0, 3, 3]


def runs_of_one_step(positions: Sequence[int]) -> list[int]:
    """The number of the document of each token of a row."""
    labels: list[int] = []
    for n, position in enumerate(positions):
        goes_on = n > 0 and position == positions[n - 1] + 1
        labels.append(labels[-1] if goes_on else n)
    return labels


def random_multimodal_document(rng: random.Random) -> list[tuple[int, int, int]]:
    """(time, height, width) of each token, as in Qwen2-VL: a part begins after the largest number so far."""
    tokens: list[tuple[int, int, int]] = []
    for _ in range(rng.randint(1, 4)):
        first = max((max(token) for token in tokens), default=-1) + 1
        if rng.random() < 0.5:
            tokens += [(first + n,) * 3 for n in range(rng.randint(1, 4))]
        else:
            frames, height, width = rng.choice((1, 1, 2, 3)), rng.randint(1, 3), rng.randint(1, 3)
            tokens += [
                (first + t, first + h, first + w) for t in range(frames) for h in range(height) for w in range(width)
            ]
    return tokens


class TestSegmentIds:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_zero_is_padding_anywhere(self, seed: int) -> None:
        rng = random.Random(seed)
        (window, causal), tokens = rng.choice(DIAGONALS), rng.randint(1, 14)
        rows = []
        for _ in range(rng.randint(1, 3)):
            rows.append(random_names(rng, tokens))  # in random order, because a number is only a name
        mask = BlockDiagonalMask.from_segment_ids(torch.tensor(rows), window=window, causal=causal)
        assert_is(mask, dense_of_labels([[label or None for label in row] for row in rows], window, causal))

    def test_rows_may_use_the_same_ids(self) -> None:
        mask = BlockDiagonalMask.from_segment_ids(torch.tensor([[1, 1, 2], [2, 1, 1]]))
        assert mask.key_start.tolist() == [0, 0, 2, 3, 4, 4]

    def test_one_dimension_is_one_row(self) -> None:
        flat = BlockDiagonalMask.from_segment_ids(torch.tensor([3, 3, 0, 1]))
        row = BlockDiagonalMask.from_segment_ids(torch.tensor([[3, 3, 0, 1]]))
        assert torch.equal(flat.to_dense(), row.to_dense())


class TestPaddingMask:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize(("window", "causal"), DIAGONALS)
    def test_padding_on_every_side_and_empty_rows(self, window: Window, causal: bool, dtype: torch.dtype) -> None:
        rows = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
        mask = BlockDiagonalMask.from_padding_mask(torch.tensor(rows, dtype=dtype), window=window, causal=causal)
        assert_is(mask, dense_of_labels([[label or None for label in row] for row in rows], window, causal))

    def test_any_nonzero_number_is_a_token(self) -> None:
        mask = BlockDiagonalMask.from_padding_mask(torch.tensor([0, 7, -1]))
        assert_is(mask, torch.tensor([[0, 0, 0], [0, 1, 0], [0, 1, 1]]) == 1)


class TestChunks:
    """Chunks are counted from each document's first key; a query sees only the chunk of its own place."""

    @pytest.mark.parametrize("seed", SEEDS)
    def test_against_pairs(self, seed: int) -> None:
        rng = random.Random(seed)
        documents, (window, causal) = rng.randint(0, 6), rng.choice(DIAGONALS)
        seqlens, chunk = random_lengths(rng, documents), rng.choice((1, 2, 3, 5, 100))
        seqlens_k = rng.choice((seqlens, random_lengths(rng, documents)))
        mask = BlockDiagonalMask.from_seqlens(seqlens, seqlens_k, window=window, causal=causal, chunk_size=chunk)
        dense = dense_of_documents(seqlens, seqlens_k, window, causal, sum(seqlens), sum(seqlens_k))
        begin_q = begin_k = 0
        for len_q, len_k in zip(seqlens, seqlens_k, strict=True):
            for i in range(len_q):
                place = i + len_k - len_q  # queries before the first key belong to chunks without keys
                for j in range(len_k):
                    dense[begin_q + i, begin_k + j] &= j // chunk == place // chunk
            begin_q, begin_k = begin_q + len_q, begin_k + len_k
        assert_is(mask, dense)

    def test_every_constructor_accepts_chunks(self) -> None:
        expected = BlockDiagonalMask.from_seqlens([5, 3], chunk_size=2).to_dense()
        assert expected.int().argmax(1).tolist() == [0, 0, 2, 2, 4, 5, 5, 7]
        position_ids, segment_ids = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), torch.tensor([1, 1, 1, 1, 1, 2, 2, 2])
        for mask in (
            BlockDiagonalMask.from_cu_seqlens([0, 5, 8], chunk_size=2),
            BlockDiagonalMask.from_position_ids(position_ids, chunk_size=2),
            BlockDiagonalMask.from_segment_ids(segment_ids, chunk_size=2),
        ):
            assert torch.equal(mask.to_dense(), expected)
        padded = BlockDiagonalMask.from_padding_mask(torch.tensor([[0, 1, 1, 1, 0]]), chunk_size=2)
        assert padded.key_start.tolist() == [0, 1, 1, 3, 4]


class TestSpans:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_against_pairs(self, seed: int) -> None:
        """Packed rows with padding, windows and chunks; spans end at the ends of documents, whatever their ids."""
        rng = random.Random(seed)
        (window, causal), chunk = rng.choice(DIAGONALS), rng.choice((None, 2, 4))
        rows, tokens = rng.randint(1, 3), rng.randint(1, 14)
        segments = torch.tensor([random_names(rng, tokens) for _ in range(rows)])
        spans = torch.tensor([random_names(rng, tokens) for _ in range(rows)]).clamp(max=3)  # ids repeat
        reach = {"window": window, "causal": causal, "chunk_size": chunk}
        dense = BlockDiagonalMask.from_segment_ids(segments, **reach).to_dense()
        flat_segments, flat_spans = segments.flatten().tolist(), spans.flatten().tolist()
        for i in range(rows * tokens):
            j = i
            while flat_spans[i] and flat_segments[i] and j < rows * tokens and (j == i or j % tokens):
                if (flat_spans[j], flat_segments[j]) != (flat_spans[i], flat_segments[i]):
                    break
                dense[i, j] = dense[j, i] = True
                j += 1
        shape = rng.choice(((rows, tokens), (-1,)))
        mask = BlockDiagonalMask.from_segment_ids(segments, spans=spans.view(shape), **reach)
        assert_is(mask, dense)

    def test_an_image_in_a_causal_text(self) -> None:
        spans = torch.tensor([0, 7, 7, 7, 0, 0, 7, 7])  # the last two tokens are in other documents
        for mask in (
            BlockDiagonalMask.from_seqlens([5, 2, 1], spans=spans),
            BlockDiagonalMask.from_cu_seqlens([0, 5, 7, 8], spans=spans[None]),
            BlockDiagonalMask.from_position_ids(torch.tensor([0, 1, 2, 3, 4, 0, 1, 0]), spans=spans),
        ):
            assert mask.validate().key_start.tolist() == [0, 0, 0, 0, 0, 5, 5, 7]
            assert mask.key_stop.tolist() == [1, 4, 4, 4, 5, 6, 7, 8]

    def test_spans_in_slack_are_ignored(self) -> None:
        mask = BlockDiagonalMask.from_cu_seqlens([0, 3], total_q=6, spans=torch.tensor([0, 1, 1, 1, 2, 2]))
        assert mask.validate().key_start.tolist() == [0, 0, 0, 3, 3, 3]
        assert mask.key_stop.tolist() == [1, 3, 3, 3, 3, 3]
        padded = BlockDiagonalMask.from_padding_mask(torch.tensor([[0, 1, 1, 0]]), spans=torch.full((1, 4), 3))
        assert padded.validate().to_dense().sum(1).tolist() == [0, 2, 2, 0]


def random_names(rng: random.Random, tokens: int) -> list[int]:
    """Runs of ids, some of them 0."""
    row: list[int] = []
    names = rng.sample(range(1, 99), 20)
    while len(row) < tokens:
        row += [rng.choice((0, names.pop()))] * rng.randint(1, 5)
    return row[:tokens]


def random_intervals(rng: random.Random, most: int = 12) -> BlockDiagonalMask:
    """A random mask: ascending bounds, with empty rows at random places."""
    queries, keys = rng.randint(0, most), rng.randint(0, most)
    start = sorted(rng.randint(0, keys) for _ in range(queries))
    stop = sorted(rng.randint(0, keys) for _ in range(queries))
    stop = [max(pair) for pair in zip(start, stop, strict=True)]
    return BlockDiagonalMask(
        torch.tensor(start, dtype=torch.int32), torch.tensor(stop, dtype=torch.int32), keys
    ).validate()


class TestOperations:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_transpose(self, seed: int) -> None:
        mask = random_intervals(random.Random(seed))
        transposed = mask.transpose().validate()
        assert torch.equal(transposed.to_dense(), mask.to_dense().T)
        assert torch.equal(transposed.transpose().validate().to_dense(), mask.to_dense())
        assert mask.transpose() is transposed

    @pytest.mark.parametrize("seed", SEEDS)
    def test_restrict(self, seed: int) -> None:
        rng = random.Random(seed)
        mask = random_intervals(rng)
        rows, keys = (
            torch.tensor(sorted(rng.sample(range(size), rng.randint(0, size))), dtype=dtype)
            for size, dtype in ((mask.num_queries, torch.int64), (mask.num_keys, torch.int32))
        )
        dense = mask.to_dense()
        assert_is(mask.restrict(rows), dense[rows])
        assert_is(mask.restrict(key_positions=keys), dense[:, keys])
        assert_is(mask.restrict(rows, keys), dense[rows][:, keys])
        assert_is(mask.restrict(), dense)

    def test_to_another_device(self) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        moved = mask.to("meta")
        assert (moved.device.type, moved.num_queries, moved.num_keys) == ("meta", 5, 5)
        assert torch.equal(mask.to("cpu").to_dense(), mask.to_dense())

    def test_frozen(self) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2])
        for field in dataclasses.fields(mask):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(mask, field.name, getattr(mask, field.name))

    def test_equality_is_identity(self) -> None:
        one, other = (BlockDiagonalMask.from_seqlens([3, 2]) for _ in range(2))
        assert one != other
        assert len({one, other, one}) == 2

    def test_repr_reads_no_values(self) -> None:
        mask = BlockDiagonalMask.from_seqlens([3, 2], device="meta")
        assert repr(mask) == "BlockDiagonalMask(num_queries=5, num_keys=5, device=meta)"

    @pytest.mark.parametrize(
        ("start", "stop", "message"),
        [
            ([0, 0], [1, 4], r"row 1 of the mask sees keys \[0, 4\), which reaches outside the 3 keys"),
            ([-1, 0], [1, 2], r"row 0 of the mask sees keys \[-1, 1\), which reaches outside"),
            ([0, 2], [1, 1], r"row 1 of the mask sees keys \[2, 1\), which ends before it begins"),
            ([1, 0], [1, 2],
             r"row 1 of the mask sees keys \[0, 2\), which begins or ends before the interval of the row"),
            ([0, 0], [3, 2],
             r"row 1 of the mask sees keys \[0, 2\), which begins or ends before the interval of the row"),
        ],
    )  # fmt: skip
    def test_validate_names_the_first_bad_row(self, start: list[int], stop: list[int], message: str) -> None:
        bounds = (torch.tensor(bound, dtype=torch.int32) for bound in (start, stop))
        mask = BlockDiagonalMask(*bounds, 3, trusted=True)
        with pytest.raises(ValueError, match=message):
            mask.validate()
        with pytest.raises(ValueError, match=message):
            BlockDiagonalMask(mask.key_start, mask.key_stop, 3)
