"""Ranks that fail while others wait: the others raise at the time limit of the group, which each case makes anew."""

import os
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.models import BATCHES, alone_on, is_last, loss_of, make_model, on_ranks, packed, same
from tritonpack import SequenceParallel
from tritonpack.parallel import consistency

LIMIT = timedelta(seconds=3)
ENDED = r"(?i)timed out|timeout|connection (closed|reset)"  # gloo's errors


class UserError(Exception):
    pass


def make_group():
    return dist.new_group(list(range(dist.get_world_size())), timeout=LIMIT)


def ends():
    """The error that a fault of the last rank raises there, and on the others."""
    return pytest.raises(UserError) if is_last() else pytest.raises(RuntimeError, match=ENDED)


def raise_here(*_):
    raise UserError("my hook")


def in_forward(model):
    model.model.layers[0].register_forward_hook(raise_here)
    model(**packed())


def in_backward(model):
    loss = model(**packed()).loss
    loss.register_hook(raise_here)
    loss.backward()


def others_raise(fault, **options):
    """The last rank has a fault in its second batch, and the others raise at the time limit. A new group then works."""
    on_ranks(make_model(), loss_of, packed())  # what is imported at the first batch doesn't count
    model, group = make_model(), make_group()
    with ends(), SequenceParallel(model, group, **options):
        model(**packed()).loss.backward()
        if is_last():
            fault(model)
        else:
            model(**packed()).loss.backward()
    dist.barrier()
    same(on_ranks(make_model(), loss_of, packed(), group=make_group()), alone_on("llama", "packed"))


def along_dimensions():
    """Ranks wait along dimensions of a mesh, some of them for ranks that wait for others."""
    on_ranks(make_model(), loss_of, packed())
    shape, limit = (dist.get_world_size() // 2, 2), dist.ProcessGroupGloo._Options()
    limit._timeout = LIMIT
    override = dict.fromkeys(("across", "within"), ("gloo", limit))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "within"), backend_override=override)
    model = make_model()
    if is_last():  # the others wait in the next layer
        model.model.layers[0].register_forward_hook(raise_here)
    with ends(), SequenceParallel(model, mesh, exchange=("group_cast", "ulysses")):
        model(**packed())


def error_on_every_rank():
    """Ranks that fail at the same place are in step: they go on, and the group stays usable."""
    group, model = make_group(), make_model()
    with SequenceParallel(model, group):
        handle = model.model.layers[1].register_forward_hook(raise_here)
        with pytest.raises(UserError):
            model(**packed())
        handle.remove()
        model(**packed()).loss.backward()
    model.zero_grad()
    same(on_ranks(model, loss_of, packed(), group=group), alone_on("llama", "packed"))


def floating_point_arguments_are_compared():
    """One bit of one number differs."""
    model, batch = make_model(), BATCHES["embeddings"]()
    with mock.patch.object(consistency, "CHUNK", 64), SequenceParallel(model):
        for place in (0, 17, batch["inputs_embeds"].numel() - 1):
            other = batch["inputs_embeds"].clone()
            other.view(-1).view(torch.int64)[place] ^= is_last()
            with pytest.raises(ValueError, match="batches or settings: inputs_embeds differs"):
                model(**batch | {"inputs_embeds": other})
        other = batch["inputs_embeds"].repeat(1, 1, 2)[..., 1:33]  # not contiguous, and shifted
        assert model(**batch | {"inputs_embeds": other}).loss.isfinite()


def process_ends():
    """gloo's connection closes for a rank that waits in an exchange."""
    model = make_model()
    if is_last():
        model.model.layers[0].register_forward_hook(lambda *_: os._exit(3))
    with SequenceParallel(model):
        model(**packed()).loss.backward()


CASES = {
    "error in forward": partial(others_raise, in_forward),
    "error in forward, batches unchecked": partial(others_raise, in_forward, check_batches=False),
    "error in backward": partial(others_raise, in_backward),
    "error in backward, ulysses": partial(others_raise, in_backward, exchange="ulysses"),
    "error on every rank": error_on_every_rank,
    "along dimensions": along_dimensions,
    "floating-point arguments are compared": floating_point_arguments_are_compared,
    "kills a rank": process_ends,
}
ALSO_ON_FOUR = ["error in forward", "along dimensions"]
