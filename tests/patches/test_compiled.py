"""Patched models under torch.compile: exact, one graph for every length, no recompilation for another shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

import tritonpack
from tests.patches import zoo
from tests.patches.calls import FORMS, call_of, documents
from tests.patches.models import COMMON, VOCAB, Graphs, tiny_model
from tests.patches.padded_batches import (
    WAYS,
    padded_batch,
    read,
    require_equal,
    require_equal_values,
    require_saved,
    step,
    training_model,
)
from tests.patches.sweep.subject import Subject
from tests.patches.zoo import tiny_pair_model

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.slow]  # warnings from the compiler

# They differ in these: values narrower than keys, and experts; a forward of ours; windows on some layers, and sinks;
# chunks and a temperature; positions from a table; both sides. A model whose layers are all alike has one layer,
# because the compiler compiles each by itself.
FAMILIES: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: zoo.tiny_model("deepseek_v3"),
    "falcon": lambda: zoo.tiny_model("falcon", num_hidden_layers=1),
    "gpt_oss": lambda: zoo.tiny_model("gpt_oss"),
    "llama4_text": lambda: zoo.tiny_model("llama4_text"),
    "opt": lambda: zoo.tiny_model("opt", num_hidden_layers=1),
    "by name": lambda: tiny_model("mistral", dtype=torch.float32, num_hidden_layers=1, attention="tritonpack"),
    "bart": lambda: tiny_pair_model("bart", dtype=torch.float32),
    "t5": lambda: tiny_pair_model("t5", dtype=torch.float32),
}
LAYOUTS = [(7, 1, 3, 11), (13,), (2, 20, 5), (30, 4), (12, 9, 8, 3, 1), (22,), (5, 5, 5, 5, 5, 5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_every_length(family: str) -> None:
    graphs, model = Graphs(), FAMILIES[family]()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")  # the eager one reads how many tokens an expert got
    if family != "by name":
        tritonpack.patch(model)
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    for lengths in ((7, 1, 3, 11), (5, 9, 3), (12, 3, 4, 2, 6)):
        subject = Subject(model)
        call = subject.arguments(subject.lay_out(FORMS["without_cache"], documents(lengths)))
        assert torch.equal(compiled(**call).logits, model(**call).logits)
    assert graphs.count == 1


@pytest.mark.filterwarnings("error:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", ["graphs", "aot_eager"])
def test_training_on_collated_batches(checkpointed: bool, backend: str) -> None:
    """One graph, also for batches of one document, and if the layers run again in backward."""
    graphs, model = Graphs(), tiny_model("llama", dtype=torch.float32).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    with tritonpack.patch(model):
        used: Any = graphs if backend == "graphs" else backend
        compiled = torch.compile(model, backend=used, fullgraph=True, dynamic=True)
        for lengths in LAYOUTS[:4]:
            rows = [{"input_ids": torch.randint(3, VOCAB, (length,)).tolist()} for length in lengths]
            batch = tritonpack.PackingCollator()(rows) | {"use_cache": False}
            gradients = []
            for forward in (model, compiled):
                model.zero_grad()
                forward(**batch).loss.backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            for expected, got in zip(*gradients, strict=True):
                torch.testing.assert_close(got, expected)
    assert graphs.count == (backend == "graphs")


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_recurrent_layers_run_outside_of_graphs_that_fit_all_lengths(family: str) -> None:
    """The first batches, with one document and with several, make all graphs; later batches make none."""
    graphs, model, seen = Graphs(), zoo.tiny_model(family), []
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend=graphs, dynamic=True)
        for lengths in LAYOUTS:
            call = call_of(pieces=documents(lengths))
            assert torch.equal(compiled(**call).logits, model(**call).logits), lengths
            seen.append(graphs.count)
    assert seen[2:] == seen[2:3] * len(seen[2:])


@pytest.mark.parametrize("family", ["roformer", "openai-gpt"])
@pytest.mark.parametrize("inside", [False, True], ids=["", "base model"])
def test_graphs_read_the_packing_of_their_own_call(family: str, inside: bool) -> None:
    torch._dynamo.reset()
    model = zoo.tiny_model(family)
    with tritonpack.patch(model):
        whole = model.base_model if inside else model
        compiled = torch.compile(whole, backend="eager", dynamic=True)
        for lengths in LAYOUTS[:3]:
            for form in ("position_ids", "segments_alone"):
                call = call_of(form, documents(lengths))
                torch.testing.assert_close(compiled(**call)[0], whole(**call)[0])


def test_refusals_in_a_graph() -> None:
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **COMMON)).eval()
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend="eager", dynamic=True)
        call = {name: x for name, x in call_of("padded_right").items() if name != "position_ids"}
        torch.testing.assert_close(compiled(**call).logits, model(**call).logits)
        with pytest.raises(RuntimeError, match="gives one result for each row"):
            compiled(**call_of())


# Padded batches

SHAPES = range(6)


def whole(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)  # type: ignore[return-value]


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def base_model(model: nn.Module, **options: Any) -> nn.Module:
    model.model.compile(**options)
    return model


def each_layer(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        layer.compile(**options)
    return model


@WAYS
@pytest.mark.parametrize(
    ("compiled", "family", "dynamic"),
    [
        (whole, "llama", True),
        (whole, "llama", None),
        (whole, "mistral", True),
        (in_place, "llama", True),
        (base_model, "llama", None),
        (each_layer, "mistral", None),
    ],
)
def test_graphs_fit_all_shapes(
    compiled: Callable[..., nn.Module], family: str, dynamic: bool | None, options: dict[str, bool]
) -> None:
    """The first batch makes all graphs if the compiler knows that shapes change; else the first three do, because two
    of them have the same number of rows, columns or tokens."""
    layers = {"num_hidden_layers": 1} if family == "llama" else {}
    graphs, model, twin = Graphs(), training_model(family, **layers), training_model(family, **layers)
    with tritonpack.patch(model, **options) as handle:
        called = compiled(model, backend=graphs, dynamic=dynamic)
        for number in SHAPES:
            batch = padded_batch(number)
            with torch._dynamo.config.patch(error_on_recompile=number >= (1 if dynamic else 3)):
                require_equal(step(twin, batch, "both"), step(model, batch, "both", called=called))
    assert graphs.count <= (5 if dynamic else 8), "one graph of the base model, and the others around it"
    require_saved(handle.saved, *map(padded_batch, SHAPES), options=options)


@WAYS
def test_training_and_evaluation_in_turns(options: dict[str, bool]) -> None:
    """Each mode has graphs of its own; no later batch makes any."""
    graphs, model, twin = Graphs(), training_model(num_hidden_layers=1), training_model(num_hidden_layers=1)
    with tritonpack.patch(model, **options):
        called = torch.compile(model, backend=graphs, dynamic=True)
        for number in SHAPES:
            batch = padded_batch(number)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                require_equal(step(twin, batch), step(model, batch, called=called))
                with torch.no_grad():
                    require_equal_values(read(twin.eval()(**batch), batch), read(called.eval()(**batch), batch))
            twin.train(), called.train()


@WAYS
@pytest.mark.parametrize(("backend", "checkpointed"), [("aot_eager", False), ("inductor", False), ("aot_eager", True)])
def test_gradients_of_the_compilers_backward_pass(backend: str, checkpointed: bool, options: dict[str, bool]) -> None:
    torch._dynamo.reset()
    model, twin = (training_model(num_hidden_layers=1 + checkpointed) for _ in range(2))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with tritonpack.patch(model, **options) as handle:
        called = torch.compile(model, backend=backend, dynamic=True)
        for number in range(3):
            batch = padded_batch(number)
            require_equal(step(twin, batch, "both"), step(model, batch, "both", called=called))
    require_saved(handle.saved, *map(padded_batch, range(3)), options=options)
