"""A patched model under torch.compile: one graph for every length, and exact results."""

from typing import Any

import pytest
import torch

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.models import VOCAB, Graphs, tiny_model

# They differ in these: values narrower than keys, and experts; a forward of ours; windows on some layers, and sinks;
# chunks and a temperature; positions from a table. Llama, without any of these, is trained below. A model whose layers
# are all alike has one layer, because the compiler compiles each by itself.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "falcon": {"num_hidden_layers": 1},
    "gpt_oss": {},
    "llama4_text": {},
    "opt": {"num_hidden_layers": 1},
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # from the compiler


def test_a_full_graph() -> None:
    """Of a model with one layer, traced and not compiled, so that it is quick; other tests here take minutes."""
    torch._dynamo.reset()
    ids = torch.randint(3, VOCAB, (1, 20))
    batch = {"input_ids": ids, "position_ids": (torch.arange(20) % 7)[None], "labels": ids, "use_cache": False}
    model = tiny_model("llama", num_hidden_layers=1)
    with tritonpack.patch(model), torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(**batch).logits, model(**batch).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_every_length(family: str) -> None:
    graphs = Graphs()
    model = zoo.tiny_model(family, **FAMILIES[family])
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the eager one reads how many tokens an expert got
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        for total in (12, 9, 20, 33):
            batch = {
                "input_ids": torch.randint(3, VOCAB, (1, total)),
                "position_ids": (torch.arange(total) % 7)[None],
                "use_cache": False,
            }
            assert torch.equal(compiled(**batch).logits, model(**batch).logits)
    assert graphs.count == 1


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_collated_batches_share_one_graph(checkpointed: bool) -> None:
    """Also those of one document, and if the layers run again in backward."""
    graphs = Graphs()
    model = tiny_model("llama", dtype=torch.float32).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        for lengths in LAYOUTS[:4]:
            documents = [{"input_ids": torch.randint(3, VOCAB, (length,)).tolist()} for length in lengths]
            batch = tritonpack.PackingCollator()(documents) | {"use_cache": False}
            gradients = []
            for forward in (model, compiled):
                model.zero_grad()
                forward(**batch).loss.backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            for expected, got in zip(*gradients, strict=True):
                torch.testing.assert_close(got, expected)
    assert graphs.count == 1


LAYOUTS = [(7, 1, 3, 11), (13,), (2, 20, 5), (30, 4), (12, 9, 8, 3, 1), (22,), (5, 5, 5, 5, 5, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_recurrent_layers_run_outside_of_graphs_that_fit_all_lengths(family: str) -> None:
    """The first batches, with one document and with several, make all graphs; later batches make none."""
    graphs = Graphs()
    model = zoo.tiny_model(family)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend=graphs, dynamic=True)
        seen = []
        for lengths in LAYOUTS:
            batch = sweep.FORMS["position_ids"](zoo.documents(lengths))
            got = compiled(batch.ids, **batch.arguments).logits
            assert torch.equal(got, model(batch.ids, **batch.arguments).logits), lengths
            seen.append(graphs.count)
    assert seen[2:] == seen[2:3] * len(seen[2:])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roformer", "openai-gpt"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "base model"])
def test_graphs_read_the_packing_of_their_own_call(family: str, inside: bool) -> None:
    """The hook of a compiled module runs outside of its graph. The graph reads what the hook has set."""
    torch._dynamo.reset()
    model = zoo.tiny_model(family)
    with tritonpack.patch(model):
        whole = model.base_model if inside else model
        compiled = torch.compile(whole, backend="eager", dynamic=True)
        for lengths in LAYOUTS[:3]:
            for form in ("position_ids", "segments_alone"):
                batch = sweep.FORMS[form](zoo.documents(lengths))
                got, expected = (batch.gather(run(batch.ids, **batch.arguments)[0]) for run in (compiled, whole))
                torch.testing.assert_close(got, expected)
