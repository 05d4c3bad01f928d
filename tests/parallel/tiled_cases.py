"""The head and the loss on tiles of rows, under DDP, FSDP2, FullyShardedDataParallel and SequenceParallel.

Functions that take `tiles`, options of `patch`, are for MLPs on tiles, too: `tiled_mlp_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.parallel.composition_cases import full
from tests.parallel.models import (
    BATCHES,
    alone,
    alone_on,
    close,
    loss_of,
    make_float32_model,
    make_model,
    on_ranks,
    packed,
    same,
)
from tests.parallel.padded_cases import WRAPPERS, stock
from tests.patches.padded_batches import padded_batch, training_model
from tests.patches.test_every_model import state
from tests.patches.test_tiled_loss import Largest
from tritonpack import SequenceParallel, patch

STEPS = 2


def shares_batches(tiles: dict[str, int], batch: str, family: str, **options: Any) -> None:
    """The loss and all gradients of one process without tiles, in float64."""
    model = make_model(family)
    with patch(model, **tiles):
        got = on_ranks(model, loss_of, BATCHES[batch](), **options)
    same(got, alone_on(family, batch))


def shares_batches_in_float32() -> None:
    """With transformers' own loss, and the number of targets of several batches."""
    for more in ({}, {"num_items_in_batch": 100}, {"num_items_in_batch": torch.tensor(100)}):
        want = alone(make_float32_model(), loss_of, packed(), **more)
        model = make_float32_model()
        with patch(model, tiled_loss=4):
            got = on_ranks(model, partial(loss_of, **more), packed())
        close(got.loss, want.loss, "loss", 1e-6)
        for name, gradient in want.gradients.items():
            close(got.gradients[name], gradient, name, 1e-5)


