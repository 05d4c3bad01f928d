"""MLPs on tiles of rows, under DDP, FSDP2, FullyShardedDataParallel and SequenceParallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.parallel.composition_cases import full, make_mesh, over_all
from tests.parallel.models import BATCHES, alone, alone_on, close, loss_of, make_model, on_ranks, packed, same
from tests.parallel.padded_cases import WRAPPERS, stock
from tests.patches.padded_batches import padded_batch, training_model
from tests.patches.test_every_model import state
from tests.patches.test_tiled_loss import Largest
from tritonpack import SequenceParallel, patch

STEPS = 2


def shares_batches(batch: str, family: str, **options: Any) -> None:
    """The loss and all gradients of one process without tiles, in float64."""
    model = make_model(family)
    with patch(model, tiled_mlp=4):
        got = on_ranks(model, loss_of, BATCHES[batch](), **options)
    same(got, alone_on(family, batch))


def recomputes_layers() -> None:
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with patch(model, tiled_mlp=4, tiled_loss=4):
        same(on_ranks(model, loss_of, packed()), alone_on("llama", "packed"))


def largest_tensor() -> None:
    """No rank makes a tensor with more numbers than a tile times the intermediate size."""
    model = make_model(intermediate_size=1009)
    batch = packed((30, 34))
    with SequenceParallel(model), Largest(model) as seen:
        model(**batch).loss.backward()
    assert seen.numel >= 64 // dist.get_world_size() * 1009
    with patch(model, tiled_mlp=5, tiled_loss=5), SequenceParallel(model), Largest(model) as seen:
        model(**batch).loss.backward()
    assert seen.numel == 5 * 1009, seen.shape


def shards_under(name: str) -> None:
    """SequenceParallel around a wrapped model."""
    want = alone(make_model(), loss_of, packed())
    model = make_model()
    patch(model, tiled_mlp=4)
    wrapped = WRAPPERS[name](model)
    with SequenceParallel(wrapped):
        loss = wrapped(**packed()).loss
        loss.backward()
    close(loss.detach(), want.loss[0], "loss")
    for parameter, p in model.named_parameters():
        close(full(p.grad), want.gradients[parameter], parameter)


def with_mlps_sharded(model: nn.Module) -> nn.Module:
    """Each MLP is gathered in its own forward alone, and again for its backward pass."""
    mesh = make_mesh("sp")
    for layer in model.model.layers:
        fully_shard(layer.mlp, mesh=mesh, reshard_after_forward=True)
    return over_all(model, mesh)


def trains_as_stock(wrap: Any, first: str) -> None:
    """Steps of training and of evaluation. Each rank has a batch and a number of tiles of its own."""
    model = training_model()
    handle = patch(model, tiled_mlp=5) if first == "patch" else None
    wrapped = wrap(model)
    if handle is None:
        handle = patch(wrapped, tiled_mlp=5)
    assert len(handle.report.mlps) == len(model.model.layers)
    for number in range(STEPS):
        batch = padded_batch(number + dist.get_rank())
        want = stock(number, "loss")
        model.zero_grad()
        loss = wrapped(**batch).loss
        loss.backward()
        close(loss.detach().double(), want.values["loss"].double(), "loss", 1e-6)
        for parameter, p in model.named_parameters():
            torch.testing.assert_close(full(p.grad), want.gradients[parameter], rtol=0, atol=1e-6)
        with torch.no_grad():
            close(wrapped.eval()(**batch).loss.double(), want.values["loss"].double(), "loss in evaluation", 1e-6)
        wrapped.train()
        if hasattr(wrapped, "reshard"):
            wrapped.reshard()


def fsdp1(first: str) -> None:
    """FullyShardedDataParallel around layers puts views of a flat parameter in the place of weights."""
    want = stock(0, "loss")
    model = training_model()
    handle = patch(model, tiled_mlp=5) if first == "patch" else None
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=policy
    )
    if handle is None:
        handle = patch(wrapped, tiled_mlp=5)
    assert len(handle.report.mlps) == len(model.model.layers)
    loss = wrapped(**padded_batch(dist.get_rank())).loss
    loss.backward()
    close(loss.detach().double(), want.values["loss"].double(), "loss", 1e-6)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        for parameter, p in wrapped.named_parameters():
            name = parameter.replace("_fsdp_wrapped_module.", "")
            torch.testing.assert_close(p.grad, want.gradients[name], rtol=0, atol=1e-6)


def refuses_parts_that_are_sharded_by_themselves() -> None:
    model, mesh = training_model(), make_mesh("sp")
    fully_shard(model.model.layers[1].mlp.up_proj, mesh=mesh)
    with (
        patch(over_all(model, mesh), tiled_mlp=5),
        pytest.raises(ValueError, match=r"up_proj.weight of .*layers.1.mlp \(LlamaMLP\) is sharded by itself"),
    ):
        model(**padded_batch(0))


def leaves_models_as_they_were() -> None:
    model = training_model()
    before = state(model)
    with patch(model, tiled_mlp=5), SequenceParallel(model):
        model(**padded_batch(0)).loss.backward()
    assert state(model) == before


NAMES = ("DDP", "DDP, unused parameters", "DDP, static graph", "FSDP", "FSDP, resharded", "FSDP, checkpointing")
CASES = {
    "FSDP, a sharded part": refuses_parts_that_are_sharded_by_themselves,
    **{f"FullyShardedDataParallel, {first} first": partial(fsdp1, first) for first in ("patch", "wrapper")},
    "unpatched": leaves_models_as_they_were,
    **{f"{batch}, llama": partial(shares_batches, batch, "llama") for batch in BATCHES},
    "packed, gemma2": partial(shares_batches, "packed", "gemma2"),
    "packed, ring, zigzag, summed": partial(
        shares_batches, "packed", "llama", exchange="ring", layout="zigzag", grad_reduce="sum"
    ),
    "largest tensor": largest_tensor,
    "checkpointing": recomputes_layers,
    **{f"SequenceParallel around {name}": partial(shards_under, name) for name in ("DDP", "FSDP")},
    **{
        f"{name}, {first} first": partial(trains_as_stock, wrap, first)
        for name, wrap in {**{name: WRAPPERS[name] for name in NAMES}, "FSDP, sharded MLPs": with_mlps_sharded}.items()
        for first in ("patch", "wrapper")
    },
}
