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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaModel,
    MambaConfig,
    PreTrainedModel,
)

import tritonpack
from tests.patches import zoo
from tests.patches.calls import (
    EXACT,
    alone,
    call_of,
    documents,
    packed,
    require_exact,
    state,
    without_dropout,
)
from tests.patches.comparison import apart
from tests.patches.models import tiny_model
from tritonpack import UnsupportedModelError
from tritonpack.patches.applied_patch import applied_to

# Models with the kernels alone, positions and a dense mask, a recurrence, attention outside of the interface, and a
# mask of its own.
FAMILIES = ("llama", "roformer", "mamba", "bloom", "openai-gpt")

every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family: str) -> PreTrainedModel:
    return zoo.tiny_model(family, dtype=torch.float64)


def is_patched(model: nn.Module) -> bool:
    return bool(applied_to(model))


@every_family
def test_patches_nest(family: str) -> None:
    """A patch with another backend is in force until it is left. Handles are undone once, in any order."""
    model = build(family)
    before, expected = state(model), alone(model, gradients=False)
    outer = tritonpack.patch(model)
    during = state(model)
    assert during != before
    with tritonpack.patch(model) as inner:
        assert inner.report == outer.report
        require_exact(model, expected)
    assert state(model) == during
    with tritonpack.patch(model, backend="reference") as other:
        assert other.report.backend == "reference"
        require_exact(model, expected)
    hooks = [[len(one) for one in found[:3]] for found in state(model).values()]
    assert hooks == [[len(one) for one in found[:3]] for found in during.values()]
    assert repr(tritonpack.patch(model)) == repr(outer)
    tritonpack.unpatch(model)
    second = tritonpack.patch(model, backend="reference")
    for handle in (outer, inner, outer):
        handle.unpatch()
    require_exact(model, expected)
    for _ in range(2):
        second.unpatch()
        assert state(model) == before
    assert torch.equal(alone(model, gradients=False).values, expected.values)


@pytest.mark.parametrize("others", [{}, {"backend": "reference"}], ids=["alike", "another"])
def test_threads_that_patch_one_model_leave_it_unpatched(others: dict[str, str]) -> None:
    model, errors = build("llama"), []
    before = state(model)

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
        in_threads([patch_and_unpatch, lambda: patch_and_unpatch(**others)])
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert state(model) == before


def in_threads(runs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("family", ["mamba", "roformer"])
def test_each_thread_has_its_own_packing(family: str) -> None:
    model = build(family)
    layouts = [(7, 1, 3, 11), (2, 20), (22,), (10, 5, 7)]
    expected = [alone(model, documents(lengths), gradients=False).values for lengths in layouts]
    gaps: list[float] = []

    def run(number: int) -> None:
        for _ in range(6):
            got = packed(model, pieces=documents(layouts[number]), gradients=False)
            gaps.append(apart([expected[number]], [got.values]))

    with tritonpack.patch(model):
        in_threads([lambda number=number: run(number) for number in range(len(layouts))])
    assert len(gaps) == 6 * len(layouts)
    assert max(gaps) < EXACT


def test_a_model_around_a_patched_part() -> None:
    """The whole model's patch replaces the part's while it is in force. Then a part can't have another patch."""
    model = build("bloom")
    before, expected = state(model), alone(model, gradients=False)
    part = tritonpack.patch(model.base_model)
    with tritonpack.patch(model):
        require_exact(model, expected)
        with pytest.raises(ValueError, match="a part of a model that is patched"):
            tritonpack.patch(model.base_model, backend="reference")
        with tritonpack.patch(model.base_model):
            pass
        require_exact(model, expected)
    part.unpatch()
    assert state(model) == before


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


def test_copies_are_unpatched_by_themselves() -> None:
    model = build("mamba")
    expected = alone(model, gradients=False)
    tritonpack.patch(model)
    tritonpack.patch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            require_exact(twin, expected)
            tritonpack.unpatch(twin)
        assert not is_patched(twin)
    require_exact(model, expected)


def test_a_saved_model_has_no_trace_of_the_patch(tmp_path: Any) -> None:
    model = tiny_model("llama")
    with tritonpack.patch(model):
        model.save_pretrained(tmp_path)
    assert "tritonpack" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_report() -> None:
    handle = tritonpack.patch(tiny_model("qwen2"), backend="reference")
    report = handle.report
    assert (report.model_type, report.by_document, report.left) == ("qwen2", (), ())
    assert str(report) == "qwen2: backend reference, in place of sdpa"
    assert str(report) in repr(handle)
    model = tiny_model("llama", dtype=torch.float32)
    with tritonpack.patch(model) as handle:
        assert (handle.report.runs, handle.report.backend) == ("blocked (auto, on cpu)", "auto")
        assert "backend blocked (auto, on cpu), in place of sdpa" in str(handle.report)
        model.to("meta")  # as another device: the report names what would run there
        assert "backend auto, in place of sdpa" in str(handle.report)
    for attention in ("sdpa", "eager"):
        with tritonpack.patch(model, attention=attention) as handle:
            assert (handle.report.runs, f"{attention} with a dense mask" in str(handle.report)) == (attention, True)
    for attention in ("tritonpack", "eager"):
        mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))
        with tritonpack.patch(mamba, attention=attention) as handle:
            assert str(handle.report).startswith("mamba: no attention in its layers\n")