def keeps_logits_of(keep: Any, wanted: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Targets of chosen tokens; some ranks may own none of them."""
    batch = packed()
    targets = wanted(nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100))
    batch |= {"labels": targets, "shift_labels": targets}
    want = alone(make_model(), loss_of, batch, logits_to_keep=keep)
    model = make_model()
    with patch(model, tiled_loss=2):
        got = on_ranks(model, partial(loss_of, logits_to_keep=keep), batch)
    same(got, want)


def ranks_without_targets() -> None:
    for keep in (0, 51):  # only the first token predicts something, or none does
        batch = packed()
        batch["labels"] = batch["labels"].new_full((1, 51), -100)
        batch["labels"][0, 1 : 2 - bool(keep)] = 7
        model = make_model()
        with patch(model, tiled_loss=4):
            got = on_ranks(model, partial(loss_of, num_items_in_batch=3), batch)
        same(got, alone(make_model(), loss_of, batch, num_items_in_batch=3))


def largest_tensor(gather_outputs: bool) -> None:
    """No rank makes a tensor with more numbers than a tile times the vocabulary; outputs have no logits to gather."""
    model = make_model(vocab_size=1009)
    batch = packed((30, 34))
    with SequenceParallel(model), Largest(model) as seen:
        model(**batch).loss.backward()
    assert seen.numel >= 64 // dist.get_world_size() * 1009
    with patch(model, tiled_loss=5), SequenceParallel(model, gather_outputs=gather_outputs), Largest(model) as seen:
        output = model(**batch)
        output.loss.backward()
        with torch.no_grad():
            evaluated = model(**batch)
    assert seen.numel == 5 * 1009, seen.shape
    assert output.logits is None
    assert evaluated.logits is None
    close(evaluated.loss, output.loss.detach(), "loss")


def recomputes_layers(tiles: dict[str, int]) -> None:
    model = make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with patch(model, **tiles):
        same(on_ranks(model, loss_of, packed()), alone_on("llama", "packed"))


def shards_under(tiles: dict[str, int], name: str) -> None:
    """SequenceParallel around a wrapped model."""
    want = alone(make_model(), loss_of, packed())
    model = make_model()
    patch(model, **tiles)
    wrapped = WRAPPERS[name](model)
    with SequenceParallel(wrapped):
        loss = wrapped(**packed()).loss
        loss.backward()
    close(loss.detach(), want.loss[0], "loss")
    for parameter, p in model.named_parameters():
        close(full(p.grad), want.gradients[parameter], parameter)


def patch_and_wrap(model: nn.Module, tiles: dict[str, int], wrap: Callable[..., nn.Module], first: str) -> nn.Module:
    handle = patch(model, **tiles) if first == "patch" else None
    wrapped = wrap(model)
    if handle is None:
        handle = patch(wrapped, **tiles)
    assert len(handle.report.mlps) == (len(model.model.layers) if "tiled_mlp" in tiles else 0)
    return wrapped


def trains_as_stock(tiles: dict[str, int], wrap: Callable[..., nn.Module], first: str) -> None:
    """Steps of training and of evaluation. Each rank has a batch and a number of tiles of its own."""
    model = training_model()
    wrapped = patch_and_wrap(model, tiles, wrap, first)
    for number in range(STEPS):
        batch = padded_batch(number + dist.get_rank())
        want = stock(number, "loss")
        model.zero_grad()
        output = wrapped(**batch)
        output.loss.backward()
        assert (output.logits is None) == ("tiled_loss" in tiles)
        close(output.loss.detach().double(), want.values["loss"].double(), "loss", 1e-6)
        for parameter, p in model.named_parameters():
            torch.testing.assert_close(full(p.grad), want.gradients[parameter], rtol=0, atol=1e-6)
        with torch.no_grad():
            close(wrapped.eval()(**batch).loss.double(), want.values["loss"].double(), "loss in evaluation", 1e-6)
        wrapped.train()
        if hasattr(wrapped, "reshard"):
            wrapped.reshard()


def refuses_a_head_that_is_sharded_by_itself() -> None:
    for frozen in (True, False):
        whole = training_model()
        whole.lm_head.requires_grad_(not frozen)
        model = WRAPPERS["FSDP, a sharded head"](whole)
        handle = patch(model, tiled_loss=5)
        with pytest.raises(ValueError, match=r"fully_shard\(layer\) for each layer and fully_shard\(model\), but not"):
            model(**padded_batch(0))
        with torch.no_grad():
            loss = model(**padded_batch(0)).loss
        handle.unpatch()
    torch.testing.assert_close(loss, training_model()(**padded_batch(0)).loss)


def fsdp1(tiles: dict[str, int], first: str) -> None:
    """FullyShardedDataParallel puts views of a flat parameter in the place of weights, for MLPs in those of layers."""
    want = stock(0, "loss")
    model = training_model()
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    if "tiled_mlp" in tiles:
        options["auto_wrap_policy"] = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = patch_and_wrap(model, tiles, partial(FullyShardedDataParallel, **options), first)
    output = wrapped(**padded_batch(dist.get_rank()))
    output.loss.backward()
    assert (output.logits is None) == ("tiled_loss" in tiles)
    close(output.loss.detach().double(), want.values["loss"].double(), "loss", 1e-6)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        for parameter, p in wrapped.named_parameters():
            name = parameter.replace("_fsdp_wrapped_module.", "")
            torch.testing.assert_close(p.grad, want.gradients[name], rtol=0, atol=1e-6)


def leaves_models_as_they_were(tiles: dict[str, int]) -> None:
    model = training_model()
    before = state(model)
    with patch(model, **tiles), SequenceParallel(model):
        model(**padded_batch(0)).loss.backward()
    assert state(model) == before


NAMES = ("DDP", "DDP, unused parameters", "DDP, static graph", "FSDP", "FSDP, resharded", "FSDP, checkpointing")


def cases_of(tiles: dict[str, int], small: dict[str, int], wrappers: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """The cases of what runs on tiles: `tiles` divide batches that ranks share, `small` those of single ranks."""
    return {
        **{f"FullyShardedDataParallel, {first} first": partial(fsdp1, small, first) for first in ("patch", "wrapper")},
        "unpatched": partial(leaves_models_as_they_were, small),
        **{f"{batch}, llama": partial(shares_batches, tiles, batch, "llama") for batch in BATCHES},
        "packed, gemma2": partial(shares_batches, tiles, "packed", "gemma2"),
        "packed, ring, zigzag, summed": partial(
            shares_batches, tiles, "packed", "llama", exchange="ring", layout="zigzag", grad_reduce="sum"
        ),
        "checkpointing": partial(recomputes_layers, tiles),
        **{f"SequenceParallel around {name}": partial(shards_under, tiles, name) for name in ("DDP", "FSDP")},
        **{
            f"{name}, {first} first": partial(trains_as_stock, small, wrap, first)
            for name, wrap in wrappers.items()
            for first in ("patch", "wrapper")
        },
    }


CASES = {
    **cases_of({"tiled_loss": 4}, {"tiled_loss": 5}, {name: WRAPPERS[name] for name in NAMES}),
    "FSDP, a sharded head": refuses_a_head_that_is_sharded_by_itself,
    "packed, gpt_oss": partial(shares_batches, {"tiled_loss": 4}, "packed", "gpt_oss"),
    "float32": shares_batches_in_float32,
    "logits_to_keep=3": partial(keeps_logits_of, 3, lambda x: x[:, -3:]),
    "logits_to_keep=places": partial(keeps_logits_of, torch.tensor([1, 7, 50]), lambda x: x[:, [1, 7, 50]]),
    "ranks without targets": ranks_without_targets,
    "largest tensor": partial(largest_tensor, False),
    "largest tensor, gathered": partial(largest_tensor, True),
}
