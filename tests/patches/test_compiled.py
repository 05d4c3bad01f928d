"""Patched models under torch.compile: exact, one graph for every length, no recompilation for another shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tritonpack
from tests.patches import zoo
from tests.patches.calls import FORMS, call_of, documents
from tests.patches.comparison import apart
from tests.patches.models import Graphs
from tests.patches.padded_batches import (
    LIMIT,
    SHARE,
    UNPAD,
    WAYS,
    gradients_of,
    padded_batch,
    read,
    require_equal,
    require_equal_values,
    require_saved,
    step,
    training_model,
)  # fmt: skip
from tests.patches.sweep.subject import Subject

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
    make, dtype = (zoo.tiny_pair_model if family in zoo.PAIRS else zoo.tiny_model), torch.float32
    graphs, model = Graphs(), with_grouped_experts(make(family, dtype=dtype, **FAMILIES[family]))
    if "attention" not in FAMILIES[family]:
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


# Padded batches


COMPILED: dict[str, Callable[[Any], list[nn.Module]]] = {
    "in place": lambda model: [model],
    "base model": lambda model: [model.model],
    "each layer": lambda model: list(model.model.layers),
}


@slow
@WAYS
@pytest.mark.parametrize(
    ("compiled", "family", "dynamic"),
    [("whole", "llama", True), ("whole", "llama", None), ("whole", "mistral", True), ("in place", "llama", True),
     ("base model", "llama", None), ("each layer", "mistral", None)],
)  # fmt: skip
def test_graphs_fit_all_shapes(compiled: str, family: str, dynamic: bool | None, options: dict[str, bool]) -> None:
    """The first batch makes all graphs if the compiler knows that shapes change; else the first three do, because two
    of them have the same number of rows, columns or tokens. Each mode has graphs of its own."""
    layers = {"num_hidden_layers": 1} if family == "llama" else {}
    graphs, model, twin = Graphs(), training_model(family, **layers), training_model(family, **layers)
    evaluated = (compiled, dynamic) == ("whole", True)
    with tritonpack.patch(model, **options) as handle:
        called: Any = torch.compile(model, backend=graphs, dynamic=dynamic) if compiled == "whole" else model
        for part in COMPILED[compiled](model) if called is model else ():
            part.compile(backend=graphs, dynamic=dynamic)
        for number in range(6):
            batch = padded_batch(number)
            with torch._dynamo.config.patch(error_on_recompile=number >= (1 if dynamic else 3)):
                require_equal(step(twin, batch, "both"), step(model, batch, "both", called=called))
                if evaluated:
                    with torch.no_grad():
                        require_equal_values(read(twin.eval()(**batch), batch), read(called.eval()(**batch), batch))
                    twin.train(), called.train()
    if not evaluated:
        assert graphs.count <= (5 if dynamic else 8), "one graph of the base model, and the others around it"
        require_saved(handle.saved, *map(padded_batch, range(6)), options=options)


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    documents = [{"input_ids": row[live.bool()].tolist()} for row, live in rows]
    return tritonpack.PackingCollator()(documents) | {"use_cache": False}


@pytest.mark.fast("graphs-False-unpad")
@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("options", [{}, UNPAD, SHARE], ids=["packed", "unpad", "share"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", ["graphs", "aot_eager", "inductor"])
def test_training(backend: str, checkpointed: bool, options: dict[str, bool]) -> None:
    """Of collated rows in one graph, also for batches of one document; and if the layers run again in backward."""
    graphs, model = Graphs(), training_model(num_hidden_layers=1 + checkpointed)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [padded_batch(number) for number in range(3)]
    if not options:
        batches = [packed(batch) for batch in (*batches, {name: x[:1] for name, x in batches[0].items()})]
    with tritonpack.patch(model, **options) as handle:
        used: Any = graphs if backend == "graphs" else backend
        called = torch.compile(model, backend=used, fullgraph=not options, dynamic=True)
        for batch in batches:
            gradients = []
            for forward in (model, called):
                model.zero_grad()
                forward(**batch).loss.backward()
                gradients.append([*gradients_of(model).values()])
            assert apart(*gradients) < LIMIT
    if options:
        require_saved(handle.saved, *[batch for batch in batches for _ in range(2)], options=options)
    else:
        assert graphs.count == (backend == "graphs")
