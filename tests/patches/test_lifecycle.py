"""Patches that nest, interrupts, threads, copies, and wrappers of other projects."""

import contextlib
import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.test_every_model import state
from tritonpack.patches.applied_patch import Options, applied_to

# Models with the kernels alone, positions and a dense mask, a recurrence, attention outside of the interface, and a
# mask of its own.
FAMILIES = ("llama", "roformer", "mamba", "bloom", "openai-gpt")

every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str) -> PreTrainedModel:
    return zoo.tiny_model(family, dtype=torch.float64)


def packed(model: PreTrainedModel, lengths: tuple[int, ...] = sweep.LENGTHS) -> Tensor:
    return sweep.logits(model, sweep.FORMS["position_ids"](zoo.documents(lengths))).detach()


def alone(model: PreTrainedModel, lengths: tuple[int, ...] = sweep.LENGTHS) -> Tensor:
    return sweep.alone(model, zoo.documents(lengths), gradients=False).values


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@every_family
def test_leaving_an_inner_patch_keeps_the_outer_one(family: str) -> None:
    model = build(family)
    before, expected = state(model), alone(model)
    outer = tritonpack.patch(model)
    during = state(model)
    with tritonpack.patch(model) as inner:
        assert inner.report == outer.report
        assert gap(packed(model), expected) < sweep.tolerance(model)
    assert state(model) == during
    assert gap(packed(model), expected) < sweep.tolerance(model)
    inner.unpatch()  # a second call does nothing
    assert state(model) == during
    outer.unpatch()
    assert state(model) == before
    outer.unpatch()
    assert state(model) == before


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_handles_are_unpatched_in_any_order(backend: str) -> None:
    model = build("mamba")
    before = state(model)
    first, second = tritonpack.patch(model), tritonpack.patch(model, backend=backend)
    first.unpatch()
    assert [applied.asked for applied in applied_to(model)] == [Options(backend=backend)]
    second.unpatch()
    assert state(model) == before
    first.unpatch()
    assert state(model) == before


@pytest.mark.parametrize("backends", [("auto", "auto"), ("auto", "reference")])
def test_threads_that_patch_one_model_leave_it_unpatched(backends: tuple[str, str]) -> None:
    model = build("llama")
    before, errors = state(model), []

    def patch_and_unpatch(backend: str) -> None:
        try:
            for _ in range(30):
                with tritonpack.patch(model, backend=backend):
                    pass
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=patch_and_unpatch, args=(backend,)) for backend in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert state(model) == before


@every_family
def test_a_patch_with_another_backend_is_in_force_until_it_is_left(family: str) -> None:
    model = build(family)
    before, expected = state(model), alone(model)
    outer = tritonpack.patch(model)
    during = state(model)
    with tritonpack.patch(model, backend="reference") as inner:
        assert inner.report.backend == "reference"
        assert len(applied_to(model)) == 1
        assert gap(packed(model), expected) < sweep.tolerance(model)
    # The hooks are the same; only their numbers in torch's dictionaries are new.
    assert [len(hooks) for m in state(model).values() for hooks in m[:3]] == [
        len(hooks) for m in during.values() for hooks in m[:3]
    ]
    assert applied_to(model)[0].report == outer.report
    assert gap(packed(model), expected) < sweep.tolerance(model)
    outer.unpatch()
    assert state(model) == before


