"""setup: trainings go on with other arguments if the batches of the epoch stay, or say which argument changes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import tritonpack
from tests.integrations.test_setup import DOCUMENTS, StopAt, Watch, make_trainer

TOKENS = 64
STEPS = 10  # rows of an epoch
SETUP = {"tokens", "lookahead", "max_document_length"}  # arguments of setup


def trained(
    folder: Path, resume: int | None = None, stop: int | None = None, callback: Any = None, **options: Any
) -> tuple[Any, list[Any]]:
    """The trainer, and the documents of each batch that it has trained on."""
    packing = {name: options.pop(name) for name in SETUP & options.keys()}
    options = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1000, **options}
    trainer = make_trainer(folder, **options)
    tritonpack.setup(trainer, **{"tokens": TOKENS, "steps_together": 1, **packing})
    watch = Watch(trainer.model)
    for one in (callback, None if stop is None else StopAt(stop)):
        if one is not None:
            trainer.add_callback(one)
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    return trainer, watch.batches


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "within the first epoch": (4, {}, {}),
    "after the first epoch": (11, {}, {}),
    "within the second epoch": (14, {}, {}),
    "more epochs": (4, {"num_train_epochs": 1}, {"num_train_epochs": 3}),
    "more epochs after the last": (STEPS, {"num_train_epochs": 1}, {"num_train_epochs": 2}),
    "fewer epochs": (4, {"num_train_epochs": 3}, {"num_train_epochs": 1}),
    "more steps": (4, {"max_steps": 5}, {"max_steps": 24}),
    "steps in place of epochs": (13, {"num_train_epochs": 2}, {"max_steps": 24}),
    "logging and loading": (
        4, {}, {"logging_steps": 3, "save_steps": 7, "dataloader_num_workers": 1, "lookahead": 0.011},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_goes_on_with_the_same_batches(case: str, tmp_path: Path) -> None:
    step, first, then = CASES[case]
    whole, batches = trained(tmp_path / "whole", **then)
    trained(tmp_path / "parts", stop=step, **first)
    resumed, rest = trained(tmp_path / "parts", resume=step, **then)
    assert rest == batches[step:]
    assert resumed.state.global_step == whole.state.global_step
    saved = [trainer.state.stateful_callbacks["tritonpack"] for trainer in (resumed, whole)]
    assert saved[0] == saved[1] or first != then
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, whole.model.get_parameter(name)), name


class Steps(TrainerCallback):
    """The numbers of batches that were trained on before each optimizer step ended, and the learning rates after it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.ends: list[int] = []
        self.rates: list[float] = []

    def on_step_end(self, *_: Any, lr_scheduler: Any, **__: Any) -> None:
        self.ends.append(len(self.watch.batches))
        self.rates.append(lr_scheduler.get_last_lr()[0])


ROWS = 11  # of an epoch, if there are two of them
ACCUMULATIONS: dict[str, list[tuple[int, int]]] = {  # accumulations, and the optimizer step that each one ends with
    "more": [(1, 4), (2, 14)],
    "fewer": [(2, 2), (1, 20)],
    "over the end of an epoch": [(2, 3), (3, 9)],
    "at the end of an epoch": [(3, 4), (2, 10)],
    "in the second epoch": [(1, 15), (4, 17)],
    "twice": [(1, 4), (2, 6), (4, 10)],
    "twice with the same": [(1, 4), (2, 6), (2, 14)],
    "and back": [(2, 2), (1, 4), (2, 13)],
}


