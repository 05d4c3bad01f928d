"""Documents that can't be packed are refused with their place and their column."""

import json

import pytest

from tests.packing.offline.tables import documents, write_files
from tritonpack import pack_to_disk

pytest.importorskip("datasets")

import datasets
import pyarrow as pa

from tritonpack.packing.offline import sources

GOOD = {"input_ids": [1, 2], "labels": [1, 2]}


def lines(*bad):
    return "".join(json.dumps(document) + "\n" for document in (GOOD, GOOD, *bad))


@pytest.fixture
def given(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [], "labels": []}, "input_ids is empty; every document needs a token. Filter it out first"),
        ({"input_ids": [1, 2, 3], "labels": [1]}, "labels has 1 value for 3 tokens; give every token one"),
        (
            {"input_ids": [1, -7], "labels": [1, 2]},
            "input_ids holds a number below 0; only labels .* got -7 at position 1",
        ),
        (
            {"input_ids": [1, 2**31], "labels": [1, 2]},
            "input_ids holds a number above 2147483647; got 2147483648 at pos",
        ),
        ({"input_ids": [1, 2], "labels": [1, 2**40]}, "labels holds a number above 2147483647"),
        ({"input_ids": [1, 2], "labels": [1, -(2**40)]}, "labels holds a number below -2147483647"),
        ({"input_ids": [1, 2.5], "labels": [1, 2]}, "input_ids holds float and int; write one integer per token"),
        ({"input_ids": [1, None], "labels": [1, 2]}, r"input_ids has a missing value \(null\); got None at position 1"),
        ({"input_ids": None, "labels": [1, 2]}, r"input_ids is missing \(null\); remove the document"),
        ({"input_ids": [1, 2]}, r"labels is missing \(null\); remove the document"),
        ({"input_ids": [1, "a"], "labels": [1, 2]}, "input_ids holds int and str; write one integer per token"),
        ({"input_ids": [[1], [2]], "labels": [1, 2]}, "input_ids holds list; write one integer per token"),
        ({"input_ids": [1.0, 2.0], "labels": [1, 2]}, "input_ids holds float; write one integer per token"),
        ({"input_ids": [1, 10**20], "labels": [1, 2]}, "input_ids holds 1000+, which has more than 64 bits"),
        ({"input_ids": "abc", "labels": [1, 2]}, "input_ids holds str; write one integer per token"),
        (GOOD | {"text": "a"}, "has the columns input_ids, labels, text, but the first line has input_ids, labels;"),
        ([1, 2], r"isn't an object with 'input_ids', but '\[1, 2\]'"),
    ],
)
def test_json_lines(given, tmp_path, bad, message):
    (given / "a.jsonl").write_text(lines())
    (given / "b.jsonl").write_text("\n" + lines(bad, GOOD))
    with pytest.raises(ValueError, match=f"line 4 of .*b.jsonl:? {message}"):
        pack_to_disk(given, 8, tmp_path / "out")


def test_json_line_that_is_no_json(given, tmp_path):
    (given / "a.jsonl").write_text(lines() + '{"input_ids": [1\n')
    with pytest.raises(ValueError, match=r"line 3 of .*a.jsonl isn't JSON: .*\. Write one object on each line\."):
        pack_to_disk(given, 8, tmp_path / "out")


def test_json_place_in_a_later_part(given, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 64)
    (given / "a.jsonl").write_text("\n\n" + lines(*[GOOD] * 30) + "  \n" + json.dumps(GOOD | {"labels": [1]}))
    with pytest.raises(ValueError, match=r"line 36 of .*a\.jsonl: labels has 1 value for 2 tokens"):
        pack_to_disk(given, 8, tmp_path / "out", jobs=3)


def test_json_line_of_another_kind_among_many(given, tmp_path):
    good = {"input_ids": [1, 2], "label": 0, "box": [0.5, 1]}
    path = given / "a.jsonl"
    for bad, message in [
        ({"input_ids": [1.0]}, "input_ids holds float; write one integer"),
        ({"input_ids": [10**20]}, "input_ids holds 1000+, which has more than 64 bits"),
        ({"input_ids": "abc"}, "input_ids holds str; write one integer"),
        ({"label": [1]}, "label holds a row of a number, but a number on an earlier line; convert one"),
        ({"box": [1, "a"]}, "box holds a row of a number and text"),
        ({"text": "a"}, "the columns input_ids, label, box, text, but the first line has input_ids, label, box"),
    ]:
        path.write_text("".join(json.dumps(one) + "\n" for one in [good] * 5000 + [good | bad] + [good] * 1000))
        with pytest.raises(ValueError, match=rf"line 5001 of .*a.jsonl.* {message}"):
            pack_to_disk(path, 8, tmp_path / "out", columns=["input_ids", "box"])
    path.write_text("".join(json.dumps(one) + "\n" for one in [good, good | {"box": []}, good | {"box": None}]))
    with pytest.raises(ValueError, match=r"line 3 of .*: box is missing"):
        pack_to_disk(path, 8, tmp_path / "out", columns=["input_ids", "box"])
    assert pack_to_disk(path, 8, tmp_path / "out", columns=["input_ids"]).documents == 3


