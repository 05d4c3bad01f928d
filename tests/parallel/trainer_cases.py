"""Trainers of transformers and TRL, and accelerate, beside the same training in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from tests.ecosystem import training
from tests.parallel.composition_cases import make_mesh, optimizer_of
from tests.parallel.models import Result, alone, gradients_of, loss_of, make_batch, make_model, same
from tests.patches.models import tiny_model
from tritonpack import MultipackDistributedBatchSampler, SequenceParallel, dataloader, patch

TIMES = ("runtime", "per_second", "step_time", "preparation_time")
# What other numbers of batches change: padding counts as operations, and metrics of batches are averaged.
PER_BATCH = ("total_flos", "eval_entropy", "eval_mean_token_accuracy", "eval_rewards", "eval_logps", "eval_logits")


@contextmanager
def launched(alone: bool = False) -> Iterator[None]:
    """The environment that accelerate reads from a launcher, or of a process `alone`, though there is a process group.

    accelerate's global state is reset before and afterwards.
    """
    from accelerate.state import AcceleratorState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = {} if alone else {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "0",  # required, but unused: a process group exists
    }  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with mock.patch.dict(os.environ, variables):
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def arguments(folder: str, **options: Any) -> TrainingArguments:
    return TrainingArguments(**training.arguments(folder, **options))  # type: ignore[arg-type]


class Stream(IterableDataset):
    """Documents without numbers."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        yield from training.features()


def plain(folder: str, model: Any, **options: Any) -> Trainer:
    dataset = options.pop("train_dataset", training.features())
    return Trainer(
        tiny_model("llama") if model is None else model,
        arguments(folder, include_num_input_tokens_seen="non_padding", **options),
        train_dataset=dataset,
        eval_dataset=training.features()[:4],
        data_collator=training.pad,
        compute_metrics=lambda given: {"logits": float(np.abs(given.predictions[given.label_ids >= 0]).sum())},
    )


def packed(folder: str, model: Any, **options: Any) -> Any:
    """With `setup`, whose rows of 32 tokens are planned in one process and for the replicas alike if there is one."""
    trainer = plain(folder, model, **options)
    tritonpack.setup(trainer, 32)
    return trainer


def of_trl(name: str, folder: str, model: Any, **options: Any) -> Any:
    """A trainer of tests/ecosystem/test_padded.py, with more options."""
    from tests.ecosystem.test_padded import TRAINERS

    counting = {"include_num_input_tokens_seen": "non_padding"} if name.startswith("SFT") else {}
    setting = TRAINERS[name]._replace(options={**TRAINERS[name].options, **counting, **options})
    return setting.trainer(folder, model)  # type: ignore[arg-type]


def with_given_completions(folder: str, model: Any, **options: Any) -> Any:
    """GRPO on completions that depend on prompts alone, not on the random numbers of so many processes."""
    trainer = of_trl("GRPO", folder, model, **options)
    trainer._generate_single_turn = lambda prompts, *_, **__: (
        [[5 + (sum(ids) + 7 * (i % 2) + j) % 40 for j in range(3 + i % 2)] for i, ids in enumerate(prompts)],
        None,
    )
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
    methods = {name: vars(Trainer)[name] for name in ("train", "evaluate", "predict")}
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
    assert all((x - moved_there[name]).abs().max() < 4 * training.EXACT * most for name, x in moved.items())
    for one, other in zip(expected.state.log_history, trainer.state.log_history, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if not any(word in name for word in TIMES + (PER_BATCH if sizes["dp"] > 1 else ())):
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, one, other)
    for name, p in trainer.model.named_parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p), f"{name} differs between ranks"
    assert not {"compute_loss", "prediction_step"} & vars(trainer).keys() or make is packed
    assert not {"gather", "prepare_data_loader"} & vars(trainer.accelerator).keys()
    assert methods == {name: vars(Trainer)[name] for name in methods}


