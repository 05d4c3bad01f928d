"""SequenceParallel under accelerate and transformers' Trainer, which read environment variables of a launcher."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.parallel.composition_cases import make_mesh, optimizer_of
from tests.parallel.models import close, exact_loss, make_batch, make_model
from tests.patches.models import VOCAB
from tritonpack import (
    MultipackDistributedBatchSampler,
    PackingCollator,
    SavedTokensCallback,
    SequenceParallel,
    dataloader,
    patch,
)


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


def require_equal_everywhere(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p), f"{name} differs between ranks"


def accelerated() -> None:
    from accelerate import Accelerator

    reference, model = make_model(), make_model()
    patch(reference)
    expected = reference(**make_batch(0)).loss
    expected.backward()
    with launched():
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        assert isinstance(model, DistributedDataParallel)
        with SequenceParallel(model):
            output = model(**make_batch(0))
            accelerator.backward(output.loss)
            assert output.logits.shape[1] < make_batch(0)["input_ids"].shape[1]
            close(output.loss.detach(), expected.detach(), "loss")
            for (name, p), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
                close(p.grad, whole.grad, name)
            optimizer.step()
    require_equal_everywhere(model)


def arguments(folder: str, **options) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=3, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_steps=1, **options,
    )  # fmt: skip


def own_loader() -> None:
    """Trainer's own loader gives the ranks of a group one batch, and the counts have each token once."""
    mesh = make_mesh("dp", "sp")
    replicas = mesh["dp"].size()
    documents = [{"input_ids": [number % VOCAB] * (3 + number)} for number in range(6 * replicas)]
    model, before = make_model(), {name: vars(Trainer)[name] for name in ("train", "evaluate", "predict")}
    model.loss_function = exact_loss
    given, items = [], []

    def watch(_: nn.Module, args: object, batch: dict[str, Tensor]) -> None:
        given.append(batch["input_ids"])
        items.append(int(batch["num_items_in_batch"]))

    class Counts(TrainerCallback):
        def on_step_end(self, args: TrainingArguments, *_: object, **__: object) -> None:
            assert trainer.accelerator.reduce(torch.ones(1), reduction="sum") == replicas
            assert trainer.accelerator.gather(torch.ones(2)).shape == (2 * replicas,)
            assert trainer.get_total_train_batch_size(args) == 2 * replicas

    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    with launched(), tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 1}
        options = arguments(folder, **sizes, include_num_input_tokens_seen="all")
        trainer = Trainer(model, options, train_dataset=documents, eval_dataset=documents[:2], callbacks=[Counts()])
        trainer.data_collator = PackingCollator()
        with SequenceParallel(model, mesh["sp"]):
            trainer.train()
            hook.remove()
            assert trainer.evaluate()["eval_loss"] > 0
    seen = trainer.state.num_input_tokens_seen
    assert seen == sum(len(document["input_ids"]) for document in documents)
    assert sum(items) == seen - len(documents)  # first tokens aren't targets
    everywhere: list[list[Tensor]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, given)
    places = [mesh.mesh.tolist()[replica] for replica in range(replicas)]
    for group in places:
        assert all(torch.equal(x, y) for x, y in zip(everywhere[group[0]], everywhere[group[1]], strict=True))
    assert sum(x.numel() for group in places for x in everywhere[group[0]]) == seen
    require_equal_everywhere(model)
    assert {name: vars(Trainer)[name] for name in before} == before


