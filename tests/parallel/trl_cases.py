"""Trainers of transformers and TRL, with their own loaders, beside the same trainer in one process."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

import tritonpack
from tests.ecosystem.training import EXACT, arguments, features, pad
from tests.parallel.trainer_cases import launched, require_equal_everywhere
from tests.patches.models import tiny_model
from tritonpack import SequenceParallel, patch

TIMES = ("runtime", "per_second", "step_time", "preparation_time")
# What other numbers of batches change: padding counts as operations, and metrics of batches are averaged.
PER_BATCH = ("total_flos", "eval_entropy", "eval_mean_token_accuracy", "eval_rewards", "eval_logps", "eval_logits")


class Stream(IterableDataset):
    """Documents without numbers."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from features()


def plain(folder: str, model: Any, **options: Any) -> Trainer:
    dataset = options.pop("train_dataset", features())
    made = arguments(folder, include_num_input_tokens_seen="non_padding", **options)  # type: ignore[arg-type]
    return Trainer(
        tiny_model("llama") if model is None else model,
        TrainingArguments(**made),
        train_dataset=dataset,
        eval_dataset=features()[:4],
        data_collator=pad,
        compute_metrics=lambda given: {"logits": float(np.abs(given.predictions[given.label_ids >= 0]).sum())},
    )


def of_trl(name: str, folder: str, model: Any, **options: Any) -> Any:
    """A trainer of tests/ecosystem/test_padded.py, with more options."""
    from tests.ecosystem.test_padded import TRAINERS

    counting = {"include_num_input_tokens_seen": "non_padding"} if name.startswith("SFT") else {}
    setting = TRAINERS[name]._replace(options={**TRAINERS[name].options, **counting, **options})
    return setting.trainer(folder, model)  # type: ignore[arg-type]


def packed(folder: str, model: Any, **options: Any) -> Any:
    """With `setup`, whose rows of 32 tokens are planned in one process and for the replicas alike if there is one."""
    trainer = plain(folder, model, **options)
    tritonpack.setup(trainer, 32)
    return trainer


