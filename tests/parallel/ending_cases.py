"""Cases that end the process of the last rank, while the others wait for it, or the process group of the world."""

import gc
import os
import tempfile
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.failing_cases import in_forward, is_last, make_group, quick, raise_here
from tests.parallel.models import alone_on, loss_of, make_model, on_ranks, packed, same
from tritonpack import RankFailedError, SequenceParallel
from tritonpack.parallel import watch


def before_a_batch():
    """No connection closes for a rank that waits at its next batch; it misses a sign of life."""
    model = make_model()
    with quick(), mock.patch.object(watch, "SILENCE", 1), SequenceParallel(model, make_group()):
        model(**packed()).loss.backward()
        if is_last():
            os._exit(3)
        model(**packed())


def in_a_batch():
    """gloo's connection closes for a rank that waits in an exchange."""
    model = make_model()
    if is_last():
        model.model.layers[0].register_forward_hook(lambda *_: os._exit(3))
    with quick(), SequenceParallel(model, make_group()):
        model(**packed()).loss.backward()


def in_the_world():
    """Without a group of its own, a context takes the whole world's, which can then be made anew."""
    model, rank, size = make_model(), dist.get_rank(), dist.get_world_size()
    with quick(), pytest.raises(RankFailedError, match="failed in batch 2"), SequenceParallel(model):
        in_forward(model)
    dist.destroy_process_group()
    file = Path(tempfile.gettempdir()) / f"tritonpack-ranks-of-{os.getppid()}"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    same(on_ranks(make_model(), loss_of, packed()), alone_on("llama", "packed"))
    dist.barrier()
    file.unlink(missing_ok=True)


def along_dimensions():
    """Ranks wait along dimensions of a mesh, some of them for ranks that wait for others."""
    model, mesh = make_model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
    options = {"exchange": ("group_cast", "ulysses"), "layout": "balanced"}
    if is_last():  # the others wait in the next layer
        model.model.layers[0].register_forward_hook(partial(raise_here, RuntimeError("my hook")))
    error = RuntimeError if is_last() else RankFailedError
    with quick(), pytest.raises(error, match="my hook"), SequenceParallel(model, mesh, **options):
        model(**packed())


def of_a_group():
    """Nothing holds a group that was destroyed."""
    group, model = make_group(), make_model()
    with SequenceParallel(model, group):
        model(**packed()).loss.backward()
    left = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert left() is None


CASES = {
    "of a group": of_a_group,
    "before a batch": before_a_batch,
    "in a batch": in_a_batch,
    "in the world": in_the_world,
    "along dimensions": along_dimensions,
}
