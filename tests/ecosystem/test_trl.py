"""TRL's SFTTrainer, packing and padding-free: without a word of warning, and what padded training gives."""

import functools
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tritonpack
from tests.ecosystem.training import (
    EXACT,
    Outcome,
    Padded,
    arguments,
    distance,
    features,
    no_warning,
    tokenizer,
    trained,
)
from tests.patches import zoo
from tests.patches.models import tiny_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def make_trainer(
    model: PreTrainedModel | str, folder: Path, peft_config: Any = None, rows: Any = None, **options: Any
) -> Any:
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


def test_a_warning_is_seen() -> None:
    with pytest.raises(AssertionError, match="mind the step"), no_warning():
        logging.getLogger("trl.trainer.sft_trainer").warning("mind the step")
    with pytest.raises(UserWarning, match="mind the step"), no_warning():
        warnings.warn("mind the step", stacklevel=1)


# All documents take part in every step, so that it doesn't matter to which rows packing deals them.
WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
WAYS: dict[str, dict[str, Any]] = {
    "padding-free": {"padding_free": True, **WHOLE},
    "padding-free, padded rows": {"padding_free": True, "pad_to_multiple_of": 64, **WHOLE},
    "packing": {"packing": True, "max_length": 64, "per_device_train_batch_size": 3},
    "packing, row by row": {
        "packing": True, "max_length": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3,
    },
    "checkpointing": {"padding_free": True, "gradient_checkpointing": True, **WHOLE},
}  # fmt: skip


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Padded:
    """What stock transformers makes of a family in padded batches, trained once for all ways that are held against
    it."""

    @functools.cache
    def train(family: str) -> Outcome:
        return trained(make_trainer(tiny_model(family), tmp_path_factory.mktemp(family), **WHOLE))

    return train


@pytest.mark.parametrize(("family", "way"), [*(("mistral", way) for way in WAYS), ("llama", "padding-free")])
@pytest.mark.fast("mistral-packing")
def test_packed_training_is_padded_training(family: str, way: str, padded: Padded, tmp_path: Path) -> None:
    expected = padded(family)
    model = tiny_model(family)
    with no_warning(), tritonpack.patch(model):
        got = trained(make_trainer(model, tmp_path, **WAYS[way]))
    assert distance(expected, got) < EXACT


def on_disk(folder: Path) -> Any:
    tritonpack.pack_dataset(datasets.Dataset.from_list(features()), 64).save_to_disk(folder / "rows")
    return datasets.load_from_disk(str(folder / "rows"))


@pytest.mark.slow
def test_training_on_rows_on_disk_is_padded_training(padded: Padded, tmp_path: Path) -> None:
    rows, model = on_disk(tmp_path), tiny_model("mistral")
    options = {"padding_free": True, "per_device_train_batch_size": len(rows)}
    with no_warning(), tritonpack.patch(model):
        got = trained(make_trainer(model, tmp_path, rows=rows, **options))
    assert distance(padded("mistral"), got) < EXACT


@pytest.mark.slow
def test_a_family_in_which_stock_leaks(tmp_path: Path) -> None:
    """transformers keeps the documents of one row apart for llama, for gpt_oss it doesn't: its masks know nothing of
    position ids."""

    def model() -> PreTrainedModel:
        return zoo.tiny_model("gpt_oss", dtype=torch.float64)

    options: dict[str, Any] = {"router_aux_loss_coef": 0.0, **WHOLE}
    expected = trained(make_trainer(model(), tmp_path, **options))
    options["padding_free"] = True
    assert distance(expected, trained(make_trainer(model(), tmp_path, **options))) > 1e-3
    ours = model()
    with no_warning(), tritonpack.patch(ours):
        assert distance(expected, trained(make_trainer(ours, tmp_path, **options))) < EXACT


@pytest.mark.slow
def test_a_model_that_the_trainer_loads_by_name(tmp_path: Path) -> None:
    tiny_model("mistral").save_pretrained(tmp_path / "model")
    losses = []
    for options in ({}, {"padding_free": True}):
        name = "tritonpack" if options else "sdpa"
        load = {"model_init_kwargs": {"attn_implementation": name, "dtype": "auto"}}
        with no_warning():
            trainer = make_trainer(str(tmp_path / "model"), tmp_path, **WHOLE, **load, **options)
            losses.append(trained(trainer))
        assert trainer.model.config._attn_implementation == name
    assert distance(*losses) < EXACT


@pytest.mark.parametrize("way", ["padding-free", "packing"])
def test_evaluation(way: str, tmp_path: Path) -> None:
    """One batch holds all documents, so that the mean is over the same tokens."""
    whole = {"per_device_eval_batch_size": 8}
    expected = make_trainer(tiny_model("mistral"), tmp_path, **whole).evaluate()
    model = tiny_model("mistral")
    with no_warning(), tritonpack.patch(model):
        got = make_trainer(model, tmp_path, **{**WAYS[way], **whole}).evaluate()
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert got[name] == pytest.approx(expected[name], rel=EXACT), name
