"""TRL's trainers with padded batches: without padding and with common beginnings once, they train as stock does."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import tritonpack
from tests.ecosystem import test_trl
from tests.ecosystem.training import EXACT, arguments, distance, trained
from tests.patches.models import COMMON, tiny_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

WORDS = [f"w{i}" for i in range(3, 60)]
PROMPTS = [" ".join(WORDS[i : i + 6 + 3 * i]) for i in range(4)]
ANSWERS = [" ".join(WORDS[i + 20 : i + 22 + i % 5]) for i in range(8)]
PAIRS = [{"prompt": p, "chosen": f" {ANSWERS[i]}", "rejected": f" {ANSWERS[7 - i]}"} for i, p in enumerate(PROMPTS)]
LABELLED = [
    {"prompt": p, "completion": f" {ANSWERS[(i + j) % 8]}", "label": bool(j)}
    for i, p in enumerate(PROMPTS)
    for j in (0, 1)
]


def tokenizer() -> Any:
    """Words between spaces are tokens."""
    made = test_trl.tokenizer()
    made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def with_reference(kind: str, examples: list[dict[str, Any]], size: int) -> Callable[[Path], Any]:
    """A trainer that compares the model with another one."""

    def make(folder: Path) -> Any:
        options = arguments(folder, per_device_train_batch_size=size, gradient_checkpointing=False)
        return getattr(trl, f"{kind}Trainer")(
            tiny_model("llama"),
            tiny_model("llama", initializer_range=0.1),
            args=getattr(trl, f"{kind}Config")(**options),
            train_dataset=datasets.Dataset.from_list(examples),
            processing_class=tokenizer(),
        )

    return make


def reward(folder: Path) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **COMMON, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).double()
    options = trl.RewardConfig(**arguments(folder, per_device_train_batch_size=2, gradient_checkpointing=False))
    return trl.RewardTrainer(
        model, args=options, train_dataset=datasets.Dataset.from_list(PAIRS), processing_class=tokenizer()
    )


def online(kind: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        config = getattr(trl, f"{kind}Config")(
            **arguments(
                folder, per_device_train_batch_size=4, gradient_checkpointing=False, num_generations=4,
                max_completion_length=6, beta=0.0, use_vllm=False,
            )
        )  # fmt: skip
        return getattr(trl, f"{kind}Trainer")(
            tiny_model("llama"),
            reward_funcs=lambda completions, **_: [float(len(set(text)) % 7) for text in completions],
            args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=tokenizer(),
        )

    return make


TRAINERS: dict[str, Callable[[Path], Any]] = {
    "DPO": with_reference("DPO", PAIRS, 2),
    "KTO": with_reference("KTO", LABELLED, 4),
    "Reward": reward,
    "GRPO": online("GRPO"),
    "RLOO": online("RLOO"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{"unpad": True}, {"share_prefixes": True}], ids=["unpad", "share"])
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.sampled("DPO-share", "GRPO-share")
def test_losses_and_weights_are_stocks(name: str, options: dict[str, bool], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(TRAINERS[name](tmp_path / "stock"))
        trainer = TRAINERS[name](tmp_path / "ours")
        with tritonpack.patch(trainer.model, **options) as handle:
            got = trained(trainer)
    assert distance(expected, got) < EXACT
    assert handle.saved is not None
    print(f"{name}: {handle.saved}")
    assert handle.saved.tokens_computed < handle.saved.tokens_given
