"""setup with VisionPackingCollator: accumulated rows weigh each target alike, also where Trainer wouldn't."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("numba")

from transformers import Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import EXACT, arguments, distance, trained
from tests.packing.vision.examples import KINDS, build, examples
from tests.patches.models import tiny_model
from tests.test_guides import DOCS
from tritonpack.packing.vision.families import FAMILIES

# transformers' classes with accepts_loss_kwargs = False
UNWEIGHTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "gemma4")


def make(folder: Path, name: str, rows: int, **options: Any) -> Trainer:
    given = arguments(folder, max_steps=1, gradient_accumulation_steps=rows, max_grad_norm=0.0)
    return Trainer(build(name), TrainingArguments(**given), train_dataset=examples(name), **options)


@pytest.mark.slow
def test_page_names_the_classes_that_trainer_averages() -> None:
    held_back = {
        name for name in KINDS if not getattr(type(build(name)), "accepts_loss_kwargs", True) and name in FAMILIES
    }
    assert held_back == set(UNWEIGHTED)
    page = (DOCS / "vision.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`accepts_loss_kwargs = False` \(([^)]*)\)", page.replace("\n", " "))
    assert set(re.findall(r"`(\w+)`", line)) == held_back


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma4"])
def test_plain_trainer_is_exact_with_what_the_page_says(name: str, tmp_path: Path) -> None:
    """Three rows of two examples each move the weights as one row of all, if the model is told to take kwargs."""
    dataset = [*examples(name), *examples(name)][:6]
    moves = []
    for told, rows in ((True, 1), (True, 3), (False, 3)):
        model = build(name)
        tritonpack.patch(model)
        if told:
            model.accepts_loss_kwargs = True
        given = arguments(tmp_path, max_steps=1, per_device_train_batch_size=6 // rows, max_grad_norm=0.0,
                          gradient_accumulation_steps=rows, remove_unused_columns=False)  # fmt: skip
        collate = tritonpack.VisionPackingCollator(model)
        moves.append(trained(Trainer(model, TrainingArguments(**given), train_dataset=dataset, data_collator=collate)))
    assert distance(moves[1], moves[0]) <= EXACT
    assert distance(moves[2], moves[0]) > 1e-3, "the mean of the rows' means"


@pytest.mark.slow
@pytest.mark.parametrize("name", UNWEIGHTED)
def test_accumulated_rows_train_as_one(name: str, tmp_path: Path) -> None:
    whole, parts = make(tmp_path, name, 1), make(tmp_path, name, 100)
    assert not parts.model_accepts_loss_kwargs, "transformers means Trainer to take the mean of the rows' means"
    longest = max(len(example["input_ids"]) for example in examples(name))
    tritonpack.setup(whole, 4096, collate_fn=tritonpack.VisionPackingCollator(whole.model))
    tritonpack.setup(parts, longest, collate_fn=tritonpack.VisionPackingCollator(parts.model))
    assert len(parts.get_train_dataloader()) > 1 == len(whole.get_train_dataloader())
    assert distance(trained(parts), trained(whole)) <= EXACT


def test_undo_restores_what_trainer_passes_to_the_model(tmp_path: Path) -> None:
    trainer = make(tmp_path, "qwen2_5_vl", 4)
    collate = tritonpack.VisionPackingCollator(trainer.model)
    assert trainer.model_accepts_loss_kwargs is False
    with pytest.raises(ValueError, match="the row size is 4"):
        tritonpack.setup(trainer, 4, collate_fn=collate)
    assert trainer.model_accepts_loss_kwargs is False
    with tritonpack.setup(trainer, 256, collate_fn=collate):
        assert trainer.model_accepts_loss_kwargs is True
    assert trainer.model_accepts_loss_kwargs is False


def test_other_classes_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.accepts_loss_kwargs = False
    options = TrainingArguments(**arguments(tmp_path, gradient_accumulation_steps=2))
    trainer = Trainer(model, options, train_dataset=[{"input_ids": [3, 4, 5]}])
    with pytest.raises(ValueError, match=r"Trainer doesn't pass num_items_in_batch .*accepts_loss_kwargs = True"):
        tritonpack.setup(trainer, 64)
    model.accepts_loss_kwargs = True
    tritonpack.setup(Trainer(model, options, train_dataset=[{"input_ids": [3, 4, 5]}]), 64).undo()


@pytest.mark.slow
def test_loss_of_a_row_without_targets() -> None:
    model = build("qwen2_5_vl")
    tritonpack.patch(model)
    example = examples("qwen2_5_vl")[1]
    row = tritonpack.VisionPackingCollator(model)([example | {"labels": torch.full_like(example["input_ids"], -100)}])
    assert model(**row).loss.isnan()
    assert model(**row, num_items_in_batch=torch.tensor(3)).loss == 0


@pytest.mark.slow
def test_evaluation_needs_the_collator_too(tmp_path: Path) -> None:
    dataset = examples("qwen2_5_vl")
    for collated in (False, True):
        model = build("qwen2_5_vl")
        collate = tritonpack.VisionPackingCollator(model)
        options = TrainingArguments(**arguments(tmp_path, remove_unused_columns=False))
        own = {"data_collator": collate} if collated else {}
        trainer = Trainer(model, options, train_dataset=dataset, eval_dataset=dataset, **own)
        with tritonpack.setup(trainer, 256, collate_fn=collate):
            if collated:
                assert trainer.evaluate()["eval_loss"] == pytest.approx(model(**collate(dataset)).loss.item())
            else:
                with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
                    trainer.evaluate()
