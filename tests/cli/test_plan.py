import json
import re
from functools import partial

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from tests.cli.command import run
from tritonpack.cli import figures
from tritonpack.cli import plan as command
from tritonpack.cli.strategies import BASELINES, OURS, measure
from tritonpack.packing.planning.cost import CostModel
from tritonpack.packing.planning.plan import Plan, plan_epoch

COST = CostModel(per_token=30_000.0, per_square=1.0)


@pytest.fixture
def lengths():
    return np.random.default_rng(0).integers(1, 257, 2000).astype(np.int32)


def results_of(lengths, capacity=1024, ranks=4, epochs=1):
    strategies = {OURS: partial(plan_epoch, tail="keep"), **BASELINES}
    of = (lengths, capacity, ranks, epochs, 0)
    tokens = int(lengths.sum())
    return [measure(*one, *of, cost=COST, total_tokens=tokens) for one in strategies.items()]


def test_prints_table_and_writes_numbers_and_picture(tmp_path, lengths, capsys):
    np.save(tmp_path / "lengths.npy", lengths)
    numbers, out = tmp_path / "plan.json", tmp_path / "out"
    code = run(
        *("plan", tmp_path / "lengths.npy", "--capacity", 1024, "--ranks", 4),
        *("--epochs", 2, "--out", out, "--json", numbers),
    )
    output = capsys.readouterr().out
    assert code == 0, output
    assert f"2,000 documents, {lengths.sum():,} tokens" in output
    ways = json.loads(numbers.read_text())["ways"]
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
    assert f"padded rows take {times:.2f} times as long" in " ".join(output.split())
    picture = (out / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 40_000  # an empty figure has 5,000 or so


def test_ways_without_a_step_show_no_measures():
    results = results_of(np.full(30, 100, dtype=np.int32), ranks=40)
    assert [found.means["num_steps"] for found in results][1:] == [0] * 4
    shown = command.table(results, 1)
    assert [cell for column in shown.columns[2:] for cell in list(column.cells)[1:]] == [""] * 4 * 8
    assert next(command.findings(results)).startswith("There are too few documents for a step of padded, interleaved")


@pytest.mark.slow
def test_says_how_many_steps_are_planned_at_once(tmp_path, lengths, capsys):
    np.save(tmp_path / "lengths.npy", lengths)
    arguments = ("plan", tmp_path / "lengths.npy", "--capacity", 600, "--out", tmp_path)
    assert run(*arguments) == 0
    chosen = capsys.readouterr().out
    found = re.search(r"about \d documents, so (\d+) steps are planned at once", " ".join(chosen.split()))
    assert found is not None
    assert int(found[1]) >= 8
    assert run(*arguments, "--steps-together", 1) == 0
    alone = capsys.readouterr().out
    assert "planned at once" not in alone
    full = [float(re.search(rf"^ {OURS} +[\d,]+ +([\d.]+)", text, re.MULTILINE)[1]) for text in (alone, chosen)]
    assert full[0] < 98 < full[1]


@pytest.mark.slow
def test_makes_the_folders_of_the_picture_and_of_the_numbers(tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("\n".join(["7"] * 40))
    picture, numbers = tmp_path / "deep" / "a.png", tmp_path / "deeper" / "still" / "a.json"
    arguments = ("plan", tmp_path / "lengths.txt", "--capacity", 14, "--ranks", 2)
    assert run(*arguments, "--out", picture, "--json", numbers) == 0
    assert picture.exists()
    assert json.loads(numbers.read_text())["documents"] == 40
    assert "Means over" not in capsys.readouterr().out
    folder = tmp_path / "run.1"  # a folder may have an ending
    folder.mkdir()
    assert run(*arguments, "--out", folder) == 0
    assert (folder / "plan.png").exists()


@pytest.mark.slow
def test_overlong_documents_are_reported_and_count_as_not_covered(tmp_path, capsys):
    (tmp_path / "lengths.json").write_text(json.dumps([10] * 60 + [100]))
    numbers = tmp_path / "plan.json"
    arguments = ("plan", tmp_path / "lengths.json", "--capacity", 20, "--out", tmp_path, "--json", numbers)
    assert run(*arguments) == 2
    assert "document 60, 100 tokens" in capsys.readouterr().err
    assert run(*arguments, "--overlong", "drop") == 0
    assert "1 document longer than the capacity dropped: 100 tokens lost." in capsys.readouterr().out
    assert json.loads(numbers.read_text())["ways"][OURS]["tokens_covered"] == pytest.approx(600 / 700)


def test_costs_are_computed_for_the_given_model(tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "lengths.json").write_text(json.dumps([10] * 60))
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = run(
        *("plan", tmp_path / "lengths.json", "--capacity", 20, "--out", tmp_path, "--json", tmp_path / "plan.json"),
        *("--objective", "cost", "--model", tmp_path / "config.json"),
    )
    output = " ".join(capsys.readouterr().out.split())
    assert code == 0
    expected = CostModel.from_shape(
        hidden_size=64, num_layers=2, num_heads=4, head_dim=16, num_key_value_heads=4, intermediate_size=128,
        vocab_size=256,
    )  # fmt: skip
    assert f"attention to documents of {expected.per_token / expected.per_square:,.0f} tokens" in output
    assert json.loads((tmp_path / "plan.json").read_text())["cost"]["per_token"] == expected.per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "capacity"),
        (["--capacity", "abc"], "--capacity must be an integer from 1 to 1073741824; got abc."),
        (["--capacity", "-5"], "--capacity must be an integer from 1 to 1073741824; got -5."),
        (["--capacity", "99999999999"], "--capacity must be an integer from 1 to 1073741824; got 99999999999."),
        (["--capacity", "20", "--ranks", "0"], "--ranks must be an integer from 1 to 1048576; got 0."),
        (["--capacity", "20", "--epochs", "1.5"], "--epochs must be an integer from 1 to 2147483647; got 1.5."),
        (["--capacity", "20", "--seed", "-1"], "--seed must be an integer from 0 to 9223372036854775807; got -1."),
        (["--capacity", "20", "--steps-together", ""], "--steps-together must be an integer from 1 to 2147483647; got"),
        (["--capacity", "20", "--lookahead", "2"], "--lookahead must be a number from 0 to 1; got 2."),
        (["--capacity", "20", "--lookahead", "nan"], "--lookahead must be a number from 0 to 1; got nan."),
        (["--capacity", "20", "--tail", "wag"], "--tail must be one of drop, spread, keep; got wag."),
        (["--capacity", "20", "--objective", "x"], "--objective must be one of quadratic, linear, cost; got x."),
        (["--capacity", "20", "--overlong", "x"], "--overlong must be one of error, truncate, split, drop; got x."),
        (["--capacity", "20", "--out", "a.pdf"], "--out a.pdf ends in .pdf, and the picture is a PNG; name a file"),
        (["--capacity", "20", "--ranks", "61"], "600 tokens don't fill one step of 61 ranks"),
        (["--capacity", "20000"], "don't fill one step"),
        (["--capacity", "20000"], "and --tail drop leaves out what doesn't. Use --tail keep or spread, fewer ranks"),
        (["--capacity", "5"], "longer than the --capacity of 5 tokens"),
        (["--capacity", "5"], "say what to do with them: --overlong truncate, split or drop."),
        (["--capacity", "5", "--overlong", "drop"], "--overlong drop leaves nothing"),
        (["--capacity", "20", "--column", "n"], "column"),
        (["--capacity", "20", "--model", "/nowhere/config.json"], "there is no file or folder /nowhere/config.json"),
        (["--capacity", "20", "--out", "/proc/nowhere"], "/proc/nowhere"),
        (["--capacity", "20", "--json", "/proc/nowhere.json"], "/proc/nowhere.json"),
    ],
)  # fmt: skip
def test_wrong_command_line_prints_one_line_and_exits_with_2(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text(json.dumps([10] * 60))
    assert run("plan", "lengths.json", *arguments) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]*\n", captured.err)
    assert message in captured.err
    assert "Invalid value" not in captured.err


