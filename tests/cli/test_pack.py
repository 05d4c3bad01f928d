"""`tritonpack pack`: every form of documents gives the same rows; what can't be read is named; resuming; numbers."""

import json
import re
from unittest.mock import Mock

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("datasets")

import datasets
import pyarrow as pa
from pyarrow import parquet

from tests.cli.command import refused, run
from tests.packing.tables import LENGTHS, documents, documents_of, write_files
from tritonpack import pack

KINDS = ("arrow", "parquet", "jsonl")


@pytest.fixture
def error(capsys, tmp_path):
    """Pack; the message. No folder is left."""

    def message(path, *options):
        out = tmp_path / "deep" / "out"
        found = refused(capsys, "pack", path, "--capacity", 10, "--out", out, *options)
        assert not out.exists()
        return found

    return message


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "documents.jsonl"
    given = [{"input_ids": list(range(n)), "completion_mask": [1] * n} for n in (3, 9, 5, 2, 8, 12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    return path


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


def test_summary_and_numbers(tmp_path, lines, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    out, numbers = tmp_path / "rows", tmp_path / "numbers.json"
    command = ("pack", lines, "--capacity", 10)
    assert run(*command, "--out", out, "--json", numbers, "--overlong", "split") == 0
    output = capsys.readouterr().out
    assert [re.sub(" {2,}", "|", line.rstrip()) for line in output.splitlines()] == [
        "documents|6 of 39 tokens",
        "longer|1 document longer than the capacity split into 2 pieces: no token lost",
        "rows|4 of 10 tokens, 97.50% full; no packing needs fewer than 4",
        "columns|input_ids, labels, position_ids, seq_lengths",
        "labels are made from|completion_mask",
        f"to load the rows|datasets.load_from_disk('{out}')",
    ]
    found = json.loads(numbers.read_text())
    assert found["rows"] == len(datasets.load_from_disk(str(out))) == 4
    assert found["report"] == {"policy": "split", "documents": 1, "tokens_lost": 0, "pieces": 2, "noun": "document"}
    assert (found["efficiency"], found["options"]["overlong"]) == (0.975, "split")
    assert run(*command, "--out", tmp_path / "more", "--overlong", "drop", "--json", "-", "--no-shuffle") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["report"]["tokens_lost"] == 12
    assert "1 document longer than the capacity dropped: 12 tokens lost" in captured.err

    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [7], "text": "a"}')
    assert run("pack", path, "--capacity", 1, "--out", tmp_path / "one", "--columns", "input_ids") == 0
    output = capsys.readouterr().out
    assert re.search(r"rows +1 of 1 token, 100% full; no packing needs fewer than 1", output)
    assert re.search("left out +text", output)


def test_interrupted_command_goes_on_to_the_same_rows(tmp_path, lines, monkeypatch):
    command = ("pack", lines, "--capacity", 12, "--out")
    out = tmp_path / "out"
    assert run(*command, tmp_path / "whole") == 0

    killed = Mock(side_effect=KeyboardInterrupt)
    for method in ("save_to_disk", "shuffle"):
        with monkeypatch.context() as patched:
            patched.setattr(datasets.Dataset, method, killed)
            assert run(*command, out) == 130
    (out / "data-00000-of-00002.arrow").touch()  # of a process that was killed while it wrote
    monkeypatch.setattr("tritonpack.packing.rows._checked", killed)
    assert run(*command, out) == 0
    assert {path.name for path in out.iterdir()} == {"data-00000-of-00001.arrow", "dataset_info.json", "state.json"}
    assert [*datasets.load_from_disk(str(out))] == [*datasets.load_from_disk(str(tmp_path / "whole"))]


def test_changed_documents_are_packed_again(tmp_path):
    path = tmp_path / "a.parquet"
    for tokens in ([1, 2], [3, 4]):
        parquet.write_table(pa.table({"input_ids": [tokens]}), path)
        out = tmp_path / str(tokens[0])
        assert run("pack", path, "--capacity", 10, "--out", out) == 0
        assert datasets.load_from_disk(str(out))[0]["input_ids"] == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_place_in_files(tmp_path, error, kind):
    given = documents()
    given[4]["labels"] = [1]  # the first of the second of three files
    path = write_files(tmp_path / "in", kind, given)
    assert f"document 0 of {path / f'1.{kind}'} has 8 input_ids but 1 labels; give" in error(path)


def test_wrong_paths_and_files(tmp_path, error, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = datasets.Dataset.from_list(documents())
    datasets.DatasetDict(train=table, test=table).save_to_disk("splits")
    for name in ("empty", "mixed", "data"):
        (tmp_path / name).mkdir()
    for name in ("a.txt", "empty.jsonl", "empty.arrow", "broken.parquet", "mixed/a.jsonl", "mixed/a.parquet"):
        (tmp_path / name).write_text("broken" * 100 if "broken" in name else "")
    (tmp_path / "mixed" / "b.jsonl").write_text('{"input_ids": [1]}')
    (tmp_path / "blank.json").write_text("\n\n")
    (tmp_path / "numbers.json").write_text("[1, 2]")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    files = write_files(tmp_path / "files", "jsonl", documents())
    for path, *options, message in [
        *[(path, f"there is no file or folder {path}") for path in ("./nowhere", "nowhere.parquet", "data/nothere")],
        ("empty", "has no file that can be read; name files of one format: .arrow, .parquet, .jsonl"),
        ("a.txt", "has files that end in '.txt'; name files of one format: .arrow"),
        ("*.none", "has no file that can be read"),
        ("mixed", "has files that end in '.jsonl', '.parquet'; name files of one format"),
        *[(path, f"{path} can't be read: ") for path in ("broken.parquet", "empty.arrow")],
        *[(path, f"{path} holds no document; remove it.") for path in ("empty.jsonl", "blank.json")],
        ("mixed/*.jsonl", "mixed/a.jsonl holds no document; remove it."),
        ("numbers.json", "numbers.json can't be read: it holds no mappings with 'input_ids'. Write it again."),
        ("link*", "link.jsonl can't be read: Unable to find"),
        ("splits", "has the splits test, train; name one of them by --split; got None"),
        ("splits", "--split", "dev", "name one of them by --split; got 'dev'"),
        *[(path, "--split", "train", "has no splits; leave out --split train") for path in ("splits/train", files)],
        (files, "--out", files / "rows", f"--out {files / 'rows'} lies in {files}, whose files are the documents"),
    ]:
        assert message in error(path, *options)
    state, (data,) = tmp_path / "splits" / "train" / "state.json", (tmp_path / "splits" / "train").glob("*.arrow")
    data.rename(tmp_path / "gone")
    assert re.search(rf"splits can't be read: .*{data.name}", error("splits", "--split", "test"))
    state.write_text("[]")
    assert "splits/train can't be read: " in error("splits/train")


def test_full_disk_is_an_error_of_output(tmp_path, lines, capsys, monkeypatch):
    full = OSError(28, "No space left on device")
    copied = datasets.exceptions.DatasetGenerationError("failed")
    copied.__cause__ = full
    for owner, name, error in ((datasets, "load_dataset", copied), (datasets.Dataset, "save_to_disk", full)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, Mock(side_effect=error))
            assert run("pack", lines, "--capacity", 12, "--out", tmp_path / "out") == 1
        assert capsys.readouterr().err.startswith("error: [Errno 28] No space left on device; free space in")
