import csv
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import torch

from tritonpack import varlen_attention
from tritonpack.cli import main
from tritonpack.cli.bench import batch, measure, peers
from tritonpack.cli.bench.batch import Shape, make_batch
from tritonpack.cli.bench.command import compare
from tritonpack.cli.bench.measure import Times
from tritonpack.cli.bench.report import Row, reasons, table

SHAPE = Shape(90, 4, 1, 16, torch.float32, torch.device("cpu"))
SMALL = ("--tokens", "96", "--heads", "4", "--head-dim", "16", "--repeats", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def run(*arguments):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments])
    return exit_info.value.code


@pytest.mark.heavy
def test_a_table_a_csv_and_a_picture(capsys, tmp_path):
    assert run(*SMALL, "--out", str(tmp_path / "new")) == 0
    output = capsys.readouterr().out
    assert "96 tokens, 4 query heads and 1 key heads of 16, float32" in output
    for name in ("tritonpack", "sdpa, padded", "sdpa, dense mask"):
        assert len(re.findall(rf"│ {name} +│ +[\d.]+ \([\d.]+-[\d.]+\) │", output)) == 4
    assert output.count("1.00x") >= 4
    with (tmp_path / "new" / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 3 * 2
    assert {row["status"] for row in rows} == {"ok"}
    assert all(0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"]) for row in rows)
    assert {(row["tokens"], row["repeats"], row["backend"]) for row in rows} == {("96", "1", "blocked")}
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.heavy
def test_wrong_results_are_never_timed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "varlen_attention", lambda *a: varlen_attention(*a) * 1.001)
    assert run(*SMALL, "--out", str(tmp_path)) == 1
    output = capsys.readouterr().out
    assert re.search(r"│ tritonpack +│ +not timed │ +not timed │", output)
    assert re.search(r"Not timed: tritonpack, one document: AssertionError: out.* beyond twice plain", output)
    assert "1.00x" not in output
    with (tmp_path / "bench.csv").open() as file:
        assert all(not row["p50_ms"] for row in csv.DictReader(file) if row["implementation"] == "tritonpack")


@pytest.mark.parametrize("name", ["tritonpack", "sdpa, padded", "sdpa, dense mask"])
@pytest.mark.parametrize("place", [0, 37, 89], ids=["first", "in the middle", "last"])
def test_each_peer_is_right_and_every_checked_value_counts(name, place, monkeypatch):
    made = make_batch((40, 1, 49), SHAPE)
    (prepared,) = (peers.Prepared(peer, made) for peer in peers.peers_for(SHAPE.device) if peer.name == name)
    measure.verify(made, prepared)
    monkeypatch.setattr(torch.autograd, "grad", spoilt(torch.autograd.grad, prepared, place))
    with pytest.raises(AssertionError, match=r"dk beyond|dk, dv beyond"):
        measure.verify(made, prepared)


def spoilt(grad, prepared, place):
    """autograd.grad with the gradient of one key of the packed layout off by a little."""

    def wrong(outputs, leaves, *rest, **options):
        gradients = list(grad(outputs, leaves, *rest, **options))
        if leaves is prepared.leaves:
            keys = torch.arange(gradients[1].numel()).view_as(gradients[1])
            gradients[1].view(-1)[prepared.layout.leave(keys)[place, -1, 0]] += 0.01
        return tuple(gradients)

    return wrong


def test_long_documents_are_checked_at_their_end(monkeypatch):
    monkeypatch.setattr(measure, "_CHECKED_ROWS", 8)
    made = make_batch((60, 30), SHAPE)
    prepared = peers.Prepared(peers.Peer(peers.OURS, peers.ours), made)
    measure.verify(made, prepared)
    with pytest.raises(AssertionError, match="out"):
        measure.verify(make_batch((60, 30), SHAPE, seed=1), prepared)


@pytest.mark.heavy
def test_a_peer_that_cannot_says_why(monkeypatch):
    monkeypatch.setattr(peers, "MOST_PADDING", 1)
    ours, padded, dense = compare("mixed", make_batch((80, 10), SHAPE), peers.peers_for(SHAPE.device), 1)
    assert padded.reason == "ValueError: 2 rows of 80 would be 2 times the tokens"
    assert padded.forward is None
    assert ours.both > 0
    assert dense.both > 0


@pytest.mark.parametrize("tokens", [16, 17, 1000, 4096])
def test_lengths_fill_the_batch(tokens):
    for lengths in batch.distributions(tokens).values():
        assert sum(lengths) == tokens
        assert min(lengths) >= 1


def test_calls_alternate():
    order = []
    times = measure.time_alternating({n: lambda n=n: order.append(n) for n in "ab"}, 3, torch.device("cpu"))
    assert "".join(order) == "ab" + "ababab"
    assert set(times) == {"a", "b"}


def test_times_stand_beside_ours(capsys):
    from rich.console import Console

    quick, slow = Times(1, 1, 1), Times(2, 3, 4.567)
    rows = [
        Row("short", 3, "tritonpack", quick, quick),
        Row("short", 3, "other", slow, slow),
        Row("long", 1, "tritonpack", reason="ValueError: [no]"),
        Row("long", 1, "other", slow, slow),
    ]
    Console(width=200).print(table(rows))
    output = capsys.readouterr().out
    assert re.search(r"short \(3\) │ tritonpack +│ 1.00 \(1.00-1.00\) .* 2.00 │ +1.00x", output)
    assert re.search(r"│ other +│ 3.00 \(2.00-4.57\) .* 6.00 │ +3.00x", output)
    assert re.search(r"long \(1\) +│ tritonpack +│ +not timed", output)
    assert reasons(rows) == ["tritonpack, long: ValueError: [no]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "3"], "--tokens"),
        (["--head-dim", "1000"], "--head-dim must be from 1 to 512; got 1000"),
        (["--device", "cuda"], "torch sees no GPU here"),
        (["--dtype", "int8"], "--dtype"),
        (["--out", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
