"""`tritonpack plan`: the table, the numbers, the picture, the strategies that are compared."""

import json
import re
from functools import partial

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console

from tests.cli.command import refused, run
from tritonpack.cli import plan as command
from tritonpack.cli.strategies import BASELINES, OURS, measure, next_fit_rows, padded_rows
from tritonpack.packing.planning.plan import plan_epoch

LENGTHS = np.random.default_rng(0).integers(1, 257, 2000).astype(np.int32)


def results_of(lengths=LENGTHS, capacity=1024, ranks=4):
    strategies = {OURS: partial(plan_epoch, tail="keep"), **BASELINES}
    plans = {name: strategy(lengths, capacity, ranks, seed=0) for name, strategy in strategies.items()}
    return [measure(name, plan, lengths, int(lengths.sum())) for name, plan in plans.items()]


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """Plan lengths; the output in one line per paragraph, and the numbers."""
    monkeypatch.setenv("COLUMNS", "400")

    def plan(lengths, *options, code=0):
        np.save(tmp_path / "a.npy", lengths)
        numbers = tmp_path / "plan.json"
        assert run("plan", tmp_path / "a.npy", "--json", numbers, *options) == code
        return capsys.readouterr().out, json.loads(numbers.read_text())

    return plan


@pytest.mark.slow
def test_table_numbers_and_rows(planned):
    output, found = planned(LENGTHS, "--capacity", 1024, "--ranks", 4)
    assert f"a.npy: 2,000 documents, {LENGTHS.sum():,} tokens; from 1 to 256" in output
    assert "Costs are those of a Llama of 8 billion parameters: attention to a document of " in output
    ways = found["ways"]
    assert list(ways) == [OURS, *BASELINES]
    for name, way in ways.items():
        row = re.search(rf"^ {name} +([\d.]+) +([\d.]+) +([\d.]+)", output, re.MULTILINE)
        assert float(row[1]) == way["num_steps"]
        assert float(row[2]) == pytest.approx(100 * way["efficiency"], abs=0.01)
        assert float(row[3]) == pytest.approx(100 * way["utilization"], abs=0.01)
    # What packing is for: the same tokens in fewer steps, on ranks that wait for each other less.
    ours, padded, in_order = ways[OURS], ways["padded"], ways["next-fit"]
    assert ours["efficiency"] > 0.97 > in_order["efficiency"] > padded["efficiency"]
    assert ours["cost_utilization"] > in_order["cost_utilization"] > padded["cost_utilization"]
    assert ours["l2_lag"] < in_order["l2_lag"]
    assert padded["padding"] > 0.3 > ours["padding"] == 0
    times = ours["cost_utilization"] / padded["cost_utilization"]
    assert f"padded rows take {times:.2f} times as long" in output
    rows = output.partition("a letter is a document:\n")[2].splitlines()
    assert rows[0].startswith("A") or len({*rows[0]}) > 4


@pytest.mark.slow
def test_overlong_documents_and_singulars(planned, tmp_path, capsys):
    output, found = planned([10] * 60 + [100], "--capacity", 20, "--overlong", "drop")
    assert "1 document longer than the capacity dropped: 100 tokens lost." in output
    assert found["ways"][OURS]["tokens_covered"] == pytest.approx(600 / 700)
    assert "leaves 14.29% of the tokens out of an epoch; --tail spread or keep" in output
    output, _ = planned([3, 1], "--capacity", 2, "--overlong", "truncate", "--tail", "keep")
    assert "1 document longer than the capacity truncated: 1 token cut off." in output
    assert "1 document, 1 token;" in planned([1], "--capacity", 1)[0]
    np.save(tmp_path / "a.npy", [3, 1])
    for options, message in (
        (("--overlong", "error"), "1 of 2 documents is longer than the --capacity of 2 tokens"),
        (("--overlong", "drop", "--tail", "drop"), "1 token can't fill one step of 1 rank with 2 tok"),
    ):
        assert message in refused(capsys, "plan", tmp_path / "a.npy", "--capacity", 2, *options)