def test_json_columns_that_differ(given, tmp_path):
    (given / "a.jsonl").write_text(lines())
    (given / "b.jsonl").write_text(lines(GOOD | {"token_type_ids": [0, 0]}))
    with pytest.raises(
        ValueError, match=r"line 3 of .*b.jsonl has the columns input_ids, labels, token_type_ids, but the first line"
    ):
        pack_to_disk(given, 8, tmp_path / "out")


@pytest.mark.parametrize("kind", ["arrow", "feather", "parquet"])
def test_place_in_files(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 30)
    given = documents()
    given[7]["labels"] = [1]  # in the second of three files, which begins with document 4
    path = write_files(tmp_path / "in", kind, given)
    with pytest.raises(ValueError, match=rf"document 3 of .*1\.{kind}: labels has 1 value for 4 tokens"):
        pack_to_disk(path, 10, tmp_path / "out")


def test_place_in_datasets_and_streams(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 30)
    given = documents()
    given[7]["labels"] = [1]
    table = datasets.Dataset.from_list(given)
    with pytest.raises(ValueError, match="document 7: labels has 1 value for 4 tokens"):
        pack_to_disk(table, 10, tmp_path / "table")
    with pytest.raises(ValueError, match="document 7 of the stream: labels has 1 value for 4 tokens"):
        pack_to_disk(table.to_iterable_dataset(), 10, tmp_path / "stream")


IDS = {"input_ids": [[1, 2], [3]]}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"text": ["a"]}, {}, "the dataset has no column 'input_ids'; it has 'text'. Tokenize the text first"),
        (IDS | {"text": ["a", "b"], "labels": [[1, 2], [3]]}, {}, "such as columns=input_ids,labels, or remove"),
        (IDS | {"seq_lengths": [[1, 1], [1]]}, {}, "'seq_lengths', .* Rows of several documents are packed already"),
        (IDS, {"columns": ["input_ids", "labels"]}, "has no column 'labels', which columns names; it has 'input_ids'"),
        (IDS | {"labels": [[1, 2], [3]]}, {"columns": ["labels"]}, "names 'labels' without 'input_ids'; add it"),
        (IDS, {"columns": ["input_ids", "input_ids"]}, "one of them twice"),
        (IDS | {"position_ids": [[0, 1], [0]]}, {"columns": ["input_ids", "position_ids"]}, "'position_ids', which"),
        (IDS | {"labels": IDS["input_ids"], "label": IDS["input_ids"]}, {}, "'labels', 'label', which all hold labels"),
        (IDS | {"label": [0, 1]}, {}, "document 0: label holds int64, not a row of one value per token"),
        (IDS | {"attention_mask": [[1, 1], [0]]}, {}, "document 1: attention_mask isn't 1 .* the padding.* got 0"),
        (IDS | {"completion_mask": [[1, 2], [0]]}, {}, "completion_mask holds other values than 0 and 1; got 2 at pos"),
        (IDS | {"special_tokens_mask": [[1, 200], [0]]}, {}, "special_tokens_mask holds a number above 127"),
        ({"input_ids": [["a"], ["b"]]}, {}, "document 0: input_ids holds string, not integers"),
        ({"input_ids": [[True], [False]]}, {}, "document 0: input_ids holds bool, not integers"),
        ({"input_ids": ["ab", "c"]}, {}, "document 0: input_ids holds string, not a row of one value per token"),
    ],
)  # fmt: skip
def test_columns(tmp_path, columns, options, message):
    with pytest.raises(ValueError, match=message):
        pack_to_disk(datasets.Dataset(pa.table(columns)), 8, tmp_path / "out", **options)


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int8(), 2)], ids=str)
def test_types_of_lists(tmp_path, kind):
    table = pa.table({"input_ids": pa.array([[1, 2], [3, 4], [5, 6]], kind)})
    source = datasets.Dataset(table).select([2, 0])
    pack_to_disk(source, 4, tmp_path / "out", seed=None)
    assert datasets.load_from_disk(str(tmp_path / "out"))[0]["input_ids"] == [5, 6, 1, 2]