def loader_for_a_group() -> None:
    """`dataloader(group=)` gives the ranks of a group one row, and the groups different ones."""
    mesh = make_mesh("dp", "sp")
    documents = [{"input_ids": [number] * (1 + number % 7)} for number in range(40)]
    loader = dataloader(documents, 16, group=mesh["sp"])  # with rank 0's seed
    sampler = MultipackDistributedBatchSampler(16, [1 + number % 7 for number in range(40)], group=mesh["sp"])
    assert (sampler.num_replicas, sampler.rank) == (mesh["dp"].size(), mesh.get_local_rank("dp"))
    rows = [batch["input_ids"].flatten().unique().tolist() for batch in loader]
    everywhere: list[list[list[int]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, rows)
    groups = mesh.mesh.tolist()
    assert all(everywhere[group[0]] == everywhere[group[1]] for group in groups)
    assert sorted(number for group in groups for row in everywhere[group[0]] for number in row) == list(range(40))
    with pytest.raises(ValueError, match="Leave them out, or the group"):
        dataloader(documents, 16, group=mesh["sp"], num_replicas=1, rank=0)
    with pytest.raises(ValueError, match=r"must be a process group or a DeviceMesh, such as mesh\['sp'\]; got 2"):
        dataloader(documents, 16, group=2)
    with pytest.raises(ValueError, match="don't let it prepare this DataLoader"):
        _ = loader.batch_sampler.batch_size
    if dist.get_rank() == 1:
        documents = documents[1:]
    with pytest.raises(ValueError, match="the lengths"):
        dataloader(documents, 16, group=mesh["sp"])


def refusals() -> None:
    """Settings with which a Trainer can't share batches, and a mesh whose groups it can't number."""
    model = make_model()
    for message, options, more in (
        ("leave it at None: every rank loads", {"accelerator_config": {"dispatch_batches": True}}, {}),
        ("leave it at False", {"eval_use_gather_object": True}, {}),
        (r"has a compute_loss_func.*gather_outputs=True", {}, {"compute_loss_func": lambda *_, **__: None}),
    ):
        with launched(), tempfile.TemporaryDirectory() as folder, SequenceParallel(model):
            trainer = Trainer(model, arguments(folder, **options), train_dataset=[{"input_ids": [1, 2]}] * 4, **more)
            with pytest.raises(ValueError, match=message):
                trainer.train()
    if dist.get_world_size() == 4:
        groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
        with pytest.raises(ValueError, match=r"don't form a dimension of a mesh of 4 ranks"):
            dataloader([{"input_ids": [1, 2]}] * 4, 16, group=groups[dist.get_rank() in (1, 2)])


def saved_tokens() -> None:
    """The logs of every rank have the tokens of all ranks. Each has two of six documents of its own in a step."""
    number = 6 * dist.get_world_size()
    documents = [{"input_ids": list(range(3 + i)), "labels": list(range(3 + i))} for i in range(number)]

    def collate(some: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = {
            name: nn.utils.rnn.pad_sequence([torch.tensor(one[name]) for one in some], True, fill)
            for name, fill in (("input_ids", 0), ("labels", -100))
        }
        return {**batch, "attention_mask": (batch["labels"] != -100).long()}

    model = make_model()
    given = []
    model.register_forward_pre_hook(lambda _, args, batch: given.append(batch["input_ids"].numel()), with_kwargs=True)
    with launched(), tempfile.TemporaryDirectory() as folder, patch(model, unpad=True) as handle:
        options = arguments(folder, per_device_train_batch_size=2)
        trainer = Trainer(model, options, train_dataset=documents, data_collator=collate)
        trainer.add_callback(SavedTokensCallback(trainer))
        trainer.train()
    assert len(given) == 3
    totals = torch.tensor([sum(given), handle.saved.tokens_computed])
    dist.all_reduce(totals)
    assert totals[1] == sum(len(document["input_ids"]) for document in documents)
    logged = trainer.state.log_history[-1]["train_tokens_saved_share"]
    assert logged == pytest.approx(1 - float(totals[1] / totals[0]))
    assert totals[0] != dist.get_world_size() * sum(given)  # ranks differ


CASES = {
    "accelerate": accelerated,
    "own loader of Trainer": own_loader,
    "loader for a group": loader_for_a_group,
    "refusals of Trainer": refusals,
    "saved tokens": saved_tokens,
}
