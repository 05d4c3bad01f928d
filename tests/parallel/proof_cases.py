"""Models that aren't known are proven by all ranks together, in their first call: under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.patches.foreign import Convolution, Mixing, Unshown, config
from tritonpack import SequenceParallel, UnsupportedModelError, patch

Wrap = Callable[[Any], nn.Module]


def fully_sharded(model: Any, keep: bool = False) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=not keep)
    return fully_shard(model, reshard_after_forward=not keep)


def batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """Ranks have documents of their own; one rank has none that are packed."""
    ids = torch.randint(3, 60, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids} if rows > 1 else {"input_ids": ids, "position_ids": (torch.arange(12) % 5)[None]}


def gradients(wrap: Wrap, *, proven: bool) -> list[torch.Tensor]:
    """The gradients of two steps. `proven` asks for the proof before them."""
    torch.manual_seed(0)
    model = Unshown(config()).train()
    handle = patch(model)
    wrapped = wrap(model)
    if proven:
        handle.prove()
    rank, found = dist.get_rank(), []
    for step in range(2):
        wrapped.zero_grad()
        wrapped(**batch(2 * step + rank, 1 + rank)).logits.square().mean().backward()
        steps = [p.grad for p in wrapped.parameters() if p.grad is not None]
        found += [x.full_tensor() if isinstance(x, DTensor) else x.clone() for x in steps]
    return found


def the_first_call_trains(wrap: Wrap) -> None:
    first, second = gradients(wrap, proven=False), gradients(wrap, proven=True)
    assert len(first) == len(second) > 0
    assert all(map(torch.equal, first, second))


def a_leak_is_refused_on_every_rank(wrap: Wrap) -> None:
    rank = dist.get_rank()
    for kind in (Mixing, Unshown):
        model: Any = kind(config())
        if kind is Unshown:
            model.model.layers[1].mlp = Convolution(model.model.layers[1].mlp)
        patch(model)
        wrapped = wrap(model)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="don't stay apart"):
                wrapped(**batch(rank, 1 + rank))


def sequence_parallel_proves_on_entry() -> None:
    model = Unshown(config())
    with SequenceParallel(model):
        model(**batch(0, 1))
    with pytest.raises(UnsupportedModelError, match="don't stay apart"), SequenceParallel(Mixing(config())):
        pass


WRAPPERS: dict[str, Wrap] = {
    "DDP": DistributedDataParallel,
    "FSDP2": fully_sharded,
    "FSDP2 that keeps layers whole": partial(fully_sharded, keep=True),
}

CASES: dict[str, Callable[[], None]] = {
    **{f"{name} trains": partial(the_first_call_trains, wrap) for name, wrap in WRAPPERS.items()},
    **{f"{name} refuses": partial(a_leak_is_refused_on_every_rank, wrap) for name, wrap in WRAPPERS.items()},
    "sequence parallelism": sequence_parallel_proves_on_entry,
}