def run(
    make: Callable[..., Any], group: Any, order: str, gathers: bool = False, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Train and evaluate, inside of the context or (without a group) in one process.

    Returns:
        The trainer, and how far each weight has moved.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = tiny_model("llama") if order == "context first" else None
        trainer = make(folder, None, **options) if model is None else None
        shared = model if trainer is None else trainer.model
        stack.enter_context(patch(shared) if group is None else SequenceParallel(shared, group, gather_outputs=gathers))
        trainer = trainer or make(folder, model, **options)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    return trainer, {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}


def agree(
    make: Callable[..., Any], order: str = "trainer first", dims: tuple[str, str] = ("dp", "sp"), **options: Any
) -> None:
    """Weights, losses, counts and metrics of a trainer equal those of one process with the same documents in a step."""
    sizes = {"dp": dist.get_world_size() // 2, "sp": 2}
    mesh = init_device_mesh("cpu", tuple(sizes[name] for name in dims), mesh_dim_names=dims)
    size = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **options}
    whole = {"per_device_train_batch_size": size["per_device_train_batch_size"] * sizes["dp"]}
    if make is plain:  # its evaluation has the mean over the targets of a step, that of TRL's trainers over batches
        whole["per_device_eval_batch_size"] = size["per_device_eval_batch_size"] * sizes["dp"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with launched(alone=True):
            expected, moved = run(make, None, order, **{**size, **whole})
        with launched():
            trainer, moved_there = run(make, mesh["sp"], order, **size)
    most = max(x.abs().max() for x in moved.values())
    assert most > 1e-4
    assert all((x - moved_there[name]).abs().max() < 4 * EXACT * most for name, x in moved.items())
    for one, other in zip(expected.state.log_history, trainer.state.log_history, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if not any(word in name for word in TIMES + (PER_BATCH if sizes["dp"] > 1 else ())):
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, one, other)
    require_equal_everywhere(trainer.model)
    assert not {"compute_loss", "prediction_step"} & vars(trainer).keys() or make is packed
    assert not {"gather", "prepare_data_loader"} & vars(trainer.accelerator).keys()


def with_given_completions(folder: str, model: Any, **options: Any) -> Any:
    """GRPO on completions that depend on prompts alone, not on the random numbers of so many processes."""
    trainer = of_trl("GRPO", folder, model, **options)
    trainer._generate_single_turn = lambda prompts, *_, **__: (
        [[5 + (sum(ids) + 7 * (i % 2) + j) % 40 for j in range(3 + i % 2)] for i, ids in enumerate(prompts)],
        None,
    )
    return trainer


def each_token_once() -> None:
    """TRL's head scores as many rows on all ranks together as there are tokens, in either order."""
    from trl.trainer import utils

    own = utils._ChunkedLogProbFunction.apply
    for order in ("trainer first", "context first"):
        rows = []

        def count(states: Tensor, *others: Any, rows: list[int] = rows) -> Any:
            if torch.is_grad_enabled():
                rows.append(len(states))
            return own(states, *others)

        with mock.patch.object(utils, "_ChunkedLogProbFunction") as function, launched():
            function.apply = count
            trainer, _ = run(partial(of_trl, "SFT"), dist.group.WORLD, order, include_num_input_tokens_seen="all")
        total = torch.tensor([sum(rows)])
        dist.all_reduce(total)
        assert total == trainer.state.num_input_tokens_seen, order
        assert sum(rows) < 0.6 * total


def refused(make: Callable[..., Any], remedy: str, **options: Any) -> None:
    with launched(), pytest.raises((ValueError, RuntimeError), match=remedy):
        run(make, dist.group.WORLD, "trainer first", per_device_train_batch_size=2, **options)


def logits_of_all_ranks(make: Callable[..., Any], remedy: str, **options: Any) -> None:
    """A loss from logits is an error with the remedy, which makes it exact."""
    refused(make, remedy, **options)
    agree(make, gathers=True, **options)


def resumed() -> None:
    """A run that is resumed from a checkpoint ends with the weights of one without a break."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    ends = []
    with launched():
        for checkpoint in (None, f"{folder[0]}/checkpoint-2"):
            trainer = plain(folder[0], None, save_strategy="steps", save_steps=2, max_steps=4)
            with SequenceParallel(trainer.model):
                trainer.train(resume_from_checkpoint=checkpoint)
            ends.append(list(trainer.model.parameters()))
            dist.barrier()
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def generations_that_do_not_fit() -> None:
    made = partial(of_trl, "GRPO", per_device_train_batch_size=3)
    for wrong, options, remedy in (
        ({}, {"num_generations": 6}, "Raise per_device_train_batch_size or steps_per_generation"),
        ({"use_vllm": True}, {}, "Pass use_vllm=False"),
        ({"log_completions": True}, {}, "Pass log_completions=False"),
    ):
        with launched(), tempfile.TemporaryDirectory() as folder:
            trainer = made(folder, None, **options)
            vars(trainer).update(wrong)
            with SequenceParallel(trainer.model), pytest.raises(ValueError, match=remedy):
                trainer.train()


def predictions() -> None:
    """The logits of `predict` are those of the whole data set, once and in its order."""
    with launched(alone=True), tempfile.TemporaryDirectory() as folder:
        expected = plain(folder, None).predict(features()[:5])
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = plain(folder, None, per_device_eval_batch_size=2)
        with SequenceParallel(trainer.model):
            got = trainer.predict(features()[:5])
    assert got.predictions.shape == expected.predictions.shape
    known = expected.label_ids >= 0
    assert np.array_equal(got.label_ids, expected.label_ids)
    assert np.abs(got.predictions[known] - expected.predictions[known]).max() < 1e-5


CASES: dict[str, Callable[[], None]] = {
    "a Trainer with its own loader": partial(agree, plain, gradient_accumulation_steps=2),
    "a Trainer that is built inside": partial(agree, plain, "context first", gradient_accumulation_steps=2),
    "a stream": partial(agree, plain, train_dataset=Stream()),
    "workers": partial(agree, plain, dataloader_num_workers=1),
    "ranks that aren't neighbours": partial(agree, plain, dims=("sp", "dp"), gradient_accumulation_steps=2),
    "setup": partial(agree, packed),
    "SFTTrainer": partial(agree, partial(of_trl, "SFT")),
    "SFTTrainer that is built inside": partial(agree, partial(of_trl, "SFT"), "context first"),
    "SFTTrainer, completions": partial(agree, partial(of_trl, "SFT, completions")),
    "SFTTrainer, padding-free": partial(agree, partial(of_trl, "SFT"), padding_free=True),
    "DPOTrainer": partial(agree, partial(of_trl, "DPO")),
    "DPOTrainer, LoRA": partial(agree, partial(of_trl, "DPO, LoRA")),
    "KTOTrainer": partial(agree, partial(of_trl, "KTO")),
    "GRPOTrainer": partial(agree, partial(of_trl, "GRPO")),
    "GRPOTrainer, LoRA": partial(agree, partial(of_trl, "GRPO, LoRA")),
    "GRPOTrainer, given completions": partial(agree, with_given_completions),
    "RLOOTrainer": partial(agree, partial(of_trl, "RLOO")),
    "label smoothing": partial(
        logits_of_all_ranks, plain, "gather_outputs=True", label_smoothing_factor=0.1, gradient_accumulation_steps=2
    ),
    "ORPOTrainer": partial(logits_of_all_ranks, partial(of_trl, "ORPO"), "A head or a loss outside of the given model"),
    "generations that don't fit": generations_that_do_not_fit,
    "DistillationTrainer": partial(
        refused, partial(of_trl, "Distillation"), "To generate, leave the context, or pause"
    ),
    "resumed": resumed,
    "each token once": each_token_once,
    "predictions": predictions,
}

# Two replicas, of neighbours or of every other rank.
ALSO_ON_FOUR = (
    "a Trainer with its own loader", "SFTTrainer that is built inside", "DPOTrainer", "GRPOTrainer, given completions",
    "ranks that aren't neighbours",
)  # fmt: skip
