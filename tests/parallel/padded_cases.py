"""Padded batches as one row under DDP, FSDP2 and SequenceParallel: ranks get the gradients of stock in one process."""

from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.composition_cases import make_mesh, over_all
from tests.patches import padded_batches as padded
from tests.patches.calls import state
from tritonpack import SequenceParallel, patch

STEPS = 3


def stock(number, objective):
    """The values of this rank's batch, and the mean over the ranks of the gradients of their batches."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = padded.training_model()
    for one in range(size):
        batch = padded.padded_batch(number + one)
        output = model(**batch)
        if one == rank:
            values = padded.read(output, batch)
        (padded.OBJECTIVES[objective](output, batch) / size).backward()
    return padded.Step(values, padded.gradients_of(model))


def fully_sharded(model, **options):
    return over_all(model, make_mesh("sp"), **options)


def checkpointing(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fully_sharded(model)


WRAPPERS = {
    "DDP": DistributedDataParallel,
    "DDP, unused parameters": partial(DistributedDataParallel, find_unused_parameters=True),
    "DDP, static graph": partial(DistributedDataParallel, static_graph=True),
    "DDP, compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager", dynamic=True)),
    "FSDP": fully_sharded,
    "FSDP, resharded": partial(fully_sharded, reshard_after_forward=True),
    "FSDP, checkpointing": checkpointing,
}


def trains_as_stock(name, objective, first):
    """Steps of training and of evaluation on batches of other shapes; logits are read before the backward pass."""
    for options in (padded.UNPAD, padded.SHARE):
        model = padded.training_model()
        batches = [padded.padded_batch(number + dist.get_rank()) for number in range(STEPS)]
        handle = patch(model, **options) if first == "patch" else None
        wrapped = WRAPPERS[name](model)
        handle = handle or patch(wrapped, **options)
        for number, batch in enumerate(batches):
            want = stock(number, objective)
            padded.require_equal(want, padded.step(model, batch, objective, called=wrapped))
            with torch.no_grad():
                padded.require_equal_values(want.values, padded.read(wrapped.eval()(**batch), batch))
            wrapped.train()
            if isinstance(wrapped, FSDPModule):
                wrapped.reshard()  # else `zero_grad` would miss the gradients of the root: it holds whole weights now
        padded.require_saved(handle.saved, *batches, *batches, options=options)


def shares_padded_batches():
    """In SequenceParallel the ranks share the padded batch as it is; outside of it the same patch removes padding."""
    for options in (padded.UNPAD, padded.SHARE):
        model, batch = padded.training_model(), padded.padded_batch(0)
        want, before = padded.step(padded.training_model(), batch), state(model)
        handle = patch(model, **options)
        with SequenceParallel(model):
            output = model(**batch)
            output.loss.backward()
        torch.testing.assert_close(output.loss.detach().double(), want.values["loss"])
        assert output.logits.shape[1] < batch["input_ids"].numel(), "the batch wasn't sharded"
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad / dist.get_world_size(), want.gradients[name], rtol=0, atol=1e-6)
        assert handle.saved.tokens_computed == handle.saved.tokens_given
        padded.require_equal(want, padded.step(model, batch))
        handle.unpatch()
        assert state(model) == before


CASES = {
    **{
        f"{name}, {objective}, {first} first": partial(trains_as_stock, name, objective, first)
        for name, objective, first in product(WRAPPERS, padded.OBJECTIVES, ("patch", "wrapper"))
    },
    "SequenceParallel": shares_padded_batches,
}