def test_replicas_of_data_parallel_are_refused() -> None:
    """Their layers would run with the weights of the original. torch makes replicas by this method of each module."""
    model = build("mamba")
    with tritonpack.patch(model):
        for module in (model, model.backbone):
            with pytest.raises(UnsupportedModelError, match=r"replica of torch\.nn\.DataParallel"):
                module._replicate_for_data_parallel()
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("action", ["patch", "unpatch", "patch again"])
@pytest.mark.fast("patch-llama", "unpatch-mamba")
def test_interrupts_of_patch_and_unpatch(family: str, action: str) -> None:
    """The model is patched as before or as after, and never in between; a patch without a handle is none."""
    model = build(family)
    before, expected = state(model), alone(model, gradients=False)

    def prepared() -> Any:
        while is_patched(model):
            tritonpack.unpatch(model)
        if action != "patch":
            tritonpack.patch(model)
        return model

    actions: dict[str, Callable[[Any], Any]] = {
        "patch": tritonpack.patch, "unpatch": tritonpack.unpatch,
        "patch again": lambda model: tritonpack.patch(model, backend="reference"),
    }  # fmt: skip
    outcomes = set()
    for broken in broken_anywhere(prepared, actions[action], 60):
        outcomes.add(is_patched(broken))
        if is_patched(broken):
            require_exact(broken, expected)
            assert tritonpack.patch(broken).report.backend == "auto"
            tritonpack.unpatch(broken)
            tritonpack.unpatch(broken)
        assert state(broken) == before
    assert outcomes == {"patch": {False}, "unpatch": {False, True}, "patch again": {True}}[action]


@pytest.mark.parametrize("family", ["mamba", "roformer", "llama"])
def test_interrupted_forward_leaves_no_packing_behind(family: str) -> None:
    """torch calls no hook after an interrupt. After an error the model can be unpatched, too."""
    model = build(family)
    before, expected = state(model), alone(model, gradients=False)
    with tritonpack.patch(model):
        last = model.lm_head if hasattr(model, "lm_head") else next(reversed(list(model.children())))
        for module in (last, list(model.base_model.modules())[-1]):
            for error in (Broken(), RuntimeError("inside")):
                hook = module.register_forward_pre_hook(lambda *_, error=error: (_ for _ in ()).throw(error))
                with contextlib.suppress(Broken, RuntimeError):
                    packed(model, pieces=documents((4, 18)), gradients=False)
                hook.remove()
                require_exact(model, expected)
    assert state(model) == before


# Checkpoints


@pytest.mark.fast("llama-patched-CheckpointImpl.REENTRANT", "mamba-wrapped-CheckpointImpl.NO_REENTRANT")
@pytest.mark.parametrize("implementation", list(CheckpointImpl))
@pytest.mark.parametrize("first", ["patched", "wrapped"])
@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "llama"])
def test_layers_in_torchs_checkpoint_wrapper(family: str, first: str, implementation: CheckpointImpl) -> None:
    """As FSDP and accelerate put it around them."""
    model = without_dropout(build(family))
    expected = alone(model)
    model.train().enable_input_require_grads()

    def wrap() -> None:
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for i, layer in enumerate(module):
                    module[i] = checkpoint_wrapper(layer, checkpoint_impl=implementation)

    if first == "wrapped":
        wrap()
    with tritonpack.patch(model):
        if first == "patched":
            packed(model, gradients=False)
            wrap()
        require_exact(model, expected, "without_cache")
    for module in model.modules():
        assert "tritonpack" not in str(getattr(module, "checkpoint_fn", ""))


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "tritonpack"), ("llama", "sdpa"), ("mamba2", "tritonpack")]
)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_after_unpatch(family: str, attention: str, reentrant: bool | None) -> None:
    """Exact, or refused where it recomputes layers. A copy isn't unpatched with its original."""
    model = build(family).train()
    model.enable_input_require_grads()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def gradients(model: Any, loss: Any = None) -> list[Any]:
        model.zero_grad()
        (model(**call_of("without_cache")).logits.square().sum() if loss is None else loss).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with tritonpack.patch(model, attention=attention):
        want, twin = gradients(model), copy.deepcopy(model)
        loss = model(**call_of("without_cache")).logits.square().sum()
    if reentrant is None:
        assert apart(want, gradients(model, loss)) < EXACT
    else:
        with pytest.raises(ValueError, match=r"Call backward\(\) before unpatch\(\)"):
            loss.backward()
    assert apart(want, gradients(twin)) < EXACT
    with tritonpack.patch(model, attention=attention):
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
    message = r"configuration.* shared with a patched model.*copy\.deepcopy\(config\).*patch this model, too"
    with pytest.raises(ValueError, match=message):
        reference(row)
    assert torch.equal(other(row).logits, expected)
    two = tritonpack.patch(reference)
    one.unpatch()
    require_exact(reference, apart_)
    two.unpatch()
    assert torch.equal(reference(row).logits, expected)
    assert policy.config._attn_implementation == stock._attn_implementation


ON_A_PATCHED_PART = r"LlamaModel.*belongs to LlamaForCausalLM, which is patched.*unpatch.*build.*patch the whole"


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


def test_a_replaced_part_is_refused() -> None:
    model = llama()
    old, new = model.model, llama(LlamaModel)
    with tritonpack.patch(model):
        model(**call_of())
        for arguments in (call_of(), call_of("offsets_alone"), {"input_ids": call_of()["input_ids"]}):
            model.model = new
            with pytest.raises(UnsupportedModelError, match=r"LlamaModel.*replaced since.*tritonpack\.patch"):
                model(**arguments)
            model.model = old
            model(**arguments)
        model.model = new
    assert not is_patched(model)
    assert not is_patched(old)
    assert old.config._attn_implementation == "sdpa"


class Wrapper(nn.Module):
    """As FSDP and others put it around parts of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapped_part_is_accepted() -> None:
    model = llama()
    expected = alone(model, gradients=False)
    with tritonpack.patch(model):
        model.model = Wrapper(model.model)
        require_exact(model, expected)
        model.model = model.model.inner
