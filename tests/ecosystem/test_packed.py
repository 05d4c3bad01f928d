"""transformers' Trainer and TRL's SFTTrainer: packed training is padded training, step by step; SFTTrainer without a
word of warning."""

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import (
    EXACT,
    Outcome,
    apart,
    arguments,
    distance,
    features,
    no_warning,
    pad,
    tokenizer,
    trained,
)
from tests.patches.models import tiny_model

pytest.importorskip("accelerate")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PACKERS: dict[str, Callable[[], Any]] = {
    "ours": tritonpack.PackingCollator,
    "ours, padded rows": lambda: tritonpack.PackingCollator(pad_to_multiple_of=64, pad_token_id=0),
    "flattening": DataCollatorWithFlattening,
    "flattening, flash": lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}


def make_trainer(model: PreTrainedModel, folder: Path, collator: Any = pad, **options: Any) -> Trainer:
    """Windows of two batches of unequal token counts: only the count of predicted tokens weighs them rightly."""
    return Trainer(
        model,
        TrainingArguments(**arguments(folder, gradient_accumulation_steps=2, **options)),
        train_dataset=features() * 2,
        eval_dataset=features(),
        data_collator=collator,
    )


def make_sft(model: PreTrainedModel, folder: Path, peft_config: Any = None, rows: Any = None, **options: Any) -> Any:
    """A trainer of the documents, or of rows of documents."""
    plain = {"packing": False, "padding_free": False, "max_length": None, "gradient_checkpointing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL's own defaults use names that transformers has replaced
        config = trl.SFTConfig(**arguments(folder, **{**plain, **options}))
    return trl.SFTTrainer(
        model,
        config,
        train_dataset=datasets.Dataset.from_list(features()) if rows is None else rows,
        eval_dataset=datasets.Dataset.from_list(features()[:8]),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


# All documents take part in every step, so that it doesn't matter to which rows packing deals them.
WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
MAKERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {"trainer": (make_trainer, {}), "sft": (make_sft, WHOLE)}


class Way(NamedTuple):
    """A way to train packed: a key of `MAKERS`, whose padded training it is held against; a model; options."""

    maker: str
    family: str
    options: dict[str, Any]
    ready: Callable[[PreTrainedModel], object] = tritonpack.patch


def packed_by(name: str, **options: Any) -> dict[str, Any]:
    return {"collator": PACKERS[name](), **options}


def checkpointed(*, reentrant: bool) -> dict[str, Any]:
    return packed_by("ours", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def patched_to(attention: Any) -> Callable[[PreTrainedModel], object]:
    return lambda model: tritonpack.patch(model, attention=attention)


ROWS = {"packing": True, "max_length": 64}
WAYS = {
    "ours-llama": Way("trainer", "llama", packed_by("ours")),
    **{name: Way("trainer", "mistral", packed_by(name)) for name in PACKERS},
    "checkpointing": Way("trainer", "llama", checkpointed(reentrant=False)),
    "reentrant checkpointing": Way("trainer", "llama", checkpointed(reentrant=True)),
    "compiled": Way("trainer", "llama", packed_by("ours", torch_compile=True, torch_compile_backend="eager")),
    "by name": Way("trainer", "mistral", packed_by("flattening"),
                   lambda model: model.set_attn_implementation("tritonpack")),
    **{name: Way("trainer", "mistral", packed_by("flattening, flash"), patched_to(name)) for name in ("sdpa", "eager")},
    "sft-packing": Way("sft", "mistral", {**ROWS, "per_device_train_batch_size": 3}),
    "sft-packing, row by row": Way("sft", "mistral", {**ROWS, **WHOLE, "per_device_train_batch_size": 1}),
    "sft-padding-free": Way("sft", "mistral", {"padding_free": True, **WHOLE}),
    "sft-padding-free-llama": Way("sft", "llama", {"padding_free": True, **WHOLE}),
    "sft-padding-free, padded rows": Way("sft", "mistral", {"padding_free": True, "pad_to_multiple_of": 64, **WHOLE}),
    "sft-checkpointing": Way("sft", "mistral", {"padding_free": True, "gradient_checkpointing": True, **WHOLE}),
}  # fmt: skip


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Outcome]:
    """What stock transformers makes of a family in padded batches, trained once for all that are held against it."""

    @functools.cache
    def train(maker: str, family: str) -> Outcome:
        make, options = MAKERS[maker]
        return trained(make(tiny_model(family), tmp_path_factory.mktemp(family), **options))

    return train


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # the compiler's; of renamed options
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.fast("ours-llama", "sft-packing")
def test_packed_training_is_padded_training(name: str, padded: Any, tmp_path: Path) -> None:
    torch._dynamo.reset()
    way = WAYS[name]
    expected, model = padded(way.maker, way.family), tiny_model(way.family)
    tritonpack.register()
    with no_warning() if way.maker == "sft" else nullcontext():
        way.ready(model)
        got = trained(MAKERS[way.maker][0](model, tmp_path, **way.options))
    assert distance(expected, got) < EXACT


def test_stock_leaks_in_the_same_test(padded: Any, tmp_path: Path) -> None:
    """Trainer turns the cache off, with which transformers itself tells documents apart in one row; a mask of ones
    undoes that."""

    def collate(batch: Any) -> Any:
        flat = DataCollatorWithFlattening()(batch)
        return {**flat, "attention_mask": torch.ones_like(flat["input_ids"])}

    expected, model = padded("trainer", "llama"), tiny_model("llama")
    assert distance(expected, trained(make_trainer(tiny_model("llama"), tmp_path, collate))) > 1e-3
    with tritonpack.patch(model):
        assert distance(expected, trained(make_trainer(model, tmp_path, collate))) < EXACT


@pytest.mark.slow
def test_training_on_rows_on_disk_is_padded_training(padded: Any, tmp_path: Path) -> None:
    tritonpack.pack_dataset(datasets.Dataset.from_list(features()), 64).save_to_disk(tmp_path / "rows")
    rows, model = datasets.load_from_disk(str(tmp_path / "rows")), tiny_model("mistral")
    options = {"padding_free": True, "per_device_train_batch_size": len(rows)}
    with no_warning(), tritonpack.patch(model):
        got = trained(make_sft(model, tmp_path, rows=rows, **options))
    assert distance(padded("sft", "mistral"), got) < EXACT


EVALUATED = {
    "padded": ("trainer", {"per_device_eval_batch_size": 4}, {}),
    "packed": ("trainer", {"per_device_eval_batch_size": 4}, packed_by("ours")),
    "sft-padding-free": ("sft", {"per_device_eval_batch_size": 8}, {"padding_free": True, **WHOLE}),
    "sft-packing": ("sft", {"per_device_eval_batch_size": 8}, {**ROWS, "per_device_train_batch_size": 3}),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation(name: str, tmp_path: Path) -> None:
    """The mean over batches of as many documents each; of SFTTrainer one batch holds all documents."""
    maker, sizes, options = EVALUATED[name]
    make, model = MAKERS[maker][0], tiny_model("mistral")
    expected = make(tiny_model("mistral"), tmp_path, **sizes).evaluate()
    with no_warning() if maker == "sft" else nullcontext(), tritonpack.patch(model):
        got = make(model, tmp_path, **{**options, **sizes}).evaluate()
    for metric in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")[: 3 if maker == "sft" else 1]:
        assert got[metric] == pytest.approx(expected[metric], rel=EXACT), metric


@pytest.mark.slow
def test_a_saved_model_holds_no_trace(tmp_path: Path) -> None:
    """Neither the checkpoints that Trainer writes nor its last word name our attention; a saved model loads by name."""
    model, collator = tiny_model("llama"), tritonpack.PackingCollator()
    tritonpack.patch(model)
    trainer = make_trainer(model, tmp_path / "run", collator, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    configs = list(tmp_path.rglob("*.json"))
    assert len([path for path in configs if path.name == "config.json"]) == 4
    assert not [path for path in configs if "tritonpack" in path.read_text()]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "last").config._attn_implementation == "sdpa"
    tritonpack.unpatch(model)
    expected = torch.cat([model(torch.tensor([d["input_ids"]])).logits for d in features()], 1)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "last", attn_implementation="tritonpack", dtype=torch.float64
    )
    assert apart(loaded(**collator(features())).logits, expected) < EXACT


def test_context_parallelism_of_trainer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate accepts such a configuration on GPUs alone, so it's put into an accelerator that was made without."""
    model, collator = tiny_model("llama"), tritonpack.PackingCollator()
    trainer = make_trainer(model, tmp_path, collator)
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", SimpleNamespace(
        cp_enabled=True, cp_backend="torch", cp_size=2, tp_size=1, sp_size=1, sp_enabled=False, sp_backend="deepspeed",
    ), raising=False)  # fmt: skip
    with tritonpack.patch(model), pytest.raises(ValueError, match="supported only with SDPA attention"):
        trainer.training_step(model, dict(collator(features()[:2])))
    with pytest.raises(ValueError, match=r"shares batches among processes .*'cp': 2.*SequenceParallel"):
        tritonpack.setup(trainer, tokens=64)
