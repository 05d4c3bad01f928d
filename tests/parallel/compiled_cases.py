"""SequenceParallel under torch.compile: layers exchange within one graph, which fits every batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.models import close, make_batch, make_model
from tritonpack import SequenceParallel
from tritonpack.parallel import operators

EXACT = 1e-12  # relative to a tensor's largest number


class Graphs:
    """A backend of torch.compile.

    Args:
        backend: the name of the backend that runs graphs: "aot_eager" traces backward, too.

    Attributes:
        attentions: for each graph so far, how many layers attend in it.
    """

    def __init__(self, backend: str = "eager") -> None:
        torch._dynamo.reset()
        self.run = lookup_backend(backend)
        self.attentions: list[int] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs = [inner.graph for inner in module.modules() if isinstance(inner, torch.fx.GraphModule)]
        targets = [node.target for graph in graphs for node in graph.nodes]
        self.attentions.append(targets.count(operators.shared_attention))
        return self.run(module, inputs)


def agrees(
    exchange: Any, backend: str = "eager", family: str = "llama", group: Any = None, checkpointing: bool = False,
    layers: tuple[int, ...] = (2,),
) -> None:  # fmt: skip
    """Losses, logits and gradients are those without a compiler.

    `layers` are the numbers of layers in the graphs that have some. A graph of one layer serves all layers, as in
    models with experts, whose graphs end at the experts.
    """
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
            del outputs, output
            counts.append((len(graphs.attentions), len(operators._SHARED)))
    # The first call of a patched model is watched, so it has a graph of its own.
    assert [count for count in graphs.attentions if count] in ([*layers] * n for n in (1, 2)), graphs.attentions
    assert counts[1:] == counts[1:2] * 2, f"graphs and calls in the registry: {counts}"


def without_gradients() -> None:
    model, whole = make_model(), make_model()
    graphs = Graphs("aot_eager")
    with SequenceParallel([model, whole], exchange="ulysses"), torch.no_grad():
        found, wanted = (one(**make_batch(0)).loss for one in (torch.compile(model, backend=graphs), whole))
    close(found, wanted, "loss", EXACT)
    assert max(graphs.attentions) == 2


def mesh() -> None:
    ranks = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("across", "within"))
    agrees(("ring", "ulysses"), group=ranks)


def dropout() -> None:
    model = make_model(attention_dropout=0.1)
    with SequenceParallel(model), pytest.raises(ValueError, match="dropout"):
        torch.compile(model, backend="eager")(**make_batch(0))


def each_layer() -> None:
    """Layers that are compiled one by one, as accelerate does, without a break: fullgraph=True."""
    model, whole = make_model(), make_model()
    graphs = Graphs()
    layers: nn.ModuleList = model.model.layers
    for layer in layers:
        layer.compile(backend=graphs, dynamic=True, fullgraph=True)
    with SequenceParallel([model, whole]):
        for number in range(3):
            outputs = [one(**make_batch(number)) for one in (model, whole)]
            close(*(output.logits.detach() for output in outputs), "logits", EXACT)
    assert set(graphs.attentions) == {1}, graphs.attentions


CASES = {
    **{exchange: partial(agrees, exchange) for exchange in ("all_gather", "group_cast", "ring", "ulysses")},
    "all_gather, traced backward": partial(agrees, "all_gather", "aot_eager"),
    "ulysses, traced backward, recomputed": partial(agrees, "ulysses", "aot_eager", checkpointing=True),
    "ulysses, sinks": partial(agrees, "ulysses", family="gpt_oss", layers=(1,)),
    "ring, sinks": partial(agrees, "ring", "aot_eager", family="gpt_oss", layers=(1,)),
    "without gradients": without_gradients,
    "mesh": mesh,
    "layers one by one": each_layer,
    "dropout": dropout,
}
ALSO_ON_FOUR = ("mesh", "ulysses")
