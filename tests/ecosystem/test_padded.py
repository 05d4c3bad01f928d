"""Trainers whose batches are padded, transformers' with its own collators and TRL's: without padding, and with common
beginnings once, they train and evaluate as stock does."""

import importlib
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
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = {name: value for name, value in COMMON.items() if name not in ("num_key_value_heads", "head_dim")}


def seeded(auto_class: Any, kind: str, num_labels: int = 3, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return auto_class.from_config(AutoConfig.for_model(kind, num_labels=num_labels, **options)).double()


def decoder(auto_class: Any) -> PreTrainedModel:
    return seeded(auto_class, "llama", **COMMON)


def encoder(auto_class: Any) -> PreTrainedModel:
    return seeded(auto_class, "bert", **ENCODER, **NO_DROPOUT)


def masking(tokenizer: Any) -> Any:
    tokenizer.mask_token = "w3"
    return DataCollatorForLanguageModeling(tokenizer, seed=1)


def classified() -> list[dict[str, Any]]:
    return [{**document, "label": len(document["input_ids"]) % 3} for document in alike()]


def tagged() -> list[dict[str, Any]]:
    return [{**document, "labels": [token % 3 for token in document["input_ids"]]} for document in alike()]


class Task(NamedTuple):
    """What transformers' Trainer trains: a model, a collator made from a tokenizer, and examples."""

    model: Callable[[], PreTrainedModel]
    collator: Callable[[Any], Any]
    examples: Callable[[], list[dict[str, Any]]]

    def trainer(self, folder: Path, model: Any = None) -> Trainer:
        """Windows of two batches with unequal numbers of targets; the last of an epoch has one batch."""

        def metrics(found: EvalPrediction) -> dict[str, float]:
            logits, labels = np.asarray(found.predictions), np.asarray(found.label_ids)
            logits, labels = logits[labels != -100], labels[labels != -100]
            return {"accuracy": float((logits.argmax(-1) == labels).mean()), "size": float(np.abs(logits).mean())}

        options = arguments(
            folder, per_device_train_batch_size=4, per_device_eval_batch_size=5, gradient_accumulation_steps=2
        )
        return Trainer(
            self.model() if model is None else model,
            TrainingArguments(**options),
            train_dataset=self.examples(),
            eval_dataset=self.examples()[2:],
            data_collator=self.collator(tokenizer()),
            compute_metrics=metrics,
        )


CLASSES, TAGS = AutoModelForSequenceClassification, AutoModelForTokenClassification
TASKS: dict[str, Task] = {
    "causal": Task(
        lambda: tiny_model("mistral"), lambda given: DataCollatorForLanguageModeling(given, mlm=False), alike
    ),
    "classifier": Task(lambda: decoder(CLASSES), DataCollatorWithPadding, classified),
    "tagger": Task(lambda: decoder(TAGS), DataCollatorForTokenClassification, tagged),
    "encoder, masked": Task(lambda: encoder(AutoModelForMaskedLM), masking, alike),
    "encoder, classifier": Task(lambda: encoder(CLASSES), DataCollatorWithPadding, classified),
    "encoder, tagger": Task(lambda: encoder(TAGS), DataCollatorForTokenClassification, tagged),
}


WORDS = [f"w{i}" for i in range(3, 60)]
PROMPTS = [" ".join(WORDS[i : i + 6 + 3 * i]) for i in range(4)]
ANSWERS = [" ".join(WORDS[i + 20 : i + 22 + i % 5]) for i in range(8)]
PAIRS = [{"prompt": p, "chosen": f" {ANSWERS[i]}", "rejected": f" {ANSWERS[7 - i]}"} for i, p in enumerate(PROMPTS)]
LABELLED = [
    {"prompt": p, "completion": f" {ANSWERS[(i + j) % 8]}", "label": bool(j)}
    for i, p in enumerate(PROMPTS)
    for j in (0, 1)
]


TEXTS = [{"text": f"{prompt} {ANSWERS[i % 8]}"} for i, prompt in enumerate(PROMPTS * 3)]
COMPLETED = [{"prompt": p, "completion": f" {ANSWERS[i % 8]}"} for i, p in enumerate(PROMPTS * 3)]
ASKED = [{"prompt": prompt} for prompt in PROMPTS]

TRIPLES = [{**pair, "reference": f" {answer}"} for pair, answer in zip(PAIRS, ANSWERS[2:], strict=False)]
EXPERIMENTAL = ("CPO", "ORPO", "TPO")  # where TRL keeps a trainer
ONLINE = {"num_generations": 2, "max_completion_length": 6, "use_vllm": False}
WINDOWS = {"max_length": None, "gradient_accumulation_steps": 2}  # of batches with unequal numbers of tokens
SMALL = {"per_device_train_batch_size": 2}


def llama() -> Any:
    return tiny_model("llama")


def mixtral() -> Any:
    return tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)


def scoring() -> Any:
    return seeded(CLASSES, "llama", 1, **COMMON)


