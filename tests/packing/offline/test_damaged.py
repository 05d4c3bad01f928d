"""Files that can't be read: a ValueError names the file, and where it can the document."""

import json
import random

import pytest

from tests.packing.offline.tables import documents, write_files
from tritonpack import pack_to_disk
from tritonpack.errors import OutputError
from tritonpack.packing.offline import folder as folders

pytest.importorskip("datasets")

import datasets
import pyarrow as pa
from pyarrow import parquet

KINDS = ["arrow", "feather", "parquet", "jsonl"]


def damage(data, how, rng):
    data = bytearray(data)
    if how == "cut":
        return data[: rng.randrange(1, len(data))]
    if how == "utf-16":
        return data.decode("latin1").encode("utf-16")
    for _ in range(20 if how == "flips" else len(data)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


@pytest.mark.parametrize("how", ["cut", "flips", "noise", "utf-16"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_is_read_or_named(tmp_path, kind, how):
    rng = random.Random(f"{kind} {how}")
    write_files(tmp_path / "in", kind, documents([rng.randrange(1, 40) for _ in range(40)]), files=1)
    whole = (tmp_path / "in" / f"0.{kind}").read_bytes()
    messages = {}
    for number in range(8):
        path = tmp_path / f"{number}.{kind}"
        path.write_bytes(damage(whole, how, rng))
        try:  # damage may change only values
            pack_to_disk(path, 50, tmp_path / "out" / str(number))
        except ValueError as error:
            messages[str(path)] = str(error)
    assert messages
    assert all(path in message and "\n" not in message for path, message in messages.items())


def test_damaged_page_names_the_first_document_it_may_be(tmp_path):
    rng = random.Random(0)
    table = pa.table({"input_ids": [[rng.randrange(250) for _ in range(150)] for _ in range(300)]})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    data = bytearray(path.read_bytes())
    data[2000:2400] = bytes(byte ^ 0x5A for byte in data[2000:2400])
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"document 0 of .*a\.parquet, or a document after it, can't be read: .*again"):
        pack_to_disk(path, 2048, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_system_errors_name_the_file(tmp_path, kind):
    given = tmp_path / f"a.{kind}"
    given.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"{given} can't be read: No such file or directory\."):
        pack_to_disk(tmp_path / "*.*", 8, tmp_path / "rows" / "out")
    given.unlink()
    given.mkdir()
    with pytest.raises(ValueError, match=rf"{given} can't be read.*: .*(directory|Cannot open|Couldn't|not a regular)"):
        pack_to_disk(tmp_path / "a.*", 8, tmp_path / "rows" / "out")


def test_folders_that_are_named_like_files_are_searched(tmp_path):
    write_files(tmp_path / "in" / "a.parquet", "parquet", documents())
    assert pack_to_disk(tmp_path / "in", 10, tmp_path / "out").documents == len(documents())


@pytest.mark.parametrize("content", [b"", b"[]", b'"a"', b"{}", b"\xff\xfe", b'{"_data_files": [{}]}', b"[" * 9999])
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_damaged_folder_of_save_to_disk(tmp_path, name, content):
    datasets.Dataset.from_list(documents()).save_to_disk(tmp_path / "in")
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} can't be read as save_to_disk writes it: .*Write the file again\."):
        pack_to_disk(tmp_path / "in", 10, tmp_path / "out")


def test_missing_file_of_save_to_disk(tmp_path):
    datasets.Dataset.from_list(documents()).save_to_disk(tmp_path / "in")
    (data,) = (tmp_path / "in").glob("*.arrow")
    data.unlink()
    with pytest.raises(ValueError, match=rf"{data} can't be read: No such file"):
        pack_to_disk(tmp_path / "in", 10, tmp_path / "out")


@pytest.mark.parametrize(("pattern", "content"), [("lengths-*.npy", b"\x93NUMPY"), ("sorted-*.arrow", b"ARROW1\0\0")])
def test_damaged_temporary_file_is_named(tmp_path, pattern, content, monkeypatch):
    source = datasets.Dataset.from_list(documents())
    complete = folders.write

    def damaging(path, write):
        complete(path, write)
        if path.match(pattern):
            path.write_bytes(content)

    monkeypatch.setattr("tritonpack.packing.offline.steps.write", damaging)
    with pytest.raises(
        ValueError, match=r"the temporary file .*\.packing/\w+-000000\.\w+ \(remove it, and run the sam"
    ):
        pack_to_disk(source, 10, tmp_path / "out")


def test_only_errors_of_writing_are_output_errors(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "replace", full)
    with pytest.raises(OutputError, match="free space in"):
        pack_to_disk(datasets.Dataset.from_list(documents()), 10, tmp_path / "out")


def test_folder_that_cannot_be_made_is_refused_before_documents_are_read(tmp_path):
    (tmp_path / "file").touch()
    for out, message in (("/proc/x", "can't be made: No such"), (tmp_path / "file", "is a file"),
                         (tmp_path / "file" / "x", "can't be made: Not a directory")):  # fmt: skip
        with pytest.raises(ValueError, match=f"out={out} {message}.*name a"):
            pack_to_disk(json.dumps("nowhere"), 10, out)
