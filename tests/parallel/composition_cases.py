"""SequenceParallel with what reduces, shards, wraps or compiles models: what ranks train is what one process trains."""

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from tritonpack import BlockDiagonalMask, PackingCollator, SequenceParallel, patch, varlen_attention

VOCABULARY = 64


def loss_in_full(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """transformers' loss of causal models without its cast to float32, which would hide errors below 1e-7."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    total = nn.functional.cross_entropy(
        logits.view(-1, vocab_size), shift_labels.view(-1), ignore_index=ignore_index, reduction="sum"
    )
    return total / ((shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def make_model(dtype=torch.float64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(dtype)
    if dtype == torch.float64:
        model.loss_function = loss_in_full
    return model


def make_batch(number: int) -> dict[str, Any]:
    """41 to 60 tokens of four documents; some of their tokens are no targets."""
    generator = torch.Generator().manual_seed(number)
    lengths = (13, 1, 22 + number % 4, 5 + 5 * (number % 3))
    documents = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    features = [{"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) > 2, -100)} for ids in documents]
    return PackingCollator()(features)


def near(ours: torch.Tensor, theirs: torch.Tensor, name: str, tolerance: float = 1e-10) -> None:
    size = theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size, msg=lambda text: f"{name}: {text}")


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def bare(name: str) -> str:
    """A parameter's name without what wrappers add."""
    return name.removeprefix("module.")


# --- who reduces gradients


def make_mesh(*names: str) -> DeviceMesh:
    """Groups of two share batches, or the world does, if "sp" is all there is."""
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
    """Three steps of training, by ranks that share batches in groups.

    Attributes:
        wrap: model, mesh -> what is called.
        names: dimensions of the mesh; where there are two, "sp" has size 2.
        accumulate: batches per step.
        checkpointing: whether activations are computed again in backward.
        inner: whether the context is given the model within the wrapper.
        options: of the context.
    """

    wrap: Callable[..., nn.Module]
    names: tuple[str, ...] = ("dp", "sp")
    accumulate: int = 1
    checkpointing: bool = False
    inner: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self, step: int, part: int, replica: int) -> dict[str, Any]:
        return make_batch(100 * step + 10 * part + replica)


STEPS, LEARNING_RATE, CLIP = 3, 0.5, 0.5  # gradients' norms are about 1


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One that shows a gradient's scale, which Adam would hide."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def alone(training: Training, replicas: int, replica: int):
    """What one process computes: this replica's losses, norms, the first step's gradients, the parameters after all."""
    model = make_model()
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
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {name: p.detach() for name, p in model.named_parameters()}


def trains_as_one(training: Training) -> None:
    mesh = make_mesh(*training.names)
    replicas = mesh["dp"].size() if "dp" in training.names else 1
    replica = mesh.get_local_rank("dp") if "dp" in training.names else 0
    expected_losses, expected_norms, expected_gradients, expected = alone(training, replicas, replica)

    model = make_model()
    if training.checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    wrapped = training.wrap(model, mesh)
    optimizer = optimizer_of(wrapped)
    losses = iter(expected_losses)
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
                assert output.logits.shape[1] < batch["input_ids"].shape[1], "the batch isn't shared"
                near(loss.detach(), next(losses), f"loss of step {step}")
            if step == 0:
                for name, p in wrapped.named_parameters():
                    near(full(p.grad), expected_gradients[bare(name)], f"gradient of {name}")
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
            near(full(norm), expected_norms[step], f"norm of step {step}")
            optimizer.step()
            optimizer.zero_grad()
    for name, p in wrapped.named_parameters():
        near(full(p.detach()), expected[bare(name)], name)


def packed_without_sharing() -> None:
    """FSDP alone around a patched model: each rank has a batch of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, model = make_model(), make_model()
    for one in (reference, model):
        patch(one)
    for one in range(size):
        (reference(**make_batch(one)).loss / size).backward()
    fully_sharded(model, make_mesh("sp"))(**make_batch(rank)).loss.backward()
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        near(full(p.grad), expected.grad, name)


def in_mixed_precision() -> None:
    reference, model = make_model(torch.float32), make_model(torch.float32)
    patch(reference)
    expected = reference(**make_batch(0)).loss
    expected.backward()
    mesh = make_mesh("sp")
    model = over_all(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with SequenceParallel(model, mesh["sp"]):
        output = model(**make_batch(0))
        output.loss.backward()
    assert output.logits.dtype == torch.bfloat16
    near(output.loss.detach(), expected.detach(), "loss", 1e-2)
    for (name, p), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        near(full(p.grad), whole.grad, name, 5e-2)


class Attending(nn.Module):
    """A layer of one's own, which is handed the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor, mask: BlockDiagonalMask) -> torch.Tensor:
        q = self.project(x).view(-1, 2, 8)
        return varlen_attention(q, q, q, mask)


def mask_for_a_layer() -> None:
    """FSDP copies the dataclasses that it finds in a layer's arguments."""
    torch.manual_seed(1)
    layer, x, mask = Attending(), torch.randn(9, 16), BlockDiagonalMask.from_seqlens([4, 5])
    expected = layer(x, mask)
    sharded = fully_shard(layer, mesh=make_mesh("sp"), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    near(sharded(x, mask).float(), expected, "output", 2e-2)


# --- who doesn't


def over_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def sharded_over_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_sharded(model, mesh["dp"])


def one_layer_over_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.model.layers[1], mesh=mesh["dp"])
    return fully_shard(model, mesh=flattened(mesh))


def hybrid_over_replicas(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_sharded(model, mesh["dp", "one"])


def unreduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def refused_on_entry(wrap: Callable[..., nn.Module], names: tuple[str, ...] = ("dp", "sp")) -> None:
    mesh = make_mesh(*names)
    wrapped = wrap(make_model(), mesh)
    with pytest.raises(
        ValueError, match=r"reduces gradients over the ranks \[.*\], but a batch is shared by the ranks"
    ):
        SequenceParallel(wrapped, mesh["sp"]).__enter__()


def found_apart(wrap: Callable[..., nn.Module]) -> None:
    """What the context can't see on entry, it sees in the second step, on every rank."""
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


CASES = {
    "DDP over the world": partial(trains_as_one, Training(data_parallel, ("sp",))),
    "DDP, two batches per step": partial(trains_as_one, Training(data_parallel, accumulate=2)),
    "DDP around the model of the context": partial(
        trains_as_one, Training(data_parallel, inner=True, options={"exchange": "ring"})
    ),
    "FSDP, activations computed again": partial(trains_as_one, Training(over_all, checkpointing=True)),
    "FSDP, two batches per step": partial(
        trains_as_one, Training(over_all, accumulate=2, options={"exchange": "ulysses"})
    ),
    "HSDP, replicas of dp": partial(trains_as_one, Training(fully_sharded, ("dp", "sp"), checkpointing=True)),
    "HSDP, replicas of sp": partial(trains_as_one, Training(fully_sharded, ("sp", "dp"))),
    "FSDP in bfloat16": in_mixed_precision,
    "FSDP, nothing shared": packed_without_sharing,
    "FSDP, a mask for a layer": mask_for_a_layer,
    "DDP over replicas": partial(refused_on_entry, over_replicas),
    "FSDP over replicas": partial(refused_on_entry, sharded_over_replicas),
    "FSDP over replicas in one layer": partial(refused_on_entry, one_layer_over_replicas),
    "HSDP over replicas": partial(refused_on_entry, hybrid_over_replicas, ("dp", "one", "sp")),
    "DDP over replicas, unseen": partial(found_apart, over_replicas),
    "nothing reduced": partial(found_apart, unreduced),
}
