import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from tritonpack import BinDataset, PackedDataset, PackingCollator, pack, pack_dataset
from tritonpack.packing.documents import measure_lengths

LENGTHS = (3, 9, 5, 2, 8)


def documents(lengths=LENGTHS):
    rows = [[100 * number + position for position in range(1, length + 1)] for number, length in enumerate(lengths)]
    return [{"input_ids": row, "labels": [-token for token in row]} for row in rows]


def tokens_of(packed):
    return [[document["input_ids"] for document in packed[index]] for index in range(len(packed))]


class TestPackedDataset:
    def test_items_are_bins(self):
        rows = [document["input_ids"] for document in documents()]
        packed = pack_dataset(documents(), 10)
        assert len(packed) == 3
        assert tokens_of(packed) == [[rows[1]], [rows[4]], [rows[2], rows[0], rows[3]]]
        assert packed[-1] == packed[2]
        with pytest.raises(IndexError, match="bin 3 of a packing with 3 bins"):
            packed[3]

    def test_split_and_truncate(self):
        split = pack_dataset(documents(), 6, overlong="split", algorithm="next_fit")
        assert split[2] == [
            {"input_ids": [107, 108, 109], "labels": [-107, -108, -109]},
        ]
        assert sum(len(row) for packed in tokens_of(split) for row in packed) == sum(LENGTHS)
        truncated = pack_dataset(documents(), 6, overlong="truncate", algorithm="next_fit")
        assert tokens_of(truncated)[1] == [[101, 102, 103, 104, 105, 106]]

    def test_lengths_and_length_function(self):
        measured = pack_dataset([(4,), (7,)], 8, length=lambda document: document[0])
        assert [measured[0], measured[1]] == [[(7,)], [(4,)]]
        given = pack_dataset(documents(), 10, lengths=LENGTHS, max_items=1)
        assert len(given) == 5

    def test_refuses(self):
        packing = pack(LENGTHS, 10)
        with pytest.raises(ValueError, match=r"the packing has a document 4, but the dataset only 3 documents"):
            PackedDataset(documents()[:3], packing)
        with pytest.raises(ValueError, match="4 lengths for a dataset of 5 documents"):
            pack_dataset(documents(), 10, lengths=LENGTHS[:4])
        with pytest.raises(ValueError, match=r"got generator. Pack iterables with pack_stream"):
            pack_dataset((document for document in documents()), 10)
        with pytest.raises(ValueError, match="got dict"):
            pack_dataset({"input_ids": [[1]]}, 10)

    @pytest.mark.parametrize(("packed_as", "is_now"), [(8, 7), (8, 9), (8, 30), (30, 8), (30, 15)])
    def test_refuses_document_of_another_length(self, packed_as, is_now):
        packing = pack((*LENGTHS[:4], packed_as), 10, overlong="split")
        packed = PackedDataset(documents((*LENGTHS[:4], is_now)), packing)
        with pytest.raises(ValueError, match=rf"document 4 has {is_now} tokens, but its tokens .* were packed"):
            tokens_of(packed)


class TestLoading:
    def test_one_row_per_bin(self):
        packed = pack_dataset(documents(), 10)
        rows = [batch["input_ids"].tolist() for batch in DataLoader(packed, batch_size=1, collate_fn=PackingCollator())]
        assert rows == [[list(chain.from_iterable(bins))] for bins in tokens_of(packed)]
        whole = [batch["input_ids"].tolist() for batch in DataLoader(packed, None, collate_fn=PackingCollator())]
        assert whole == rows

    def test_batch_of_bins_is_one_row(self):
        packed = pack_dataset(documents(), 10)
        first, second = DataLoader(packed, batch_size=2, collate_fn=PackingCollator())
        assert first["input_ids"].shape == (1, 17)
        assert first["cu_seq_lens_q"].tolist() == [0, 9, 17]
        assert second["cu_seq_lens_q"].tolist() == [0, 5, 8, 10]

    def test_refuses_empty_bins(self):
        with pytest.raises(ValueError, match="needs at least one document"):
            PackingCollator()([[], []])

    @pytest.mark.parametrize(
        "method", [method for method in ("fork", "spawn") if method in multiprocessing.get_all_start_methods()]
    )
    @pytest.mark.sampled("fork")
    def test_in_workers(self, method):
        packed = pack_dataset(documents(), 6, overlong="split")
        loader = DataLoader(
            packed, batch_size=2, collate_fn=PackingCollator(), num_workers=1, multiprocessing_context=method
        )
        expected = DataLoader(packed, batch_size=2, collate_fn=PackingCollator())
        assert [batch["input_ids"].tolist() for batch in loader] == [batch["input_ids"].tolist() for batch in expected]

    def test_pickles(self):
        packed = pack_dataset(documents(), 6, overlong="split")
        assert tokens_of(pickle.loads(pickle.dumps(packed))) == tokens_of(packed)


class TestBinDataset:
    def test_index_by_number_and_list(self):
        rows = documents()
        bins = BinDataset(rows)
        assert bins[[4, 0]] == [rows[4], rows[0]]
        assert bins[np.array([1])] == [rows[1]]
        assert bins[2] == rows[2]
        assert len(bins) == 5

    def test_getitems_is_called_once(self):
        class Counting(Subset):
            asked = 0

            def __getitems__(self, indices):
                self.asked += 1
                return super().__getitems__(indices)

        dataset = Counting(documents(), [4, 3, 2, 1, 0])
        assert BinDataset(dataset)[[0, 2]] == [documents()[4], documents()[2]]
        assert dataset.asked == 1


