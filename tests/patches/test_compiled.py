"""A patched model under torch.compile: one graph, packed exactly, for every length."""

from typing import Any

import pytest
import torch

import tritonpack
from tests.patches import zoo
from tests.patches.models import VOCAB, tiny_model

# What differs between them: values narrower than keys, and experts; a forward of ours; windows on some layers, and
# sinks; chunks and a temperature; positions from a table. Llama, which has none of it, is trained below. Where layers
# are all alike there is one, because the compiler takes each for itself.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "falcon": {"num_hidden_layers": 1},
    "gpt_oss": {},
    "llama4_text": {},
    "opt": {"num_hidden_layers": 1},
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler's own


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_every_length(family: str) -> None:
    torch._dynamo.reset()
    graphs = 0

    def count(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module

    model = zoo.tiny_model(family, **FAMILIES[family])
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the eager one asks how many tokens an expert got
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=True)
        for total in (12, 9, 20, 33):
            batch = {
                "input_ids": torch.randint(3, VOCAB, (1, total)),
                "position_ids": (torch.arange(total) % 7)[None],
                "use_cache": False,
            }
            assert torch.equal(compiled(**batch).logits, model(**batch).logits)
    assert graphs == 1


def test_training() -> None:
    torch._dynamo.reset()
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1).train()
    ids = torch.randint(3, VOCAB, (1, 20))
    batch = {"input_ids": ids, "labels": ids, "position_ids": (torch.arange(20) % 7)[None], "use_cache": False}
    with tritonpack.patch(model):
        gradients = []
        for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            model.zero_grad()
            forward(**batch).loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)
