"""The tiled loss and tiled MLPs under Trainer, TRL and Liger-Kernel: trained as without, or refused with the remedy."""

from pathlib import Path
from typing import Any

import pytest
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import EXACT, arguments, distance, features, tokenizer, trained
from tests.patches.models import tiny_model


def make_trainer(folder: Path, model: Any = None, *, metrics: Any = None, **options: Any) -> Trainer:
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return Trainer(
        tiny_model("llama") if model is None else model,
        TrainingArguments(**arguments(folder, **options)),
        train_dataset=features(),
        eval_dataset=features(),
        data_collator=collate,
        compute_metrics=metrics,
    )


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"unpad": True}], ids=["", "unpad"])
def test_training_and_evaluation(options: dict[str, bool], tmp_path: Path) -> None:
    """Windows of gradient accumulation with unequal numbers of tokens."""
    outcomes, losses = [], []
    for tiled in (False, True):
        trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5)
        if tiled:
            tritonpack.patch(trainer.model, tiled_loss=7, **options)
        outcomes.append(trained(trainer))
        losses.append(trainer.evaluate()["eval_loss"])
    assert distance(*outcomes) < EXACT
    assert abs(losses[0] - losses[1]) < EXACT * losses[0]


@pytest.mark.slow
def test_setup_with_tiled_mlps(tmp_path: Path) -> None:
    outcomes = []
    for rows in (False, 7):
        trainer = make_trainer(tmp_path, gradient_accumulation_steps=2)
        handle = tritonpack.setup(trainer, 64, tiled_mlp=rows)
        assert handle.patch.report.mlp_rows == rows
        outcomes.append(trained(trainer))
    assert distance(*outcomes) < EXACT


@pytest.mark.parametrize(
    "option", ["label_smoothing_factor", pytest.param("compute_loss_func", marks=pytest.mark.slow)]
)
def test_losses_of_the_trainer_read_logits(option: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **({option: 0.1} if option == "label_smoothing_factor" else {}))
    if option == "compute_loss_func":
        trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.mean()
    tritonpack.patch(trainer.model, tiled_loss=7)
    with pytest.raises(ValueError, match=r"is trained without labels, .* label_smoothing_factor and compute_loss_func"):
        trainer.train()


def test_a_later_setup_needs_the_option(tmp_path: Path) -> None:
    """It patches the model once more, and the last patch is in force."""
    trainer = make_trainer(tmp_path)
    tritonpack.patch(trainer.model, tiled_loss=7)
    for options, rows in (({}, 0), ({"tiled_loss": 5}, 5)):
        with tritonpack.setup(trainer, 64, **options) as handle:
            assert handle.patch.report.tile_rows == rows


def test_metrics_of_logits(tmp_path: Path) -> None:
    """Evaluation computes logits where something reads them."""
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {}

    trainer = make_trainer(tmp_path, metrics=metrics)
    trainer.evaluate()
    tritonpack.patch(trainer.model, tiled_loss=7)
    trainer.evaluate()
    assert trainer.predict(features()).predictions.shape == seen[0].shape
    mask = trainer.data_collator(features())["attention_mask"][..., None].numpy()
    assert abs((seen[0] - seen[1]) * mask).max() < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("first", ["patch", "trainer"])
def test_the_fused_head_of_sft_trainer_is_refused(first: str, tmp_path: Path) -> None:
    """SFTTrainer replaces the model's forward by one that makes no logits either."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model = tiny_model("llama")
    if first == "patch":
        tritonpack.patch(model, tiled_loss=7)
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**arguments(tmp_path, max_length=None)),
        train_dataset=datasets.Dataset.from_list(features()),
        processing_class=tokenizer(),
    )
    if first == "patch":
        with pytest.raises(ValueError, match="Liger-Kernel's and TRL's don't, patch the model without tiled_loss"):
            trainer.train()
    else:
        with pytest.raises(ValueError, match=r"can't be computed in tiles: its forward isn't .* but of trl"):
            tritonpack.patch(trainer.model, tiled_loss=7)


@pytest.mark.slow
def test_packed_training_by_setup(tmp_path: Path) -> None:
    outcomes = []
    for tiled_loss in (False, 7):
        trainer = make_trainer(tmp_path)
        handle = tritonpack.setup(trainer, tokens=64, tiled_loss=tiled_loss)
        assert handle.patch.report.tile_rows == tiled_loss
        outcomes.append(trained(trainer))
    assert distance(*outcomes) < EXACT
