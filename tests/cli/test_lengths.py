import re
import sys

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from tritonpack.cli.lengths import READERS, read_lengths
from tritonpack.cli.paths import LENGTHS


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.json", "[3, 1, 2]", None),
        ("a.json", "[[7, 8, 9], [7], [7, 8]]", None),
        ("a.json", '[{"length": 3}, {"length": 1}, {"length": 2}]', None),
        ("a.json", '{"text": ["a", "b", "c"], "n": [3, 1, 2]}', "n"),
        ("a.json", '{"input_ids": [[7, 8, 9], [7], [7, 8]], "labels": []}', None),
        ("a.json", "\ufeff[3, 1, 2]", None),
        ("a.jsonl", "3\n1\n2\n", None),
        ("a.json", '{"length": 3}\n{"length": 1}\n{"length": 2}\n', None),
        ("a.jsonl", "3\r\n\r\n1\r\n2", None),
        ("a.jsonl", "[7, 8, 9]\n[7]\n[7, 8]\n", None),
        ("a.jsonl", '{"tokens": [7, 8, 9]}\n{"tokens": [7]}\n{"tokens": [7, 8]}\n', None),
        ("a.jsonl", '{"a": 9, "n": 3}\n{"n": 1, "a": 9}\n{"a": 9, "n": 2}\n', "n"),
        ("a.JSONL", "3\n1\n2\n", None),
        ("a.txt", "3\n 1\n\n2", None),
        ("a.csv", "3\n1\n2\n", None),
        ("a.csv", "length\n3\n1\n2\n", None),
        ("a.csv", 'text,n\n"two\nlines, and a comma",3\nb,1\n\nc, 2\n', "n"),
        ("a.csv", "length,text\n3,a\n1,b\n2,c\n", None),
        ("a.csv", "length;text\n3;a\n1;b, or so\n2;c\n", None),
        ("a.csv", "text\tlength\na\t3\nb\t1\nc\t2\n", None),
        ("a.csv", "\ufefflength\r\n3\r\n1\r\n2", None),
        ("a.csv", "\n\n3\n1\n2\n", None),
    ],
)
def test_reads(tmp_path, name, content, column):
    if name == "a.csv":
        pytest.importorskip("pyarrow")
    lengths = read_lengths(written(tmp_path, name, content), column)
    assert lengths.tolist() == [3, 1, 2]
    assert lengths.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, ">u4"])
def test_reads_npy(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([3, 1, 2], dtype=dtype))
    assert read_lengths(tmp_path / "a.npy").tolist() == [3, 1, 2]


def test_reads_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    ids = [[7, 8, 9], [7], [7, 8]]
    table = pyarrow.table({"text": ["a", "b", "c"], "n": pyarrow.array([3, 1, 2], pyarrow.uint16()), "input_ids": ids})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read_lengths(tmp_path / "a.parquet").tolist() == [3, 1, 2]
    assert read_lengths(tmp_path / "a.parquet", "n").tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match=r"a.parquet, column 'text', holds string, neither integers nor lists"):
        read_lengths(tmp_path / "a.parquet", "text")
    with pytest.raises(ValueError, match=r"a.parquet has no column 'm'; it has 'text', 'n', 'input_ids'"):
        read_lengths(tmp_path / "a.parquet", "m")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([3, None, 2], "column 'n', has missing values"),
        ([3.0, 1.0], "column 'n', holds double"),
        ([3, 0], "document 1, has 0 tokens"),
        ([[7], []], "document 1, has 0 tokens"),
        ([["a"]], "column 'n', holds string"),
    ],
)
def test_refuses_parquet(tmp_path, column, message):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"n": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message):
        read_lengths(tmp_path / "a.parquet")


def test_damaged_parquet_names_the_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    ids = [list(range(number, number + 100)) for number in range(200_000 // 100)]
    with parquet.ParquetWriter(path, pyarrow.schema([("input_ids", pyarrow.list_(pyarrow.int64()))])) as writer:
        writer.write_table(pyarrow.table({"input_ids": ids}))
        writer.write_table(pyarrow.table({"input_ids": ids}))
    start = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start + 40 : start + 90] = bytes(50)
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"a.parquet, document \d+ or one after it, column 'input_ids', can't be read: "
    ):
        read_lengths(path)


