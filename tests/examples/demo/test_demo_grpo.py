"""`make demo-grpo` as a whole and its parts, on a small library."""

import math
import re

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from examples.demo import settings_for
from examples.demo.corpus import read_corpus
from examples.demo.grpo import compare_losses
from examples.demo.grpo.__main__ import main
from examples.demo.grpo.rollouts import Shape, make_groups
from examples.demo.grpo.training import WAYS, attention_of, collate, loss_of, train
from examples.demo.measuring import Measurements
from examples.demo.training import build_model

SHAPE = Shape(prompts=2, completions=3, prompt_length=60, completion_length=40)


@pytest.fixture
def settings():
    return settings_for("cpu", "auto", "auto", max_length=100, threads=1, seed=0)


@pytest.fixture
def documents(small_library):
    return read_corpus(max_length=100, num_validation=0, seed=0).training


@pytest.mark.slow
def test_demo_trains_all_ways_and_draws(small_library, tmp_path, capsys, imported_once):
    out = tmp_path / "out"
    arguments = ["--steps", 3, "--completions", 3, "--prompt-length", 60, "--completion-length", 40, "--device", "cpu"]
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "3 steps of 2 prompts with 3 completions each" in output
    assert all(re.search(rf" {way} [\d,]+ [\d.]+ ", output) for way in WAYS)
    assert "The losses of all ways agree" in output
    assert re.search(
        r"shared takes \S+ steps in the time of one of padded, and \S+ in the time of one of packed\.", output
    )
    picture = (out / "demo-grpo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000  # an empty figure has 5,000 or so


def test_groups_have_the_shape_and_one_seed_gives_the_same(documents):
    steps, again, other = (make_groups(documents, SHAPE, 5, seed) for seed in (0, 0, 1))
    assert [len(groups) for groups in steps] == [2] * 5
    for group in (group for groups in steps for group in groups):
        assert 52 <= len(group.prompt) <= 60
        assert len(group.completions) == 3
        assert all(1 <= len(completion) <= 40 for completion in group.completions)
        assert group.advantages.mean() == pytest.approx(0)
        assert group.advantages.std() == pytest.approx(1)
        assert [list(ids) for ids in group.sequences()] == [[*group.prompt, *own] for own in group.completions]
    assert all(
        np.array_equal(a.prompt, b.prompt) and np.array_equal(a.advantages, b.advantages)
        for x, y in zip(steps, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert not np.array_equal(steps[0][0].advantages, other[0][0].advantages)


@pytest.mark.fast("tree")
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_each_sequence_alone(way, documents, settings):
    (groups,) = make_groups(documents, SHAPE, 1, seed=0)
    model = build_model(settings).double()
    with attention_of(way, model):
        step = collate(way, groups, "cpu")
        loss = loss_of(model, step)
        loss.backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for advantage, completion, ids in zip(group.advantages, group.completions, group.sequences(), strict=True):
            scores = model(torch.as_tensor(ids)[None]).logits[0, :-1].log_softmax(-1)
            expected -= (
                advantage * scores[torch.arange(len(ids) - 1), torch.as_tensor(ids[1:])][-len(completion) :].sum()
            )
    expected /= sum(len(completion) for group in groups for completion in group.completions)
    expected.backward()
    assert step.tokens == sum(len(ids) for group in groups for ids in group.sequences())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)  # the loss is in float32
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()], rtol=1e-4, atol=1e-7)


def test_ways_with_trees_compute_common_tokens_once(documents, settings):
    steps = make_groups(documents, SHAPE, 3, seed=0)
    runs = {}
    for way in WAYS:
        *progress, runs[way] = train(way, steps, settings)
        assert progress == [None] * 4
    distinct = tuple(
        len({tuple(ids[: i + 1]) for group in groups for ids in group.sequences() for i in range(len(ids))})
        for groups in steps
    )
    assert runs["tree"].computed == distinct
    assert runs["packed"].computed == runs["packed"].tokens == runs["padded"].tokens
    assert sum(runs["padded"].computed) > sum(runs["padded"].tokens)
    # The padding right before a document stays.
    shared = np.subtract(runs["shared"].computed, distinct)
    assert min(shared) >= 0
    assert max(shared) <= SHAPE.prompts * SHAPE.completions
    agree, sentence = compare_losses(runs, torch.float32)
    assert agree, sentence


def make_run(losses, computed=100, peak_bytes=2**20 * 50, seconds=0.5):
    steps = len(losses)
    return Measurements(
        tuple(losses), (9.0, 9.0, *[seconds] * (steps - 2)), (100,) * steps, (computed,) * steps, peak_bytes
    )


def make_runs(gap=1e-7):
    losses = [0.1, 0.2, 0.3]
    return {
        "padded": make_run(losses, computed=123456, peak_bytes=2**20 * 1234, seconds=12.0),
        "packed": make_run([loss + gap for loss in losses], peak_bytes=None),
        "shared": make_run(losses, computed=50, peak_bytes=2**20 * 617, seconds=3.0),
        "tree": make_run(losses, computed=50),
    }


@pytest.mark.parametrize("gap", [1e-3, math.nan])
def test_wrong_losses_are_reported(gap):
    agree, sentence = compare_losses(make_runs(gap), torch.float32)
    assert not agree
    assert f"THE LOSSES OF packed ARE WRONG: the largest gap is {gap:.1e}, and 1e-05 is allowed." in sentence


def test_allowed_gap_finds_sequences_that_see_each_other(documents, settings):
    steps = make_groups(documents, SHAPE, 1, seed=0)
    model = build_model(settings)
    right, wrong = collate("padded", steps[0], "cpu"), collate("packed", steps[0], "cpu")
    wrong = wrong._replace(inputs={name: wrong.inputs[name] for name in ("input_ids", "logits_to_keep")})
    runs = {way: make_run([loss_of(model, step).item()]) for way, step in (("padded", right), ("packed", wrong))}
    agree, _ = compare_losses({way: runs[way if way == "packed" else "padded"] for way in WAYS}, torch.float32)
    assert not agree
