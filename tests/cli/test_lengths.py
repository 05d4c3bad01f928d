"""read_lengths: each form of a file, and each wrong one with its message."""

import re

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tritonpack.cli.plan import read_lengths


def written(tmp_path, name, content):
    """A file of text, of bytes, or of an array or the columns of a table."""
    path = tmp_path / name
    if name.endswith((".csv", ".jsonl", ".parquet")):
        pytest.importorskip("pyarrow")
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif isinstance(content, dict):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(content), path, row_group_size=2)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


IDS = [[7, 8, 9], [7], [7, 8]]
TABLE = {"text": ["a", "b", "c"], "n": np.array([3, 1, 2], np.uint16), "input_ids": IDS}


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.json", "\ufeff[3, [7], 2]", None),
        ("a.JSON", "[3, 1, 2]", None),
        ("a.txt", "3 1\n2\n", None),
        ("a.jsonl", '{"length": 3}\r\n\r\n{"length": 1}\r\n{"length": 2}', None),
        ("a.jsonl", '{"tokens": [7, 8, 9]}\n{"tokens": [7]}\n{"tokens": [7, 8]}\n', None),
        ("a.csv", 'text,n\n"two\nlines, and a comma",3\nb,1\n\nc, 2\n', "n"),
        ("a.csv", "\ufefflength\r\n3\r\n1\r\n2", None),
        *[("a.npy", np.array([3, 1, 2], dtype), None) for dtype in (np.int64, np.uint8, ">u4")],
        ("a.parquet", TABLE, None),
        ("a.parquet", TABLE, "n"),
    ],
)
def test_reads(tmp_path, name, content, column):
    lengths = read_lengths(written(tmp_path, name, content), column)
    assert lengths.tolist() == [3, 1, 2]
    assert lengths.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.json", "", None, "the file doesn't hold a list of documents, in JSON and UTF-8: Expecting value: line 1"),
        ("a.json", "[]", None, "lengths is empty: there is no document to pack"),
        ("a.json", '{"a": [1], "b": [2]}', None, 'documents, in JSON and UTF-8: it holds {"a": [1], "b": [2]}'),
        ("a.json", f'[{"7, " * 20} ["{"x" * 50}"]]', None, f'document 20 is ["{"x" * 38}, neither'),
        *[("a.json", f"[1, {value}]", None, f"document 1 is {value}, neither a number of tokens nor a list")
          for value in ("2.0", "true", "null", '["Hello"]')],
        ("a.json", "[1, -2]", None, "document 1 has length -2. Remove empty documents"),
        ("a.json", "[1, 2147483648]", None, "document 1 has 2147483648 tokens; at most 2147483647 are planned"),
        ("a.json", b"\xff\xfe\x00", None, "in JSON and UTF-8: 'utf-8' codec"),
        ("a.jsonl", '{"a": 1, "b": 2}', None, "its columns are 'a', 'b'; name the one with the lengths with --column"),
        ("a.txt", "3\n4.5\n", None, "invalid literal for int() with base 10: '4.5'"),
        ("a.txt", "3\n" + "9" * 20, None, "lengths must be a row of integers"),
        ("a.txt", "3\n", "n", "a.txt has no columns, but --column n was asked for; leave it out"),
        ("a.arrow", "", None, "ends in '.arrow'; lengths are read from .json, .npy, "),
        ("a.npy", b"\x93NUMPY\x01\x00\x03\x00{(\n", None, "the file doesn't hold "),
        ("a.npy", np.array([1.0, 2.0]), None, "lengths must be a row of integers"),
        ("a.csv", "length,m\n3,4\n,5\n", None, "missing values (null)"),
        ("a.csv", "\n3,4\n5,6\n", None, "its first line is 3,4; without names, make it a .txt file"),
        ("a.csv", "", None, "Empty CSV file"),
        ("a.parquet", "PAR1 or so", None, "the file doesn't hold "),
        ("a.parquet", {"n": [3.0, 1.0]}, None, "column 'n' has values of the type double, not integers or lists"),
        ("a.parquet", {"n": [["a"]]}, None, "column 'n' has values of the type string"),
        ("a.parquet", TABLE, "m", "there is no column 'm'; its columns are 'text', 'n', 'input_ids'; name the one"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, name, content, column, message):
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError, match=re.escape(message)) as info:
        read_lengths(path, column)
    assert str(path) in str(info.value)
    assert "\n" not in str(info.value)
