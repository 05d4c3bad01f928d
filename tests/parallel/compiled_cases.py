"""SequenceParallel under torch.compile: graphs end where ranks exchange, and fit every batch."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import lookup_backend

from tests.parallel.models import close, make_batch, make_model, mesh_of
from tritonpack import SequenceParallel


def agrees(exchange, backend="eager", family="llama", checkpointing=False):
    """Losses, logits and gradients are those without a compiler. The third batch needs no new graph."""
    models = make_model(family), make_model(family)
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable()
    torch._dynamo.reset()
    graphs, counts = [], []

    def count(module, inputs):
        graphs.append(module)
        return lookup_backend(backend)(module, inputs)  # "aot_eager" traces backward, too

    compiled = torch.compile(models[0], backend=count, dynamic=True)
    group = None if isinstance(exchange, str) else mesh_of(dist.get_world_size() // 2, 2)
    with SequenceParallel(models, group, exchange=exchange):
        for number in range(3):
            batch = make_batch(number)
            outputs = [forward(**batch) for forward in (compiled, models[1])]
            for model, output in zip(models, outputs, strict=True):
                model.zero_grad()
                output.loss.backward()
            for name in ("loss", "logits"):
                close(*(output[name].detach() for output in outputs), name)
            for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                close(p.grad, q.grad, name)
            counts.append(len(graphs))
    assert 0 < counts[1] == counts[2], counts


def full_graph():
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
    "pair": partial(agrees, ("ring", "ulysses")),
    "full graph": full_graph,
}
ALSO_ON_FOUR = ("pair",)