def test_message_names_file_and_line(tmp_path, capsys):
    (tmp_path / "lengths.jsonl").write_text("3\nNaN\n")
    assert run("plan", tmp_path / "lengths.jsonl", "--capacity", 5, "--out", tmp_path) == 2
    assert f"{tmp_path}/lengths.jsonl, line 2, is NaN" in capsys.readouterr().err
    assert not (tmp_path / "plan.png").exists()


def test_table_fits_80_columns(lengths, capsys):
    from rich.console import Console

    Console(width=80).print(command.table(results_of(lengths, epochs=2), epochs=2))
    output = capsys.readouterr().out
    assert "Means over 2 epochs" in output
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_headings_of_one_rank(lengths):
    """Columns that compare ranks, and those that are 0 everywhere, say nothing of one rank; the legend has the rest."""
    results = results_of(lengths, ranks=1)
    headings = [column.header.replace("\n", " ") for column in command.table(results, 1).columns]
    assert headings == ["strategy", "steps", "rows full %", "padding %", "length spread", "covered %"]
    explained = list(command.legend(results).columns[0].cells)
    assert all(heading.removesuffix(" %") in explained for heading in headings[1:])
    assert not {"ranks busy", "busy by cost", "L2 lag mean", "L2 lag most"} & set(explained)
    equal = [column.header for column in command.table(results_of(np.full(30, 1000), ranks=1), 1).columns]
    assert "padding\n%" not in equal


