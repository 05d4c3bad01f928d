"""setup with VisionPackingCollator: accumulated rows weigh each target alike, also where Trainer wouldn't."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("numba")

from transformers import Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import EXACT, arguments, distance, trained
from tests.packing.vision.examples import KINDS, build, examples
from tests.test_guides import DOCS
from tritonpack.packing.vision.families import FAMILIES

# transformers' classes with accepts_loss_kwargs = False
UNWEIGHTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "gemma4")


def make(folder: Path, name: str, rows: int, **options: Any) -> Trainer:
    given, model = arguments(folder, max_steps=1, gradient_accumulation_steps=rows, max_grad_norm=0.0), build(name)
    assert not model.accepts_loss_kwargs, "transformers means Trainer to take the mean of the rows' means"
    model.accepts_loss_kwargs = options.pop("accepts", True)
    return Trainer(model, TrainingArguments(**given), train_dataset=examples(name), **options)


@pytest.mark.slow
def test_page_names_the_classes_that_trainer_averages() -> None:
    models = {name: type(build(name)) for name in FAMILIES.keys() & KINDS.keys()}
    held_back = {name for name, model in models.items() if not getattr(model, "accepts_loss_kwargs", True)}
    page = (DOCS / "vision.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`accepts_loss_kwargs = False` \(([^)]*)\)", page.replace("\n", " "))
    assert set(re.findall(r"`(\w+)`", line)) == held_back == set(UNWEIGHTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNWEIGHTED)
def test_accumulated_rows_train_as_one(name: str, tmp_path: Path) -> None:
    whole, parts = make(tmp_path, name, 1), make(tmp_path, name, 100)
    longest = max(len(example["input_ids"]) for example in examples(name))
    for trainer, tokens in ((whole, 4096), (parts, longest)):
        tritonpack.setup(trainer, tokens, collate_fn=tritonpack.VisionPackingCollator(trainer.model))
    assert len(parts.get_train_dataloader()) > 1 == len(whole.get_train_dataloader())
    assert distance(trained(parts), trained(whole)) <= EXACT


def test_accumulation_without_counts_of_targets_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, "qwen2_5_vl", 4, accepts=False)
    with pytest.raises(ValueError, match=r"set model\.accepts_loss_kwargs = True before the trainer is made"):
        tritonpack.setup(trainer, 256, collate_fn=tritonpack.VisionPackingCollator(trainer.model))
