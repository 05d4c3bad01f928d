import math

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")

from rich.console import Console

from tritonpack.cli.demo.report import compare_losses, final_loss, loss_gap, table
from tritonpack.cli.demo.training import Run


def make_run(way, losses, peak_bytes=2**20 * 50):
    steps = len(losses)
    positions = 200 if way == "padded" else 100
    seconds = (9.0, 9.0, *[0.5] * (steps - 2))
    return Run(way, tuple(losses), seconds, (100,) * steps, (positions,) * steps, peak_bytes, validation_loss=2.5)


def make_runs(packed_gap=1e-6, naive_gap=1e-2):
    losses = [5.0, 4.0, 3.0, 2.0]
    return {
        "padded": make_run("padded", losses),
        "naive": make_run("naive", [loss + naive_gap for loss in losses]),
        "packed": make_run("packed", [loss + packed_gap for loss in losses]),
    }


def test_measurements():
    runs = make_runs()
    assert runs["padded"].tokens_per_second == 200  # the slow first two steps aren't counted
    assert runs["padded"].padding_share == 0.5
    assert final_loss(make_run("padded", [9.0, 5.0, 4.0, 3.0, 2.0, 1.0])) == 3.0
    assert loss_gap(runs["naive"], runs["padded"]) == pytest.approx(1e-2)


def test_the_table_shows_the_measurements():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(make_runs() | {"naive": make_run("naive", [5.5, 4.0, 3.0, 2.0], peak_bytes=None)}))
    lines = [line.split() for line in capture.get().splitlines()]
    rows = {words[0]: " ".join(words) for words in lines if words and words[0] in ("padded", "naive", "packed")}
    for value in ("200", "1.00x", "50 MiB", "50.0%", "3.5000", "2.5000"):
        assert value in rows["padded"]
    assert "unknown" in rows["naive"]
    assert "5.0e-01" in rows["naive"]


def test_packed_training_is_closer_to_padded_than_naive():
    closer, sentence = compare_losses(make_runs(), nothing_leaks=False)
    assert closer
    assert "stays within 1.0e-06 of padded's and naive's within 1.0e-02." in sentence


@pytest.mark.parametrize("gap", [0.1, math.nan])
def test_packed_training_that_goes_wrong_is_reported(gap):
    closer, sentence = compare_losses(make_runs(packed_gap=gap), nothing_leaks=False)
    assert not closer
    assert "PACKED IS NO CLOSER THAN NAIVE" in sentence


def test_naive_training_may_be_as_close_where_nothing_leaks():
    closer, sentence = compare_losses(make_runs(packed_gap=1e-7, naive_gap=0.0), nothing_leaks=True)
    assert closer
    assert "NO CLOSER" not in sentence