def test_patching_a_model_around_a_patched_part() -> None:
    """The whole model's patch replaces the part's while it is in force. Then a part can't have another patch."""
    model = build("bloom")
    before, expected = state(model), alone(model)
    part = tritonpack.patch(model.base_model)
    with tritonpack.patch(model):
        assert gap(packed(model), expected) < sweep.tolerance(model)
        with pytest.raises(ValueError, match="a part of a model that is patched"):
            tritonpack.patch(model.base_model, backend="reference")
        with tritonpack.patch(model.base_model):
            pass
        assert gap(packed(model), expected) < sweep.tolerance(model)
    assert applied_to(model)[0].model is model.base_model
    part.unpatch()
    assert state(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_applying_and_reverting_twice_change_nothing(family: str) -> None:
    """After an interrupt both may run again, from any state."""
    model = build(family)
    before, expected = state(model), alone(model)
    tritonpack.patch(model)
    during, (applied,) = state(model), applied_to(model)
    applied.apply()
    assert state(model) == during
    assert gap(packed(model), expected) < sweep.tolerance(model)
    applied.revert()
    applied.revert()
    assert state(model) == before


def test_a_handle_that_is_collected_changes_nothing() -> None:
    model = build("llama")
    tritonpack.patch(model)
    during = state(model)
    tritonpack.patch(model)
    gc.collect()
    assert state(model) == during
    tritonpack.unpatch(model)
    assert state(model) == during
    tritonpack.unpatch(model)
    assert not applied_to(model)


def test_a_patched_model_is_freed_with_its_last_reference() -> None:
    """No cycle through hooks keeps weights alive until the next collection."""
    model = build("llama")
    tritonpack.patch(model)
    packed(model)
    freed: list[bool] = []
    gc.disable()
    try:
        model.lm_head.register_buffer("canary", torch.zeros(1), persistent=False)
        weakref.finalize(model, freed.append, True)
        del model
        assert freed
    finally:
        gc.enable()


def test_copies_are_unpatched_by_themselves() -> None:
    model = build("mamba")
    expected = alone(model)
    handle = tritonpack.patch(model)
    again = tritonpack.patch(model)
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.load(file)):
        for _ in range(2):
            assert gap(packed(twin), expected) < sweep.tolerance(model)
            tritonpack.unpatch(twin)
        assert not applied_to(twin)
    assert gap(packed(model), expected) < sweep.tolerance(model)
    again.unpatch()
    handle.unpatch()


class Broken(BaseException):
    """An interrupt. A KeyboardInterrupt would end pytest."""


PLACES = ("tritonpack/patches", "torch/nn/modules/module.py")


@contextlib.contextmanager
def broken_at(line: int, places: tuple[str, ...] = PLACES) -> Iterator[list[int]]:
    """Raise at the n-th line of tritonpack or of torch's hooks that runs. Yields the number of lines that ran."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in places):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise Broken
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def broken_anywhere(
    make: Callable[[], PreTrainedModel], action: Callable[[PreTrainedModel], Any], points: int
) -> Iterator[PreTrainedModel]:
    """Models on which an action was interrupted, at points spread evenly over its lines."""
    action(make())  # the first call runs more lines
    model = make()
    with broken_at(-1) as count:
        action(model)
    for point in range(points):
        model = make()
        with contextlib.suppress(Broken), broken_at(1 + point * count[0] // points):
            action(model)
            raise AssertionError(f"it wasn't broken off at point {point} of {points} of {count[0]} lines")
        yield model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_patch_leaves_nothing(family: str) -> None:
    model = build(family)
    before, logits = state(model), packed_as_stock(model)

    def unpatched() -> PreTrainedModel:
        while applied_to(model):
            tritonpack.unpatch(model)
        return model

    for broken in broken_anywhere(unpatched, tritonpack.patch, 100):
        if applied_to(broken):  # the interrupt came while the handle was returned
            raise AssertionError("patched without a handle")
        assert state(broken) == before
    assert torch.equal(packed_as_stock(model), logits)


def packed_as_stock(model: PreTrainedModel) -> Tensor:
    ids = torch.cat(zoo.documents(sweep.LENGTHS), 1)
    return model(ids).logits.detach()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_interrupted_unpatch_is_complete(family: str) -> None:
    """The model is unpatched, or still patched if nothing had been taken away yet, and never in between."""
    model = build(family)
    before, expected = state(model), alone(model)

    def patched() -> PreTrainedModel:
        while applied_to(model):
            tritonpack.unpatch(model)
        tritonpack.patch(model)
        return model

    outcomes = set()
    for broken in broken_anywhere(patched, tritonpack.unpatch, 100):
        outcomes.add(bool(applied_to(broken)))
        if applied_to(broken):
            assert gap(packed(broken), expected) < sweep.tolerance(model)
            tritonpack.unpatch(broken)
        assert state(broken) == before
    assert False in outcomes


@pytest.mark.slow
def test_an_interrupted_nested_patch_leaves_the_outer_one() -> None:
    model = build("mamba")
    before, expected = state(model), alone(model)

    def fresh() -> PreTrainedModel:
        while applied_to(model):
            tritonpack.unpatch(model)
        tritonpack.patch(model)
        return model

    def again(model: PreTrainedModel) -> None:
        tritonpack.patch(model, backend="reference")

    for broken in broken_anywhere(fresh, again, 40):
        assert [applied.asked for applied in applied_to(broken)] == [Options()]
        assert len(applied_to(broken)[0].leases) == 1
        assert gap(packed(broken), expected) < sweep.tolerance(model)
        tritonpack.unpatch(broken)
        assert state(broken) == before


@pytest.mark.parametrize("family", ["mamba", "roformer"])
def test_an_interrupted_forward_leaves_no_packing_behind(family: str) -> None:
    """torch calls no hook after an interrupt."""
    model = build(family)
    expected = alone(model)
    with tritonpack.patch(model):
        interrupt = model.lm_head if hasattr(model, "lm_head") else next(reversed(list(model.children())))
        for module in (interrupt, list(model.base_model.modules())[-1]):
            hook = module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Broken()))
            with contextlib.suppress(Broken):
                packed(model, (4, 18))
            hook.remove()
            assert gap(packed(model), expected) < sweep.tolerance(model)


@pytest.mark.parametrize("family", ["mamba", pytest.param("qwen3_next", marks=pytest.mark.slow), "roformer"])
def test_each_thread_has_its_own_packing(family: str) -> None:
    model = build(family)
    layouts = [(7, 1, 3, 11), (2, 20), (22,), (10, 5, 7)]
    expected = [alone(model, lengths) for lengths in layouts]
    gaps: list[float] = []

    def run(number: int) -> None:
        for _ in range(6):
            gaps.append(gap(packed(model, layouts[number]), expected[number]))

    with tritonpack.patch(model):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(layouts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(gaps) == 6 * len(layouts)
    assert max(gaps) < sweep.tolerance(model)


def wrapped_layers(model: PreTrainedModel, implementation: CheckpointImpl) -> None:
    """Wrap all layers, as FSDP and accelerate apply activation checkpointing."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = checkpoint_wrapper(layer, checkpoint_impl=implementation)


