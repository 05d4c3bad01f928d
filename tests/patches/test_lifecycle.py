"""Patches come and go, by `patch` and by name: nested, shared, copied, interrupted, in threads; what is left is the
identical model."""

import contextlib
import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForTokenClassification, LlamaModel

import tritonpack
from tests.fresh import FreshInterpreters
from tests.patches import calls, zoo
from tests.patches.calls import EXACT, alike, alone, call_of, documents, in_threads, is_patched, packed, state
from tests.patches.models import tiny_model
from tests.patches.zoo import apart
from tritonpack import UnsupportedModelError
from tritonpack.patches.parts import AttentionName

UNPAD, SHARE, REFERENCE = {"unpad": True}, {"share_prefixes": True}, {"backend": "reference"}
# Model types with the kernels alone, positions and a dense mask, a recurrence, attention outside of the interface, and
# a mask of its own; and options of patch().
MODELS: dict[str, dict[str, bool]] = {
    "llama": {}, "roformer": {}, "mamba": {}, "bloom": {}, "openai-gpt": {},
    "llama unpad": UNPAD, "llama share": SHARE, "qwen3_next unpad": UNPAD,
}  # fmt: skip


def build(family: str) -> Any:
    return zoo.tiny_model(family, dtype=torch.float64)


class Patchable:
    """A model, what it was before any patch, and the results of documents alone."""

    def __init__(self, name: str) -> None:
        self.model, self.options = build(name.split()[0]), MODELS[name]
        self.layers = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        self.before, self.expected = state(self.model), alone(self.model, alike(), gradients=False)

    def patch(self, **more: Any) -> Any:
        return tritonpack.patch(self.model, **self.options, **more)

    def run(self, pieces: Any = None, gradients: bool = False) -> Any:
        form = "padded_left" if self.options else "position_ids"
        return packed(self.model, form, pieces or alike(), gradients=gradients)

    def require_exact(self, model: Any = None) -> None:
        calls.require_exact(model or self.model, self.expected, "position_ids", "padded_left", pieces=alike())


@pytest.mark.parametrize("name", ["llama", "roformer", "mamba", "bloom", "openai-gpt"])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_patches_nest(name: str, data: st.DataObject) -> None:
    """The latest patch is in force until its handles are released, in any order; a patch with the same options gets one
    handle more."""
    one, options = Patchable(name), ({}, REFERENCE, UNPAD, SHARE) if name == "llama" else ({}, REFERENCE)
    stack: list[tuple[int, list[Any]]] = []  # options by number, and the handles with them
    for _ in range(8):
        handles = [handle for _, held in stack for handle in held]
        number = data.draw(st.integers(-len(handles), len(options) - 1))
        if number >= 0:
            if not stack or stack[-1][0] != number:
                stack.append((number, []))
            handles.append(tritonpack.patch(one.model, **options[number]))
            stack[-1][1].append(handles[-1])
        else:
            handle = handles.pop(number)
            tritonpack.unpatch(one.model) if number == -1 else handle.unpatch()
            handle.unpatch()  # a second call does nothing
            stack = [(number, [other for other in held if other is not handle]) for number, held in stack]
            while stack and not stack[-1][1]:
                stack.pop()
        assert is_patched(one.model) == bool(stack)
        before = [handle.saved.tokens_given if handle.saved else 0 for handle in handles]
        if stack:
            one.require_exact()
        for handle, given_before in zip(handles, before, strict=True):
            counts = handle.saved is not None and handle.saved.tokens_given > given_before
            assert counts == (handle in stack[-1][1] and stack[-1][0] > 1)
    for _, held in stack:
        for handle in held:
            handle.unpatch()
    assert state(one.model) == one.before


def test_threads_that_patch_one_model_leave_it_unpatched() -> None:
    """Two with the same options, and one with another backend."""
    before, left = state(model := build("llama")), [30, 30, 30]

    def run(thread: int, **options: Any) -> None:
        while left[thread]:
            with tritonpack.patch(model, **options):
                left[thread] -= 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads([lambda: run(0), lambda: run(1), lambda: run(2, **REFERENCE)])
    finally:
        sys.setswitchinterval(interval)
    assert left == [0, 0, 0]  # no thread has failed
    assert state(model) == before


@pytest.mark.parametrize("name", ["mamba", "roformer", "llama unpad", "llama share"])
def test_each_thread_has_its_own_packing(name: str) -> None:
    """They wait for each other at every layer, so both are in the middle of the model at once."""
    one, barrier, gaps = Patchable(name), threading.Barrier(2, timeout=60), list[float]()
    layouts = [documents((7, 1, 3, 11)), alike() if "share" in name else documents((2, 20))]
    expected = [alone(one.model, pieces, gradients=False).values for pieces in layouts]

    def run(number: int) -> None:
        for _ in range(3):
            gaps.append(apart([expected[number]], [one.run(layouts[number]).values]))

    with one.patch():
        for layer in (layer for layers in one.layers for layer in layers):
            layer.register_forward_hook(lambda *_: (barrier.wait(), None)[1])
        in_threads([lambda: run(0), lambda: run(1)])
    assert len(gaps) == 6
    assert max(gaps) < EXACT


