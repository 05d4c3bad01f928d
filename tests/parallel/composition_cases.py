"""SequenceParallel with DDP, FSDP2 and HSDP: ranks train the same model as one process, or are refused."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.models import (
    SINGLE,
    SPECIFIC,
    TOLERANCE,
    close,
    gradients_of,
    make_batch,
    make_model,
    make_zoo_model,
    whole,
)
from tritonpack import SequenceParallel, patch


def make_mesh(*names):
    """A mesh in which pairs of ranks share batches; without "dp", all ranks share them."""
    size = dist.get_world_size()
    sizes = {"dp": size // 2, "sp": 2 if "dp" in names else size, "one": 1}
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


def flattened(mesh):
    return mesh._flatten("_".join(mesh.mesh_dim_names))


def data_parallel(model, mesh):
    return DistributedDataParallel(model, process_group=flattened(mesh).get_group())


def fully_sharded(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def over_all(model, mesh, **options):
    return fully_sharded(model, flattened(mesh), **options)


@dataclass(frozen=True)
class Training:
    """How ranks that share batches train for three steps.

    Attributes:
        wrap: (model, mesh) -> the called module.
        names: the names of the mesh's dimensions.
        accumulate: batches per step.
        checkpointing: whether backward recomputes activations.
        inner: whether the context gets the model inside the wrapper.
        options: the options of the context.
        model: a family, or a type of the zoo, some of whose layers compute in float32.
    """

    wrap: object
    names: tuple = ("dp", "sp")
    accumulate: int = 1
    checkpointing: bool = False
    inner: bool = False
    options: dict = field(default_factory=dict)
    model: str = "llama"

    def make(self):
        return make_model(self.model) if self.model in SPECIFIC else make_zoo_model(self.model)


STEPS, LEARNING_RATE, CLIP = 3, 0.5, 0.5  # gradients' norms are about 1


def optimizer_of(model):
    """SGD, because Adam would hide the scale of gradients."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def train(training, model, compute):
    """Three steps: `compute` runs the batches of a part of a step. The gradients of the first, and the norms of all."""
    optimizer, norms, gradients = optimizer_of(model), [], {}
    for step in range(STEPS):
        for part in range(training.accumulate):
            compute(100 * step + 10 * part, part == training.accumulate - 1)
        gradients = gradients or gradients_of(model)
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return gradients, norms


def trains_as_one(training):
    mesh, tolerance = make_mesh(*training.names), TOLERANCE if training.model in SPECIFIC else SINGLE
    replicas, replica = (mesh["dp"].size(), mesh.get_local_rank("dp")) if "dp" in training.names else (1, 0)
    reference, model, losses = training.make(), training.make(), {}
    patch(reference)

    def alone(number, _):
        for one in range(replicas):
            loss = reference(**make_batch(number + one)).loss / training.accumulate
            (loss / replicas).backward()
            losses[number, one] = loss.detach()

    def shared(number, last):
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        with wrapped.no_sync() if not last and hasattr(wrapped, "no_sync") else nullcontext():
            batch = make_batch(number + replica)
            output = wrapped(**batch)
            loss = output.loss / training.accumulate
            loss.backward()
        assert output.logits.shape[1] < batch["input_ids"].shape[1], "the batch wasn't sharded"
        close(loss.detach(), losses[number, replica], f"loss of batch {number}", tolerance)

    gradients, norms = train(training, reference, alone)
    if training.checkpointing:
        model.train().gradient_checkpointing_enable()
    wrapped = training.wrap(model, mesh)
    with SequenceParallel(model if training.inner else wrapped, mesh["sp"], **training.options):
        found, found_norms = train(training, wrapped, shared)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        close(found[name], gradient, f"gradient of {name}", 10 * tolerance)
    close(torch.stack(found_norms), torch.stack(norms), "norms", tolerance)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(whole(p.detach()), q.detach(), name, tolerance)


def over_replicas(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def one_layer_over_replicas(model, mesh):
    fully_shard(model.model.layers[1], mesh=mesh["dp"])
    return fully_shard(model, mesh=flattened(mesh))


def refused_on_entry(wrap, names=("dp", "sp")):
    mesh = make_mesh(*names)
    message = r"reduces gradients over the ranks \[.*\], but a batch is shared by"
    with pytest.raises(ValueError, match=message):
        SequenceParallel(wrap(make_model(), mesh), mesh["sp"]).__enter__()


def parameters_come_apart(wrap):
    """Only the inner model is passed to the context, so the second step raises, on every rank."""
    mesh, model = make_mesh("dp", "sp"), make_model()
    wrapped, batch = wrap(model, mesh), make_batch(mesh.get_local_rank("dp"))
    with SequenceParallel(model, mesh["sp"]):
        wrapped(**batch).loss.backward()
        optimizer_of(model).step()
        with pytest.raises(ValueError, match="parameters differ between the ranks"):
            wrapped(**batch)


TRAININGS = {
    "DDP over the world": Training(data_parallel, ("sp",)),
    "DDP, two batches per step": Training(data_parallel, accumulate=2),
    "DDP around the model of the context": Training(data_parallel, inner=True, options={"exchange": "ring"}),
    "DDP, recurrent": Training(data_parallel, ("sp",), model="qwen3_next"),
    "FSDP, recurrent": Training(over_all, ("sp",), model="qwen3_next"),
    "FSDP, checkpointing": Training(over_all, checkpointing=True),
    "FSDP, two batches per step": Training(over_all, accumulate=2, options={"exchange": "ulysses"}),
    "HSDP, replicas of dp": Training(fully_sharded, checkpointing=True),
    "HSDP, replicas of sp": Training(fully_sharded, ("sp", "dp")),
}
CASES = {name: partial(trains_as_one, training) for name, training in TRAININGS.items()} | {
    "DDP over replicas": partial(refused_on_entry, over_replicas),
    "FSDP over replicas in one layer": partial(refused_on_entry, one_layer_over_replicas),
    "HSDP over replicas": partial(
        refused_on_entry, lambda model, mesh: fully_sharded(model, mesh["dp", "one"]), ("dp", "one", "sp")
    ),
    "DDP over replicas, inner model passed": partial(parameters_come_apart, over_replicas),
    "gradients not reduced": partial(parameters_come_apart, lambda model, mesh: model),
}
ALSO_ON_FOUR = [name for name in CASES if "recurrent" not in name]  # its documents are longer than a share of four
