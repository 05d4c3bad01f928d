"""`tritonpack plan`: the lengths that are read, the table, the numbers, the ways that are compared."""

import json
import re
from dataclasses import asdict
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from tests.cli.command import run
from tritonpack.cli import plan as command
from tritonpack.cli.machine import percent
from tritonpack.cli.plan import BASELINES, OURS, next_fit_rows, padded_rows, read_lengths
from tritonpack.packing.planning.plan import plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics

LENGTHS = np.random.default_rng(0).integers(1, 257, 2000).astype(np.int32)


def ways_of(lengths=LENGTHS, capacity=1024, ranks=4):
    strategies = {OURS: partial(plan_epoch, tail="keep"), **BASELINES}
    plans = {name: strategy(lengths, capacity, ranks, seed=0) for name, strategy in strategies.items()}
    return {name: asdict(plan_statistics(plan, lengths, padded=name == "padded")) for name, plan in plans.items()}


@pytest.mark.parametrize("to_standard_output", [False, True])
def test_table_and_numbers(to_standard_output, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    np.save(tmp_path / "a.npy", [*LENGTHS, 2000])
    numbers = "-" if to_standard_output else tmp_path / "deeper" / "still" / "plan.json"
    options = ("--capacity", 1024, "--ranks", 4, "--overlong", "drop", "--objective", "linear", "--json", numbers)
    assert run("plan", tmp_path / "a.npy", *options) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out if to_standard_output else numbers.read_text())
    output = captured.err if to_standard_output else captured.out
    tokens = int(LENGTHS.sum()) + 2000
    assert f"a.npy: 2,001 documents, {tokens:,} tokens; from 1 to 2,000" in output
    assert "1 document longer than the capacity dropped: 2,000 tokens lost." in output
    assert (found["documents"], found["tokens"], found["overlong"]["tokens_lost"]) == (2001, tokens, 2000)
    assert found["options"]["objective"] == "linear"
    ways = found["ways"]
    assert list(ways) == [OURS, *BASELINES]
    for name, way in ways.items():
        row = re.search(rf"^ {name} +([\d.]+) +([\d.]+) +([\d.]+).* ([\d.]+) *$", output, re.MULTILINE)
        assert float(row[1]) == way["num_steps"]
        shares = [way[key] for key in ("efficiency", "utilization", "tokens_covered")]
        assert [float(cell) for cell in row.groups()[1:]] == pytest.approx([100 * share for share in shares], abs=0.01)
        assert way["tokens_covered"] <= 1 - 2000 / tokens
    # What packing is for: the same tokens in fewer steps, on ranks that wait for each other less.
    ours, padded, in_order = ways[OURS], ways["padded"], ways["next-fit"]
    assert ours["efficiency"] > 0.97 > in_order["efficiency"] > padded["efficiency"]
    assert ours["cost_utilization"] > in_order["cost_utilization"] > padded["cost_utilization"]
    assert padded["padding"] > 0.3 > ours["padding"] == 0
    times = ours["cost_utilization"] / padded["cost_utilization"]
    assert f"padded rows take {times:.2f} times as long" in output
    assert f"tritonpack leaves {1 - ours['tokens_covered']:.2%} of the tokens out of an epoch; --tail spread" in output


def test_columns_and_cells(capsys):
    """The table fits a plain terminal. A way without a step has no measures."""
    Console(width=80).print(command.table(ways_of()))
    output = capsys.readouterr().out
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80
    ways = ways_of(np.full(30, 100, dtype=np.int32), ranks=40)
    assert [found["num_steps"] for found in ways.values()][1:] == [0] * 2
    cells = [cell for column in command.table(ways).columns[2:] for cell in [*column.cells][1:]]
    assert cells == [""] * 2 * 8
    assert [*map(percent, (1.0, 0.999999, 0.98165))] == ["100", "99.99", "98.17"]  # only all is shown as 100


@pytest.mark.parametrize("baseline", BASELINES.values())
@pytest.mark.parametrize("ranks", [1, 8])
def test_each_document_once_and_no_row_above_capacity(baseline, ranks):
    lengths = LENGTHS % 64 + 1
    plan = baseline(lengths, 256, ranks)
    assert plan.num_ranks == ranks
    assert len(set(plan.items.tolist())) == len(plan.items) > len(lengths) - ranks * 64
    assert plan.sums(lengths).max() <= 256
    assert np.diff(plan.offsets).min() > 0
    orders = [baseline(lengths, 256, ranks, seed).items.tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    none = baseline(np.array([5, 6]), 10, 8)
    assert (none.num_steps, len(none.items)) == (0, 0)


def test_rows_of_each_way():
    lengths = LENGTHS % 64 + 1
    plan = padded_rows(lengths, 300, 3)
    assert {*np.diff(plan.offsets)} == {300 // lengths.max()}
    assert padded_rows(np.full(11, 10), 40, 2).num_documents == 8  # 4 in each row; a whole step needs 8
    plan = next_fit_rows(lengths, 100, 1, seed=5)
    rows = [found.tolist() for found in plan.rows_of_rank(0)]
    assert all(lengths[row].sum() + lengths[after[0]] > 100 for row, after in pairwise(rows))
    assert len(plan.items) == len(lengths)


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
