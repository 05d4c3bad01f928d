import json
import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from tritonpack.cli import main
from tritonpack.cli.plan import figure, report
from tritonpack.cli.plan.strategies import BASELINES, OURS, compare, our_way
from tritonpack.packing.cost import CostModel
from tritonpack.packing.plan import Plan

COST = CostModel(per_token=30_000.0, per_square=1.0)


@pytest.fixture
def lengths():
    return np.random.default_rng(0).integers(1, 257, 2000).astype(np.int32)


def run(*arguments):
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    return exit_info.value.code


def results_of(lengths, capacity=1024, ranks=4, epochs=1):
    ways = (our_way("quadratic", "drop", 0.01, 1, COST), *BASELINES)
    total = int(lengths.sum())
    return compare(
        ways,
        lengths,
        total_tokens=total,
        capacity=capacity,
        num_ranks=ranks,
        seed=0,
        epochs=epochs,
        cost=COST,
        planned=lambda epochs: None,
    )


def test_plans_prints_and_draws(tmp_path, lengths, capsys):
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
    assert list(ways) == [OURS, *(way.name for way in BASELINES)]
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
    assert f"padded rows {times:.2f} times as long" in " ".join(output.split())
    picture = (out / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 40_000  # an empty figure has 5,000 or so


@pytest.mark.heavy
def test_few_documents_per_step_are_pointed_out(tmp_path, lengths, capsys):
    np.save(tmp_path / "lengths.npy", lengths)
    arguments = ("plan", tmp_path / "lengths.npy", "--capacity", 600, "--out", tmp_path)
    assert run(*arguments) == 0
    alone = capsys.readouterr().out
    assert "A step holds about 4 documents, few to combine: --steps-together" in " ".join(alone.split())
    assert run(*arguments, "--steps-together", 64) == 0
    together = capsys.readouterr().out
    assert "few to combine" not in " ".join(together.split())
    full = [float(re.search(rf"^ {OURS} +[\d,]+ +([\d.]+)", text, re.MULTILINE)[1]) for text in (alone, together)]
    assert full[0] < 95 < 98 < full[1]


def test_the_picture_has_the_name_that_was_asked_for(tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("\n".join(["7"] * 40))
    code = run("plan", tmp_path / "lengths.txt", "--capacity", 14, "--ranks", 2, "--out", tmp_path / "deep" / "a.png")
    assert code == 0
    assert (tmp_path / "deep" / "a.png").exists()
    assert "Means over" not in capsys.readouterr().out


def test_overlong_documents_are_reported_and_count_as_tokens(tmp_path, capsys):
    (tmp_path / "lengths.json").write_text(json.dumps([10] * 60 + [100]))
    numbers = tmp_path / "plan.json"
    arguments = ("plan", tmp_path / "lengths.json", "--capacity", 20, "--out", tmp_path, "--json", numbers)
    assert run(*arguments) == 2
    assert "document 60, 100 tokens" in capsys.readouterr().err
    assert run(*arguments, "--overlong", "drop") == 0
    assert "1 documents longer than the capacity dropped: 100 tokens lost." in capsys.readouterr().out
    assert json.loads(numbers.read_text())["ways"][OURS]["tokens_covered"] == pytest.approx(600 / 700)


def test_costs_of_a_model(tmp_path, capsys):
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
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        head_dim=16,
        num_key_value_heads=4,
        intermediate_size=128,
        vocab_size=256,
    )
    assert f"attention to documents of {expected.per_token / expected.per_square:,.0f} tokens" in output
    assert json.loads((tmp_path / "plan.json").read_text())["cost"]["per_token"] == expected.per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "capacity"),
        (["--capacity", "0"], "--capacity"),
        (["--capacity", "20", "--ranks", "0"], "--ranks"),
        (["--capacity", "20", "--tail", "wag"], "--tail"),
        (["--capacity", "20", "--ranks", "61"], "60 documents can't give each of 61 ranks one"),
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
)
def test_bad_usage_is_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text(json.dumps([10] * 60))
    assert run("plan", "lengths.json", *arguments) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]*\n", captured.err)
    assert message in captured.err


