"""`tritonpack plan`: the table, the numbers, the ways that are compared."""

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
from tritonpack.cli.plan import BASELINES, OURS, next_fit_rows, padded_rows
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
