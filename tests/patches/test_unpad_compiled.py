"""torch.compile of models that run padded batches as one row: exact, and no recompilation for another shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tritonpack
from tests.patches.models import Graphs
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

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # from the compiler

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


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize(
    ("compiled", "family", "dynamic"),
    [
        (whole, "llama", True),
        (whole, "llama", None),
        (whole, "mistral", True),
        (in_place, "llama", True),
        (base_model, "llama", None),
        (each_layer, "llama", None),
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
    counts = []
    with tritonpack.patch(model, **options) as handle:
        called = compiled(model, backend=graphs, dynamic=dynamic)
        for number in SHAPES:
            late = number >= (1 if dynamic else 3)
            with torch._dynamo.config.patch(error_on_recompile=late):
                require_equal(
                    step(twin, padded_batch(number), "both"),
                    step(model, padded_batch(number), "both", called=called),
                )
            counts.append(graphs.count)
    assert counts[-1] <= (5 if dynamic else 8), "one graph of the base model, and the others around it"
    require_saved(handle.saved, *map(padded_batch, SHAPES), options=options)


@WAYS
@pytest.mark.slow
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


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_the_compilers_backward_pass(backend: str, options: dict[str, bool]) -> None:
    torch._dynamo.reset()
    model, twin = (training_model(num_hidden_layers=1) for _ in range(2))
    with tritonpack.patch(model, **options) as handle:
        called = torch.compile(model, backend=backend, dynamic=True)
        for number in range(3):
            batch = padded_batch(number)
            require_equal(step(twin, batch, "both"), step(model, batch, "both", called=called))
    require_saved(handle.saved, *map(padded_batch, range(3)), options=options)


@pytest.mark.slow
@WAYS
def test_compiled_under_checkpointing(options: dict[str, bool]) -> None:
    torch._dynamo.reset()
    model, twin = training_model(), training_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with tritonpack.patch(model, **options) as handle:
        called = torch.compile(model, backend="aot_eager", dynamic=True)
        for number in range(3):
            batch = padded_batch(number)
            require_equal(step(twin, batch, "both"), step(model, batch, "both", called=called))
    require_saved(handle.saved, *map(padded_batch, range(3)), options=options)