def test_a_bad_file_is_named(tmp_path, capsys):
    (tmp_path / "lengths.jsonl").write_text("3\nNaN\n")
    assert run("plan", tmp_path / "lengths.jsonl", "--capacity", 5, "--out", tmp_path) == 2
    assert f"{tmp_path}/lengths.jsonl, line 2, is nan" in capsys.readouterr().err
    assert not (tmp_path / "plan.png").exists()


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    find_spec = "tritonpack.cli.app.importlib.util.find_spec"
    monkeypatch.setattr(find_spec, lambda name: None if name == "matplotlib" else name)
    assert run("plan", "lengths.json", "--capacity", 5) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    monkeypatch.setattr(find_spec, lambda name: None if name == "transformers" else name)
    assert run("plan", "lengths.json", "--capacity", 5, "--model", "config.json") == 2
    assert "--model needs transformers" in capsys.readouterr().err


def test_the_table_fits_a_plain_terminal(lengths, capsys):
    from rich.console import Console

    results = results_of(lengths, epochs=2)
    Console(width=80).print(report.table(results, 2))
    output = capsys.readouterr().out
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_100_percent_means_all():
    assert report._percent(1.0) == "100"
    assert report._percent(0.999999) == "99.99"
    assert report._percent(0.98165) == "98.17"


def test_letters_count_on_after_z():
    assert [figure._letters(number) for number in (0, 25, 26, 51, 52, 701, 702)] == [
        *("A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"),
    ]


def test_lines_lie_end_to_end_and_padded_ones_are_as_wide_as_their_longest():
    lengths = np.array([3, 5, 2])
    packed = figure._packed_line([2, 0, 1], lengths)
    assert [(x.document, x.start, x.length) for x in packed] == [(2, 0, 2), (0, 2, 3), (1, 5, 5)]
    padded = figure._padded_line([2, 1], lengths)
    assert [(x.document, x.start, x.length) for x in padded] == [(2, 0, 2), (None, 2, 3), (1, 5, 5), (None, 10, 0)]


@pytest.mark.parametrize(("ranks", "capacity"), [(1, 256), (4, 1024), (40, 600)])
def test_draws_what_it_says(tmp_path, lengths, ranks, capacity):
    """One rank, several, and more ranks than lines; each document of ours is drawn twice, once on each side."""
    results = results_of(lengths, capacity, ranks)
    drawn = []
    original = figure._draw_lines

    def keep(axes, lines, *rest):
        drawn.append((axes.get_title(), lines))
        original(axes, lines, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(figure, "_draw_lines", keep)
        figure.draw(tmp_path / "a.png", results[0], results[3], lengths, COST, "title", 0)
    assert (tmp_path / "a.png").stat().st_size > 40_000
    (_, padded), (_, packed) = drawn
    plan = results[0].plan
    for index, line in enumerate(packed):
        assert [segment.document for segment in line] == plan.row(*divmod(index, ranks)).tolist()
    documents = {segment.document for line in packed for segment in line}
    shown = {segment.document for line in padded for segment in line if segment.document is not None}
    assert shown <= documents
    assert shown == documents or len(padded) == figure._PADDED_LINES
    assert all(line[-1].start + line[-1].length <= capacity for line in padded + packed)


def test_a_way_without_a_whole_step_is_drawn_as_such(tmp_path):
    lengths = np.full(4, 10, dtype=np.int32)
    results = results_of(lengths, capacity=20, ranks=2)
    empty = replace(results[3], plan=Plan(np.zeros(0, np.int32), np.zeros(1, np.int64), 2, 20))
    figure.draw(tmp_path / "a.png", results[0], empty, lengths, COST, "title", 0)
    assert (tmp_path / "a.png").exists()
