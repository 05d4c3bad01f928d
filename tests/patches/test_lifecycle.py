"""Patches come and go: nested, shared, copied, interrupted, in threads; what is left is the identical model."""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaModel,
    PreTrainedModel,
)  # fmt: skip

import tritonpack
from tests.patches import zoo
from tests.patches.calls import (
    EXACT,
    alike,
    alone,
    call_of,
    documents,
    in_threads,
    is_patched,
    packed,
    require_exact,
    state,
)  # fmt: skip
from tests.patches.comparison import apart
from tritonpack import UnsupportedModelError

UNPAD, SHARE = {"unpad": True}, {"share_prefixes": True}
# Model types with the kernels alone, positions and a dense mask, a recurrence, attention outside of the interface, and
# a mask of its own; and options of patch().
MODELS: dict[str, dict[str, bool]] = {
    "llama": {}, "roformer": {}, "mamba": {}, "bloom": {}, "openai-gpt": {},
    "llama unpad": UNPAD, "llama share": SHARE, "qwen3_next unpad": UNPAD,
}  # fmt: skip


def build(family: str) -> PreTrainedModel:
    return zoo.tiny_model(family, dtype=torch.float64)


class Patchable:
    """A model, what it was before any patch, and the results of documents alone."""

    def __init__(self, name: str) -> None:
        self.model, self.options = build(name.split()[0]), MODELS[name]
        self.before, self.expected = state(self.model), alone(self.model, alike(), gradients=False)

    def patch(self, **more: Any) -> Any:
        return tritonpack.patch(self.model, **self.options, **more)

    def run(self, pieces: Any = None, gradients: bool = False) -> Any:
        form = "padded_left" if self.options else "position_ids"
        return packed(self.model, form, pieces or alike(), gradients=gradients)

    def require_exact(self, model: Any = None) -> None:
        require_exact(model or self.model, self.expected, "position_ids", "padded_left", pieces=alike())


@pytest.mark.parametrize("name", MODELS)
def test_patches_nest(name: str) -> None:
    """A patch with another backend is in force until it is left. Handles are undone once, in any order."""
    one = Patchable(name)
    model, outer = one.model, one.patch()
    during = state(model)
    assert during != one.before
    with one.patch() as inner:
        assert inner.report == outer.report
        one.require_exact()
    assert state(model) == during
    with one.patch(backend="reference") as other:
        assert other.report.backend == "reference"
        one.require_exact()
    hooks = [[len(one) for one in found[:3]] for found in state(model).values()]
    assert hooks == [[len(one) for one in found[:3]] for found in during.values()]
    assert repr(one.patch()) == repr(outer)
    tritonpack.unpatch(model)
    second = one.patch(backend="reference")
    for handle in (outer, inner, outer):
        handle.unpatch()
    one.require_exact()
    for _ in range(2):
        second.unpatch()
        assert state(model) == one.before
    assert torch.equal(alone(model, alike(), gradients=False).values, one.expected.values)


def test_the_later_patch_is_in_force() -> None:
    """unpad, above it share_prefixes, above it neither; handles are unpatched in another order."""
    one = Patchable("llama unpad")
    outer, middle = one.patch(), tritonpack.patch(one.model, **SHARE)
    one.run()
    assert 0 < middle.saved.tokens_computed < sum(piece.numel() for piece in alike()) < middle.saved.tokens_given
    with tritonpack.patch(one.model) as inner:
        one.require_exact()
        assert inner.saved is None
    assert tritonpack.patch(one.model, **SHARE).saved is middle.saved  # one patch, two handles
    tritonpack.unpatch(one.model)
    outer.unpatch()
    given = middle.saved.tokens_given
    one.require_exact()
    assert middle.saved.tokens_given > given
    assert outer.saved.tokens_given == 0
    middle.unpatch()
    assert state(one.model) == one.before


def test_threads_that_patch_one_model_leave_it_unpatched() -> None:
    """Two with the same options, and one with another backend."""
    before, errors = state(model := build("llama")), []

    def patch_and_unpatch(**options: Any) -> None:
        try:
            for _ in range(30):
                with tritonpack.patch(model, **options):
                    pass
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads([patch_and_unpatch, patch_and_unpatch, lambda: patch_and_unpatch(backend="reference")])
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert state(model) == before


