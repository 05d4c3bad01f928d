"""Trainers of transformers and TRL with their own loaders inside of SequenceParallel, beside the same trainer in one
process."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from tests.ecosystem.training import EXACT, arguments, features
from tests.parallel.trainer_cases import launched, require_equal_everywhere
from tests.patches.models import tiny_model
from tritonpack import SequenceParallel, patch

COUNTS = ("num_input_tokens_seen", "num_tokens", "mean_token_accuracy", "entropy", "total_flos")


@contextmanager
def alone() -> Iterator[None]:
    """A Trainer that is built here is the only process, though there is a process group."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def plain(model: PreTrainedModel, folder: str, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from tests.ecosystem.training import pad

    made = arguments(folder, include_num_input_tokens_seen="non_padding", **options)
    return Trainer(
        model,
        TrainingArguments(**made),
        train_dataset=features(),
        eval_dataset=features()[:5],
        data_collator=pad,
    )


def of_trl(name: str) -> Callable[..., Any]:
    """A trainer of tests/ecosystem/test_trl_padded.py, on a model and with more options."""
    from tests.ecosystem.test_trl_padded import TRAINERS

    def make(model: PreTrainedModel, folder: str, **options: Any) -> Any:
        setting = TRAINERS[name]
        counting = {"include_num_input_tokens_seen": "all"} if name.startswith("SFT") else {}
        setting = setting._replace(options={**setting.options, **counting, **options})
        return setting.trainer(folder, model)  # type: ignore[arg-type]

    return make


def run(make: Callable[..., Any], folder: str, order: str, mesh: Any, **options: Any) -> Any:
    """Train and evaluate inside of the context, or (without a mesh) in one process."""
    model = tiny_model("llama")
    if order == "context first" and mesh is not None:
        with SequenceParallel(model, mesh):
            trainer = make(model, folder, **options)
            train(trainer)
        return trainer
    trainer = make(model, folder, **options)
    with patch(trainer.model) if mesh is None else SequenceParallel(trainer.model, mesh):
        train(trainer)
    return trainer


def train(trainer: Any) -> None:
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()


def outcome(trainer: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return trainer.state.log_history, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def agree(make: Callable[..., Any], order: str = "trainer first", **options: Any) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "sp"))
    per_device = options.pop("per_device_train_batch_size", 2)
    whole = per_device * mesh["dp"].size()
    with tempfile.TemporaryDirectory() as folder:
        with alone():
            expected = outcome(run(make, folder, order, None, per_device_train_batch_size=whole, **options))
        with launched():
            trainer = run(make, folder, order, mesh["sp"], per_device_train_batch_size=per_device, **options)
        got = outcome(trainer)
    start = dict(tiny_model("llama").named_parameters())
    moved = max(float((p - start[name]).abs().max()) for name, p in expected[1].items())
    assert moved > 1e-3
    for name, p in expected[1].items():
        assert float((p - got[1][name]).abs().max()) < 4 * EXACT * moved, name
    assert len(got[0]) == len(expected[0])
    for one, other in zip(expected[0], got[0], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if not any(word in name for word in ("runtime", "per_second", "step_time", "preparation_time")):
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, one, other)
    require_equal_everywhere(trainer.model)


CASES = {
    "Trainer, trainer first": lambda: agree(plain, gradient_accumulation_steps=2),
    "Trainer, context first": lambda: agree(plain, "context first", gradient_accumulation_steps=2),
    "SFTTrainer, trainer first": lambda: agree(of_trl("SFT"), gradient_accumulation_steps=2),
    "SFTTrainer, context first": lambda: agree(of_trl("SFT"), "context first", gradient_accumulation_steps=2),
    "DPOTrainer": lambda: agree(of_trl("DPO")),
    "GRPOTrainer": lambda: agree(of_trl("GRPO")),
    "SFTTrainer, padding-free": lambda: agree(of_trl("SFT"), padding_free=True),
}
