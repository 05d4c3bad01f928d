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
SETUP = {"tokens", "max_document_length"}  # arguments of setup


def trained(
    folder: Path, resume: int | None = None, stop: int | None = None, callback: Any = None, **options: Any
) -> tuple[Any, list[Any]]:
    """The trainer, and the documents of each batch that it has trained on."""
    packing = {name: options.pop(name) for name in SETUP & options.keys()}
    options = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1000, **options}
    trainer = make_trainer(folder, **options)
    tritonpack.setup(trainer, **{"tokens": TOKENS, **packing})
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
    "logging and loading": (4, {}, {"logging_steps": 3, "save_steps": 7, "dataloader_num_workers": 1}),
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


ANEW = r" Restore that, or pass ignore_data_skip=True in the TrainingArguments to begin the epoch anew\.$"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"tokens": 72}, r"its epoch 0 has other batches since: the tokens of a row was 64 and is 72\." + ANEW),
    "seed": ({"data_seed": 5}, r"seed was 0 and is 5\. Restore that, or pass ignore_data_skip=True"),
    "strategy": ({"train_sampling_strategy": "sequential"}, r"shuffle was True and is False\." + ANEW),
    "documents": ({"train_dataset": DOCUMENTS[::-1]}, r"Pass the same, in the same order"),
    "cut": ({"max_document_length": 9}, r"other lengths.*cut alike.* Or pass ignore_data_skip=True"),
    "accumulation": (
        {"gradient_accumulation_steps": 3}, r"since: gradient_accumulation_steps was 1 and is 3\." + ANEW
    ),
    "epochs that need more steps": (
        {"num_train_epochs": 6, "tokens": 62}, rf"max_steps give each epoch \d+ steps\.{ANEW}"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_names_what_changes_the_batches(case: str, tmp_path: Path) -> None:
    options, message = OTHERS[case]
    longer = case.startswith("epochs")  # the first epoch alone takes fewer steps than the longest of six
    trained(tmp_path, stop=4, **({"num_train_epochs": 1, "tokens": 62} if longer else {}))
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, resume=4, **options)


@pytest.mark.slow
def test_refuses_checkpoints_without_its_state(tmp_path: Path) -> None:
    trained(tmp_path, stop=4)
    path = tmp_path / "checkpoint-4" / "trainer_state.json"
    saved = json.loads(path.read_text())
    saved["stateful_callbacks"]["tritonpack"]["loader"]["version"] = 0
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"this isn't a state of version 5 of .*Resume with the version"):
        trained(tmp_path, resume=4)
    del saved["stateful_callbacks"]["tritonpack"]
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"without tritonpack\.setup"):
        trained(tmp_path, resume=4)
    assert len(trained(tmp_path, resume=4, ignore_data_skip=True)[1]) == 2 * STEPS - 4, "its epoch began anew"


@pytest.mark.slow
def test_epoch_that_a_callback_ended_is_not_resumed(tmp_path: Path) -> None:
    class EndEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step == 3

    trained(tmp_path, stop=5, callback=EndEpoch())
    with pytest.raises(ValueError, match=r"its epoch 1 has other batches since: a callback ended .*ignore_data_skip"):
        trained(tmp_path, resume=5)
