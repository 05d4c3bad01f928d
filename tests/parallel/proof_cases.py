"""Models that aren't known are proven by all ranks together, in their first call: under DDP and FSDP2."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.models import whole
from tests.patches.foreign import Convolution, Mixing, Unshown, config
from tritonpack import SequenceParallel, UnsupportedModelError, patch


def fully_sharded(model, keep=False):
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=not keep)
    return fully_shard(model, reshard_after_forward=not keep)


def batch(seed, rows):
    """Ranks have documents of their own; one rank has none that are packed."""
    ids = torch.randint(3, 60, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids} if rows > 1 else {"input_ids": ids, "position_ids": (torch.arange(12) % 5)[None]}


def the_first_call_trains(wrap):
    """Two steps have the gradients of a model that was proven before them."""
    found = {}
    for proven in (False, True):
        torch.manual_seed(0)
        model = Unshown(config()).train()
        handle, found[proven] = patch(model), []
        wrapped = wrap(model)
        if proven:
            handle.prove()
        for step in range(2):
            wrapped.zero_grad()
            wrapped(**batch(2 * step + dist.get_rank(), 1 + dist.get_rank())).logits.square().mean().backward()
            found[proven] += [whole(p.grad).clone() for p in wrapped.parameters() if p.grad is not None]
    assert len(found[False]) == len(found[True]) > 0
    assert all(map(torch.equal, found[False], found[True]))


def a_leak_is_refused_on_every_rank(wrap):
    rank = dist.get_rank()
    for kind in (Mixing, Unshown):
        model = kind(config())
        if kind is Unshown:
            model.model.layers[1].mlp = Convolution(model.model.layers[1].mlp)
        patch(model)
        wrapped = wrap(model)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="don't stay apart"):
                wrapped(**batch(rank, 1 + rank))


def sequence_parallel_proves_on_entry():
    model = Unshown(config())
    with SequenceParallel(model):
        model(**batch(0, 1))
    with pytest.raises(UnsupportedModelError, match="don't stay apart"), SequenceParallel(Mixing(config())):
        pass


WRAPPERS = {
    "DDP": DistributedDataParallel,
    "FSDP2": fully_sharded,
    "FSDP2 that keeps layers whole": partial(fully_sharded, keep=True),
}
CASES = {
    **{f"{name} trains": partial(the_first_call_trains, wrap) for name, wrap in WRAPPERS.items()},
    **{f"{name} refuses": partial(a_leak_is_refused_on_every_rank, wrap) for name, wrap in WRAPPERS.items()},
    "sequence parallelism": sequence_parallel_proves_on_entry,
}
