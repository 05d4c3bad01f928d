"""Padded batches as one row, in models that are wrapped, copied, interrupted, patched again, or called by threads."""

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.padded_batches import (
    BOTH_WAYS,
    LIMIT,
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
from tests.patches.test_every_model import state
from tests.small_copies.comparison import apart
from tritonpack.patches.applied_patch import applied_to

SLOW = pytest.mark.slow
EVERY_OBJECTIVE = pytest.mark.parametrize(
    "objective", [name if name == "both" else pytest.param(name, marks=SLOW) for name in OBJECTIVES]
)
FIRST = pytest.mark.parametrize("first", ["patch", pytest.param("wrapper", marks=SLOW)])


def stock(number: int, objective: str = "both", family: str = "llama", **more: Any) -> Step:
    """The step of an unpatched model on a batch."""
    return step(training_model(family), padded_batch(number), objective, **more)


class TestLogitsBesideLabels:
    """Users read the logits of a call with labels, in training and in evaluation."""

    @pytest.mark.fast("llama-both-share")
    @BOTH_WAYS
    @EVERY_OBJECTIVE
    @pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=SLOW)])
    def test_training(self, family: str, objective: str, options: dict[str, bool]) -> None:
        model = training_model(family)
        batches = [padded_batch(number) for number in range(6)]
        with tritonpack.patch(model, **options) as handle:
            for number, batch in enumerate(batches):
                require_equal(stock(number, objective, family), step(model, batch, objective))
        require_saved(handle.saved, *batches, options=options)

    @BOTH_WAYS
    def test_first_labels_behind_padding_on_the_left(self, options: dict[str, bool]) -> None:
        """A document's first token is predicted from the padding before it, as without the options. Stock's padding
        sees other tokens, so a patched model is the standard."""
        model, batch = training_model(), padded_batch(1)
        with torch.no_grad():
            model.get_input_embeddings().weight[0] = 0.02
        first = (batch["attention_mask"].diff(dim=1) == 1).nonzero() + torch.tensor([0, 1])
        batch["labels"][tuple(first.T)] = batch["input_ids"][tuple(first.T)]
        with tritonpack.patch(model):
            want = step(model, batch)
        with tritonpack.patch(model, **options):
            require_equal(want, step(model, batch))

    @WAYS
    @pytest.mark.parametrize("training", [False, pytest.param(True, marks=SLOW)])
    @pytest.mark.parametrize("guard", [torch.no_grad, pytest.param(torch.inference_mode, marks=SLOW)])
    def test_evaluation(self, guard: Callable[[], Any], training: bool, options: dict[str, bool]) -> None:
        model = training_model().train(training)
        for number in range(4):
            batch = padded_batch(number)
            with guard():
                want = read(model(**batch), batch)
                with tritonpack.patch(model, **options):
                    got = read(model(**batch), batch)
            require_equal_values(want, got)

    @WAYS
    def test_logits_read_after_the_backward_pass(self, options: dict[str, bool]) -> None:
        model, batch = training_model(), padded_batch(0)
        want = read(model(**batch), batch)
        with tritonpack.patch(model, **options):
            output = model(**batch)
            output.loss.backward()
            require_equal_values(want, read(output, batch))

    @WAYS
    def test_logits_read_after_unpatching(self, options: dict[str, bool]) -> None:
        model, batch = training_model(), padded_batch(0)
        want = read(model(**batch), batch)
        with tritonpack.patch(model, **options):
            output = model(**batch)
        require_equal_values(want, read(output, batch))

    @WAYS
    def test_outputs_as_tuples(self, options: dict[str, bool]) -> None:
        model, batch = training_model(), padded_batch(0)
        want = model(**batch, return_dict=False)
        with tritonpack.patch(model, **options):
            got = model(**batch, return_dict=False)
        mask = batch["attention_mask"][..., None]
        assert apart([want[0], want[1] * mask], [got[0], got[1] * mask]) < LIMIT


