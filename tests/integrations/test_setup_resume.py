"""setup: trainings go on with other arguments if the batches of the epoch stay, or say which argument changes them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tritonpack
from tests.integrations.test_setup import DOCUMENTS, StopAt, Watch, make_trainer

TOKENS = 64
STEPS = 10  # rows of an epoch


def trained(folder: Path, resume: int | None = None, stop: int | None = None, **options: Any) -> tuple[Any, list[Any]]:
    """The trainer, and the documents of each batch that it has trained on."""
    packing = {name: options.pop(name) for name in ("tokens", "lookahead", "max_document_length") if name in options}
    options = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1000, **options}
    trainer = make_trainer(folder, **options)
    tritonpack.setup(trainer, **{"tokens": TOKENS, "steps_together": 1, **packing})
    watch = Watch(trainer.model)
    if stop is not None:
        trainer.add_callback(StopAt(stop))
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return trainer, watch.batches


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "more epochs": (4, {"num_train_epochs": 1}, {"num_train_epochs": 3}),
    "more epochs after the last": (STEPS, {"num_train_epochs": 1}, {"num_train_epochs": 2}),
    "fewer epochs": (4, {"num_train_epochs": 3}, {"num_train_epochs": 1}),
    "more steps": (4, {"max_steps": 5}, {"max_steps": 24}),
    "steps in place of epochs": (13, {"num_train_epochs": 2}, {"max_steps": 24}),
    "logging and loading": (
        4, {}, {"logging_steps": 3, "save_steps": 7, "dataloader_num_workers": 1, "lookahead": 0.011},
    ),
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled("more epochs", "more steps")
def test_goes_on_with_the_same_batches(case: str, tmp_path: Path) -> None:
    step, first, then = CASES[case]
    whole, batches = trained(tmp_path / "whole", **then)
    trained(tmp_path / "parts", stop=step, **first)
    resumed, rest = trained(tmp_path / "parts", resume=step, **then)
    assert rest == batches[step:]
    assert resumed.state.global_step == whole.state.global_step
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, whole.model.get_parameter(name)), name


ANEW = r" Restore that, or pass ignore_data_skip=True in the TrainingArguments to begin the epoch anew\.$"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"tokens": 72}, r"the rest of its epoch 0 has other batches since: tokens was 64 and is 72\." + ANEW),
    "seed": ({"data_seed": 5}, r"its data_seed \(or else seed\) was 0 and is 5\. Set that seed in the TrainingArgu"),
    "strategy": (
        {"train_sampling_strategy": "sequential"},
        r"the shuffling \(train_sampling_strategy\) was True and is False\." + ANEW,
    ),
    "documents": (
        {"train_dataset": DOCUMENTS[::-1]},
        r"Train on the same documents in the same order, with the same max_",
    ),
    "cut": (
        {"max_document_length": 9},
        r"other lengths.*with the same max_document_length, or pass ignore_data_skip=True",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        r"after 4 batches of epoch 0, and Trainer would resume after 8 batches of epoch 0, because "
        r"gradient_accumulation_steps was 1 and is 2\." + ANEW,
    ),
}


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_names_what_changes_the_batches(case: str, tmp_path: Path) -> None:
    options, message = OTHERS[case]
    trained(tmp_path, stop=4)
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, resume=4, **options)


@pytest.mark.heavy
def test_names_epochs_that_need_more_steps(tmp_path: Path) -> None:
    """The first epoch alone takes fewer steps than the longest of six, which all then have."""
    trainer, _ = trained(tmp_path, tokens=40, stop=2, num_train_epochs=1)
    short = len(trainer.get_train_dataloader())
    longer = len(trained(tmp_path / "longer", tokens=40, stop=1, num_train_epochs=6)[0].get_train_dataloader())
    assert short < longer
    with pytest.raises(ValueError, match=f"max_steps give each epoch {longer} steps, and it had {short}.{ANEW}"):
        trained(tmp_path, tokens=40, resume=2, num_train_epochs=6)
