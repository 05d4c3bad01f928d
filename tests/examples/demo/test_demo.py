"""The demo as a whole and its parts, on a small library."""

import math
import re
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from examples.demo import compare_losses, isolation, settings_for
from examples.demo.__main__ import main
from examples.demo.corpus import read_corpus
from examples.demo.grpo.__main__ import main as grpo
from examples.demo.training import WAYS, Run, build_model, collate, train, train_in_turns


@pytest.fixture
def settings():
    return settings_for("cpu", "auto", "auto", max_length=128, threads=1, seed=0)


@pytest.fixture
def corpus(small_library):
    return read_corpus(max_length=128, num_validation=10, seed=0)


@pytest.mark.slow
def test_demo_trains_all_ways_and_draws(small_library, tmp_path, capsys, imported_once):
    out = tmp_path / "out"
    arguments = ["--steps", "4", "--documents", "4", "--max-length", "128", "--device", "cpu", "--out", str(out)]
    code = main(arguments)
    output = " ".join(capsys.readouterr().out.split())
    assert code == 0, output
    assert "80 documented functions" in output
    assert all(re.search(rf" {way} +[\d,]+ +[\d.]+x ", output) for way in WAYS)
    assert "packed: isolated: documents of" in output
    assert re.search(r"naive: documents .* see each other: the leak begins in .*layers\.0", output)
    picture = (out / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # an empty figure has 5,000 or so


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        (main, "--steps 1", "argument --steps: must be at least 3; got 1"),
        (main, "--steps many", "--steps"),
        (main, "--device cuda", "torch sees no GPU here; use --device cpu or auto"),
        (main, "--nonsense", "--nonsense"),
        (main, "--out /proc/nowhere", "/proc/nowhere"),
        (grpo, "--completions 1", "--completions"),
        (grpo, "--prompt-length 8", "--prompt-length"),
        (grpo, "--documents 3", "--documents"),
    ],
)
def test_wrong_options_exit_with_2(program, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        program(arguments.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_all_ways_have_the_same_tokens_and_labels(corpus):
    documents = corpus.steps(1, 5, seed=0)[0]
    padded, unpadded, naive, packed = (collate(way, documents, "cpu") for way in WAYS)
    assert all(torch.equal(padded[name], unpadded[name]) for name in padded | unpadded)
    assert naive.keys() == packed.keys()
    assert torch.equal(naive["input_ids"], packed["input_ids"])
    real = padded["attention_mask"].bool()
    assert torch.equal(padded["input_ids"][real], packed["input_ids"][0])
    predicted = padded["labels"][:, 1:][padded["labels"][:, 1:] >= 0]
    assert torch.equal(predicted, packed["labels"][packed["labels"] >= 0])


def test_packed_is_isolated_and_naive_leaks(settings):
    isolated, proof = isolation("packed", settings)
    assert isolated
    assert "moved by other documents 0.0e+00" in proof
    isolated, leak = isolation("naive", settings)
    assert not isolated
    assert "see each other" in leak


def test_run_has_losses_of_steps_and_of_held_out_documents(corpus, settings):
    steps = corpus.steps(3, 4, seed=0)
    *progress, run = train("padded", steps, corpus.validation, settings)
    assert progress == [None] * 4
    assert run.losses[-1] < run.losses[0]
    assert run.tokens == tuple(sum(map(len, step)) for step in steps)
    assert run.computed == tuple(4 * max(map(len, step)) for step in steps)
    assert len(run.seconds) == 3
    assert min(run.seconds) > 0
    # The same training by hand, and the held-out documents in one padded batch.
    model = build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    for step in steps:
        model(**collate("padded", step, "cpu")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        together = model.eval()(**collate("padded", corpus.validation, "cpu")).loss.item()
    assert run.validation_loss == pytest.approx(together, rel=100 * torch.finfo(torch.float32).eps)


def test_unpadded_trains_on_tokens_alone(corpus, settings):
    steps = corpus.steps(3, 4, seed=0)
    (*_, padded), (*_, unpadded) = (train(way, steps, corpus.validation, settings) for way in ("padded", "unpadded"))
    assert unpadded.gap(padded) < 1e-5
    assert sum(unpadded.tokens) == sum(unpadded.computed) < sum(padded.computed)


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "error", "words"), [(1, RuntimeError, "empty"), (-1, BrokenProcessPool, "")])
def test_failure_of_a_process_ends_the_training(threads, error, words, corpus, settings, imported_once):
    """An exception, and its death."""
    with pytest.raises(error, match=words):
        train_in_turns([[]], corpus.validation, replace(settings, threads=threads))


def make_run(losses, peak_bytes=2**20 * 50, computed=100):
    steps = len(losses)
    seconds = (9.0, 9.0, *[0.5] * (steps - 2))
    return Run(tuple(losses), seconds, (100,) * steps, (computed,) * steps, peak_bytes, validation_loss=2.5)


def make_runs(packed_gap=1e-6, naive_gap=1e-2, unpadded_gap=1e-7):
    gaps = {"unpadded": unpadded_gap, "naive": naive_gap, "packed": packed_gap}
    losses = [5.0, 4.0, 3.0, 2.0]
    moved = {way: make_run([loss + gap for loss in losses]) for way, gap in gaps.items()}
    return {"padded": make_run(losses, computed=200), **moved}


def test_speed_padding_and_gap():
    runs = make_runs()
    assert runs["padded"].tokens_per_second == 200  # the slow first two steps aren't counted
    assert runs["padded"].padding_share == 0.5
    assert runs["naive"].gap(runs["padded"]) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("gaps", "nothing_leaks", "closer", "words"),
    [
        ({}, False, True, "training loss stays within 1.0e-07 of padded's, packed's within 1.0e-06"),
        ({}, False, True, "naive's within 1.0e-02."),
        *(({f"{way}_gap": gap}, False, False, f" {way.upper()} IS NO CLOSER THAN NAIVE: {way} training went wrong.")
          for way in ("unpadded", "packed") for gap in (0.1, math.nan)),
        ({"packed_gap": 1e-7, "naive_gap": 0.0}, True, True, "within"),
    ],
)  # fmt: skip
def test_packed_training_is_closer_to_padded_than_naive(gaps, nothing_leaks, closer, words):
    """Unless nothing leaks."""
    found, sentence = compare_losses(make_runs(**gaps), nothing_leaks=nothing_leaks)
    assert found == closer
    assert words in sentence
    assert closer == ("NO CLOSER" not in sentence)