class TestCheckpointing:
    @WAYS
    @EVERY_OBJECTIVE
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_two_batches_before_their_backward_passes(
        self, reentrant: bool, objective: str, options: dict[str, bool]
    ) -> None:
        """The recomputation of the first batch comes after the forward pass of the second."""
        model, batches = training_model("mistral"), [padded_batch(number) for number in (0, 1)]
        for batch in batches:
            OBJECTIVES[objective](model(**batch), batch).backward()
        want = gradients_of(model)
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        before, runs = state(model), [0]
        counted = model.model.layers[0].self_attn.register_forward_hook(partial(_count, runs))
        with tritonpack.patch(model, **options) as handle:
            for loss in [OBJECTIVES[objective](model(**batch), batch) for batch in batches]:
                loss.backward()
        assert runs == [4]  # each batch forward and again
        assert apart(list(want.values()), list(gradients_of(model).values())) < LIMIT
        require_saved(handle.saved, *batches, options=options)
        counted.remove()
        assert state(model) == before

    @WAYS
    @FIRST
    def test_wrapped_layers(self, first: str, options: dict[str, bool]) -> None:
        """Layers in torch's wrapper, as FSDP and accelerate put it around them."""
        model, batch = training_model(), padded_batch(0)

        def wrap() -> None:
            for i, layer in enumerate(model.model.layers):
                model.model.layers[i] = checkpoint_wrapper(layer)

        if first == "wrapper":
            wrap()
        with tritonpack.patch(model, **options) as handle:
            if first == "patch":
                wrap()
            got = step(model, batch, "both")
        want = stock(0)
        require_equal(want, Step(got.values, dict(zip(want.gradients, got.gradients.values(), strict=True))))
        require_saved(handle.saved, batch, options=options)

    @WAYS
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpoint_around_the_whole_model(self, reentrant: bool, options: dict[str, bool]) -> None:
        """The recomputation removes the padding again, and must find it at the same places."""
        model, batch = training_model(), padded_batch(0)
        embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()

        def gradient() -> Tensor:
            x = embeddings.clone().requires_grad_()
            run = lambda x: model(inputs_embeds=x, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss  # noqa: E731
            checkpoint(run, x, use_reentrant=reentrant).backward()
            assert x.grad is not None
            return x.grad

        want = gradient()
        with tritonpack.patch(model, **options):
            assert apart([want], [gradient()]) < LIMIT


def _count(runs: list[int], *_: Any) -> None:
    runs[0] += 1


class TestPeft:
    @WAYS
    @FIRST
    def test_lora(self, first: str, options: dict[str, bool]) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
        batches, results = [padded_batch(number) for number in (0, 1)], []
        for patched in (False, True):
            torch.manual_seed(1)
            model = training_model()
            handle = tritonpack.patch(model, **options) if patched and first == "patch" else None
            model = peft.get_peft_model(model, config).double()
            if patched and first == "wrapper":
                handle = tritonpack.patch(model, **options)
            results.append([step(model, batch, "both") for batch in batches])
        for want, got in zip(*results, strict=True):
            require_equal(want, got)
            assert 0 < sum(x is not None for x in got.gradients.values()) < len(got.gradients)  # adapters alone
        require_saved(handle.saved, *batches, options=options)
        merged = model.merge_and_unload()
        require_equal_values(read(model(**batches[0]), batches[0]), read(merged(**batches[0]), batches[0]))
        require_saved(handle.saved, *batches, *[batches[0]] * 2, options=options)


class TestAccelerate:
    @WAYS
    @FIRST
    def test_prepared_models(self, first: str, options: dict[str, bool]) -> None:
        accelerate = pytest.importorskip("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        batches, weights = [padded_batch(number) for number in range(4)], []
        for patched in (False, True):
            model = training_model()
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            handle = tritonpack.patch(model, **options) if patched and first == "patch" else None
            prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            if patched and first == "wrapper":
                handle = tritonpack.patch(prepared, **options)
            for batch in batches:
                with accelerator.accumulate(prepared):
                    accelerator.backward(OBJECTIVES["both"](prepared(**batch), batch))
                    optimizer.step()
                    optimizer.zero_grad()
            weights.append([p.detach().clone() for p in model.parameters()])
        before = [p.detach() for p in training_model().parameters()]
        moved = [[a - b for a, b in zip(after, before, strict=True)] for after in weights]
        assert apart(*moved) < LIMIT
        require_saved(handle.saved, *batches, options=options)

    @WAYS
    @FIRST
    def test_mixed_precision(self, first: str, options: dict[str, bool]) -> None:
        """accelerate runs the forward under autocast, and converts every output to float32."""
        accelerate = pytest.importorskip("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, results = accelerate.Accelerator(cpu=True, mixed_precision="bf16"), []
        for patched in (False, True):
            model = training_model(dtype=torch.float32)
            before = state(model)
            handle = tritonpack.patch(model, **options) if patched and first == "patch" else None
            prepared = accelerator.prepare_model(model)
            if patched and first == "wrapper":
                handle = tritonpack.patch(prepared, **options)
            output = prepared(**padded_batch(0))
            assert output.logits.dtype == torch.float32
            results.append(step(model, padded_batch(0), "both"))
        require_as_exact(stock(0), *results)
        require_saved(handle.saved, *[padded_batch(0)] * 2, options=options)
        handle.unpatch()
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert state(model).keys() == before.keys()
        assert not applied_to(model)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class TestAutocast:
    @WAYS
    @pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=SLOW)])
    def test_as_exact_as_stock(self, checkpointing: bool, options: dict[str, bool]) -> None:
        model, batch = training_model(dtype=torch.float32), padded_batch(0)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", torch.bfloat16):
            plain = step(model, batch, "both")
            with tritonpack.patch(model, **options) as handle:
                got = step(model, batch, "both")
                assert model(**batch).logits.dtype == torch.bfloat16
        require_as_exact(stock(0), plain, got)
        require_saved(handle.saved, batch, batch, options=options)