@pytest.mark.slow
@pytest.mark.parametrize("by", ["num_train_epochs", "max_steps"])
@pytest.mark.parametrize("case", ACCUMULATIONS)
def test_goes_on_with_another_accumulation(case: str, by: str, tmp_path: Path) -> None:
    """No batch twice or left out, and the learning rate falls to 0 at the last step."""
    batches = trained(tmp_path / "whole")[1]
    assert len(batches) == 2 * ROWS
    done, taken, resume = 0, 0, None
    for accumulated, step in ACCUMULATIONS[case]:
        per_epoch = -(-ROWS // accumulated)
        trainer = make_trainer(
            tmp_path / "parts", gradient_accumulation_steps=accumulated, save_strategy="steps", save_steps=1000,
            lr_scheduler_type="linear", learning_rate=1.0,
            **({"num_train_epochs": 2} if by == "num_train_epochs" else {"max_steps": 2 * per_epoch}),
        )  # fmt: skip
        tritonpack.setup(trainer, TOKENS, steps_together=1)
        watch = Watch(trainer.model)
        steps = Steps(watch)
        trainer.add_callback(steps)
        trainer.add_callback(StopAt(step))
        trainer.train(resume_from_checkpoint=resume)
        of_epoch = [*range(accumulated, ROWS, accumulated), ROWS]
        ends = [end for end in [*of_epoch, *(ROWS + end for end in of_epoch)] if end > done][: step - taken]
        assert [done + end for end in steps.ends] == ends
        assert watch.batches == batches[done : ends[-1]]
        total = trainer.state.max_steps
        assert steps.rates == pytest.approx([1 - number / total for number in range(taken + 1, step + 1)])
        done, taken, resume = ends[-1], step, str(tmp_path / "parts" / f"checkpoint-{step}")
    assert (done, taken) == (2 * ROWS, total)


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
        {"gradient_accumulation_steps": 3},
        r"after 4 batches of epoch 0, which isn't a multiple of gradient_accumulation_steps=3 \(it was 1\)\. Pass a "
        r"divisor of 4, or pass ignore_data_skip=True in the TrainingArguments to begin the epoch anew\.$",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_names_what_changes_the_batches(case: str, tmp_path: Path) -> None:
    options, message = OTHERS[case]
    trained(tmp_path, stop=4)
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, resume=4, **options)


@pytest.mark.slow
def test_names_epochs_that_need_more_steps(tmp_path: Path) -> None:
    """The first epoch alone takes fewer steps than the longest of six, which all then have."""
    trainer, _ = trained(tmp_path, tokens=40, stop=2, num_train_epochs=1)
    short = len(trainer.get_train_dataloader())
    longer = len(trained(tmp_path / "longer", tokens=40, stop=1, num_train_epochs=6)[0].get_train_dataloader())
    assert short < longer
    with pytest.raises(ValueError, match=f"max_steps give each epoch {longer} steps, and it had {short}.{ANEW}"):
        trained(tmp_path, tokens=40, resume=2, num_train_epochs=6)


@pytest.mark.slow
def test_refuses_checkpoints_without_its_state(tmp_path: Path) -> None:
    trained(tmp_path, stop=4)
    path = tmp_path / "checkpoint-4" / "trainer_state.json"
    saved = json.loads(path.read_text())
    saved["stateful_callbacks"]["tritonpack"]["loader"]["version"] = 0
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"it has version 0\. Resume with the version"):
        trained(tmp_path, resume=4)
    del saved["stateful_callbacks"]["tritonpack"]
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"without tritonpack\.setup"):
        trained(tmp_path, resume=4)
    assert len(trained(tmp_path, resume=4, ignore_data_skip=True)[1]) == 2 * ROWS - 4, "its epoch began anew"


@pytest.mark.slow
def test_goes_on_after_an_epoch_that_was_ended_early(tmp_path: Path) -> None:
    class EndEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step == 3

    whole, batches = trained(tmp_path / "whole", callback=EndEpoch())
    trained(tmp_path / "parts", stop=5, callback=EndEpoch())
    resumed, rest = trained(tmp_path / "parts", resume=5, callback=EndEpoch())
    assert rest == batches[5:]
    assert (resumed.state.global_step, resumed.state.max_steps) == (whole.state.global_step, whole.state.max_steps)
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, whole.model.get_parameter(name)), name