def lora() -> Any:
    """Adapters that are no zeros. The reference is the model without them."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj"]
    return peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets, task_type="CAUSAL_LM")


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text)) % 7) for text in completions]


class Setting(NamedTuple):
    """A trainer of TRL, its model, examples and options; `second` is the family of a reference model or a teacher."""

    kind: str
    model: Callable[[], Any]
    examples: list[dict[str, Any]]
    options: dict[str, Any]
    second: str = ""
    adapters: bool = False

    def trainer(self, folder: Path, model: Any = None) -> Any:
        given: dict[str, Any] = {"reward_funcs": reward} if "num_generations" in self.options else {}
        if self.adapters:
            given["peft_config"] = lora()
        models = [self.model() if model is None else model]
        models += [tiny_model(self.second, initializer_range=0.1)] if self.second else []
        home = importlib.import_module(f"trl.experimental.{self.kind.lower()}") if self.kind in EXPERIMENTAL else trl
        options = {"per_device_train_batch_size": 4, "gradient_checkpointing": False, **self.options}
        dataset = datasets.Dataset.from_list(self.examples)
        torch.manual_seed(0)  # of adapters
        trainer = getattr(home, f"{self.kind}Trainer")(
            *models,
            args=getattr(home, f"{self.kind}Config")(**arguments(folder, **options)),
            train_dataset=dataset,
            eval_dataset=None if self.examples is ASKED else dataset,
            processing_class=tokenizer(),
            **given,
        )
        trainer.model.double()  # adapters are made in float32
        return trainer


TRAINERS = {
    "SFT": Setting("SFT", llama, TEXTS, WINDOWS),
    "SFT, completions": Setting("SFT", llama, COMPLETED, WINDOWS),
    "SFT, experts": Setting("SFT", mixtral, TEXTS, {"max_length": None}),
    "DPO": Setting("DPO", llama, PAIRS, SMALL, "llama"),
    "DPO, LoRA": Setting("DPO", llama, PAIRS, SMALL, adapters=True),
    "DPO, experts": Setting("DPO", mixtral, PAIRS, SMALL, "mixtral"),
    "KTO": Setting("KTO", llama, LABELLED, {}, "llama"),
    "Reward": Setting("Reward", scoring, PAIRS, SMALL),
    "ORPO": Setting("ORPO", llama, PAIRS, {"max_length": 64, **SMALL}),
    "CPO": Setting("CPO", llama, PAIRS, {"max_length": 64, **SMALL}),
    "TPO": Setting("TPO", llama, TRIPLES, SMALL),
    "GRPO": Setting("GRPO", llama, ASKED, {"beta": 0.0, **ONLINE}),
    "GRPO, LoRA": Setting("GRPO", llama, ASKED, {"beta": 0.1, "num_iterations": 2, **ONLINE}, adapters=True),
    "RLOO": Setting("RLOO", llama, ASKED, {"beta": 0.0, **ONLINE}),
    "RLOO, LoRA": Setting("RLOO", llama, ASKED, {"beta": 0.1, **ONLINE}, adapters=True),
    "Distillation": Setting("Distillation", llama, ASKED, {"max_completion_length": 6}, "llama"),
}
# Means of logits over padding, too, where the patched model has zeros.
OVER_PADDING = {name: {"eval_logits/chosen", "eval_logits/rejected"} for name in ("ORPO", "CPO")}
WAYS = ("unpad", "share", "before")
CASES = [
    *((name, way) for way in WAYS[:2] for name in TASKS if way == "unpad" or not name.startswith("encoder")),
    *((name, way) for way in WAYS for name in TRAINERS if way != "before" or "exp" not in name),
]


def results(trainer: Any) -> tuple[Outcome, dict[str, float]]:
    """Losses and weights, and what evaluation gives if there is a data set for it; of Trainer also without metrics."""
    outcome, found = trained(trainer), {}
    if trainer.eval_dataset is not None:
        found = evaluated(trainer)
    if getattr(trainer, "compute_metrics", None):
        trainer.compute_metrics = None
        found |= {f"{name} alone": value for name, value in evaluated(trainer).items()}
    return outcome, found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.fast("causal-share")
def test_losses_weights_and_metrics_are_stocks(name: str, way: str, tmp_path: Path) -> None:
    """Also if the model is patched before its trainer is made: TRL then replaces the forward of the model."""
    setting: Any = {**TASKS, **TRAINERS}[name]
    stock = results(setting.trainer(tmp_path / "stock"))
    options = {"unpad": True} if way == "unpad" else {"share_prefixes": True}
    model = setting.model()
    handle = tritonpack.patch(model, **options) if way == "before" else None
    trainer = setting.trainer(tmp_path / "ours", model)
    handle = handle or tritonpack.patch(trainer.model, **options)
    trainer.add_callback(tritonpack.SavedTokensCallback(trainer))
    ours = results(trainer)
    cancels = name.startswith("RLOO")  # float32 advantages around 1, of which nothing is left in the first steps
    assert distance(stock[0], ours[0], **({"least": 1.0} if cancels else {})) < EXACT
    assert stock[1].keys() == ours[1].keys()
    for metric in stock[1].keys() - OVER_PADDING.get(name, set()):
        # Mean logits and margins are sums of numbers around 1.
        assert ours[1][metric] == pytest.approx(stock[1][metric], rel=EXACT, abs=EXACT), metric
    print(f"{name}, {way}: {handle.saved}")
    assert handle.saved is not None
    assert handle.saved.tokens_computed < handle.saved.tokens_given
    saved = next(entry["train_tokens_saved_share"] for entry in trainer.state.log_history if "train_loss" in entry)
    assert way == "before" or saved > (0.1 if name in TASKS else 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_rows_that_trl_packs_share_beginnings(tmp_path: Path) -> None:
    """`padding_free` leaves no padding, and what documents of a row have in common still runs once."""
    options = {"max_length": None}
    expected = trained(Setting("SFT", llama, TEXTS, options).trainer(tmp_path / "stock"))
    model, packed = llama(), Setting("SFT", llama, TEXTS, {**options, "padding_free": True})
    handle = tritonpack.patch(model, share_prefixes=True)
    assert distance(expected, trained(packed.trainer(tmp_path / "ours", model))) < EXACT
    assert handle.saved is not None
    assert handle.saved.tokens_computed < 0.9 * handle.saved.tokens_given