class TestLengths:
    def test_lengths_of_rows_and_mappings(self):
        assert measure_lengths(documents()).tolist() == list(LENGTHS)
        assert measure_lengths([np.ones(3), torch.ones(2), [1]]).tolist() == [3, 2, 1]
        assert measure_lengths(TensorDataset(torch.ones(2, 7)), lambda row: len(row[0])).tolist() == [7, 7]
        with pytest.raises(ValueError, match="document 1 has 0"):
            measure_lengths([[1], []])
        with pytest.raises(ValueError, match="document 0 must be a row of tokens"):
            measure_lengths(TensorDataset(torch.ones(2, 7)))

    @pytest.mark.parametrize("kind", [None, "numpy", "torch", "arrow"])
    def test_lengths_of_table_without_reading_tokens(self, kind):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.concatenate_datasets([datasets.Dataset.from_list(documents())] * 2).with_format(kind)
        assert measure_lengths(dataset).tolist() == list(LENGTHS * 2)
        chosen = dataset.select([8, 1, 1, 6])
        chosen.__class__ = type("Unread", (datasets.Dataset,), {"__getitem__": refuse})
        assert measure_lengths(chosen).tolist() == [2, 9, 9, 9]

    def test_refuses_table_with_missing_document(self):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_dict({"input_ids": [[1], None, [2]]})
        with pytest.raises(ValueError, match="document 1 must be a row of tokens"):
            measure_lengths(dataset)


class TestTable:
    """A datasets.Dataset gives a datasets.Dataset."""

    @pytest.mark.parametrize("kind", [None, "numpy", "torch"])
    @pytest.mark.parametrize("on_disk", [False, True])
    def test_rows_are_bins(self, tmp_path, kind, on_disk):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list(documents())
        if on_disk:
            dataset.save_to_disk(tmp_path / "in")
            dataset = datasets.load_from_disk(str(tmp_path / "in"))
        for options in ({"capacity": 10}, {"capacity": 6, "overlong": "split", "algorithm": "next_fit"}):
            rows = pack_dataset(dataset.with_format(kind), **options)
            lazy = pack_dataset(documents(), **options)
            assert isinstance(rows, datasets.Dataset)
            assert rows.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
            assert rows.format["type"] == kind
            assert bool(rows.cache_files) == on_disk
            for row, bins in zip(rows, lazy, strict=True):
                for name in ("input_ids", "labels"):
                    assert list(map(int, row[name])) == list(chain.from_iterable(one[name] for one in bins))
            batches = [
                next(iter(DataLoader(packed, batch_size=len(packed), collate_fn=PackingCollator())))
                for packed in (rows, lazy)
            ]
            assert batches[0]["cu_seq_lens_q"].tolist() == batches[1]["cu_seq_lens_q"].tolist()

    def test_rows_can_be_selected_and_saved(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        rows = pack_dataset(datasets.Dataset.from_list(documents()), 6, overlong="truncate")
        assert rows.info.description == (
            "Packing(5 documents and pieces of documents in 4 bins of 6 tokens, efficiency 91.67%). "
            "2 documents longer than the capacity truncated: 5 tokens cut off."
        )
        rows.select([2, 0]).save_to_disk(tmp_path / "rows")
        loaded = datasets.load_from_disk(str(tmp_path / "rows"))
        assert list(loaded) == [rows[2], rows[0]]
        assert loaded.info.description == rows.info.description

    def test_second_call_finds_the_rows(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(documents()).save_to_disk(tmp_path / "in")
        dataset = datasets.load_from_disk(str(tmp_path / "in"))
        rows = pack_dataset(dataset, 10)
        others = pack_dataset(dataset.select([0, 3]), 10), pack_dataset(dataset, 12)
        monkeypatch.setattr("tritonpack.packing.rows._checked", refuse)
        assert list(pack_dataset(dataset, 10)) == list(rows)
        assert [len(other) for other in others] == [1, 3]

    def test_processes_at_once(self, tmp_path):
        """As ranks do."""
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(documents() * 200).save_to_disk(tmp_path / "in")
        with ThreadPoolExecutor(4) as pool:  # flock also keeps threads apart, because each opens the file
            found = list(pool.map(lambda _: pack_dataset(datasets.load_from_disk(str(tmp_path / "in")), 10), range(4)))
        assert [len(rows) for rows in found] == [len(found[0])] * 4
        assert list(found[3]) == list(found[0])

    def test_lazy_with_lengths_or_a_transform(self):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list(documents())
        for packed in (
            pack_dataset(dataset, 10, lengths=LENGTHS),
            pack_dataset(dataset, 10, length=lambda document: len(document["labels"])),
            pack_dataset(dataset.with_transform(lambda batch: batch), 10),
        ):
            assert isinstance(packed, PackedDataset)
            assert tokens_of(packed) == tokens_of(pack_dataset(documents(), 10))

    def test_refuses_other_columns(self):
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_dict({"input_ids": [[1]], "text": ["a"]})
        with pytest.raises(ValueError, match=r"has the columns 'text', .*remove the others .*remove_columns"):
            pack_dataset(dataset, 4)


def refuse(*arguments):
    raise AssertionError(f"called with {arguments}")