@pytest.mark.parametrize("name", MODELS)
def test_copies_have_counts_of_their_own(name: str) -> None:
    one = Patchable(name)
    handle = one.patch()
    for twin in (copy.deepcopy(one.model), pickle.loads(pickle.dumps(one.model))):
        one.require_exact(twin)
        assert not handle.saved or handle.saved.tokens_given == 0
        tritonpack.unpatch(twin)
        assert not is_patched(twin)
    one.require_exact()
    assert not handle.saved or handle.saved.tokens_given > 0


def test_a_model_around_a_patched_part() -> None:
    """The whole model's patch replaces the part's while it is in force. Then a part can't have another patch."""
    one = Patchable("bloom")
    part = tritonpack.patch(one.model.base_model)
    with one.patch():
        with pytest.raises(ValueError, match="a part of a model that is patched"):
            tritonpack.patch(one.model.base_model, **REFERENCE)
        with tritonpack.patch(one.model.base_model):
            one.require_exact()
        one.require_exact()
    part.unpatch()
    assert state(one.model) == one.before


def test_handles_and_models_are_freed() -> None:
    """A handle that is collected changes nothing; no cycle through hooks keeps weights until the next collection."""
    model = build("llama")
    tritonpack.patch(model)
    during = state(model)
    tritonpack.patch(model)
    gc.collect()
    assert state(model) == during
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
        assert repr(tritonpack.patch(model, **options)) == repr(handle)
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


def lines_of(action: Callable[[], Any], last: int = 0, functions: Collection[Any] = ()) -> int:
    """Run an action, with an interrupt at the `last` line of tritonpack and of torch's hooks, or of these functions.
    Return how many ran."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not any(place in frame.f_code.co_filename for place in ("tritonpack/patches", "torch/nn/modules/module.py")):
            return None
        if functions and frame.f_code not in [function.__code__ for function in functions]:
            return None
        count += event == "line"
        if event == "line" and count == last:
            raise Broken
        return trace

    before = sys.gettrace()  # of a debugger, or of a measurement of coverage
    sys.settrace(trace)
    try:
        with contextlib.suppress(Broken):
            action()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("action", ["patch", "unpatch", "patch again"])
@pytest.mark.fast("patch-llama", "unpatch-mamba")
def test_interrupts_of_patch_and_unpatch(name: str, action: str) -> None:
    """The model is patched as before or as after, and never in between; a patch without a handle is none."""
    one, points, total, outcomes = Patchable(name), 60, 0, set()
    actions: dict[str, Callable[[], Any]] = {
        "patch": one.patch, "unpatch": lambda: tritonpack.unpatch(one.model),
        "patch again": lambda: one.patch(**REFERENCE),
    }  # fmt: skip
    for point in range(-2, points):
        while is_patched(one.model):
            tritonpack.unpatch(one.model)
        if action != "patch":
            one.patch()
        if point < 0:  # the first call runs more lines than the second
            total = lines_of(actions[action])
            continue
        last = 1 + point * total // points
        assert lines_of(actions[action], last) == last
        outcomes.add(is_patched(one.model))
        if is_patched(one.model):
            one.require_exact()
            assert one.patch().report.backend == "auto"
            tritonpack.unpatch(one.model)
            tritonpack.unpatch(one.model)
        assert state(one.model) == one.before
    assert outcomes == {"patch": {False}, "unpatch": {False, True}, "patch again": {True}}[action]


def test_interrupts_at_each_line_that_changes_the_name() -> None:
    one, functions = Patchable("llama"), (AttentionName.install, AttentionName.remove)
    last = lines = 0
    while lines >= last - 1:
        one.patch()
        lines = lines_of(lambda: one.patch(**REFERENCE), last, functions)
        while is_patched(one.model):
            tritonpack.unpatch(one.model)
        assert state(one.model) == one.before, f"after line {last}"
        last += 1
    assert last > 10


HOOKS = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook")


@pytest.mark.parametrize("name", ["mamba", "roformer", "llama", "llama share", "qwen3_next unpad"])
def test_a_call_after_an_interrupted_one(name: str) -> None:
    """torch calls no hook after an interrupt. The next calls, of a copy too, find nothing of the interrupted one."""
    one = Patchable(name)
    layer, head = one.layers[0][-1], getattr(one.model, "lm_head", None) or [*one.model.children()][-1]

    def throw(*_: Any) -> None:
        raise Broken if one.model.training else RuntimeError("inside")

    with one.patch():
        for part in (layer, [*layer.children()][-1], head):
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


# Configurations and modules that are shared


@pytest.mark.parametrize("family", ["llama", "bloom"])  # attention in transformers' interface, and outside of it
def test_a_shared_configuration_is_refused_with_a_remedy(family: str) -> None:
    policy = build(family)
    reference, stock = type(policy)(policy.config).double().eval(), policy.config._attn_implementation
    row, expected = call_of()["input_ids"], alone(reference, gradients=False)
    one = tritonpack.patch(policy)
    message = r"shares its configuration.* with a patched model.*copy\.deepcopy\(config\).*for this model, too"
    with pytest.raises(ValueError, match=message):
        reference(row)
    two = tritonpack.patch(reference)
    one.unpatch()
    calls.require_exact(reference, expected)
    two.unpatch()
    assert reference(row).logits.isfinite().all()
    assert policy.config._attn_implementation == stock


ON_A_PATCHED_PART = r"LlamaModel.*belongs to LlamaForCausalLM, which is patched.*unpatch.*build.*patch the model"


def llama(kind: Any = LlamaForCausalLM, config: Any = None) -> Any:
    return kind(config or zoo.tiny_config("llama")).double().eval()


@pytest.mark.parametrize("by_name", [True, False])
def test_a_head_around_a_patched_model_is_refused(by_name: bool) -> None:
    """A head that is built from a patched model's configuration is patched by name. Then it gets the patched model."""
    model = llama()
    own_config, before = copy.deepcopy(model.config), state(model)
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
    handle.unpatch()
    if by_name:
        tritonpack.unpatch(head)
    with tritonpack.patch(head):  # the remedy
        calls.require_exact(head, alone(head, gradients=False))
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
        calls.require_exact(model, expected)
        for form in ("position_ids", "offsets_alone"):
            model.model = new
            with pytest.raises(UnsupportedModelError, match=r"LlamaModel.*replaced since.*tritonpack\.patch"):
                model(**call_of(form))
            model.model = old
            model(**call_of(form))
        model.model = new
    assert (is_patched(model), is_patched(old), old.config._attn_implementation) == (False, False, "sdpa")


