"""The demo as a whole, in miniature."""

import multiprocessing
import re

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from tritonpack.cli import main
from tritonpack.cli.demo import settings_for
from tritonpack.cli.demo.checks import check_ways
from tritonpack.cli.demo.corpus import read_corpus
from tritonpack.cli.demo.model import WAYS, build_model, collate, padded_batch
from tritonpack.cli.demo.training import ProcessFailedError, Training, train_in_turns


@pytest.fixture
def settings():
    return settings_for("cpu", "auto", "auto", max_length=128, threads=1, seed=0)


@pytest.fixture
def corpus(small_library):
    return read_corpus(max_length=128, num_validation=10, seed=0)


@pytest.fixture
def imported_once(monkeypatch):
    """Processes come from one that has imported what they need, which takes each of them longer than its work. They
    are given pickled arguments and nothing else, as ever."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo", "transformers.models.llama.modeling_llama", "tritonpack.patches"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: server)


@pytest.mark.heavy
def test_the_whole_demo(small_library, tmp_path, capsys, imported_once):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--steps", "4", "--documents", "4", "--max-length", "128", "--device", "cpu", "--out", str(out)])
    output = capsys.readouterr().out
    assert exit_info.value.code == 0, output
    assert "80 documented functions" in output
    assert "can't parse them: 1 file." in output
    assert re.search(r"padded and packed agree", output)
    assert re.search(r"padded and naive don't agree", output)
    picture = (out / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # an empty figure has 5,000 or so


def test_every_way_sees_the_same_tokens_and_predicts_the_same_ones(corpus):
    documents = corpus.steps(1, 5, seed=0)[0]
    padded, naive, packed = (collate(way, documents) for way in WAYS)
    assert naive.keys() == packed.keys()
    assert torch.equal(naive["input_ids"], packed["input_ids"])
    real = padded["attention_mask"].bool()
    assert torch.equal(padded["input_ids"][real], packed["input_ids"][0])
    predicted = padded["labels"][:, 1:][padded["labels"][:, 1:] >= 0]
    assert torch.equal(predicted, packed["labels"][packed["labels"] >= 0])


def test_the_same_seed_gives_the_same_model_in_any_precision(settings):
    first, again, precise = build_model(settings), build_model(settings), build_model(settings, torch.float64)
    for a, b, c in zip(first.parameters(), again.parameters(), precise.parameters(), strict=True):
        assert torch.equal(a, b)
        assert c.dtype == torch.float64
        assert torch.equal(a.double(), c)


def test_checks_tell_exact_from_leaking(corpus, settings):
    checks = check_ways(corpus.steps(1, 4, seed=0)[0], settings)
    assert checks.exact("padded")
    assert checks.exact("packed")
    assert not checks.logits.exact("naive")
    assert not checks.gradients.exact("naive")
    assert checks.moved["packed"] == 0.0
    assert checks.moved["naive"] > 1000 * checks.logits.bound


def test_a_run_measures_what_it_did(corpus, settings):
    steps = corpus.steps(3, 4, seed=0)
    training = Training("padded", steps, corpus.validation, settings)
    for _ in steps:
        training.step()
    run = training.finish()
    assert run.losses[-1] < run.losses[0]
    assert run.tokens == tuple(sum(map(len, step)) for step in steps)
    assert run.positions == tuple(4 * max(map(len, step)) for step in steps)
    assert len(run.seconds) == 3
    assert min(run.seconds) > 0
    # Judged by hand: each held-out document alone.
    model = build_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.shape.learning_rate)
    for step in steps:
        model(**padded_batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        counts = [len(document) - 1 for document in corpus.validation]
        losses = [model(**padded_batch([document])).loss.item() for document in corpus.validation if len(document) > 1]
    alone = sum(loss * count for loss, count in zip(losses, filter(None, counts), strict=True)) / sum(counts)
    assert run.validation_loss == pytest.approx(alone, rel=100 * torch.finfo(torch.float32).eps)


def test_a_failing_process_is_an_error(corpus, settings, imported_once):
    with pytest.raises(ProcessFailedError, match="training the padded way failed with exit code 1"):
        train_in_turns([[]], corpus.validation, settings)
