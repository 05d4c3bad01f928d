"""TRL's trainers with padded batches: without padding and with common beginnings once, they train as stock does."""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import tritonpack
from tests.ecosystem.training import EXACT, Outcome, arguments, distance, tokenizer, trained
from tests.patches.models import COMMON, tiny_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

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

Make = Callable[[Path], Any]  # a trainer that writes into a folder


def made(kind: str, *models: Any, folder: Path, examples: list[dict[str, Any]], **given: Any) -> Any:
    """A trainer of a kind. `given` are arguments of the trainer (`peft_config`, `reward_funcs`), and options."""
    home = importlib.import_module(f"trl.experimental.{kind.lower()}") if kind in ("CPO", "ORPO") else trl
    own = {name: given.pop(name) for name in ("peft_config", "reward_funcs") if name in given}
    options = arguments(folder, gradient_checkpointing=False, **{"per_device_train_batch_size": 4, **given})
    dataset = datasets.Dataset.from_list(examples)
    torch.manual_seed(0)  # of adapters
    trainer = getattr(home, f"{kind}Trainer")(
        *models,
        args=getattr(home, f"{kind}Config")(**options),
        train_dataset=dataset,
        eval_dataset=dataset if examples is not ASKED else None,
        processing_class=tokenizer(),
        **own,
    )
    trainer.model.double()  # adapters are made in float32
    return trainer


def other(family: str = "llama", **options: Any) -> Any:
    """A reference model, or a teacher."""
    return tiny_model(family, initializer_range=0.1, **options)


def scoring() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **COMMON, num_labels=1)
    return AutoModelForSequenceClassification.from_config(config).double()


def lora() -> dict[str, Any]:
    """Adapters that are no zeros. The reference is the model without them."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets, task_type="CAUSAL_LM")
    return {"peft_config": config}


def different(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(set(text)) % 7) for text in completions]


ONLINE = {"num_generations": 2, "max_completion_length": 6, "use_vllm": False, "reward_funcs": different}
WINDOWS = {"max_length": None, "gradient_accumulation_steps": 2}  # of batches with unequal numbers of tokens
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
SMALL = {"per_device_train_batch_size": 2}


def llama() -> Any:
    return tiny_model("llama")


def mixtral() -> Any:
    return tiny_model("mixtral", **ROUTED)


TRAINERS: dict[str, Make] = {
    "SFT": lambda at: made("SFT", llama(), folder=at, examples=TEXTS, **WINDOWS),
    "SFT, completions": lambda at: made("SFT", llama(), folder=at, examples=COMPLETED, **WINDOWS),
    "SFT, experts": lambda at: made("SFT", mixtral(), folder=at, examples=TEXTS, max_length=None),
    "DPO": lambda at: made("DPO", llama(), other(), folder=at, examples=PAIRS, **SMALL),
    "DPO, LoRA": lambda at: made("DPO", llama(), folder=at, examples=PAIRS, **SMALL, **lora()),
    "DPO, experts": lambda at: made("DPO", mixtral(), other("mixtral"), folder=at, examples=PAIRS, **SMALL),
    "KTO": lambda at: made("KTO", llama(), other(), folder=at, examples=LABELLED),
    "Reward": lambda at: made("Reward", scoring(), folder=at, examples=PAIRS, **SMALL),
    "ORPO": lambda at: made("ORPO", llama(), folder=at, examples=PAIRS, max_length=64, **SMALL),
    "CPO": lambda at: made("CPO", llama(), folder=at, examples=PAIRS, max_length=64, **SMALL),
    "GRPO": lambda at: made("GRPO", llama(), folder=at, examples=ASKED, beta=0.0, **ONLINE),
    "GRPO, LoRA": lambda at: made(
        "GRPO", llama(), folder=at, examples=ASKED, beta=0.1, num_iterations=2, **ONLINE, **lora()
    ),
    "RLOO": lambda at: made("RLOO", llama(), folder=at, examples=ASKED, beta=0.0, **ONLINE),
    "RLOO, LoRA": lambda at: made("RLOO", llama(), folder=at, examples=ASKED, beta=0.1, **ONLINE, **lora()),
    "Distillation": lambda at: made(
        "Distillation", llama(), other(), folder=at, examples=ASKED, max_completion_length=6
    ),
}
# Means of logits over padding, too, where the patched model has zeros.
OVER_PADDING = {name: {"eval_logits/chosen", "eval_logits/rejected"} for name in ("ORPO", "CPO")}


def results(trainer: Any) -> tuple[Outcome, dict[str, float]]:
    """Losses and weights, and what evaluation gives where the trainer has a data set for it."""
    outcome, evaluated = trained(trainer), {} if trainer.eval_dataset is None else trainer.evaluate()
    timing = ("runtime", "second", "epoch", "preparation")
    return outcome, {name: x for name, x in evaluated.items() if not any(word in name for word in timing)}


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{"unpad": True}, {"share_prefixes": True}], ids=["unpad", "share"])
@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.sampled("SFT, completions-share", "DPO, LoRA-share", "GRPO-share")
def test_losses_weights_and_metrics_are_stocks(name: str, options: dict[str, bool], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, metrics = results(TRAINERS[name](tmp_path / "stock"))
        trainer = TRAINERS[name](tmp_path / "ours")
        with tritonpack.patch(trainer.model, **options) as handle:
            trainer.add_callback(tritonpack.SavedTokensCallback(trainer))
            got, found = results(trainer)
    cancels = name.startswith("RLOO")  # float32 advantages around 1, of which nothing is left in the first steps
    assert distance(expected, got, **({"least": 1.0} if cancels else {})) < EXACT
    assert found.keys() == metrics.keys()
    for metric in OVER_PADDING.get(name, ()):
        del found[metric], metrics[metric]
    assert found == pytest.approx(metrics, rel=EXACT, abs=EXACT)  # mean logits and margins, of numbers around 1
    print(f"{name}: {handle.saved}")
    saved = next(entry["train_tokens_saved_share"] for entry in trainer.state.log_history if "train_loss" in entry)
    assert saved > 0
