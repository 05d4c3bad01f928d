"""Padded batches as one row under DDP, FSDP2 and SequenceParallel: ranks get the gradients of stock in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.composition_cases import make_mesh, over_all
from tests.parallel.models import whole
from tests.patches.calls import state
from tests.patches.padded_batches import (
    OBJECTIVES,
    SHARE,
    UNPAD,
    Step,
    gradients_of,
    padded_batch,
    read,
    require_equal,
    require_equal_values,
    require_saved,
    step,
    training_model,
)
from tritonpack import SequenceParallel, patch

WAYS = UNPAD, SHARE
STEPS = 3


def stock(number: int, objective: str) -> Step:
    """The values of this rank's batch, and the mean over the ranks of the gradients of their batches."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = training_model()
    for one in range(size):
        batch = padded_batch(number + one)
        output = model(**batch)
        if one == rank:
            values = read(output, batch)
        (OBJECTIVES[objective](output, batch) / size).backward()
    return Step(values, gradients_of(model))


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    return over_all(model, make_mesh("sp"), **options)


def checkpointing(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fully_sharded(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP, unused parameters": partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP, static graph": partial(DistributedDataParallel, static_graph=True),
    "DDP, compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager", dynamic=True)),
    "FSDP": fully_sharded,
    "FSDP, resharded": partial(fully_sharded, reshard_after_forward=True),
    "FSDP, checkpointing": checkpointing,
}


def trains_as_stock(name: str, objective: str, first: str, options: dict[str, bool]) -> None:
    """Steps of training and of evaluation on batches of other shapes; logits are read before the backward pass."""
    model = training_model()
    batches = [padded_batch(number + dist.get_rank()) for number in range(STEPS)]
    handle = patch(model, **options) if first == "patch" else None
    wrapped = WRAPPERS[name](model)
    before = state(model)
    if handle is None:
        handle = patch(wrapped, **options)
    for number, batch in enumerate(batches):
        want = stock(number, objective)
        require_equal(want, step(model, batch, objective, called=wrapped))
        with torch.no_grad():
            require_equal_values(want.values, read(wrapped.eval()(**batch), batch))
        wrapped.train()
        if isinstance(wrapped, FSDPModule):
            wrapped.reshard()  # else `zero_grad` would miss the gradients of the root: it holds whole weights now
    require_saved(handle.saved, *batches, *batches, options=options)
    handle.unpatch()
    assert first == "patch" or state(model) == before


def shares_padded_batches(options: dict[str, bool]) -> None:
    """In SequenceParallel the ranks share the padded batch as it is; outside of it the same patch removes padding."""
    model, batch = training_model(), padded_batch(0)
    want = step(training_model(), batch)
    before = state(model)
    handle = patch(model, **options)
    with SequenceParallel(model):
        output = model(**batch)
        output.loss.backward()
    torch.testing.assert_close(output.loss.detach().double(), want.values["loss"])
    assert output.logits.shape[1] < batch["input_ids"].numel(), "the batch wasn't sharded"
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        torch.testing.assert_close(whole(p.grad) / dist.get_world_size(), want.gradients[name], rtol=0, atol=1e-6)
    assert handle.saved.tokens_computed == handle.saved.tokens_given
    require_equal(want, step(model, batch))
    handle.unpatch()
    assert state(model) == before


def both_ways(case: Callable[..., None], *arguments: Any) -> None:
    for options in WAYS:
        case(*arguments, options)


CASES = {
    **{
        f"{name}, {objective}, {first} first": partial(both_ways, trains_as_stock, name, objective, first)
        for name, objective, first in product(WRAPPERS, OBJECTIVES, ("patch", "wrapper"))
    },
    "SequenceParallel": partial(both_ways, shares_padded_batches),
}