@pytest.mark.parametrize("ending", LENGTHS)
def test_errors_of_the_system_name_the_file(tmp_path, ending):
    path = tmp_path / f"a{ending}"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_lengths(path)
    assert tuple(READERS) == LENGTHS


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_message_names_missing_pyarrow(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=rf"{name} is read with pyarrow, which isn't installed; pip install pyarrow"):
        read_lengths(written(tmp_path, name, "3\n"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "can't be read as a .json file: Expecting value: line 1"),
        ("a.json", "[1,\n2,\nx]", "can't be read as a .json file: Expecting value: line 3"),
        ("a.json", "1\n2\nx", "a.json, line 3, isn't JSON: 'x'"),
        ("a.json", "3", "holds 3, not a list of documents"),
        ("a.json", "[]", "holds no document"),
        ("a.json", "{}", "has the columns none"),
        ("a.json", '{"a": [1], "b": [2]}', "'a', 'b'; name the one with the lengths with --column"),
        ("a.json", "[1, NaN]", "document 1, is NaN, neither a number of tokens"),
        ("a.json", "[1, 2.0]", "document 1, is 2.0, neither"),
        ("a.json", "[1, true]", "document 1, is true, neither"),
        ("a.json", "[1, null]", "document 1, is null, neither"),
        ("a.json", '[1, "two"]', 'document 1, is "two", neither'),
        ("a.json", "[1, -2]", "document 1, is -2, neither"),
        ("a.json", "[[7], []]", "document 1, is [], neither"),
        ("a.json", '[["Hello", "world"]]', 'document 0, is ["Hello", "world"], neither'),
        ("a.json", "[" * 100_000, "can't be read as a .json file"),
        ("a.json", "[" + "9" * 5000 + "]", "can't be read as a .json file"),
        ("a.json", b"\xff\xfe\x00", "can't be read as a .json file: 'utf-8' codec"),
        ("a.jsonl", "", "holds no document"),
        ("a.jsonl", "3\n\n4 5\n", "a.jsonl, line 3, isn't JSON: '4 5'"),
        ("a.jsonl", "3\nNaN\n", "line 2, is NaN"),
        ("a.jsonl", '{"a": 1, "b": 2}', "line 1 has the columns 'a', 'b'; name the one"),
        ("a.jsonl", '{"n": 1}\n{"m": 1}', "line 2 has no column 'n'; it has 'm'"),
        ("a.jsonl", '{"n": 1}\n{"n": 0}', "line 2, is 0, neither"),
        ("a.jsonl", "\x89PNG", "line 1, isn't JSON"),
        ("a.txt", "3\n4.5\n", "line 2, is 4.5, neither"),
        ("a.txt", "3\nfour\n", "line 2, isn't a number: 'four'"),
        ("a.txt", "3\n99999999999999999999\n", "line 2, is 99999999999999999999, neither"),
        ("a.npy", "[1, 2]", "can't be read as a .npy file"),
        ("a.npy", b"\x93NUMPY\x01\x00", "can't be read as a .npy file"),
        ("a.npy", b"\x93NUMPY\x01\x00\x03\x00{(\n", "can't be read as a .npy file"),
        ("a.arrow", "", "ends in '.arrow'; lengths are read from .json, .jsonl, "),
        ("a.jsonl", b"3\n4\n\xff\xfe\n", "line 1 or one after it, can't be read: 'utf-8' codec"),
        ("a.jsonl", b"3\n" * 9000 + b"\xff\n", "or one after it, can't be read: 'utf-8' codec"),
        ("a.txt", "3\n".encode("utf-16"), "line 1 or one after it, can't be read: 'utf-8' codec"),
        ("a.jsonl", "3\n" + "[" * 100_000, "line 2, isn't JSON: '[[["),
        ("a.txt", "3\n" + "9" * 5000, "line 2, isn't a number: '999"),
    ],
)
def test_refuses(tmp_path, name, content, message):
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError, match=re.escape(message)) as info:
        read_lengths(path)
    assert str(path) in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("length\n3\nnan\n", "Row #3: CSV conversion error to int64: invalid value 'nan'"),
        ("length\n3\n4.5\n", "Row #3: CSV conversion error to int64: invalid value '4.5'"),
        ("length,m\n3,4\n,5\n", "Row #3: CSV conversion error to int64: invalid value ''"),
        ("length\n3\n0\n", "document 1, has 0 tokens"),
        ("4.5\n3\n", "Row #1: CSV conversion error to int64: invalid value '4.5'"),
        ("length,m\n3,4\n3\n", "Row #3: Expected 2 columns, got 1"),
        ("n,m\n3,4\n", "has the columns 'n', 'm'"),
        ("\n3,4\n5,6\n", "a.csv has no header: its first line is '3,4'. Write the names of the columns into the first"),
        ("length\n99999999999999999999\n", "invalid value '99999999999999999999'"),
        ("", "Empty CSV file"),
    ],
)
def test_refuses_csv(tmp_path, content, message):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_lengths(written(tmp_path, "a.csv", content))


def test_refuses_text_named_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"can't be read as a \.parquet file"):
        read_lengths(written(tmp_path, "a.parquet", "PAR1 or so"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1.0, 2.0]), r"float64 of shape \(2,\), not a row of integers"),
        (np.array([[1, 2]]), r"int64 of shape \(1, 2\)"),
        (np.array([4, 0]), "document 1, has 0 tokens"),
        (np.array([4, 2**63], dtype=np.uint64),
         "document 1, has 9223372036854775808 tokens; a document has from 1 to 2147483647"),
        (np.array([4, 2**31]), "document 1, has 2147483648 tokens"),
        (np.zeros(0, dtype=np.int64), "holds no document"),
        (np.array([[1], [2, 3]], dtype=object), "can't be read as a .npy file: Object arrays"),
    ],
)  # fmt: skip
def test_refuses_npy(tmp_path, values, message):
    np.save(tmp_path / "a.npy", values, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        read_lengths(tmp_path / "a.npy")


def test_refuses_missing_files_and_folders(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_lengths(tmp_path / "nothing.json")
    with pytest.raises(ValueError, match="is a folder; name the file"):
        read_lengths(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("a.txt", "3\n"), ("a.jsonl", "3\n"), ("a.json", "[3]")])
def test_refuses_column_of_file_without_columns(tmp_path, name, content):
    with pytest.raises(ValueError, match="is 3, not an object with the column 'length'"):
        read_lengths(written(tmp_path, name, content), "length")


def test_refuses_column_of_csv_without_header(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"has no header: its first line is '3'\. .* leave out --column"):
        read_lengths(written(tmp_path, "a.csv", "3\n4\n"), "length")
