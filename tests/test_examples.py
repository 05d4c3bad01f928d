"""The examples run, and what they train gets better."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[1] / "examples"


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"train_packed", "train_with_trainer"}


@pytest.mark.parametrize("name", ["train_packed", "train_with_trainer"])
def test_training_lowers_the_loss(name):
    if name == "train_with_trainer":
        pytest.importorskip("accelerate")
    losses = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](steps=10)
    assert len(losses) == 10
    assert losses[-1] < losses[0]
