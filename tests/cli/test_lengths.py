"""read_lengths: each form of a file, and each wrong one with its message."""

import re

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tritonpack.cli.lengths import read_lengths


def written(tmp_path, name, content):
    """A file of text, of bytes, or of an array or the columns of a table."""
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif isinstance(content, dict):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table(content), path, row_group_size=2)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


IDS = [[7, 8, 9], [7], [7, 8]]
TABLE = {"text": ["a", "b", "c"], "n": np.array([3, 1, 2], np.uint16), "input_ids": IDS}


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.json", "[3, 1, 2]", None),
        ("a.json", "\ufeff[3, 1, 2]", None),
        ("a.jsonl", '{"length": 3}\r\n\r\n{"length": 1}\r\n{"length": 2}', None),
        ("a.jsonl", '{"tokens": [7, 8, 9]}\n{"tokens": [7]}\n{"tokens": [7, 8]}\n', None),
        ("a.jsonl", '{"a": 9, "n": 3}\n{"n": 1, "a": 9}\n{"a": 9, "n": 2}\n', "n"),
        ("a.JSON", "[3, 1, 2]", None),
        ("a.csv", "length\n3\n1\n2\n", None),
        ("a.csv", 'text,n\n"two\nlines, and a comma",3\nb,1\n\nc, 2\n', "n"),
        ("a.csv", "\ufefflength\r\n3\r\n1\r\n2", None),
        *[("a.npy", np.array([3, 1, 2], dtype), None) for dtype in (np.int64, np.uint8, np.uint64, ">u4")],
        ("a.parquet", TABLE, None),
        ("a.parquet", TABLE, "n"),
    ],
)
def test_reads(tmp_path, name, content, column):
    if name in ("a.csv", "a.jsonl"):
        pytest.importorskip("pyarrow")
    lengths = read_lengths(written(tmp_path, name, content), column)
    assert lengths.tolist() == [3, 1, 2]
    assert lengths.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "can't be read: Expecting value: line 1"),
        ("a.json", "[]", "lengths is empty: there is no document to pack"),
        ("a.json", '{"a": [1], "b": [2]}', 'holds {"a": [1], "b": [2]}, not a list of documents'),
        *[("a.json", f"[1, {value}]", f"document 1 is {value}, neither a number of tokens nor a list of")
          for value in ("NaN", "2.0", "true", "null", '"two"', '["Hello"]', '{"n": 3}')],
        *[("a.json", f"[1, {value}]", f"document 1 has length {tokens}. Remove empty documents")
          for value, tokens in (("-2", -2), ("[]", 0))],
        ("a.json", "[1, 2147483648]", "document 1 has 2147483648 tokens; at most 2147483647 are planned"),
        ("a.json", b"\xff\xfe\x00", "can't be read: 'utf-8' codec"),
        ("a.jsonl", "3\n4\n", "a.jsonl can't be read: "),
        ("a.jsonl", '{"a": 1, "b": 2}', "its columns are 'a', 'b'; name the one"),
        ("a.jsonl", '{"n": 1}\n{"n": 0}', "document 1 has length 0"),
        ("a.txt", "3\n4.5\n", "invalid literal for int() with base 10: '4.5'"),
        ("a.txt", "3\n" + "9" * 20, "too large to convert to C long"),
        ("a.arrow", "", "ends in '.arrow'; lengths are read from .json, .npy, "),
        ("a.npy", "[1, 2]", "can't be read"),
        ("a.npy", b"\x93NUMPY\x01\x00\x03\x00{(\n", "can't be read"),
        ("a.npy", np.array([1.0, 2.0]), "lengths must be a row of integers"),
        ("a.npy", np.array([4, 0]), "document 1 has length 0"),
        ("a.npy", np.array([4, 2**63], np.uint64), "document 1 has length 9223372036854775808"),
        ("a.csv", "length,m\n3,4\n,5\n", "missing values (null)"),
        ("a.csv", "length,m\n3,4\n3\n", "Row #3: Expected 2 columns, got 1"),
        ("a.csv", "\n3,4\n5,6\n", "its first line is '3,4'; write the names of the columns there, or make it a .txt"),
        ("a.csv", "", "Empty CSV file"),
        ("a.parquet", "PAR1 or so", "can't be read"),
        ("a.parquet", {"n": [3, None, 2]}, "column 'n' has missing values (null)"),
        ("a.parquet", {"n": [3.0, 1.0]}, "column 'n' has values of the type double, not integers or lists of token"),
        ("a.parquet", {"n": [[7], []]}, "document 1 has length 0"),
        ("a.parquet", {"n": [["a"]]}, "column 'n' has values of the type string"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, name, content, message):
    if name in ("a.csv", "a.jsonl"):
        pytest.importorskip("pyarrow")
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError, match=re.escape(message)) as info:
        read_lengths(path)
    assert str(path) in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.txt", "3\n", "n", "a.txt has no columns, but --column n was asked for; leave it out"),
        ("a.npy", np.array([3]), "n", "a.npy has no columns, but --column n was asked for; leave it out"),
        ("a.parquet", TABLE, "text", "column 'text' has values of the type string"),
        (
            "a.parquet",
            TABLE,
            "m",
            "its columns are 'text', 'n', 'input_ids'; name the one with the lengths with --column",
        ),
    ],
)
def test_refuses_columns(tmp_path, name, content, column, message):
    if name in ("a.csv", "a.jsonl"):
        pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_lengths(written(tmp_path, name, content), column)


def test_damaged_parquet_is_named(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = written(tmp_path, "a.parquet", {"input_ids": [list(range(at, at + 100)) for at in range(4)]})
    start = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 90] = bytes(90)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.parquet can't be read: "):
        read_lengths(path)
