"""SequenceParallel with DDP, FSDP2 and HSDP: ranks train the same model as one process, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def make_mesh(*names: str) -> DeviceMesh:
    """A mesh in which pairs of ranks share batches; without "dp", all ranks share them."""
    size = dist.get_world_size()
    sizes = {"dp": size // 2, "sp": 2 if "dp" in names else size, "one": 1}
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    return mesh._flatten("_".join(mesh.mesh_dim_names))


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=flattened(mesh).get_group())


def fully_sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def over_all(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
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

    wrap: Callable[..., nn.Module]
    names: tuple[str, ...] = ("dp", "sp")
    accumulate: int = 1
    checkpointing: bool = False
    inner: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"

    def make(self) -> Any:
        return make_model(self.model) if self.model in SPECIFIC else make_zoo_model(self.model)

    def batch(self, step: int, part: int, replica: int) -> dict[str, Any]:
        return make_batch(100 * step + 10 * part + replica)


STEPS, LEARNING_RATE, CLIP = 3, 0.5, 0.5  # gradients' norms are about 1


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, because Adam would hide the scale of gradients."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def alone(training: Training, replicas: int, replica: int):
    """In one process: this replica's losses, the norms, the gradients of the first step, the trained parameters."""
    model = training.make()
    patch(model)
    optimizer = optimizer_of(model)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        for part in range(training.accumulate):
            for one in range(replicas):
                loss = model(**training.batch(step, part, one)).loss / training.accumulate
                (loss / replicas).backward()
                if one == replica:
                    losses.append(loss.detach())
        gradients = gradients or gradients_of(model)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return iter(losses), norms, gradients, {name: p.detach() for name, p in model.named_parameters()}


def trains_as_one(training: Training) -> None:
    mesh, tolerance = make_mesh(*training.names), TOLERANCE if training.model in SPECIFIC else SINGLE
    replicas, replica = (mesh["dp"].size(), mesh.get_local_rank("dp")) if "dp" in training.names else (1, 0)
    losses, norms, gradients, trained = alone(training, replicas, replica)
    model = training.make()
    if training.checkpointing:
        model.train().gradient_checkpointing_enable()
    wrapped = training.wrap(model, mesh)
    optimizer = optimizer_of(wrapped)
    with SequenceParallel(model if training.inner else wrapped, mesh["sp"], **training.options):
        for step in range(STEPS):
            for part in range(training.accumulate):
                last = part == training.accumulate - 1
                if isinstance(wrapped, FSDPModule):
                    wrapped.set_requires_gradient_sync(last)
                with wrapped.no_sync() if not last and hasattr(wrapped, "no_sync") else nullcontext():
                    batch = training.batch(step, part, replica)
                    output = wrapped(**batch)
                    loss = output.loss / training.accumulate
                    loss.backward()
                assert output.logits.shape[1] < batch["input_ids"].shape[1], "the batch wasn't sharded"
                close(loss.detach(), next(losses), f"loss of step {step}", tolerance)
            if step == 0:
                for name, gradient in gradients_of(wrapped).items():
                    close(gradient, gradients.pop(name), f"gradient of {name}", 10 * tolerance)
                assert not gradients
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
            close(whole(norm), norms[step], f"norm of step {step}", tolerance)
            optimizer.step()
            optimizer.zero_grad()
    for name, p in model.named_parameters():
        close(whole(p.detach()), trained[name], name, tolerance)


def over_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def one_layer_over_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.model.layers[1], mesh=mesh["dp"])
    return fully_shard(model, mesh=flattened(mesh))


def refused_on_entry(wrap: Callable[..., nn.Module], names: tuple[str, ...] = ("dp", "sp")) -> None:
    mesh = make_mesh(*names)
    wrapped, message = wrap(make_model(), mesh), r"reduces gradients over the ranks \[.*\], but a batch is shared by"
    with pytest.raises(ValueError, match=message):
        SequenceParallel(wrapped, mesh["sp"]).__enter__()


def parameters_come_apart(wrap: Callable[..., nn.Module]) -> None:
    """Only the inner model is passed to the context, so the second step raises, on every rank."""
    mesh = make_mesh("dp", "sp")
    model = make_model()
    wrapped = wrap(model, mesh)
    optimizer = optimizer_of(model)
    batch = make_batch(mesh.get_local_rank("dp"))
    with SequenceParallel(model, mesh["sp"]):
        wrapped(**batch).loss.backward()
        optimizer.step()
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
    "FSDP over replicas": partial(refused_on_entry, lambda model, mesh: fully_sharded(model, mesh["dp"])),
    "FSDP over replicas in one layer": partial(refused_on_entry, one_layer_over_replicas),
    "HSDP over replicas": partial(
        refused_on_entry, lambda model, mesh: fully_sharded(model, mesh["dp", "one"]), ("dp", "one", "sp")
    ),
    "DDP over replicas, inner model passed": partial(parameters_come_apart, over_replicas),
    "gradients not reduced": partial(parameters_come_apart, lambda model, mesh: model),
}
ALSO_ON_FOUR = [name for name in CASES if "recurrent" not in name]  # its documents are longer than a share of four