def each_token_once(order: str) -> None:
    """TRL's head scores as many rows on all ranks together as there are tokens."""
    from trl.trainer import utils

    own, rows = utils._ChunkedLogProbFunction.apply, []

    def count(states: Tensor, *others: Any) -> Any:
        if torch.is_grad_enabled():
            rows.append(len(states))
        return own(states, *others)

    with mock.patch.object(utils, "_ChunkedLogProbFunction") as function, launched():
        function.apply = count
        trainer, _ = run(partial(of_trl, "SFT"), dist.group.WORLD, order, include_num_input_tokens_seen="all")
    total = torch.tensor(sum(rows))
    dist.all_reduce(total)
    assert total == trainer.state.num_input_tokens_seen > sum(rows) / 0.6


def refused(make: Callable[..., Any], remedy: str, then: dict[str, Any] | None = None, **options: Any) -> None:
    """An error with the remedy, and with the options `then` an exact result."""
    with launched(), pytest.raises((ValueError, RuntimeError), match=remedy):
        run(make, dist.group.WORLD, "trainer first", **{"per_device_train_batch_size": 2, **options})
    if then:
        agree(make, **then, **options)


def set_late(name: str, folder: str, model: Any, make: Callable[..., Any] = plain, **options: Any) -> Any:
    """A trainer with an attribute that is set after it was made; vLLM isn't installed."""
    trainer = make(folder, model, **options)
    setattr(trainer, name, True)
    return trainer


def resumed() -> None:
    """A run that is resumed from a checkpoint ends with the weights of one without a break."""
    folder, ends = [tempfile.mkdtemp()], []
    dist.broadcast_object_list(folder, 0)
    with launched():
        for checkpoint in (None, f"{folder[0]}/checkpoint-2"):
            trainer = plain(folder[0], None, save_strategy="steps", save_steps=2, max_steps=4)
            with SequenceParallel(trainer.model):
                trainer.train(resume_from_checkpoint=checkpoint)
            ends.append(list(trainer.model.parameters()))
            dist.barrier()
    assert all(map(torch.equal, *ends))
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def predictions() -> None:
    """The logits of `predict` are those of the whole data set, once and in its order, without `gather_outputs`."""
    found = []
    for group in (None, make_mesh("dp", "sp")["sp"]):
        with launched(alone=group is None), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            trainer = plain(folder, None, per_device_eval_batch_size=2 if group else 5)
            if group is not None:
                stack.enter_context(SequenceParallel(trainer.model, group))
            found.append(trainer.predict(training.features()[:5]))
    expected, got = found
    known = expected.label_ids >= 0
    assert np.array_equal(got.label_ids, expected.label_ids)
    assert got.predictions.shape == expected.predictions.shape
    assert np.abs(got.predictions[known] - expected.predictions[known]).max() < 1e-5


def own_loop() -> None:
    """A model, an optimizer and a loss through accelerate: the loss and gradients of one process."""
    from accelerate import Accelerator

    model, wanted = make_model(), alone(make_model(), loss_of, make_batch(0))
    with launched():
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(model, optimizer_of(model))
        with SequenceParallel(wrapped):
            loss = loss_of(wrapped, **make_batch(0))
            accelerator.backward(loss)
            same(Result(loss.detach()[None], gradients_of(model)), wanted)
            optimizer.step()