class TestCopies:
    @WAYS
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_is_a_model_of_its_own(self, duplicate: Callable[[Any], Any], options: dict[str, bool]) -> None:
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
        (applied,) = applied_to(twin)
        require_saved(applied.compaction.saved, batch, batch, options=options)
        twin.load_state_dict(model.state_dict())
        require_equal(want, step(twin, batch, "both"))
        tritonpack.unpatch(twin)
        require_equal(stock(0), step(twin, batch, "both"))
        assert not applied_to(twin)

    @WAYS
    def test_a_copy_while_a_first_call_is_interrupted(self, options: dict[str, bool]) -> None:
        model, batch = training_model(), padded_batch(0)
        with tritonpack.patch(model, **options), interrupted(model.model.layers[0]):
            step(model, batch)
        twin = copy.deepcopy(model)
        with tritonpack.patch(twin, **options):
            require_equal(stock(0), step(twin, batch, "both"))


class Interrupt(KeyboardInterrupt):
    """An interrupt of a test, not of the user who runs it."""


@contextlib.contextmanager
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


# Modules whose call is interrupted.
PLACES = ["model.layers.1", *(pytest.param(p, marks=SLOW) for p in ("model.layers.0.mlp", "model.norm", "lm_head"))]


class TestInterrupts:
    @WAYS
    @pytest.mark.parametrize("where", PLACES)
    def test_a_call_after_an_interrupted_one(self, where: str, options: dict[str, bool]) -> None:
        self.interrupt(training_model, where, options)

    @pytest.mark.slow
    @pytest.mark.parametrize("where", PLACES)
    def test_recurrent_layers(self, where: str) -> None:
        """They read the packing of their call from a context, which an interrupt must leave empty."""
        self.interrupt(lambda: zoo.tiny_model("qwen3_next", dtype=torch.float64).train(), where, UNPAD)

    def interrupt(self, make: Callable[[], PreTrainedModel], where: str, options: dict[str, bool]) -> None:
        model, want = make(), step(make(), padded_batch(1), "both")
        before = state(model)
        with tritonpack.patch(model, **options) as handle:
            for number in (0, 2):
                with interrupted(model.get_submodule(where)):
                    step(model, padded_batch(number), "both")
                require_equal(want, step(model, padded_batch(1), "both"))
        assert state(model) == before
        require_saved(handle.saved, *[padded_batch(number) for number in (0, 1, 2, 1)], options=options)
        require_equal(want, step(model, padded_batch(1), "both"))

    @WAYS
    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_a_call_after_an_interrupted_backward_pass(self, reentrant: bool | None, options: dict[str, bool]) -> None:
        model = training_model()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        before = state(model)
        with tritonpack.patch(model, **options):
            with interrupted(model.model.layers[0], backward=True):
                step(model, padded_batch(0), "both")
            require_equal(stock(1), step(model, padded_batch(1), "both"))
        assert state(model) == before


