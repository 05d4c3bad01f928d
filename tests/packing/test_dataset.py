"""pack_dataset and BinDataset: rows as `pack` plans them."""

import os

import numpy as np
import pytest
from torch.utils.data import Subset

from tests.packing.tables import LENGTHS, documents, documents_of, random_documents
from tritonpack import BinDataset, PackingCollator, pack, pack_dataset

pytest.importorskip("datasets")

import datasets

from tritonpack.packing import rows as module


def table(given, folder=None):
    """Documents in memory, or in files on disk, as its cache then is."""
    made = datasets.Dataset.from_list(given)
    if folder is None:
        return made
    made.save_to_disk(folder)
    return datasets.load_from_disk(str(folder))


@pytest.fixture
def small_batches(monkeypatch):
    """A few documents, or a row, at a time."""
    monkeypatch.setattr(module, "_BATCH_TOKENS", 25)


@pytest.mark.fast("best_fit-drop", "best_fit_decreasing-split")
@pytest.mark.parametrize("overlong", ["error", "split", "truncate", "drop"])
@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "best_fit", "next_fit"])
def test_bins_and_rows_are_those_of_pack(tmp_path, small_batches, algorithm, overlong):
    """Of a table in each format in memory or on disk, and of a table whose order was changed."""
    given = random_documents(60, 64 if overlong == "error" else 90)
    options = {"algorithm": algorithm, "max_items": 5, "overlong": overlong}
    packing = pack([len(document["input_ids"]) for document in given], 64, **options)
    expected = [
        [
            {name: values[start:stop] for name, values in given[number].items()}
            for number, start, stop in packing.spans(at)
        ]
        for at in range(packing.num_bins)
    ]
    backwards = table(given[::-1], tmp_path / "in").select(range(59, -1, -1))
    for source in (table(given).with_format("numpy"), table(given).with_format("torch"), backwards):
        rows = pack_dataset(source, 64, **options)
        assert (rows.format["type"], bool(rows.cache_files)) == (source.format["type"], source is backwards)
        assert rows.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
        cut = documents_of({name: np.asarray(values).tolist() for name, values in row.items()} for row in rows)
        assert [[document for at, document in cut if at == row] for row in range(len(rows))] == expected
        assert rows.info.description == f"{packing!r}. {packing.report}."
        assert all(
            str(PackingCollator()([row])) == str(PackingCollator()(items))
            for row, items in zip(rows, expected, strict=True)
        )


def test_bin_dataset():
    rows, asked = documents(), []

    class Counting(Subset):
        def __getitems__(self, indices):
            asked.append(indices)
            return super().__getitems__(indices)

    for bins in (BinDataset(rows), BinDataset(Counting(rows, range(14)))):
        assert (bins[[4, 0]], bins[np.array([1])], bins[2], len(bins)) == ([rows[4], rows[0]], [rows[1]], rows[2], 14)
    assert asked == [[4, 0], [1]]


def test_columns_of_rows():
    given = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "completion_mask": [False, True, True], "length": 3,
         "box": [[1], [2], [3]]},
        {"input_ids": [4], "attention_mask": [1], "completion_mask": [True], "length": 1, "box": [[4]]},
    ]  # fmt: skip
    rows = pack_dataset(table(given), 4, columns=["input_ids", "completion_mask", "box"])
    assert rows[0] == {
        "input_ids": [1, 2, 3, 4], "box": [[1], [2], [3], [4]], "labels": [-100, 2, 3, 4],
        "position_ids": [0, 1, 2, 0], "seq_lengths": [3, 1],
    }  # fmt: skip
    dtypes = {"input_ids": "int32", "labels": "int32", "position_ids": "uint16"}
    assert {name: rows.features[name].feature.dtype for name in dtypes} == dtypes
    assert pack_dataset(table(given), 70_000, columns=["input_ids"]).features["position_ids"].feature.dtype == "int32"
    given = [document | {"assistant_masks": [1] * len(document["input_ids"])} for document in documents([2, 3])]
    rows = pack_dataset(table(given), 5)
    assert rows.features["assistant_masks"].feature.dtype == "int8"
    assert sorted([one for _, one in documents_of(rows)], key=lambda one: one["input_ids"]) == given


@pytest.mark.parametrize("jobs", [1, 2])
def test_faults_in_later_batches_are_named(small_batches, jobs):
    environment, given = os.environ, documents()
    given[7]["labels"] = [1]
    with pytest.raises(ValueError, match="document 7 has 4 input_ids but 1 labels"):
        pack_dataset(table(given), 10, jobs=jobs)
    assert os.environ is environment


def test_what_was_finished_is_found(tmp_path, monkeypatch):
    """Rows that are complete, also after an interruption; other options make other rows."""
    source = table(documents(), tmp_path / "in")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_rows", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            pack_dataset(source, 10)
    rows = pack_dataset(source, 10)
    assert [len(pack_dataset(source, 10, max_items=limit)) for limit in (None, 1)] == [len(rows), len(LENGTHS)]
    assert len(pack_dataset(source, 12)) < len(rows)
    monkeypatch.setattr(module, "_rows", lambda *_, **__: 1 // 0)
    assert list(pack_dataset(source, 10)) == list(rows)
    assert {os.path.dirname(file["filename"]) for file in rows.cache_files} == {str(tmp_path / "in")}
    rows.select([2, 0]).save_to_disk(tmp_path / "rows")
    loaded = datasets.load_from_disk(str(tmp_path / "rows"))
    assert (list(loaded), loaded.info.description) == ([rows[2], rows[0]], rows.info.description)