@pytest.mark.parametrize("name", ["mamba", "roformer", "llama unpad", "llama share"])
def test_each_thread_has_its_own_packing(name: str) -> None:
    """They wait for each other at every layer, so both are in the middle of the model at once."""
    one, times, barrier = Patchable(name), 3, threading.Barrier(2, timeout=60)
    layouts = [documents((7, 1, 3, 11)), alike() if "share" in name else documents((2, 20))]
    expected = [alone(one.model, pieces, gradients=False).values for pieces in layouts]
    gaps: list[float] = []

    def run(number: int) -> None:
        for _ in range(times):
            gaps.append(apart([expected[number]], [one.run(layouts[number]).values]))

    with one.patch():
        for layers in (m for m in one.model.modules() if isinstance(m, nn.ModuleList)):
            for layer in layers:
                layer.register_forward_hook(lambda *_: (barrier.wait(), None)[1])
        in_threads([lambda: run(0), lambda: run(1)])
    assert len(gaps) == 2 * times
    assert max(gaps) < EXACT


@pytest.mark.parametrize("name", [name for name, options in MODELS.items() if options])
def test_copies_have_counts_of_their_own(name: str) -> None:
    one = Patchable(name)
    handle = one.patch()
    for twin in (copy.deepcopy(one.model), pickle.loads(pickle.dumps(one.model))):
        one.require_exact(twin)
        assert handle.saved.tokens_given == 0
        tritonpack.unpatch(twin)
        assert not is_patched(twin)
    one.require_exact()
    assert handle.saved.tokens_given > 0


def test_a_model_around_a_patched_part() -> None:
    """The whole model's patch replaces the part's while it is in force. Then a part can't have another patch."""
    one = Patchable("bloom")
    part = tritonpack.patch(one.model.base_model)
    with one.patch():
        one.require_exact()
        with pytest.raises(ValueError, match="a part of a model that is patched"):
            tritonpack.patch(one.model.base_model, backend="reference")
        with tritonpack.patch(one.model.base_model):
            pass
        one.require_exact()
    part.unpatch()
    assert state(one.model) == one.before


@pytest.mark.parametrize("options", [UNPAD, SHARE], ids=["unpad", "share"])
def test_a_patch_of_the_base_model_inside(options: dict[str, bool]) -> None:
    """A head around a patched base model gets the padded batch back."""
    one = Patchable("llama")
    with tritonpack.patch(one.model.model, **options) as handle:
        require_exact(one.model, alone(one.model, alike()), "padded_left", pieces=alike())
    assert 0 < handle.saved.tokens_computed < handle.saved.tokens_given


def test_handles_and_models_are_freed(tmp_path: Any) -> None:
    """A handle that is collected changes nothing; no cycle through hooks keeps weights until the next collection. A
    saved model has no trace of the patch."""
    model = build("llama")
    tritonpack.patch(model)
    during = state(model)
    tritonpack.patch(model)
    gc.collect()
    assert state(model) == during
    model.save_pretrained(tmp_path)
    assert "tritonpack" not in (tmp_path / "config.json").read_text()
    tritonpack.unpatch(model)
    packed(model)
    freed: list[bool] = []
    during.clear()
    gc.disable()
    try:
        weakref.finalize(model, freed.append, True)
        del model
        assert freed
    finally:
        gc.enable()


# A model, options of patch(), and how its report begins.
REPORTS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"backend": "reference"}, "qwen2: backend reference, in place of sdpa"),
    ("llama", {}, "llama: backend blocked (auto, on cpu), in place of sdpa"),
    ("llama", {"attention": "sdpa"}, "llama: sdpa with a dense mask"),
    ("llama", {"attention": "eager"}, "llama: eager with a dense mask"),
    ("mamba", {}, "mamba: no attention in its layers\n"),
    ("mamba", {"attention": "eager"}, "mamba: no attention in its layers\n"),
]


