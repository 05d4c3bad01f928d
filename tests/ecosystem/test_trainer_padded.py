"""transformers.Trainer with its own collators, which pad: without padding, and with common beginnings once, it trains
and evaluates as stock does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import tritonpack
from tests.ecosystem.training import EXACT, Outcome, alike, arguments, distance, evaluated, tokenizer, trained
from tests.patches.models import COMMON, tiny_model

pytest.importorskip("accelerate")

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {name: value for name, value in COMMON.items() if name not in ("num_key_value_heads", "head_dim")}


def decoder(auto_class: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model("llama", **COMMON, num_labels=3)).double()


def encoder(auto_class: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **ENCODER, **NO_DROPOUT, num_labels=3)
    return auto_class.from_config(config).double()


def masking(tokenizer: Any) -> Any:
    tokenizer.mask_token = "w3"
    return DataCollatorForLanguageModeling(tokenizer, seed=1)


def classified() -> list[dict[str, Any]]:
    return [{**document, "label": len(document["input_ids"]) % 3} for document in alike()]


def tagged() -> list[dict[str, Any]]:
    return [{**document, "labels": [token % 3 for token in document["input_ids"]]} for document in alike()]


class Task(NamedTuple):
    """What is trained: a model, a collator made from a tokenizer, and examples."""

    model: Callable[[], PreTrainedModel]
    collator: Callable[[Any], Any]
    examples: Callable[[], list[dict[str, Any]]]
    targets_are_next: bool = False


CLASSES, TAGS = AutoModelForSequenceClassification, AutoModelForTokenClassification
TASKS: dict[str, Task] = {
    "causal": Task(
        lambda: tiny_model("mistral"), lambda given: DataCollatorForLanguageModeling(given, mlm=False), alike, True
    ),
    "classifier": Task(lambda: decoder(CLASSES), DataCollatorWithPadding, classified),
    "tagger": Task(lambda: decoder(TAGS), DataCollatorForTokenClassification, tagged),
    "encoder, masked": Task(lambda: encoder(AutoModelForMaskedLM), masking, alike),
    "encoder, classifier": Task(lambda: encoder(CLASSES), DataCollatorWithPadding, classified),
    "encoder, tagger": Task(lambda: encoder(TAGS), DataCollatorForTokenClassification, tagged),
}


def make_trainer(task: Task, folder: Path) -> Trainer:
    """Windows of two batches with unequal numbers of targets; the last of an epoch has one batch."""

    def metrics(found: EvalPrediction) -> dict[str, float]:
        logits, labels = np.asarray(found.predictions), np.asarray(found.label_ids)
        if task.targets_are_next:
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits, labels = logits[labels != -100], labels[labels != -100]
        return {"accuracy": float((logits.argmax(-1) == labels).mean()), "size": float(np.abs(logits).mean())}

    options = arguments(
        folder, per_device_train_batch_size=4, per_device_eval_batch_size=5, gradient_accumulation_steps=2
    )
    return Trainer(
        task.model(),
        TrainingArguments(**options),
        train_dataset=task.examples(),
        eval_dataset=task.examples()[2:],
        data_collator=task.collator(tokenizer()),
        compute_metrics=metrics,
    )


def results(trainer: Trainer) -> tuple[Outcome, list[dict[str, float]]]:
    """Losses and weights, and what evaluation gives with metrics and without them."""
    outcome, with_metrics = trained(trainer), evaluated(trainer)
    trainer.compute_metrics = None
    return outcome, [with_metrics, evaluated(trainer)]


CASES = [
    (name, option)
    for name in TASKS
    for option in ("unpad", "share_prefixes")
    if option == "unpad" or not name.startswith("encoder")  # their tokens see later ones
]


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.fast("causal-share_prefixes")
def test_trains_and_evaluates_as_stock(name: str, option: str, tmp_path: Path) -> None:
    expected, metrics = results(make_trainer(TASKS[name], tmp_path / "stock"))
    trainer = make_trainer(TASKS[name], tmp_path / "ours")
    handle = tritonpack.patch(trainer.model, **{option: True})
    trainer.add_callback(tritonpack.SavedTokensCallback(trainer))
    got, found = results(trainer)
    assert distance(expected, got) < EXACT
    assert [len(one) for one in found] == [3, 1]
    for one, other in zip(metrics, found, strict=True):
        assert other == pytest.approx(one, rel=EXACT)
    print(f"{name}, {option}: {handle.saved}")
    saved = next(entry["train_tokens_saved_share"] for entry in trainer.state.log_history if "train_loss" in entry)
    assert saved > 0.1
