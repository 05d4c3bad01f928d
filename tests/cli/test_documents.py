"""The documents of `tritonpack pack`: every form that is read gives the same rows; what can't be read is named."""

import json
import random

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("datasets")

import datasets
import pyarrow as pa
from pyarrow import parquet

from tests.cli.command import run
from tests.packing.tables import LENGTHS, documents, documents_of, write_files
from tritonpack import pack

KINDS = ("arrow", "parquet", "jsonl")


@pytest.fixture
def error(capsys, tmp_path):
    """Pack; the message."""

    def refused(path, *options):
        assert run("pack", path, "--capacity", 10, "--out", tmp_path / "out", *options) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return refused


def sources_of(folder, given):
    """The same documents in every form that is read."""
    table = datasets.Dataset.from_list(given)
    table.save_to_disk(folder / "saved", num_shards=3)
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(folder / "splits")
    yield [folder / "saved"]
    yield [folder / "splits", "--split", "train"]
    for kind in KINDS:
        yield [write_files(folder / kind, kind, given)]
    yield [folder / "jsonl" / "*.jsonl", "--jobs", 2]


@pytest.mark.slow
def test_every_source_gives_the_same_rows(tmp_path):
    given = documents()
    expected = [[given[number] for number in items] for items in pack(LENGTHS, 10)]
    for number, source in enumerate(sources_of(tmp_path, given)):
        out = tmp_path / f"out-{number}"
        before = sorted(tmp_path.rglob("*"))
        assert run("pack", *source, "--capacity", 10, "--out", out, "--no-shuffle") == 0
        assert not {*tmp_path.rglob("*")}.difference([*before, out, *out.iterdir()]), "no file beside the documents"
        rows = datasets.load_from_disk(str(out))
        cut = documents_of(rows)
        assert [[document for at, document in cut if at == row] for row in range(len(rows))] == expected, source


@pytest.mark.parametrize("kind", KINDS)
def test_place_in_files(tmp_path, error, kind):
    given = documents()
    given[7]["labels"] = [1]  # in the second of three files, which begins with document 4
    path = write_files(tmp_path / "in", kind, given)
    assert f"document 3 of {path / f'1.{kind}'} has 4 input_ids but 1 labels; give" in error(path)


def test_json_lines_of_another_kind(tmp_path, error):
    good, path = {"input_ids": [1, 2]}, tmp_path / "a.jsonl"
    for bad, message in [
        ({"input_ids": [1.5]}, "document 0 of {path} needs a row of integers as input_ids"),
        ({"input_ids": None}, "document 1 of {path} needs a row of integers as input_ids; got None"),
        ({"input_ids": [10**20]}, "document 0 of {path} needs a row of integers as input_ids"),
        ({"input_ids": "abc"}, "{path}"),
        ({"input_ids": [1, "a"]}, "{path}"),
        ({"input_ids": [1], "text": "a"}, "the dataset has the columns 'text', which may not hold one value per token"),
        ([1, 2], "{path} can't be read: JSON parse error"),
    ]:
        path.write_text("".join(json.dumps(one) + "\n" for one in (good, bad)))
        assert message.format(path=path) in error(path)