# Models with attn_implementation="tritonpack"

UNTOUCHED = """
import importlib, pkgutil, sys, transformers.trainer, transformers.models.llama.modeling_llama
from transformers import AttentionInterface, AttentionMaskInterface

def state():
    homes = {name: vars(sys.modules[name]) for name in BEFORE}
    kinds = {x: dict(vars(x)) for home in homes.values() for x in [*home.values()] if isinstance(x, type)}
    found = {f"{name}.{key}": id(x) for name, home in homes.items() for key, x in [*home.items()]}
    found |= {f"{kind}.{key}": id(x) for kind, own in kinds.items() for key, x in own.items() if "_abc" not in key}
    return found | {"names": [*AttentionInterface._global_mapping, *AttentionMaskInterface._global_mapping]}

BEFORE = [name for name in sys.modules if name.split(".")[0] == "transformers"]
before = state()
import tritonpack
for module in pkgutil.walk_packages(tritonpack.__path__, "tritonpack."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
after = state()
print([key for key in before if after.get(key) != before[key]])
tritonpack.register()
print([key for key, one in state().items() if before.get(key) != one] != [])
"""


@pytest.mark.slow
def test_importing_every_module_changes_nothing_of_transformers(fresh: FreshInterpreters) -> None:
    """The comparison does find the changes by `register`."""
    result = fresh.run(UNTOUCHED)
    assert result.stdout.split("\n")[:-1] == ["[]", "True"], result.stderr


def test_a_model_that_has_the_name_is_patched(tmp_path: Any) -> None:
    """As by `patch`, at the end of its construction; a whole model has one patch, and unpatching finds it."""
    stock = tiny_model("mistral")
    expected = alone(stock)
    stock.save_pretrained(tmp_path)
    options = {"attn_implementation": "tritonpack", "dtype": torch.float64}
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path, **options), tiny_model("mistral", attention="tritonpack"),
    ):  # fmt: skip
        assert model.config._attn_implementation == "tritonpack"
        before = state(model)
        calls.require_exact(model, expected)
        with tritonpack.patch(model) as handle:
            assert handle.report.replaced == "tritonpack"
            calls.require_exact(model, expected)
        assert state(model) == before
        model.post_init()  # a subclass may call it again
        assert state(model) == before
        model.save_pretrained(tmp_path / "again")
        assert not [path for path in (tmp_path / "again").glob("*.json") if "tritonpack" in path.read_text()]
        tritonpack.unpatch(model)
        assert not is_patched(model)


@pytest.mark.parametrize("kind", ["llama", "falcon", "gptj", "git", "roformer", "openai-gpt", "qwen3_next"])
def test_set_attn_implementation_patches_and_unpatches(kind: str) -> None:
    """Some models look the name up in a table of their own classes, and some ignore it."""
    model = zoo.tiny_model(kind, dtype=torch.float64)
    before, expected = state(model), alone(model, gradients=False)
    for name in ("tritonpack", "sdpa" if kind in ("llama", "qwen3_next") else "eager"):
        model.set_attn_implementation(name)
        assert is_patched(model) == (name == "tritonpack")
        if name == "tritonpack":
            calls.require_exact(model, expected)
    if kind in ("llama", "qwen3_next"):
        assert state(model) == before
    calls.require_exact(zoo.tiny_model(kind, dtype=torch.float64, attention="tritonpack"), expected)