@pytest.mark.parametrize(("family", "options", "words"), REPORTS)
def test_report(family: str, options: dict[str, Any], words: str) -> None:
    with tritonpack.patch(model := zoo.tiny_model(family), **options) as handle:
        assert str(handle.report).startswith(words)
        assert str(handle.report) in repr(handle)
        assert (handle.report.model_type, handle.report.left) == (family, ())
        model.to("meta")  # as another device: the report names what would run there
        assert options or family == "mamba" or "backend auto, in place of sdpa" in str(handle.report)


def test_replicas_of_data_parallel_are_refused() -> None:
    """Their layers would run with the weights of the original. torch makes replicas by this method of each module."""
    with tritonpack.patch(model := build("mamba")):
        for one in (model, model.backbone):
            with pytest.raises(UnsupportedModelError, match=r"replica of torch\.nn\.DataParallel"):
                one._replicate_for_data_parallel()
    assert model._replicate_for_data_parallel()._is_replica


# Interrupts


class Broken(BaseException):
    """An interrupt. A KeyboardInterrupt would end pytest."""


@contextlib.contextmanager
def broken_at(line: int) -> Iterator[list[int]]:
    """Raise at the n-th line of tritonpack or of torch's hooks that runs. Yields the number of lines that ran."""
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in ("tritonpack/patches", "torch/nn/modules/module.py")):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise Broken
        return trace

    before = sys.gettrace()  # of a debugger, or of a measurement of coverage
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def broken_anywhere(make: Callable[[], Any], action: Callable[[Any], Any], points: int) -> Iterator[Any]:
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("action", ["patch", "unpatch", "patch again"])
@pytest.mark.fast("patch-llama", "unpatch-mamba")
def test_interrupts_of_patch_and_unpatch(name: str, action: str) -> None:
    """The model is patched as before or as after, and never in between; a patch without a handle is none."""
    one = Patchable(name)
    model = one.model

    def prepared() -> Any:
        while is_patched(model):
            tritonpack.unpatch(model)
        if action != "patch":
            one.patch()
        return model

    actions: dict[str, Callable[[Any], Any]] = {
        "patch": lambda _: one.patch(), "unpatch": tritonpack.unpatch,
        "patch again": lambda _: one.patch(backend="reference"),
    }  # fmt: skip
    outcomes = set()
    for broken in broken_anywhere(prepared, actions[action], 60):
        outcomes.add(is_patched(broken))
        if is_patched(broken):
            one.require_exact()
            assert one.patch().report.backend == "auto"
            tritonpack.unpatch(broken)
            tritonpack.unpatch(broken)
        assert state(broken) == one.before
    assert outcomes == {"patch": {False}, "unpatch": {False, True}, "patch again": {True}}[action]


HOOKS = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook")


@pytest.mark.parametrize("name", ["mamba", "roformer", "llama", "llama share", "qwen3_next unpad"])
def test_a_call_after_an_interrupted_one(name: str) -> None:
    """torch calls no hook after an interrupt. The next calls, of a copy too, find nothing of the interrupted one."""
    one = Patchable(name)
    layers = [m for m in one.model.modules() if isinstance(m, nn.ModuleList)][0]  # noqa: RUF015
    head = getattr(one.model, "lm_head", None) or [*one.model.children()][-1]

    def throw(*_: Any) -> None:
        raise Broken if one.model.training else RuntimeError("inside")

    with one.patch():
        for part in (layers[-1], [*layers[-1].children()][-1], head):
            for register in HOOKS[:2] if part is head else HOOKS:
                hook = getattr(part, register)(throw)
                for mode in (False, True):
                    one.model.train(mode)
                    with pytest.raises(Broken if mode else RuntimeError):
                        one.run(documents((4, 18)), gradients="backward" in register)
                hook.remove()
                one.model.eval()
                one.require_exact()
            one.require_exact(copy.deepcopy(one.model))
    assert state(one.model) == one.before


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("llama", {"attention": "sdpa"}), ("mamba2", {}), ("llama", UNPAD)]
)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_after_unpatch(family: str, options: dict[str, Any], reentrant: bool | None) -> None:
    """Exact, or refused where it recomputes layers. A copy isn't unpatched with its original."""
    model = build(family).train()
    model.enable_input_require_grads()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    call = call_of("padded_right") | {"use_cache": False} if options == UNPAD else call_of("without_cache")

    def gradients(model: Any, loss: Any = None) -> list[Any]:
        model.zero_grad()
        (model(**call).logits.square().sum() if loss is None else loss).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with tritonpack.patch(model, **options):
        want, twin = gradients(model), copy.deepcopy(model)
        loss = model(**call).logits.square().sum()
    if reentrant is None:
        assert apart(want, gradients(model, loss)) < EXACT
    else:
        with pytest.raises(ValueError, match=r"Call backward\(\) before unpatch\(\)"):
            loss.backward()
    assert apart(want, gradients(twin)) < EXACT
    with tritonpack.patch(model, **options):
        assert apart(want, gradients(model)) < EXACT