def loader_for_a_group() -> None:
    """`dataloader(group=)` gives the ranks of a group one row, and the groups different ones."""
    mesh = make_mesh("dp", "sp")
    documents = [{"input_ids": [number] * (1 + number % 7)} for number in range(40)]
    loader = dataloader(documents, 16, group=mesh["sp"])  # with rank 0's seed
    sampler = MultipackDistributedBatchSampler(16, [1 + number % 7 for number in range(40)], group=mesh["sp"])
    assert (sampler.num_replicas, sampler.rank) == (mesh["dp"].size(), mesh.get_local_rank("dp"))
    everywhere: list[list[list[int]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, [batch["input_ids"].flatten().unique().tolist() for batch in loader])
    groups = mesh.mesh.tolist()
    assert all(everywhere[group[0]] == everywhere[group[1]] for group in groups)
    assert sorted(number for group in groups for row in everywhere[group[0]] for number in row) == list(range(40))
    for message, call in (
        ("group says both", partial(dataloader, documents, 16, group=mesh["sp"], num_replicas=1, rank=0)),
        (r"must be a process group or a DeviceMesh, such as .*; got 2", partial(dataloader, documents, 16, group=2)),
        ("don't let it prepare this DataLoader", lambda: loader.batch_sampler.batch_size),
        ("the lengths", partial(dataloader, documents[dist.get_rank() == 1 :], 16, group=mesh["sp"])),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    if dist.get_world_size() == 4:
        groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
        with pytest.raises(ValueError, match="don't form a dimension of a mesh of 4 ranks"):
            dataloader(documents, 16, group=groups[dist.get_rank() in (1, 2)])


gathered = partial(refused, then={"gathers": True})
vllm, logs = (partial(set_late, name, make=partial(of_trl, "GRPO")) for name in ("use_vllm", "log_completions"))
CASES: dict[str, Callable[[], None]] = {
    "own loader": partial(agree, plain, gradient_accumulation_steps=2),
    "built inside": partial(agree, plain, "context first", gradient_accumulation_steps=2),
    "a stream": partial(agree, plain, train_dataset=Stream()),
    "workers": partial(agree, plain, dataloader_num_workers=1),
    "ranks that aren't neighbours": partial(agree, plain, dims=("sp", "dp"), gradient_accumulation_steps=2),
    "setup": partial(agree, packed),
    "label smoothing": partial(gathered, plain, "gather_outputs=True", label_smoothing_factor=0.1),
    "dispatch_batches": partial(refused, plain, "every rank loads", accelerator_config={"dispatch_batches": True}),
    "eval_use_gather_object": partial(refused, plain, "leave it at False", eval_use_gather_object=True),
    "compute_loss_func": partial(refused, partial(set_late, "compute_loss_func"), r"has a compute_loss_func.*gather"),
    "loader for a group": loader_for_a_group,
    "resumed": resumed,
    "predictions": predictions,
    "own loop with accelerate": own_loop,
    "TRL, SFT, built inside": partial(agree, partial(of_trl, "SFT"), "context first"),
    "TRL, each token once": partial(each_token_once, "trainer first"),
    "TRL, each token once, built inside": partial(each_token_once, "context first"),
    "TRL, SFT, padding-free": partial(agree, partial(of_trl, "SFT"), padding_free=True),
    **{
        f"TRL, {name}": partial(agree, partial(of_trl, name))
        for name in ("SFT", "SFT, completions", "DPO", "DPO, LoRA", "KTO", "GRPO", "GRPO, LoRA", "RLOO")
    },
    "TRL, GRPO, given completions": partial(agree, with_given_completions),
    "TRL, ORPO": partial(gathered, partial(of_trl, "ORPO"), "A head or a loss outside of the given model"),
    "TRL, GRPO, vLLM": partial(refused, vllm, "Pass use_vllm=False"),
    "TRL, GRPO, logs": partial(refused, logs, "Pass log_completions=False"),
    "TRL, GRPO that doesn't fit": partial(
        refused, partial(of_trl, "GRPO"), "Raise per_device_train_batch_size or", num_generations=6,
        per_device_train_batch_size=3,
    ),
    "TRL, Distillation": partial(refused, partial(of_trl, "Distillation"), "To generate, leave the context, or pause"),
}  # fmt: skip
# Two replicas, of neighbours or of every other rank.
ALSO_ON_FOUR = (
    "own loader", "ranks that aren't neighbours", "loader for a group", "predictions",
    "TRL, SFT, built inside", "TRL, DPO", "TRL, GRPO, given completions",
)  # fmt: skip