@pytest.mark.slow
def test_where_outputs_go(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "lengths.txt").write_text("7\n" * 40)
    numbers = tmp_path / "deeper" / "still" / "a.json"
    arguments = ("plan", tmp_path / "lengths.txt", "--capacity", 14, "--ranks", 2)
    assert run(*arguments, "--json", numbers, "--objective", "linear") == 0
    assert json.loads(numbers.read_text())["documents"] == 40
    capsys.readouterr()
    assert run(*arguments, "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["documents"] == 40
    assert "40 documents, 280 tokens" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--capacity 20 --ranks 61", "600 tokens can't fill one step of 61 ranks"),
        ("--capacity 20000", "and --tail drop leaves out what doesn't. Use --tail keep or spread, fewer ranks"),
        ("--capacity 5", "longer than the --capacity of 5 tokens"),
        ("--capacity 5 --overlong drop", "--overlong drop leaves nothing"),
        ("--capacity 20 --column n", "a.json has no columns, but --column n was asked for"),
        ("--capacity 20 --json /proc/nowhere.json", "--json /proc/nowhere.json can't be written"),
        (
            "--capacity 20 --json a.json",
            "--json a.json can't be written: the command reads a.json, which would be lost",
        ),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(text := json.dumps([10] * 60))
    (tmp_path / "config.json").write_text("{}")
    assert message in refused(capsys, "plan", "a.json", *arguments.split())
    assert (tmp_path / "a.json").read_text() == text


def headings(results):
    return [column.header.replace("\n", " ") for column in command.table(results).columns]


def test_columns_and_cells(capsys):
    """On one rank no column compares ranks, and none is 0 everywhere; a way without a step has no measures."""
    Console(width=80).print(command.table(results_of()))
    output = capsys.readouterr().out
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80
    one = ["strategy", "steps", "rows full %", "padding %", "length spread", "covered %"]
    several = [*one[:3], "ranks busy %", "busy by cost %", "L2 lag mean", "L2 lag most", *one[3:]]
    assert (headings(results_of(ranks=1)), headings(results_of())) == (one, several)
    assert "padding %" not in headings(results_of(np.full(30, 1000), ranks=1))
    results = results_of(np.full(30, 100, dtype=np.int32), ranks=40)
    assert [found.measures["num_steps"] for found in results][1:] == [0] * 2
    cells = [cell for column in command.table(results).columns[2:] for cell in [*column.cells][1:]]
    assert cells == [""] * 2 * 8
    sentence = next(command.findings(results))
    assert sentence.startswith("There are too few documents for a step of padded, next-fit")
    shares = (1.0, 0.999999, 0.98165)  # only all is shown as 100
    assert [command._cell("efficiency", share) for share in shares] == ["100", "99.99", "98.17"]


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 256), (4, 1024), (40, 600)])
def test_rows_of_letters(ranks, capacity, monkeypatch):
    """Packed and padded rows show the same documents: on one rank, on several, on more ranks than rows are drawn."""
    drawn = []
    monkeypatch.setattr(command, "_drawn", lambda rows, capacity: drawn.append(rows))
    plan = results_of(LENGTHS, capacity, ranks)[0].plan
    said = [*command.rows_of_letters(plan, LENGTHS, 0)]
    packed, padded = drawn
    for index, row in enumerate(packed):
        assert [length for _, length in row] == LENGTHS[plan.row(*divmod(index, ranks))].tolist()
    lengths_of = {number: length for row in packed for number, length in row}
    assert sorted(lengths_of) == list(range(len(lengths_of)))
    shown = {number: length for row in padded for number, length in row if number is not None}
    assert shown.items() <= lengths_of.items()
    assert len(shown) == len(lengths_of) or "the first 8" in said[2]
    for row in padded:
        assert len({length + more for (_, length), (_, more) in zip(row[::2], row[1::2], strict=True)}) == 1
    assert all(sum(length for _, length in row) <= capacity for row in padded + packed)


def test_letters():
    assert (
        command._drawn([[(0, 5), (None, 4), (27, 1)], [(1, 9)]], 10).plain
        == f"{'A' * 36}{'.' * 28}{'B' * 8}\n{'B' * 64}\n"
    )


@pytest.mark.parametrize("baseline", BASELINES.values())
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_each_document_once_and_no_row_above_capacity(baseline, ranks):
    lengths = LENGTHS % 64 + 1
    plan = baseline(lengths, 256, ranks)
    assert plan.num_ranks == ranks
    assert len(set(plan.items.tolist())) == len(plan.items)
    assert plan.sums(lengths).max() <= 256
    assert np.diff(plan.offsets).min() > 0
    # The documents that are left out hold fewer tokens than a step.
    assert lengths.sum() - lengths[plan.items].sum() < ranks * 256
    orders = [baseline(lengths, 256, ranks, seed).items.tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    none = baseline(np.array([5, 6]), 10, 8)
    assert (none.num_steps, len(none.items)) == (0, 0)


def test_rows_of_each_strategy():
    lengths = LENGTHS % 64 + 1
    plan = padded_rows(lengths, 300, 3)
    assert np.diff(plan.offsets).max() == 300 // lengths.max()
    assert len(plan.items) >= len(lengths) - 3
    last = padded_rows(np.full(11, 10), 40, 2)  # 4 documents per row: 8 and 3; no rank is empty
    assert [len(last.row(1, rank)) for rank in (0, 1)] == [2, 1]
    assert padded_rows(np.full(9, 10), 40, 2).num_steps == 1
    plan = next_fit_rows(lengths, 100, 1, seed=5)
    rows = [[]]
    for item in plan.items.tolist():
        if lengths[rows[-1]].sum() + lengths[item] > 100:
            rows.append([])
        rows[-1].append(item)
    assert [found.tolist() for found in plan.rows_of_rank(0)] == rows
    assert len(plan.items) == len(lengths)
