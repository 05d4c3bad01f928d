"""Ranks that fail while others wait: the others raise at the time limit of the group, which each case makes anew."""

import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.models import alone_on, is_last, loss_of, make_known_model, make_model, on_ranks, packed, same
from tritonpack import SequenceParallel

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


def before_backward(model):
    model(**packed())
    raise UserError("as after an interrupt")


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


def error_on_every_rank(where):
    """Ranks that fail at the same place are in step: they go on, and the group stays usable."""
    group, model = make_group(), make_model()
    with SequenceParallel(model, group):
        for options in ({}, {"attention_mask": torch.zeros(1, 3, dtype=torch.long)}):
            handle = where(model).register_forward_hook(raise_here)
            with pytest.raises(ValueError if options else UserError, match="attention_mask" if options else "my hook"):
                model(**packed() | options)
            handle.remove()
        model(**packed()).loss.backward()
    model.zero_grad()
    same(on_ranks(model, loss_of, packed(), group=group), alone_on("llama", "packed"))


def along_dimensions():
    """Ranks wait along dimensions of a mesh, some of them for ranks that wait for others."""
    on_ranks(make_model(), loss_of, packed())
    shape, limit = (dist.get_world_size() // 2, 2), dist.ProcessGroupGloo._Options()
    limit._timeout = LIMIT
    override = dict.fromkeys(("across", "within"), ("gloo", limit))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "within"), backend_override=override)
    model = make_known_model()
    if is_last():  # the others wait in the next layer
        model.model.layers[0].register_forward_hook(raise_here)
    with ends(), SequenceParallel(model, mesh, exchange=("group_cast", "ulysses")):
        model(**packed())


def process_ends():
    """gloo's connection closes for a rank that waits in an exchange."""
    model = make_known_model()
    if is_last():
        model.model.layers[0].register_forward_hook(lambda *_: os._exit(3))
    with SequenceParallel(model):
        model(**packed()).loss.backward()


CASES = {
    "error in forward": partial(others_raise, in_forward),
    "error in forward, batches unchecked": partial(others_raise, in_forward, check_batches=False),
    "error in backward": partial(others_raise, in_backward),
    "error in backward, ulysses": partial(others_raise, in_backward, exchange="ulysses"),
    "error before backward": partial(others_raise, before_backward),
    "error on every rank in a layer": partial(error_on_every_rank, lambda model: model.model.layers[1]),
    "error on every rank after all exchanges": partial(error_on_every_rank, lambda model: model),
    "along dimensions": along_dimensions,
    "only: a process ends": process_ends,
}
ALSO_ON_FOUR = ["error in forward", "along dimensions"]