@pytest.mark.fast("llama-patched-CheckpointImpl.REENTRANT")
@pytest.mark.parametrize("implementation", list(CheckpointImpl))
@pytest.mark.parametrize("first", ["patched", "wrapped"])
@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "llama"])
def test_layers_in_torchs_checkpoint_wrapper(family: str, first: str, implementation: CheckpointImpl) -> None:
    model = build(family)
    documents = zoo.documents(sweep.LENGTHS)
    alone = sweep.alone(model, documents)
    expected = alone.values, alone.gradients
    model.train().enable_input_require_grads()
    if first == "wrapped":
        wrapped_layers(model, implementation)
    with tritonpack.patch(model):
        if first == "patched":
            packed(model)
            wrapped_layers(model, implementation)
        logits = sweep.logits(model, sweep.FORMS["without_cache"](documents))
        packed(model, (20, 2))  # another batch in between
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        (logits * weights).sum().backward()
        assert any(isinstance(module, CheckpointWrapper) for module in model.modules())
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert sweep.difference(expected, (logits.detach(), gradients)) < sweep.tolerance(model)
    for module in model.modules():
        assert "tritonpack" not in str(getattr(module, "checkpoint_fn", ""))


def test_replicas_of_data_parallel_are_refused() -> None:
    """Their layers would run with the weights of the original. torch makes replicas by this method of each module."""
    model = build("mamba")
    with tritonpack.patch(model):
        for module in (model, model.backbone):
            with pytest.raises(tritonpack.UnsupportedModelError, match=r"replica of torch\.nn\.DataParallel"):
                module._replicate_for_data_parallel()
    assert model._replicate_for_data_parallel()._is_replica


NO_MODELS: dict[str, tuple[Any, str]] = {
    "a name": ("gpt2", r"the name 'gpt2'; load it first, with AutoModelForCausalLM.from_pretrained\('gpt2'\)"),
    "nothing": (None, "got None of type NoneType; pass the model that you train"),
    "a class": (AutoModelForCausalLM, "the class AutoModelForCausalLM; make a model of it first"),
    "a configuration": (LlamaConfig(), r"a LlamaConfig; make a model of it first, with .*from_config\(config\)"),
    "a list": ([1], "got a list of 1; pass one model in each call"),
    "models": ([nn.Sequential(nn.Linear(2, 2))] * 2, "got a list of 2; pass one model in each call"),
    "an object": (object(), "of type object; pass the model that you train"),
}


@pytest.mark.parametrize("name", NO_MODELS)
@pytest.mark.parametrize("function", [tritonpack.patch, tritonpack.unpatch])
def test_arguments_that_are_no_models_are_refused(name: str, function: Callable[[Any], Any]) -> None:
    given, message = NO_MODELS[name]
    with pytest.raises(ValueError, match=message) as caught:
        function(given)
    assert "\n" not in str(caught.value)
