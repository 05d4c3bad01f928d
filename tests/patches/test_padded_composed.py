"""Padded batches as one row in models that are wrapped, copied, interrupted, patched again, or called by threads."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, state
from tests.patches.comparison import apart
from tests.patches.models import tiny_model
from tests.patches.padded_batches import (
    BOTH_WAYS,
    OBJECTIVES,
    SHARE,
    UNPAD,
    WAYS,
    Step,
    gradients_of,
    padded_batch,
    read,
    require_as_exact,
    require_equal,
    require_equal_values,
    require_saved,
    step,
    training_model,
)
from tests.patches.test_lifecycle import in_threads

SLOW = pytest.mark.slow
FIRST = pytest.mark.parametrize("first", ["patch", pytest.param("wrapper", marks=SLOW)])


def stock(number: int, family: str = "llama") -> Step:
    """The step of an unpatched model on a batch."""
    return step(training_model(family), padded_batch(number), "both")


def checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def with_wrapped_layers(model: Any) -> Any:
    """As FSDP and accelerate put the wrapper around layers."""
    model.config.use_cache = False  # stock's recomputation would write to it again
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return model


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def prepared(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True).prepare(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: model,
    "reentrant checkpoints": lambda model: checkpointed(model, True),
    "checkpoints": lambda model: checkpointed(model, False),
    "wrapped layers": with_wrapped_layers,
    "adapters": with_lora,
    "accelerate": prepared,
}


@BOTH_WAYS
@pytest.mark.parametrize("first", ["patch", "wrapper"])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.fast(
    *(f"llama-{name}-patch-share" for name in WRAPPERS),
    "llama-adapters-wrapper-unpad", "llama-accelerate-wrapper-unpad", "mistral-reentrant checkpoints-wrapper-unpad",
)  # fmt: skip
def test_wrapped_models(family: str, name: str, first: str, options: dict[str, bool]) -> None:
    """Loss, logits and gradients are those of the wrapped model without a patch, in each of several batches."""
    batches, found = [padded_batch(number) for number in range(3)], []
    for patched in (False, True):
        model = training_model(family)
        handle = tritonpack.patch(model, **options) if patched and first == "patch" else None
        called = WRAPPERS[name](model)
        if patched and handle is None:
            handle = tritonpack.patch(called, **options)
        found.append([step(called, batch, "both") for batch in batches])
    for want, got in zip(*found, strict=True):
        require_equal(want, got)
    assert handle is not None
    require_saved(handle.saved, *batches, options=options)
    if name == "adapters":
        assert 0 < sum(x is not None for x in got.gradients.values()) < len(got.gradients)  # of adapters alone
        want = read(called(**batches[0]), batches[0])
        require_equal_values(want, read(called.merge_and_unload()(**batches[0]), batches[0]))


@WAYS
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_batches_before_their_backward_passes(reentrant: bool, options: dict[str, bool]) -> None:
    """The recomputation of the first batch comes after the forward pass of the second."""
    model, batches, runs = training_model("mistral"), [padded_batch(number) for number in (0, 1)], []
    for batch in batches:
        OBJECTIVES["both"](model(**batch), batch).backward()
    want = gradients_of(model)
    model.zero_grad()
    checkpointed(model, reentrant)
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    with tritonpack.patch(model, **options):
        for loss in [OBJECTIVES["both"](model(**batch), batch) for batch in batches]:
            loss.backward()
    assert len(runs) == 4  # each batch forward and again
    assert apart(list(want.values()), list(gradients_of(model).values())) < EXACT


@WAYS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_whole_model(reentrant: bool, options: dict[str, bool]) -> None:
    """The recomputation removes the padding again, and must find it at the same places."""
    model, batch = training_model(), padded_batch(0)
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()

    def gradient() -> Tensor:
        x = embeddings.clone().requires_grad_()
        told = {name: batch[name] for name in ("attention_mask", "labels")}
        checkpoint(lambda x: model(inputs_embeds=x, **told).loss, x, use_reentrant=reentrant).backward()
        assert x.grad is not None
        return x.grad

    want = gradient()
    with tritonpack.patch(model, **options):
        assert apart([want], [gradient()]) < EXACT


@WAYS
@pytest.mark.parametrize("by", ["autocast", "accelerate"])
def test_mixed_precision(by: str, options: dict[str, bool]) -> None:
    """accelerate runs the forward under autocast, and converts every output to float32, logits when they are read."""
    found = []
    for patched in (False, True):
        model, batch = training_model(dtype=torch.float32), padded_batch(0)
        handle = tritonpack.patch(model, **options) if patched else None
        if by == "accelerate":
            accelerate = pytest.importorskip("accelerate")
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            called = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
            assert called(**batch).logits.dtype == torch.float32
            found.append(step(called, batch, "both"))
        else:
            with torch.autocast("cpu", torch.bfloat16):
                found.append(step(model, batch, "both"))
                assert model(**batch).logits.dtype == torch.bfloat16
    require_as_exact(stock(0), *found)
    assert handle is not None
    require_saved(handle.saved, batch, batch, options=options)
    if by == "accelerate":
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@WAYS
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(duplicate: Callable[[Any], Any], options: dict[str, bool]) -> None:
    """It shares neither weights nor counts with the model, and each is unpatched by itself."""
    model, batch = training_model(), padded_batch(0)
    before = state(model)
    handle = tritonpack.patch(model, **options)
    want = step(model, batch, "both")
    twin = duplicate(handle.model)
    require_equal(want, step(twin, batch, "both"))
    require_saved(handle.saved, batch, options=options)
    for p in twin.parameters():
        p.data.zero_()
    require_equal(want, step(model, batch, "both"))
    handle.unpatch()
    assert state(model) == before
    twin.load_state_dict(model.state_dict())
    require_equal(want, step(twin, batch, "both"))
    tritonpack.unpatch(twin)
    require_equal(stock(0), step(twin, batch, "both"))


class Interrupt(KeyboardInterrupt):
    """An interrupt of a test, not of the user who runs it."""


@contextmanager
def interrupted(layer: nn.Module, *, backward: bool = False) -> Iterator[None]:
    """The next call of a layer, or the gradient of its output, raises an interrupt, which the block must let out."""

    def interrupt(*_: Any) -> None:
        raise Interrupt

    hook = (layer.register_full_backward_hook if backward else layer.register_forward_hook)(interrupt)
    try:
        with pytest.raises(Interrupt):
            yield
    finally:
        hook.remove()


@BOTH_WAYS
@pytest.mark.parametrize("where", ["model.layers.1", "model.layers.0.mlp", "model.norm", "lm_head"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])  # recurrent layers read the packing from a context
@pytest.mark.fast("llama-model.layers.1-share", "llama-lm_head-unpad", "qwen3_next-model.layers.1-unpad")
def test_a_call_after_an_interrupted_one(family: str, where: str, options: dict[str, bool]) -> None:
    def make() -> Any:
        return training_model() if family == "llama" else zoo.tiny_model(family, dtype=torch.float64).train()

    if family == "qwen3_next" and options == SHARE:
        pytest.skip("refused")
    model, want = make(), step(make(), padded_batch(1), "both")
    before = state(model)
    with tritonpack.patch(model, **options) as handle:
        for number in (0, 2):
            with interrupted(model.get_submodule(where)):
                step(model, padded_batch(number), "both")
            twin = copy.deepcopy(model)
            require_equal(want, step(model, padded_batch(1), "both"))
            require_equal(want, step(twin, padded_batch(1), "both"))
    assert state(model) == before
    require_saved(handle.saved, *[padded_batch(number) for number in (0, 1, 2, 1)], options=options)
    require_equal(want, step(model, padded_batch(1), "both"))


@WAYS
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_call_after_an_interrupted_backward_pass(reentrant: bool | None, options: dict[str, bool]) -> None:
    model = training_model() if reentrant is None else checkpointed(training_model(), reentrant)
    before = state(model)
    with tritonpack.patch(model, **options):
        with interrupted(model.model.layers[0], backward=True):
            step(model, padded_batch(0), "both")
        require_equal(stock(1), step(model, padded_batch(1), "both"))
    assert state(model) == before


@BOTH_WAYS
@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=SLOW)])
def test_threads_that_call_one_model(family: str, options: dict[str, bool]) -> None:
    """They wait for each other within each call, so both are in the middle of the model at once. Their batches have
    the same shape, and padding at other places."""
    model, times = training_model(family), 4
    batches = [padded_batch(0), {name: x.flip(0) for name, x in padded_batch(0).items()}]
    want = [read(model(**batch), batch) for batch in batches]
    barrier, got, errors = threading.Barrier(2, timeout=600), [], []

    def run(number: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(times):
                    got.append((number, read(model(**batches[number]), batches[number])))
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    with tritonpack.patch(model, **options) as handle:
        for part in (model.model.embed_tokens, *model.model.layers):
            part.register_forward_hook(lambda *_: (barrier.wait(), None)[1])
        in_threads([lambda: run(0), lambda: run(1)])
    assert not errors
    assert len(got) == 2 * times
    for number, values in got:
        require_equal_values(want[number], values)
    require_saved(handle.saved, *batches * times, options=options)


@WAYS
def test_gradients_of_threads_add_up(options: dict[str, bool]) -> None:
    model, batches = training_model(), [padded_batch(number) for number in (0, 1, 2)]
    for batch in batches:
        OBJECTIVES["both"](model(**batch), batch).backward()
    want = gradients_of(model)
    model.zero_grad()
    losses: list[Tensor] = []
    with tritonpack.patch(model, **options):
        in_threads([lambda b=batch: losses.append(OBJECTIVES["both"](model(**b), b)) for batch in batches])
        torch.stack(losses).sum().backward()
    assert apart(list(want.values()), list(gradients_of(model).values())) < EXACT


def test_the_later_patch_is_in_force() -> None:
    """unpad, above it share_prefixes, above it neither; handles are unpatched in another order."""
    model, batch = training_model(), padded_batch(0)
    before, want = state(model), stock(0)
    outer, middle = tritonpack.patch(model, **UNPAD), tritonpack.patch(model, **SHARE)
    require_equal(want, step(model, batch, "both"))
    require_saved(middle.saved, batch, options=SHARE)
    with tritonpack.patch(model) as inner:
        require_equal(want, step(model, batch, "both"))
        assert inner.saved is None
    assert tritonpack.patch(model, **SHARE).saved is middle.saved  # one patch, two handles
    tritonpack.unpatch(model)
    outer.unpatch()
    require_equal(want, step(model, batch, "both"))
    require_saved(middle.saved, batch, batch, options=SHARE)
    assert outer.saved.tokens_given == 0
    middle.unpatch()
    assert state(model) == before
    require_equal(want, step(model, batch, "both"))


@WAYS
def test_a_patch_of_the_base_model_inside(options: dict[str, bool]) -> None:
    """A head around a patched base model gets the padded batch back."""
    model, batch = training_model(), padded_batch(0)
    with tritonpack.patch(model.model, **options) as handle:
        require_equal(stock(0), step(model, batch, "both"))
    require_saved(handle.saved, batch, options=options)


@WAYS
def test_two_models_in_one_step(options: dict[str, bool]) -> None:
    """As a policy and its reference model."""
    model, reference, batch = training_model(), tiny_model("llama", initializer_range=0.1), padded_batch(0)

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        with torch.no_grad():
            other = reference(**batch).logits
        output = model(**batch)
        (output.loss + ((output.logits - other) * batch["attention_mask"][..., None]).square().mean()).backward()
        return [*gradients_of(model).values()]

    want = gradients()
    with tritonpack.patch(model, **options), tritonpack.patch(reference, **options):
        assert apart(want, gradients()) < EXACT
