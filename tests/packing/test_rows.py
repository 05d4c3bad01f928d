"""Rows of a `datasets.Dataset` hold its documents as `pack` plans them; documents that can't be packed are named."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.packing.tables import LENGTHS, documents, documents_of, random_documents
from tritonpack import PackingCollator, pack, pack_dataset

pytest.importorskip("datasets")

import datasets
import pyarrow as pa

from tritonpack.packing import rows as module

IDS = {"input_ids": [[1, 2], [3]]}


def by_tokens(found):
    return sorted(found, key=lambda document: document["input_ids"])


@pytest.fixture
def small_batches(monkeypatch):
    """A few documents, or a row, at a time."""
    monkeypatch.setattr(module, "_BATCH_BYTES", 100)


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "first_fit", "next_fit", "windowed"])
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_rows_are_those_of_pack(tmp_path, small_batches, algorithm, jobs):
    given = random_documents(100, 40)
    packing = pack([len(document["input_ids"]) for document in given], 64, algorithm=algorithm, max_items=5)
    datasets.Dataset.from_list(given[::-1]).save_to_disk(tmp_path / "in")
    source = datasets.load_from_disk(str(tmp_path / "in")).select(range(len(given) - 1, -1, -1))
    rows = pack_dataset(source, 64, algorithm=algorithm, max_items=5, jobs=jobs)
    cut = documents_of(rows)
    assert [[document for at, document in cut if at == row] for row in range(len(rows))] == [
        [given[number] for number in items] for items in packing
    ]


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_documents_longer_than_a_row(small_batches, overlong):
    given = documents()
    rows = pack_dataset(datasets.Dataset.from_list(given), 4, overlong=overlong)
    pieces = [
        {name: values[start : start + 4] for name, values in document.items()}
        for document in given
        for start in range(0, len(document["input_ids"]), 4)
        if overlong == "split" or len(document["input_ids"]) <= 4 or (overlong == "truncate" and start == 0)
    ]
    assert by_tokens([document for _, document in documents_of(rows)]) == by_tokens(pieces)
    assert str(pack(LENGTHS, 4, overlong=overlong).report) in rows.info.description


def test_overlong_documents_are_refused_by_default():
    with pytest.raises(ValueError, match=r"8 of 14 documents are longer .* The longest is document 10: 10 tokens\."):
        pack_dataset(datasets.Dataset.from_list(documents()), 4)


def test_columns_of_rows():
    given = [
        {
            "input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "completion_mask": [0, 1, 1], "length": 3,
            "box": [[1], [2], [3]],
        },
        {"input_ids": [4], "attention_mask": [1], "completion_mask": [1], "length": 1, "box": [[4]]},
    ]  # fmt: skip
    rows = pack_dataset(datasets.Dataset.from_list(given), 4, columns=["input_ids", "completion_mask", "box"])
    assert rows[0] == {
        "input_ids": [1, 2, 3, 4], "box": [[1], [2], [3], [4]], "labels": [-100, 2, 3, 4],
        "position_ids": [0, 1, 2, 0], "seq_lengths": [3, 1],
    }  # fmt: skip
    assert {name: rows.features[name].feature.dtype for name in ("input_ids", "labels", "position_ids")} == {
        "input_ids": "int32", "labels": "int32", "position_ids": "uint16",
    }  # fmt: skip


@pytest.mark.parametrize("capacity", [2**16, 2**16 + 1])
def test_positions_of_long_documents(capacity):
    rows = pack_dataset(datasets.Dataset.from_dict({"input_ids": [[1] * capacity]}), capacity)
    assert rows[0]["position_ids"] == list(range(capacity))


def test_masks_stay_beside_labels():
    given = documents([2, 3])
    given = [document | {"assistant_masks": [1] * len(document["input_ids"])} for document in given]
    rows = pack_dataset(datasets.Dataset.from_list(given), 5)
    assert by_tokens([document for _, document in documents_of(rows)]) == given


def test_masks_of_bools():
    source = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "completion_mask": [[False, True]]})
    assert pack_dataset(source, 4)[0]["labels"] == [-100, 2]


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int8(), 2)], ids=str)
def test_types_of_lists(kind):
    table = pa.table({"input_ids": pa.array([[1, 2], [3, 4], [5, 6]], kind)})
    assert pack_dataset(datasets.Dataset(table).select([2, 0]), 4)[0]["input_ids"] == [5, 6, 1, 2]


def test_batches_are_those_of_the_documents():
    given = documents()
    rows = pack_dataset(datasets.Dataset.from_list(given), 10)
    bins = [[given[number] for number in items] for items in pack(LENGTHS, 10)]
    for form in (None, "numpy", "torch"):
        for row, items in zip(rows.with_format(form), bins, strict=True):
            actual, expected = PackingCollator()([row]), PackingCollator()(items)
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert (actual[name] == value).all() if hasattr(value, "all") else actual[name] == value


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"text": ["a"]}, {}, "the dataset has no column 'input_ids'; it has 'text'. Tokenize the text first"),
        (IDS | {"text": ["a", "b"], "labels": [[1, 2], [3]]}, {}, "such as columns=input_ids,labels, or remove"),
        (IDS | {"seq_lengths": [[1, 1], [1]]}, {}, "'seq_lengths', .* Rows of several documents are packed already"),
        (IDS, {"columns": ["input_ids", "labels"]}, "columns names 'labels', which isn't there, .* are 'input_ids'"),
        (IDS | {"labels": [[1, 2], [3]]}, {"columns": ["labels"]}, "columns are labels; name input_ids"),
        (IDS, {"columns": ["input_ids", "input_ids"]}, "each column once"),
        (IDS, {"columns": "input_ids"}, r"columns must be a list of names, .*; got 'input_ids'"),
        (IDS, {"jobs": 0}, "jobs must be an integer from 1"),
        (IDS | {"position_ids": [[0, 1], [0]]}, {"columns": ["input_ids", "position_ids"]}, "names 'position_ids', wh"),
        (IDS | {"labels": IDS["input_ids"], "label": IDS["input_ids"]}, {}, "at most one of labels"),
        (IDS | {"label": [0, 1]}, {}, "document 0 has one number as label"),
        (IDS | {"attention_mask": [[1, 1], [0]]}, {}, "document 1 has an attention_mask that isn't 1 for each of its"),
        (IDS | {"completion_mask": [[1, 2], [0]]}, {}, "document 0 needs only 0 and 1 in completion_mask; got"),
        (IDS | {"special_tokens_mask": [[1, 200], [0]]}, {}, "document 0 Integer value 200 not in range"),
        ({"input_ids": [["a"], ["b"]]}, {}, "document 0 needs a row of integers as input_ids; got"),
        ({"input_ids": [[True], [False]]}, {}, "document 0 needs a row of integers as input_ids; got"),
        ({"input_ids": ["ab", "c"]}, {}, "document 0 needs a row of integers as input_ids; got 'ab'"),
        ({"input_ids": [[1], []]}, {}, "document 1 is empty; every document needs at least one token"),
        ({"input_ids": [[1], None]}, {}, "document 1 needs a row of integers as input_ids; got None"),
        ({"input_ids": [[1], [2, None]]}, {}, r"document 1 needs a row of integers as input_ids; got \[2, None\]"),
        ({"input_ids": [[1], [2, -7]]}, {}, "document 1 has -7 at position 1 of input_ids, .*at least 0"),
        ({"input_ids": [[1], [2**31]]}, {}, "document 1 Integer value 2147483648 not in range"),
        ({"input_ids": [[1], [2.5]]}, {}, "document 0 needs a row of integers as input_ids; got torch.float"),
        (IDS | {"labels": [[1, 2], [3, 4]]}, {}, "document 1 has 1 input_ids but 2 labels; give every token one"),
        (IDS | {"labels": [[1, 2], None]}, {}, "document 1 needs a row of integers as labels; got None"),
        (IDS | {"box": [[1, 2], [3, 4]]}, {"columns": ["input_ids", "box"]}, "document 1 has 1 input_ids but 2 box"),
        ({"input_ids": []}, {}, "the dataset holds no document"),
    ],
)  # fmt: skip
def test_refused(columns, options, message):
    with pytest.raises(ValueError, match=message):
        pack_dataset(datasets.Dataset(pa.table(columns)), 8, **options)


@pytest.mark.heavy
@pytest.mark.parametrize("jobs", [1, 2])
def test_place_in_a_later_batch(small_batches, jobs):
    environment = os.environ
    given = documents()
    given[7]["labels"] = [1]
    with pytest.raises(ValueError, match="document 7 has 4 input_ids but 1 labels"):
        pack_dataset(datasets.Dataset.from_list(given), 10, jobs=jobs)
    assert os.environ is environment


def test_options_of_rows_are_refused_elsewhere():
    for options in ({"columns": ["input_ids"]}, {"jobs": 2}):
        with pytest.raises(ValueError, match=r"columns and jobs are for a datasets\.Dataset .* for list\. Leave them"):
            pack_dataset(documents(), 10, **options)


def test_what_was_finished_is_found(tmp_path, monkeypatch):
    """The documents that were checked, after an interruption; the plan and the options make other rows."""
    datasets.Dataset.from_list(documents()).save_to_disk(tmp_path / "in")
    source = datasets.load_from_disk(str(tmp_path / "in"))

    def refuse(*_, **__):
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(module, "_rows", refuse)
        with pytest.raises(InterruptedError):
            pack_dataset(source, 10)
    monkeypatch.setattr(module, "_checked", refuse)
    rows = pack_dataset(source, 10)
    assert [len(pack_dataset(source, 10, max_items=limit)) for limit in (None, 1)] == [len(rows), len(LENGTHS)]
    monkeypatch.setattr(module, "_rows", refuse)
    assert list(pack_dataset(source, 10)) == list(rows)
    assert {os.path.dirname(file["filename"]) for file in rows.cache_files} == {str(tmp_path / "in")}


def test_best_fit_puts_similar_lengths_into_a_row_and_first_fit_mixes_them():
    given = [{"input_ids": document["input_ids"]} for document in random_documents(8000, 99)]
    source = datasets.Dataset.from_list(given)
    spread, rows = {}, {}
    for algorithm in ("best_fit_decreasing", "windowed", "first_fit"):
        found = pack_dataset(source, 1000, algorithm=algorithm)
        spread[algorithm], rows[algorithm] = np.mean([np.std(row) for row in found["seq_lengths"]]), len(found)
    assert 2 * max(spread["best_fit_decreasing"], spread["windowed"]) < spread["first_fit"]
    assert rows["best_fit_decreasing"] <= rows["first_fit"] <= 1.01 * rows["best_fit_decreasing"]


def test_pack_dataset_of_other_documents_needs_no_datasets():
    program = "import sys, tritonpack; sys.modules['datasets'] = None; print(tritonpack.pack_dataset([[1], [2]], 2)[0])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[[1], [2]]\n"
