import math

import pytest

pytest.importorskip("rich")

from rich.console import Console

from tritonpack.cli.demo.checks import Checks, Errors
from tritonpack.cli.demo.report import final_loss, loss_gap, table, verdict
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


def make_checks(packed=1e-7, naive=0.5, moved_packed=0.0):
    errors = Errors({"padded": 1e-7, "naive": naive, "packed": packed}, bound=2.1e-7)
    return Checks(errors, errors, {"naive": 0.01, "packed": moved_packed})


def test_measurements():
    runs = make_runs()
    assert runs["padded"].tokens_per_second == 200  # the slow first two steps aren't counted
    assert runs["padded"].padding_share == 0.5
    assert final_loss(make_run("padded", [9.0, 5.0, 4.0, 3.0, 2.0, 1.0])) == 3.0
    assert loss_gap(runs["naive"], runs["padded"]) == pytest.approx(1e-2)


def test_table_shows_what_was_measured():
    console = Console(width=80, record=True, quiet=False)
    with console.capture() as capture:
        console.print(table(make_runs() | {"naive": make_run("naive", [5.5, 4.0, 3.0, 2.0], peak_bytes=None)}))
    lines = [line.split() for line in capture.get().splitlines()]
    rows = {words[0]: " ".join(words) for words in lines if words and words[0] in ("padded", "naive", "packed")}
    for value in ("200", "1.00x", "50 MiB", "50.0%", "3.5000", "2.5000"):
        assert value in rows["padded"]
    assert "unknown" in rows["naive"]
    assert "5.0e-01" in rows["naive"]


def test_packed_agrees_and_naive_does_not():
    findings = verdict(make_runs(), make_checks())
    assert findings.holds
    assert findings.sentences[0].startswith("padded and packed agree")
    assert findings.sentences[1].startswith("padded and naive don't agree")
    assert "moves no bit of the others' logits under packed" in findings.sentences[3]


def test_a_leak_of_packed_is_said_and_fails():
    findings = verdict(make_runs(), make_checks(moved_packed=1e-9))
    assert not findings.holds
    assert "THE OTHERS' LOGITS by up to 1.0e-09 under packed" in findings.sentences[3]


@pytest.mark.parametrize("error", [1e-3, math.nan])
def test_wrong_packed_logits_are_said_and_fail(error):
    findings = verdict(make_runs(), make_checks(packed=error))
    assert not findings.holds
    assert findings.sentences[0].startswith("padded and packed DISAGREE")


def test_a_packed_run_that_goes_wrong_later_is_said_and_fails():
    findings = verdict(make_runs(packed_gap=0.1), make_checks())
    assert not findings.holds
    assert "PACKED IS NO CLOSER THAN NAIVE" in findings.sentences[2]


def test_naive_may_agree_where_nothing_can_leak():
    """With one document per step the three ways are one."""
    findings = verdict(make_runs(packed_gap=0.0, naive_gap=0.0), make_checks(naive=1e-7))
    assert findings.holds
    assert findings.sentences[1].startswith("padded and naive agree")