def in_threads(run: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestThreads:
    @BOTH_WAYS
    @pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=SLOW)])
    def test_threads_that_call_one_model(self, family: str, options: dict[str, bool]) -> None:
        """They wait for each other within each call, so both are in the middle of the model at once. Their batches have
        the same shape, and padding at other places."""
        model, times = training_model(family), 4
        batches = [padded_batch(0), {name: x.flip(0) for name, x in padded_batch(0).items()}]
        want = [read(model(**batch), batch) for batch in batches]
        barrier, got, errors = threading.Barrier(2, timeout=600), [], []

        def meet(*_: Any) -> None:
            barrier.wait()

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
                part.register_forward_hook(meet)
            in_threads(run, 2)
        assert not errors
        assert len(got) == 2 * times
        for number, values in got:
            require_equal_values(want[number], values)
        require_saved(handle.saved, *batches * times, options=options)

    @WAYS
    def test_gradients_of_threads_add_up(self, options: dict[str, bool]) -> None:
        model, batches = training_model(), [padded_batch(number) for number in (0, 1, 2)]
        for batch in batches:
            OBJECTIVES["both"](model(**batch), batch).backward()
        want = gradients_of(model)
        model.zero_grad()
        losses: dict[int, Tensor] = {}

        def run(number: int) -> None:
            losses[number] = OBJECTIVES["both"](model(**batches[number]), batches[number])

        with tritonpack.patch(model, **options):
            in_threads(run, 3)
            sum(losses.values()).backward()  # type: ignore[union-attr]
        assert apart(list(want.values()), list(gradients_of(model).values())) < LIMIT


class TestSeveralPatches:
    def test_the_later_patch_is_in_force(self) -> None:
        """unpad, above it share_prefixes, above it neither; handles are unpatched in another order."""
        model, batch = training_model(), padded_batch(0)
        before, want = state(model), stock(0)
        outer, middle = tritonpack.patch(model, **UNPAD), tritonpack.patch(model, **SHARE)
        require_equal(want, step(model, batch, "both"))
        require_saved(middle.saved, batch, options=SHARE)
        assert outer.saved.tokens_given == 0
        with tritonpack.patch(model) as inner:
            require_equal(want, step(model, batch, "both"))
            assert inner.saved is None
        outer.unpatch()
        require_equal(want, step(model, batch, "both"))
        require_saved(middle.saved, batch, batch, options=SHARE)
        assert outer.saved.tokens_given == 0
        middle.unpatch()
        assert state(model) == before
        require_equal(want, step(model, batch, "both"))

    @WAYS
    def test_a_patch_of_the_base_model_inside(self, options: dict[str, bool]) -> None:
        """A head around a patched base model gets the padded batch back."""
        model, batch = training_model(), padded_batch(0)
        with tritonpack.patch(model.model, **options) as handle:
            require_equal(stock(0), step(model, batch, "both"))
        require_saved(handle.saved, batch, options=options)

    @WAYS
    def test_two_models_in_one_step(self, options: dict[str, bool]) -> None:
        """As a policy and its reference model."""
        model, reference = training_model(), tiny_model("llama", initializer_range=0.1)
        batch = padded_batch(0)

        def gradients() -> dict[str, Tensor | None]:
            model.zero_grad()
            with torch.no_grad():
                other = reference(**batch).logits
            output = model(**batch)
            mask = batch["attention_mask"][..., None]
            (output.loss + ((output.logits - other) * mask).square().mean()).backward()
            return gradients_of(model)

        want = gradients()
        with tritonpack.patch(model, **options) as one, tritonpack.patch(reference, **options) as two:
            assert apart(list(want.values()), list(gradients().values())) < LIMIT
        for handle in (one, two):
            require_saved(handle.saved, batch, options=options)
