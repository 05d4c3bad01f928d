"""SequenceParallel under torch.compile: graphs end where ranks exchange, and fit every batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.models import close, make_batch, make_model
from tritonpack import SequenceParallel

EXACT = 1e-12  # relative to a tensor's largest number


class Graphs:
    """A backend of torch.compile that counts graphs.

    Args:
        backend: the name of the backend that runs graphs: "aot_eager" traces backward, too.
    """

    def __init__(self, backend: str = "eager") -> None:
        torch._dynamo.reset()
        self.run = lookup_backend(backend)
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return self.run(module, inputs)


def agrees(
    exchange: Any, backend: str = "eager", family: str = "llama", group: Any = None, checkpointing: bool = False
) -> None:
    """Losses, logits and gradients are those without a compiler. The third batch needs no new graph."""
    models = make_model(family), make_model(family)
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable()
    graphs, counts = Graphs(backend), []
    compiled = torch.compile(models[0], backend=graphs, dynamic=True)
    with SequenceParallel(models, group, exchange=exchange):
        for number in range(3):
            batch = make_batch(number)
            outputs = [forward(**batch) for forward in (compiled, models[1])]
            for model, output in zip(models, outputs, strict=True):
                model.zero_grad()
                output.loss.backward()
            for name in ("loss", "logits"):
                close(*(output[name].detach() for output in outputs), name, EXACT)
            for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                close(p.grad, q.grad, name, EXACT)
            counts.append(graphs.count)
    assert 0 < counts[1] == counts[2], counts


def mesh() -> None:
    ranks = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("across", "within"))
    agrees(("ring", "ulysses"), group=ranks)


def full_graph() -> None:
    """The compiler's error says why and what to do, for a model and for a layer."""
    torch._dynamo.reset()
    model, message = make_model(), r"exchanges with other ranks here, .*; leave fullgraph=True out"
    with SequenceParallel(model):
        with pytest.raises(RuntimeError, match=message):
            torch.compile(model, backend="eager", fullgraph=True)(**make_batch(0))
        model.model.layers[0].compile(backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match=message):
            model(**make_batch(0))


CASES = {
    "group_cast": partial(agrees, "group_cast"),
    "all_gather, traced backward": partial(agrees, "all_gather", "aot_eager"),
    "ulysses, traced backward, recomputed": partial(agrees, "ulysses", "aot_eager", checkpointing=True),
    "ring, sinks": partial(agrees, "ring", family="gpt_oss"),
    "mesh": mesh,
    "full graph": full_graph,
}
ALSO_ON_FOUR = ("mesh",)