def test_headings_of_several_ranks(lengths):
    headings = [column.header.replace("\n", " ") for column in command.table(results_of(lengths), 1).columns]
    assert headings[3:7] == ["ranks busy %", "busy by cost %", "L2 lag mean", "L2 lag most"]


@pytest.mark.slow
def test_one_of_each_is_singular(tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("3\n1")
    command = ("plan", tmp_path / "lengths.txt", "--out", tmp_path, "--overlong", "truncate", "--tail", "keep")
    assert run(*command, "--capacity", 2) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "1 document longer than the capacity truncated: 1 token cut off." in output
    (tmp_path / "one.json").write_text("[1]")
    assert run("plan", tmp_path / "one.json", "--capacity", 1, "--out", tmp_path) == 0
    assert "1 document, 1 token;" in capsys.readouterr().out
    for options, message in (
        (("--capacity", 2, "--overlong", "error"), "1 of 2 documents is longer than the --capacity of 2 tokens"),
        (
            ("--capacity", 2, "--overlong", "drop", "--tail", "drop"),
            "1 token doesn't fill one step of 1 rank with 2 tok",
        ),
    ):
        assert run(*command, *options) == 2
        assert message in capsys.readouterr().err


def test_letters_continue_after_z_with_aa():
    assert [figures.letters(number) for number in (0, 25, 26, 51, 52, 701, 702)] == [
        "A",
        "Z",
        "AA",
        "AZ",
        "BA",
        "ZZ",
        "AAA",
    ]


def test_only_a_whole_share_is_shown_as_100():
    shares = (1.0, 0.999999, 0.98165)
    assert [command._cell("efficiency", share) for share in shares] == ["100", "99.99", "98.17"]


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 256), (4, 1024), (40, 600)])
@pytest.mark.fast("1-256")
def test_both_panels_show_the_same_documents(tmp_path, lengths, ranks, capacity):
    """On one rank, on several, and on more ranks than rows are drawn."""
    results = results_of(lengths, capacity, ranks)
    drawn = []
    original = figures.draw_rows

    def keep(axes, rows, *rest):
        drawn.append(rows)
        original(axes, rows, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(figures, "draw_rows", keep)
        figures.draw_plan(tmp_path / "a.png", results[0], results[3], lengths, COST, "title", 0)
    assert (tmp_path / "a.png").stat().st_size > 40_000
    padded, packed = drawn
    plan = results[0].plan
    for index, row in enumerate(packed):
        assert [length for _, length in row] == lengths[plan.row(*divmod(index, ranks))].tolist()
    lengths_of = {number: length for row in packed for number, length in row}
    assert sorted(lengths_of) == list(range(len(lengths_of)))
    shown = {number: length for row in padded for number, length in row if number is not None}
    assert shown.items() <= lengths_of.items()
    assert len(shown) == len(lengths_of) or len(padded) == figures._PADDED_ROWS
    for row in padded:
        slots = {length + more for (_, length), (_, more) in zip(row[::2], row[1::2], strict=True)}
        assert slots == {max(length for number, length in row if number is not None)}
    assert all(sum(length for _, length in row) <= capacity for row in padded + packed)


@pytest.mark.slow
def test_draws_plan_without_steps(tmp_path):
    lengths = np.full(4, 10, dtype=np.int32)
    results = results_of(lengths, capacity=20, ranks=2)
    empty = results[3]._replace(plan=Plan(np.zeros(0, np.int32), np.zeros(1, np.int64), 2, 20))
    figures.draw_plan(tmp_path / "a.png", results[0], empty, lengths, COST, "title", 0)
    assert (tmp_path / "a.png").exists()


def test_json_dash_prints_only_numbers_to_standard_output(tmp_path, capsys):
    (tmp_path / "lengths.json").write_text(json.dumps([10] * 60))
    assert run("plan", tmp_path / "lengths.json", "--capacity", 20, "--out", tmp_path, "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["documents"] == 60
    assert "60 documents, 600 tokens" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths.json", "plan.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "lengths.json"], "--json lengths.json can't be written: it is the same file as lengths.json"),
        (["--json", "link.json"], "--json link.json can't be written: it is the same file as lengths.json"),
        (["--json", "out/plan.png", "--out", "out"], "it is the same file as out/plan.png"),
        (["--out", "link.png"], "--out link.png can't be written: it is the same file as lengths.json"),
        (["--model", ".", "--json", "config.json"], "it is the same file as config.json, which would be lost"),
    ],
)
def test_refuses_an_output_that_is_the_input(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text("[10, 10]")
    (tmp_path / "config.json").write_text("{}")
    for link in ("link.json", "link.png"):
        (tmp_path / link).symlink_to("lengths.json")
    assert run("plan", "lengths.json", "--capacity", 20, *arguments) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "lengths.json").read_text() == "[10, 10]"
    assert not (tmp_path / "out").exists()