@pytest.mark.parametrize("how", ["cut", "flips", "noise", "utf-16"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_is_read_or_named(tmp_path, capsys, kind, how):
    rng = random.Random(f"{kind} {how}")
    write_files(tmp_path / "in", kind, documents([rng.randrange(1, 40) for _ in range(40)]), files=1)
    whole = (tmp_path / "in" / f"0.{kind}").read_bytes()
    found = []
    for number in range(6):
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(damage(whole, how, rng))
        found.append(run("pack", path, "--capacity", 50, "--out", tmp_path / "out" / str(number)))
        message = capsys.readouterr().err
        assert found[-1] == 0 or (found[-1] == 2 and str(path) in message and message.count("\n") == 1), message
    assert 2 in found  # damage may change only values


def damage(data, how, rng):
    data = bytearray(data)
    if how == "cut":
        return data[: rng.randrange(1, len(data))]
    if how == "utf-16":
        return data.decode("latin1").encode("utf-16")
    for _ in range(20 if how == "flips" else len(data)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def test_damaged_folder_of_save_to_disk(tmp_path, error):
    path = tmp_path / "in"
    datasets.Dataset.from_list(documents()).save_to_disk(path)
    good = (path / "state.json").read_bytes()
    for content in (b"", b"[]", b'"a"', b"{}", b"\xff\xfe", b'{"_data_files": [{}]}', b"[" * 9999):
        (path / "state.json").write_bytes(content)
        assert f"{path / 'state.json'} can't be read" in error(path)
    (path / "state.json").write_bytes(good)
    (data,) = path.glob("*.arrow")
    data.unlink()
    assert f"{data} can't be read: " in error(path)


@pytest.mark.parametrize("kind", KINDS)
def test_links_and_folders_that_are_named_like_files(tmp_path, error, kind):
    given = tmp_path / f"a.{kind}"
    given.symlink_to(tmp_path / "nowhere")
    assert f"{given} can't be read: " in error(tmp_path / "*.*")
    given.unlink()
    given.mkdir()
    assert f"{given} can't be read: " in error(tmp_path / "a.*")
    given.rmdir()
    write_files(given, kind, documents())
    assert run("pack", given, "--capacity", 10, "--out", tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nowhere", "there is no file or folder ./nowhere"),
        ("nowhere.parquet", "there is no file or folder nowhere.parquet"),
        ("{folder}/empty", "has no file that can be read; name files of one format: .arrow, .parquet, .jsonl"),
        ("{folder}/a.txt", "has files that end in '.txt'; name files of one format: .arrow"),
        ("{folder}/a.feather", "has files that end in '.feather'; name files of one format: .arrow"),
        ("{folder}/*.none", "has no file that can be read"),
        ("{folder}/mixed", "has files that end in '.jsonl', '.parquet'; name files of one format"),
        ("{folder}/empty.jsonl", "holds no document"),
        ("{folder}/broken.parquet", "broken.parquet can't be read: "),
        ("{folder}/broken.arrow", "broken.arrow can't be read: "),
        ("{folder}/empty.arrow", "empty.arrow can't be read: "),
    ],
)
def test_paths(tmp_path, error, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    names = ("a.txt", "a.feather", "empty.jsonl", "empty.arrow", "broken.parquet", "broken.arrow")
    for name in (*names, "mixed/a.jsonl", "mixed/a.parquet"):
        (tmp_path / name).write_text("broken" * 100 if "broken" in name else "")
    assert message in error(path.format(folder=tmp_path))


def test_empty_files_beside_others_are_left_out(tmp_path):
    write_files(tmp_path / "in", "jsonl", documents())
    (tmp_path / "in" / "9.jsonl").write_text("\n \n")
    assert run("pack", tmp_path / "in", "--capacity", 10, "--out", tmp_path / "out") == 0


def test_splits(tmp_path, error):
    table = datasets.Dataset.from_list(documents())
    datasets.DatasetDict(train=table, test=table).save_to_disk(tmp_path / "in")
    assert "has the splits test, train; name one of them as split; got None" in error(tmp_path / "in")
    assert "name one of them as split; got 'dev'" in error(tmp_path / "in", "--split", "dev")
    for path in (tmp_path / "in" / "train", write_files(tmp_path / "files", "jsonl", documents())):
        assert "has no splits; leave out --split train" in error(path, "--split", "train")


def test_folder_within_the_documents(tmp_path, capsys):
    path = write_files(tmp_path / "in", "jsonl", documents())
    assert run("pack", path, "--capacity", 10, "--out", path / "rows") == 2
    assert f"--out {path / 'rows'} lies in {path}, whose files are the documents" in capsys.readouterr().err


def test_mistyped_name_in_a_folder_is_not_asked_of_the_hub(tmp_path, error, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert "there is no file or folder data/nothere." in error("data/nothere")


def test_name_on_the_hub(tmp_path, error, monkeypatch):
    asked = []

    def load_dataset(name, **options):
        asked.append((name, options))
        if name == "someone/nothing":
            raise ConnectionError("no network\nand more")
        return datasets.Dataset(pa.table({"input_ids": [[1], []]}))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "document 1 of someone/documents is empty" in error("someone/documents", "--split", "dev")
    assert (
        "no file or folder someone/nothing, and datasets.load_dataset can't load it (ConnectionError: no network)"
        in (error("someone/nothing"))
    )
    assert asked == [("someone/documents", {"split": "dev"}), ("someone/nothing", {"split": "train"})]


def test_full_disk_while_files_are_copied_is_an_error_of_output(tmp_path, capsys, monkeypatch):
    def load_dataset(*_, **__):
        raise datasets.exceptions.DatasetGenerationError("failed") from OSError(28, "No space left on device")

    path = write_files(tmp_path / "in", "parquet", documents())
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert run("pack", path, "--capacity", 10, "--out", tmp_path / "out") == 1
    assert "output can't be written: [Errno 28] No space left on device; free space in" in capsys.readouterr().err


def test_changed_documents_are_packed_again(tmp_path):
    path = tmp_path / "a.parquet"
    for tokens in ([1, 2], [3, 4]):
        parquet.write_table(pa.table({"input_ids": [tokens]}), path)
        out = tmp_path / str(tokens[0])
        assert run("pack", path, "--capacity", 10, "--out", out) == 0
        assert datasets.load_from_disk(str(out))[0]["input_ids"] == tokens
