"""transformers.Trainer: packed training is padded training, step by step."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import EXACT, Outcome, Padded, arguments, distance, features, pad, trained
from tests.patches.models import tiny_model

pytest.importorskip("accelerate")

PACKERS: dict[str, Callable[[], Any]] = {
    "ours": tritonpack.PackingCollator,
    "ours, padded rows": lambda: tritonpack.PackingCollator(pad_to_multiple_of=64, pad_token_id=0),
    "flattening": DataCollatorWithFlattening,
    "flattening, flash": lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}


def make_trainer(model: PreTrainedModel, collator: Any, folder: Path, **options: Any) -> Trainer:
    return Trainer(
        model,
        TrainingArguments(**arguments(folder, gradient_accumulation_steps=2, **options)),
        train_dataset=features() * 2,
        eval_dataset=features(),
        data_collator=collator,
    )


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Padded:
    """What stock transformers makes of a family in padded batches, trained once for all that are held against it."""

    @functools.cache
    def train(family: str) -> Outcome:
        return trained(make_trainer(tiny_model(family), pad, tmp_path_factory.mktemp(family)))

    return train


@pytest.mark.parametrize(("family", "packer"), [*(("mistral", packer) for packer in PACKERS), ("llama", "ours")])
@pytest.mark.fast("llama-ours")
def test_packed_training_is_padded_training(family: str, packer: str, padded: Padded, tmp_path: Path) -> None:
    """Windows of two batches of unequal token counts: only the count of predicted tokens weighs them rightly."""
    expected = padded(family)
    model = tiny_model(family)
    with tritonpack.patch(model):
        got = trained(make_trainer(model, PACKERS[packer](), tmp_path))
    assert distance(expected, got) < EXACT


def test_stock_leaks_in_the_same_test(padded: Padded, tmp_path: Path) -> None:
    """Trainer turns the cache off, with which transformers itself tells documents apart in one row; a mask of ones
    undoes that."""

    def collate(batch: Any) -> Any:
        flat = DataCollatorWithFlattening()(batch)
        return {**flat, "attention_mask": torch.ones_like(flat["input_ids"])}

    expected = padded("llama")
    assert distance(expected, trained(make_trainer(tiny_model("llama"), collate, tmp_path))) > 1e-3
    model = tiny_model("llama")
    with tritonpack.patch(model):
        assert distance(expected, trained(make_trainer(model, collate, tmp_path))) < EXACT


def checkpointed(*, reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


# Family, how the model is made ready, packer, and options of the trainer
WAYS: dict[str, tuple[str, Callable[[PreTrainedModel], object], str, dict[str, Any]]] = {
    "checkpointing": ("llama", tritonpack.patch, "ours", checkpointed(reentrant=False)),
    "reentrant checkpointing": ("llama", tritonpack.patch, "ours", checkpointed(reentrant=True)),
    "compiled": ("llama", tritonpack.patch, "ours", {"torch_compile": True, "torch_compile_backend": "eager"}),
    "by name": ("mistral", lambda model: model.set_attn_implementation("tritonpack"), "flattening", {}),
    "sdpa": ("mistral", functools.partial(tritonpack.patch, attention="sdpa"), "flattening, flash", {}),
    "eager": ("mistral", functools.partial(tritonpack.patch, attention="eager"), "flattening, flash", {}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # the compiler's; of renamed options
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_train(way: str, padded: Padded, tmp_path: Path) -> None:
    torch._dynamo.reset()
    family, prepare, packer, options = WAYS[way]
    expected, model = padded(family), tiny_model(family)
    tritonpack.register()
    prepare(model)
    assert distance(expected, trained(make_trainer(model, PACKERS[packer](), tmp_path, **options))) < EXACT


@pytest.mark.parametrize("collator", [pad, tritonpack.PackingCollator()], ids=["padded", "packed"])
def test_evaluation_of_a_patched_model(collator: Any, tmp_path: Path) -> None:
    """The mean over batches of as many documents each, in either form."""
    expected = make_trainer(tiny_model("mistral"), pad, tmp_path, per_device_eval_batch_size=4).evaluate()
    model = tiny_model("mistral")
    with tritonpack.patch(model):
        got = make_trainer(model, collator, tmp_path, per_device_eval_batch_size=4).evaluate()
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=EXACT)


@pytest.mark.slow
def test_a_saved_model_holds_no_trace(tmp_path: Path) -> None:
    """Neither the checkpoints that Trainer writes nor its last word name our attention; a saved model loads by name."""
    model = tiny_model("llama")
    tritonpack.patch(model)
    trainer = make_trainer(model, tritonpack.PackingCollator(), tmp_path / "run", save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    configs = list(tmp_path.rglob("*.json"))
    assert len([path for path in configs if path.name == "config.json"]) == 4
    assert not [path for path in configs if "tritonpack" in path.read_text()]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "last").config._attn_implementation == "sdpa"
    batch = tritonpack.PackingCollator()(features())
    tritonpack.unpatch(model)
    expected = torch.cat([model(torch.tensor([d["input_ids"]])).logits.detach() for d in features()], 1)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "last", attn_implementation="tritonpack", dtype=torch.float64
    )
    assert float((loaded(**batch).logits - expected).detach().abs().max() / expected.abs().max()) < EXACT


def test_context_parallelism_of_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate accepts such a configuration on GPUs alone, so it's put into an accelerator that was made without."""
    model = tiny_model("llama")
    trainer = make_trainer(model, tritonpack.PackingCollator(), tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", SimpleNamespace(
        cp_enabled=True, cp_backend="torch", cp_size=2, tp_size=1, sp_size=1, sp_enabled=False, sp_backend="deepspeed",
    ), raising=False)  # fmt: skip
    with tritonpack.patch(model), pytest.raises(ValueError, match="supported only with SDPA attention"):
        trainer.training_step(model, dict(tritonpack.PackingCollator()(features()[:2])))
    with pytest.raises(ValueError, match=r"shares batches among processes .*'cp': 2.*SequenceParallel"):
        tritonpack.setup(trainer, tokens=64)
