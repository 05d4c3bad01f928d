import json
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("datasets")

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from tests.cli.command import run
from tritonpack.cli import main


@pytest.fixture
def documents(tmp_path):
    lengths = [3, 9, 5, 2, 8, 12]
    lines = [{"input_ids": list(range(length)), "completion_mask": [1] * length} for length in lengths]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_rows_summary_and_numbers(tmp_path, documents, capsys):
    out, numbers = tmp_path / "rows", tmp_path / "numbers.json"
    command = ("pack", documents, "--capacity", 10, "--out", out, "--json", numbers)
    assert run(*command, "--overlong", "split") == 0
    assert capsys.readouterr().out.splitlines() == [
        "6 documents of 39 tokens.",
        "1 document longer than the capacity split into 2 pieces: no token lost.",
        "4 rows of 10 tokens hold 7 documents and pieces of 39 tokens: 97.50% full. "
        "No packing needs fewer than 4 rows.",
        "Columns: input_ids, labels, position_ids, seq_lengths.",
        "Labels are made from completion_mask, which the rows don't keep.",
        f"datasets.load_from_disk('{out}') loads the rows.",
    ]
    found = json.loads(numbers.read_text())
    rows = datasets.load_from_disk(str(out))
    assert found["rows"] == len(rows) == 4
    assert found["report"] == {"policy": "split", "documents": 1, "tokens_lost": 0, "pieces": 2}
    assert (found["efficiency"], found["options"]["overlong"]) == (0.975, "split")


def test_interrupted_command_goes_on_to_the_same_rows(tmp_path, documents, capsys, monkeypatch):
    command = ("pack", documents, "--capacity", 12, "--shard-mib", 1, "--out")
    assert run(*command, tmp_path / "whole") == 0

    class KilledError(Exception):
        pass

    def killed(*_, **__):
        raise KilledError

    for method in ("save_to_disk", "shuffle"):
        with monkeypatch.context() as patched:
            patched.setattr(datasets.Dataset, method, killed)
            with pytest.raises(KilledError):
                main([str(one) for one in (*command, tmp_path / "out")])
    (tmp_path / "out" / "data-00000-of-00002.arrow").touch()  # of a process that was killed while it wrote
    monkeypatch.setattr("tritonpack.packing.rows._checked", killed)
    assert run(*command, tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "data-00000-of-00001.arrow", "dataset_info.json", "state.json",
    ]  # fmt: skip
    assert list(datasets.load_from_disk(str(tmp_path / "out"))) == list(
        datasets.load_from_disk(str(tmp_path / "whole"))
    )


def test_numbers_on_standard_output(tmp_path, documents, capsys):
    command = ("pack", documents, "--capacity", 10, "--out", tmp_path / "rows", "--overlong", "drop", "--json", "-")
    assert run(*command, "--no-shuffle") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["report"]["tokens_lost"] == 12
    assert "1 document longer than the capacity dropped: 12 tokens lost." in captured.err


def test_left_out_columns_are_named(tmp_path, capsys):
    datasets.Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}).save_to_disk(tmp_path / "in")
    command = ("pack", tmp_path / "in", "--capacity", 4, "--out", tmp_path / "rows")
    assert run(*command) == 2
    assert (
        "Name the columns that rows keep, such as --columns input_ids, or remove the others" in capsys.readouterr().err
    )
    assert run(*command, "--columns", "input_ids") == 0
    assert "Left out: text." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity", "0"], "--capacity must be an integer from 1 to 1073741824; got 0."),
        (["--capacity", "10"],
         "Raise the capacity to at least 12, or say what to do with them: --overlong truncate, split"),
        (["--capacity", "12", "--algorithm", "magic"], "--algorithm must be one of best_fit_decreasing, first_fit"),
        (["--capacity", "12", "--jobs", "0"], "--jobs must be an integer from 1 to 1024; got 0."),
        (["--capacity", "12", "--columns", "input_ids,b"], "names 'b', which isn't there, or which rows don't keep"),
        (["--capacity", "12", "--split", "train"], "has no splits; leave out --split train"),
        (["--capacity", "12", "--json", "/proc/nowhere/a"], "--json /proc/nowhere/a can't be written"),
        (["--capacity", "12", "--out", "/proc/x"], "--out /proc/x can't be made: No such file or directory; name"),
        (["--capacity", "12", "--out", "{folder}"], "isn't empty; name another folder, or remove it"),
    ],
)  # fmt: skip
def test_wrong_command_line(tmp_path, documents, capsys, options, message):
    options = [option.format(folder=tmp_path) for option in options]
    assert run("pack", documents, "--out", tmp_path / "rows", *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_one_of_each_is_singular(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [7]}')
    assert run("pack", path, "--capacity", 1, "--out", tmp_path / "rows") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 document of 1 token."
    assert lines[1].startswith(
        "1 row of 1 token holds 1 document of 1 token: 100% full. No packing needs fewer than 1 row"
    )
    for content, message in (
        ('{"input_ids": [7], "labels": [7, 8]}', "document 0 of {path} has 1 input_ids but 2 labels; give"),
        ('{"input_ids": [7, 8], "labels": [7]}', "document 0 of {path} has 2 input_ids but 1 labels; give"),
        (
            '{"input_ids": [7, 8]}',
            "1 of 1 document is longer than the capacity of 1 token (the first: document 0, 2 tok",
        ),
    ):
        path.write_text(content)
        assert run("pack", path, "--capacity", 1, "--out", tmp_path / "other") == 2
        assert message.format(path=path) in capsys.readouterr().err


def test_damaged_file_is_no_error_of_output(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"input_ids": [[number % 250] * 150 for number in range(300)]}), path)
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(100) + data[200:])
    assert run("pack", path, "--capacity", 2048, "--out", tmp_path / "rows") == 2
    assert re.fullmatch(rf"error: {path} can't be read: .*\. Write the file again\.\n", capsys.readouterr().err)


def test_full_disk_is_an_error_of_output(tmp_path, documents, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.Dataset, "save_to_disk", full)
    assert run("pack", documents, "--capacity", 12, "--out", tmp_path / "rows") == 1
    assert re.match(
        r"error: output can't be written: .*No space left on device; free space in", capsys.readouterr().err
    )


def test_wrong_documents_leave_no_folder(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("no JSON")
    assert run("pack", tmp_path / "a.jsonl", "--capacity", 12, "--out", tmp_path / "deep" / "rows") == 2
    assert "a.jsonl can't be read: JSON parse error: Invalid value. in row 0" in capsys.readouterr().err
    assert not (tmp_path / "deep").exists()
