"""Patched models under torch.compile: exact, one graph for every length, no recompilation for another shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, FORMS, call_of, documents
from tests.patches.models import Graphs
from tests.patches.padded_batches import SHARE, UNPAD, gradients_of, padded_batch, require_saved, training_model
from tests.patches.sweep.subject import Subject
from tests.patches.zoo import apart

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # from the compiler
slow = pytest.mark.slow
LAYOUTS = [(7, 1, 3, 11), (13,), (2, 20, 5), (30, 4), (12, 9, 8, 3, 1), (22,), (5, 5, 5, 5, 5, 5)]


def with_grouped_experts(model: Any) -> Any:
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the eager one reads how many tokens an expert got
    return model


# They differ in these: values narrower than keys, and experts; a forward of ours; windows on some layers, and sinks;
# chunks and a temperature; positions from a table; both sides. A model whose layers are all alike has one layer,
# because the compiler compiles each by itself.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1}, "deepseek_v3": {}, "falcon": {"num_hidden_layers": 1}, "gpt_oss": {},
    "llama4_text": {}, "opt": {"num_hidden_layers": 1}, "mistral": {"num_hidden_layers": 1, "attention": "tritonpack"},
    "bart": {}, "t5": {},
}  # fmt: skip


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_every_length(family: str) -> None:
    spec, options = family + "+" * (family in zoo.PAIRS), FAMILIES[family]
    graphs, model = Graphs(), with_grouped_experts(zoo.build(spec, dtype=torch.float32, **options))
    if "attention" not in options:
        tritonpack.patch(model)
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    for lengths in ((7, 1, 3, 11), (5, 9, 3), (12, 3, 4, 2, 6)):
        subject = Subject(model)
        call = subject.arguments(subject.lay_out(FORMS["without_cache"], documents(lengths)))
        assert torch.equal(compiled(**call).logits, model(**call).logits)
    assert graphs.count == 1


@slow
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "roformer", "openai-gpt"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "base model"])
def test_families_with_several_graphs(family: str, inside: bool) -> None:
    """Graphs read the packing of their own call. The first batches, with one document and with several, make all graphs
    of recurrent layers; later batches make none."""
    graphs, model, seen = Graphs(), with_grouped_experts(zoo.tiny_model(family)), []
    with tritonpack.patch(model):
        whole = model.base_model if inside else model
        compiled = torch.compile(whole, backend=graphs, dynamic=True)
        for lengths in LAYOUTS:
            for form in ("position_ids", "segments_alone"):
                call = call_of(form, documents(lengths))
                torch.testing.assert_close(compiled(**call)[0], whole(**call)[0])
            seen.append(graphs.count)
    assert seen[2:] == seen[2:3] * len(seen[2:])


@slow
def test_refusals_in_a_graph() -> None:
    model = zoo.tiny_model("llama", kind="LlamaForSequenceClassification")
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend="eager", dynamic=True)
        call = {name: x for name, x in call_of("padded_right").items() if name != "position_ids"}
        torch.testing.assert_close(compiled(**call).logits, model(**call).logits)
        with pytest.raises(RuntimeError, match="gives one result for each row"):
            compiled(**call_of())


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    documents = [{"input_ids": row[live.bool()].tolist()} for row, live in rows]
    return tritonpack.PackingCollator()(documents) | {"use_cache": False}


# What is compiled in place; else the whole model by torch.compile.
PARTS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "whole": lambda model: [],
    "in place": lambda model: [model],
    "base model": lambda model: [model.model],
    "each layer": lambda model: list(model.model.layers),
}


@pytest.mark.fast("unpad-False-graphs-whole")
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("backend", ["graphs", "aot_eager", "inductor"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("options", [{}, UNPAD, SHARE], ids=["packed", "unpad", "share"])
def test_training(options: dict[str, bool], checkpointed: bool, backend: str, part: str) -> None:
    """Of collated rows in one graph, also for batches of one document, and of padded batches; and if the layers run
    again in backward. The first batch makes all graphs, whatever the number of rows, columns and tokens."""
    graphs, made = Graphs(), [padded_batch(number) for number in range(6 if backend == "graphs" else 3)]
    if not options:
        made = [packed(batch) for batch in (*made, {name: x[:1] for name, x in made[0].items()})]
    twin, model = (training_model(num_hidden_layers=1 + checkpointed) for _ in range(2))
    handles = [tritonpack.patch(one, **options) for one in (twin, model)]
    for one in (twin, model) if checkpointed else ():
        one.gradient_checkpointing_enable({"use_reentrant": False})
    dynamic = None if part == "each layer" else True  # then the compiler sees only in the third batch what changes
    settings: Any = {"backend": graphs if backend == "graphs" else backend, "dynamic": dynamic}
    called = torch.compile(model, fullgraph=not options, **settings) if part == "whole" else model
    for module in PARTS[part](model):
        module.compile(**settings)
    for number, batch in enumerate(made):
        with torch._dynamo.config.patch(error_on_recompile=number > (0 if dynamic else 2)):
            for one in (twin, called):
                one.zero_grad()
                one(**batch).loss.backward()
        assert apart(*([*gradients_of(one).values()] for one in (twin, model))) < EXACT
    if options:
        require_saved(handles[1].saved, *made, options=options)
    assert options or part != "whole" or graphs.count == (backend == "graphs")