# Configurations and modules that are shared


@pytest.mark.parametrize("family", ["llama", "bloom"])  # attention in transformers' interface, and outside of it
def test_a_shared_configuration_is_refused_with_a_remedy(family: str) -> None:
    policy = build(family)
    stock = copy.deepcopy(policy.config)
    reference, other = type(policy)(policy.config).double().eval(), type(policy)(stock).double().eval()
    other.load_state_dict(reference.state_dict())
    row = call_of()["input_ids"]
    expected, apart_ = reference(row).logits, alone(reference, gradients=False)
    one = tritonpack.patch(policy)
    message = r"shares its configuration.* with a patched model.*copy\.deepcopy\(config\).*for this model, too"
    with pytest.raises(ValueError, match=message):
        reference(row)
    assert torch.equal(other(row).logits, expected)
    two = tritonpack.patch(reference)
    one.unpatch()
    require_exact(reference, apart_)
    two.unpatch()
    assert torch.equal(reference(row).logits, expected)
    assert policy.config._attn_implementation == stock._attn_implementation


ON_A_PATCHED_PART = r"LlamaModel.*belongs to LlamaForCausalLM, which is patched.*unpatch.*build.*patch the model"


def llama(kind: type[PreTrainedModel] = LlamaForCausalLM, config: Any = None) -> PreTrainedModel:
    return kind(config or zoo.tiny_config("llama")).double().eval()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_head_around_a_patched_model_is_refused(by_name: bool) -> None:
    """A head that is built from a patched model's configuration is patched by name. Then it gets the patched model."""
    model = llama()
    own_config, before, expected = copy.deepcopy(model.config), state(model), alone(model, gradients=False)
    handle = tritonpack.patch(model)
    head = llama(LlamaForTokenClassification, model.config if by_name else own_config)
    head.model = model.model
    if by_name:
        with pytest.raises(UnsupportedModelError, match=r"LlamaForTokenClassification.*replaced since"):
            head(**call_of())
    during = state(model)
    for function in (tritonpack.patch, tritonpack.unpatch):
        with pytest.raises(ValueError, match=ON_A_PATCHED_PART):
            function(head)
    assert state(model) == during
    require_exact(model, expected)
    handle.unpatch()
    if by_name:
        tritonpack.unpatch(head)
    with tritonpack.patch(head):  # the remedy
        require_exact(head, alone(head, gradients=False))
    assert state(model) == before


class Wrapper(nn.ModuleDict):
    """As FSDP and others put it around parts of a model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self["inner"](*args, **kwargs)


def test_a_replaced_part_is_refused_and_a_wrapped_one_is_not() -> None:
    model = llama()
    old, new, expected = model.model, llama(LlamaModel), alone(model, gradients=False)
    with tritonpack.patch(model):
        model.model = Wrapper({"inner": old})
        require_exact(model, expected)
        for arguments in (call_of(), call_of("offsets_alone"), {"input_ids": call_of()["input_ids"]}):
            model.model = new
            with pytest.raises(UnsupportedModelError, match=r"LlamaModel.*replaced since.*tritonpack\.patch"):
                model(**arguments)
            model.model = old
            model(**arguments)
        model.model = new
    assert (is_patched(model), is_patched(old), old.config._attn_implementation) == (False, False, "sdpa")