def test_length_column_is_checked(tmp_path):
    source = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "length": [2, 3]})
    with pytest.raises(ValueError, match=r"document 1: input_ids has 1 token, but 3 by the column 'length'; measure"):
        pack_to_disk(source, 4, tmp_path / "out")
    assert pack_to_disk(source.select([0]), 4, tmp_path / "out").left_out == ("length",)


def test_masks_of_bools(tmp_path):
    source = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "completion_mask": [[False, True]]})
    pack_to_disk(source, 4, tmp_path / "out")
    assert datasets.load_from_disk(str(tmp_path / "out"))[0]["labels"] == [-100, 2]


class TestPaths:
    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("./nowhere", "there is no file or folder ./nowhere"),
            ("nowhere.parquet", "there is no file or folder nowhere.parquet"),
            ("{folder}/empty", "has no file that can be read; .arrow, .feather, .parquet, .jsonl"),
            ("{folder}/a.txt", "ends in '.txt'; documents are read from .arrow, .*Convert it with datasets"),
            ("{folder}/*.none", "has no file that can be read"),
            ("{folder}/mixed", "has files of several formats, .jsonl, .parquet; name those of one"),
            ("{folder}/empty.jsonl", "holds no document"),
            ("{folder}/broken.parquet", "broken.parquet can't be read as a Parquet file"),
            ("{folder}/broken.arrow", "broken.arrow can't be read as an Arrow file"),
            ("{folder}/empty.arrow", "empty.arrow can't be read as an Arrow file: it is empty"),
        ],
    )
    def test_refused(self, tmp_path, path, message):
        (tmp_path / "empty").mkdir()
        (tmp_path / "mixed").mkdir()
        names = (
            "a.txt",
            "empty.jsonl",
            "empty.arrow",
            "broken.parquet",
            "broken.arrow",
            "mixed/a.jsonl",
            "mixed/a.parquet",
        )
        for name in names:
            (tmp_path / name).write_text("broken" * 100 if "broken" in name else "")
        with pytest.raises(ValueError, match=message):
            pack_to_disk(path.format(folder=tmp_path), 8, tmp_path / "out")
        assert not list((tmp_path / "out").glob("*.json"))

    def test_mistyped_name_in_a_folder_is_not_asked_of_the_hub(self, tmp_path, monkeypatch):
        (tmp_path / "data").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(datasets, "load_dataset", None)
        with pytest.raises(ValueError, match=r"there is no file or folder data/nothere\."):
            pack_to_disk("data/nothere", 8, tmp_path / "out")

    def test_splits(self, tmp_path):
        table = datasets.Dataset.from_list(documents())
        datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "in")
        with pytest.raises(ValueError, match=r"has the splits train, test; name one of them as split\."):
            pack_to_disk(tmp_path / "in", 10, tmp_path / "out")
        with pytest.raises(ValueError, match="name one of them as split; got 'dev'"):
            pack_to_disk(tmp_path / "in", 10, tmp_path / "out", split="dev")
        with pytest.raises(ValueError, match="holds one dataset without splits; leave out split='train'"):
            pack_to_disk(tmp_path / "in" / "train", 10, tmp_path / "out", split="train")
        (tmp_path / "a.jsonl").write_text(lines())
        with pytest.raises(ValueError, match="holds files without splits; leave out split='train'"):
            pack_to_disk(tmp_path / "a.jsonl", 10, tmp_path / "out", split="train")

    def test_name_on_the_hub(self, tmp_path, monkeypatch):
        asked = []

        def load_dataset(name, **options):
            asked.append((name, options))
            if name == "someone/nothing":
                raise ConnectionError("no network\nand more")
            return datasets.Dataset.from_list(documents()).to_iterable_dataset()

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert pack_to_disk("someone/documents", 10, tmp_path / "out", split="dev").documents == 14
        with pytest.raises(
            ValueError, match=r"no file or folder someone/nothing, and .*\(ConnectionError: no network\)"
        ):
            pack_to_disk("someone/nothing", 10, tmp_path / "other")
        assert asked == [
            ("someone/documents", {"split": "dev", "streaming": True}),
            ("someone/nothing", {"split": "train", "streaming": True}),
        ]
