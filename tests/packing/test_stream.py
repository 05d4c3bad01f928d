from array import array
from itertools import islice

import numpy as np
import pytest
import torch

from tests.packing import naive
from tritonpack import PackingCollator, pack, pack_stream


def documents(lengths):
    """Rows of tokens; each token is 1000 * document + position."""
    return [[1000 * number + position for position in range(length)] for number, length in enumerate(lengths)]


LENGTHS = np.random.default_rng(0).integers(1, 600, 2500).tolist()


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
@pytest.mark.parametrize("max_items", [None, 4])
def test_same_bins_as_pack(overlong, max_items):
    rows = documents(LENGTHS)
    packing = pack(LENGTHS, 500, algorithm="windowed", overlong=overlong, max_items=max_items)
    stream = pack_stream(iter(rows), 500, overlong=overlong, max_items=max_items)
    for bin_index, packed in enumerate(stream):
        assert packed == [rows[number][start:stop] for number, start, stop in packing.spans(bin_index)]
    assert (stream.num_bins, stream.num_tokens) == (packing.num_bins, packing.num_tokens)
    assert (stream.efficiency, stream.report) == (packing.efficiency, packing.report)
    assert stream.report.documents > 100


@pytest.mark.parametrize("window", [1, 3, 250, 10_000])
@pytest.mark.parametrize("threshold", [0, 0.95, 1])
def test_window_and_carry_threshold(window, threshold):
    lengths = LENGTHS[:500]
    rows = documents(lengths)
    stream = pack_stream(rows, 600, window=window, carry_threshold=threshold)
    expected = naive.windowed(lengths, 600, len(lengths), window, threshold)
    assert list(stream) == [[rows[item] for item in items] for items in expected]


def test_reads_three_windows_ahead_at_most():
    """At most three windows and one document are read ahead of the bins, for any length of the stream."""
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield [7] * 60

    stream = pack_stream(endless(), 100, window=8)
    for _ in islice(stream, 200):
        assert read <= stream.num_bins + 3 * 8 + 8


def test_split_cuts_all_columns():
    document = {
        "input_ids": torch.arange(10),
        "labels": list(range(10)),
        "attention_mask": np.ones(10, dtype=int),
        "weights": array("f", range(10)),
    }
    (first,), (second,) = pack_stream([document], 6, overlong="split")
    assert [len(values) for values in first.values()] == [6] * 4
    assert {key: list(values) for key, values in second.items()} == {
        "input_ids": [6, 7, 8, 9],
        "labels": [6, 7, 8, 9],
        "attention_mask": [1] * 4,
        "weights": [6, 7, 8, 9],
    }
    batch = PackingCollator()([{key: first[key] for key in ("input_ids", "labels", "attention_mask")}])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_whole_documents_are_not_copied():
    document = {"input_ids": [1, 2], "source": "a book"}
    ((same,),) = pack_stream([document], 2)
    assert same is document


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, lambda row: array("l", row)])
def test_types_of_rows(convert):
    bins = list(pack_stream([convert([1, 2, 3, 4, 5])], 3, overlong="split"))
    assert [[list(map(int, row)) for row in packed] for packed in bins] == [[[1, 2, 3]], [[4, 5]]]
    assert type(bins[0][0]) is type(convert([1]))


def test_length_function():
    class Document:
        def __init__(self, size):
            self.size = size

    given = [Document(3), Document(5), Document(2)]
    assert list(pack_stream(given, 5, length=lambda document: document.size)) == [[given[0], given[2]], [given[1]]]
    with pytest.raises(ValueError, match=r"document 1 has 5 tokens and must be cut, but a Document isn't a row"):
        list(pack_stream(given, 4, length=lambda document: document.size, overlong="split"))


def test_empty_stream_has_no_bin():
    stream = pack_stream([], 8)
    assert list(stream) == []
    assert stream.efficiency == 1.0


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[1], []], {}, "document 1 has 0"),
        ([[1] * 9], {}, r"document 0 has 9 tokens, longer than the capacity of 8.*overlong="),
        (["text"], {}, "document 0 must be a row of tokens.*got str. Tokenize text first"),
        ([7], {}, "document 0 must be a row of tokens.*got int"),
        ([{"text": "words"}], {}, r"document 0 must be .*got the keys \['text'\]"),
        ([{"input_ids": "words"}], {}, "got 'input_ids' of str"),
        ([{"input_ids": torch.ones(1, 4)}], {}, r"'input_ids' of shape \(1, 4\)"),
        ([np.ones((2, 3))], {}, r"got shape \(2, 3\)"),
        ([[1]], {"length": lambda document: 1.5}, "document 0 has 1.5"),
        ([[1]], {"length": lambda document: True}, "document 0 has True"),
        (
            [{"input_ids": [1] * 9, "text": "words", "id": 3, "labels": [1] * 8}],
            {"overlong": "split"},
            "document 0 has 9 tokens and must be cut, but 'id', 'labels', 'text' isn't a row of one value per token",
        ),
    ],
)
def test_refuses_documents(rows, options, message):
    stream = pack_stream(rows, 8, **options)
    with pytest.raises(ValueError, match=message):
        list(stream)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[1]], {"capacity": 0}, "capacity must be an integer from 1 .*got 0"),
        ([[1]], {"capacity": True}, "got True"),
        ([[1]], {"window": 0}, "window must be an integer from 1 .*got 0"),
        ([[1]], {"window": 2.5}, "window must be .*got 2.5"),
        ([[1]], {"max_items": 0}, "max_items must be .*got 0"),
        ([[1]], {"overlong": "cut"}, "overlong must be one of .*got 'cut'"),
        ([[1]], {"carry_threshold": 1.5}, "carry_threshold must be a number from 0 to 1.*got 1.5"),
        ([[1]], {"carry_threshold": float("nan")}, "carry_threshold must be a number from 0 to 1.*got nan"),
        ([[1]], {"carry_threshold": "all"}, "carry_threshold must be a number.*got 'all'"),
        ({"input_ids": [[1]]}, {}, "documents must be an iterable of documents.*got dict"),
        (7, {}, "documents must be an iterable.*got int"),
    ],
)
def test_refuses_options_before_reading(rows, options, message):
    with pytest.raises(ValueError, match=message):
        pack_stream(rows, **{"capacity": 8, **options})


def test_streaming_dataset():
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": list(range(1, length + 1))} for length in (3, 9, 5, 2)]
    stream = pack_stream(datasets.IterableDataset.from_generator(lambda: iter(rows)), 8, overlong="truncate")
    assert [[len(document["input_ids"]) for document in packed] for packed in stream] == [[3, 5], [8], [2]]
