"""Padded batches that run as one row, without padding and with common beginnings once: outputs, losses, gradients.

test_sweep.py tries every causal class in all layouts; patches that come and go are in test_lifecycle.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, documents
from tests.patches.comparison import apart
from tests.patches.models import COMMON, tiny_model
from tests.patches.padded_batches import (
    BOTH_WAYS,
    FLOAT32,
    OBJECTIVES,
    SHARE,
    UNPAD,
    WAYS,
    Batch,
    completions,
    gradients_of,
    padded_batch,
    read,
    real,
    require_as_exact,
    require_equal,
    require_equal_values,
    require_saved,
    results,
    step,
    training_model,
    unlabelled,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: what makes its model and its batch, what it is given besides, and how much padding is computed."""

    make: Callable[[], Any] = lambda: tiny_model("llama")
    batch: Callable[[], Batch] = completions
    more: Callable[[Batch], Batch] = lambda _: {}
    limit: float = EXACT
    padding: int = 0
    ways: tuple[dict[str, bool], ...] = (UNPAD, SHARE)


def head(name: str, model_type: str = "llama", **more: Any) -> Case:
    """A head that isn't a causal language model's; its labels are tokens modulo 3, or the first ones of rows."""

    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(model_type, **COMMON, num_labels=3)
        return getattr(transformers, name).from_config(config).double().eval()

    def batch() -> Batch:
        given = padded_batch(0)
        labels = (given["input_ids"] % 3).masked_fill(given["attention_mask"] == 0, -100)
        return {**given, "labels": labels[:, 0] if "Sequence" in name else labels}

    return Case(make, batch, **more)


def family(name: str, *ways: dict[str, bool]) -> Case:
    make = lambda: zoo.tiny_model(name, dtype=torch.float64)  # noqa: E731
    return Case(make, more=lambda _: {"use_cache": False}, limit=FLOAT32, ways=ways)


def label_on_padding() -> Batch:
    """Such as a token for the end that the mask leaves out: the last token of the document predicts it."""
    batch = completions()
    ends = batch["attention_mask"].sum(1)
    batch["labels"][1, ends[1]], batch["labels"][3, ends[3]] = 7, 8
    return batch


CASES = {
    "labels on the right": Case(batch=lambda: padded_batch(0)),
    "labels on the left": Case(batch=lambda: padded_batch(1)),
    "completions on the right": Case(),
    "completions on the left": Case(batch=lambda: completions(1)),
    "hidden states": Case(more=lambda _: {"output_hidden_states": True}),
    "a tensor of items": Case(more=lambda _: {"num_items_in_batch": torch.tensor(100)}),
    "a number of items": Case(more=lambda _: {"num_items_in_batch": 7}),
    "shifted labels": Case(
        more=lambda batch: {"shift_labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    ),
    "positions": Case(
        batch=lambda: completions(1),
        more=lambda batch: {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)},
    ),
    "a label on padding": Case(batch=label_on_padding, padding=2),
    "no labels": Case(lambda: tiny_model("mistral"), lambda: unlabelled(1)),
    "routers": Case(
        lambda: tiny_model("mixtral", router_aux_loss_coef=0.5), lambda: padded_batch(0),
        lambda _: {"output_router_logits": True},
    ),
    "gpt2": family("gpt2", SHARE), "gpt_oss": family("gpt_oss", UNPAD, SHARE),
    "gemma3_text": family("gemma3_text", SHARE), "mamba2": family("mamba2", UNPAD),
    "qwen3_next": family("qwen3_next", UNPAD),
    "scores of rows": head("AutoModelForSequenceClassification"),
    "scores of tokens": head("AutoModelForTokenClassification"),
    "masked tokens": head("AutoModelForMaskedLM", "bert", ways=(UNPAD,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls(name: str) -> None:
    """All outputs and gradients are stock's, and no padding was computed but where a label is predicted from it."""
    case = CASES[name]
    for options in case.ways:
        model, batch = case.make(), case.batch()
        more = case.more(batch)
        want, gradients = results(model, batch, **more)
        with tritonpack.patch(model, **options) as handle:
            got, found = results(model, batch, **more)
        require_saved(handle.saved, batch, options=options, padding=case.padding)
        assert apart(gradients, found) < case.limit
        for key in (key for key in want if key not in ("past_key_values", "cache")):
            ones, others = ([x[key]] if isinstance(x[key], Tensor) else list(x[key]) for x in (want, got))
            assert apart([real(x, batch) for x in ones], [real(x, batch) for x in others]) < case.limit, key


@BOTH_WAYS
@pytest.mark.parametrize("keep", [4, 40, torch.tensor([2, 5, 6])], ids=str)
def test_logits_to_keep(keep: Any, options: dict[str, bool]) -> None:
    model, batch = tiny_model("llama"), padded_batch(1)
    places = slice(-keep, None) if isinstance(keep, int) else keep
    batch["labels"] = batch["labels"][:, places]
    want, gradients = results(model, batch, logits_to_keep=keep)
    with tritonpack.patch(model, **options):
        got, found = results(model, batch, logits_to_keep=keep)
    mask = batch["attention_mask"][:, places, None]
    assert apart([want.loss.detach(), want.logits * mask], [got.loss.detach(), got.logits * mask]) < EXACT
    assert apart(gradients, found) < EXACT


@BOTH_WAYS
def test_what_stays_as_it_is(options: dict[str, bool]) -> None:
    """Embeddings can't be compared exactly, so padding alone is removed. Rows beyond the limit of rotary embeddings
    run as they are: stock chooses frequencies by the padded length. Calls that ask for a cache return it."""
    model, batch = tiny_model("llama"), unlabelled()
    want = real(model(**batch).logits, batch)
    call = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach()}
    with tritonpack.patch(model, **options) as handle:
        assert apart([want], [real(model(**call, attention_mask=batch["attention_mask"]).logits, batch)]) < EXACT
        require_saved(handle.saved, batch, options=UNPAD)
        asked = model(**batch, use_cache=True)
        assert asked.past_key_values.get_seq_length() == asked.logits.shape[1]
        assert model(**batch).past_key_values is None
    for limit in (16, 6):
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=limit)
        want = real(model(**batch).logits, batch)
        with tritonpack.patch(model, **options) as handle:
            assert apart([want], [real(model(**batch).logits, batch)]) < EXACT
        assert (handle.saved.tokens_computed < handle.saved.tokens_given) == (limit == 16)


def test_what_is_shared() -> None:
    """Equal rows run once. Documents that have only their first token in common, or other positions, share nothing.
    Where there is nothing to save, the call stays as it is."""
    model, (ids,) = tiny_model("llama"), documents((9,))
    want = model(ids.expand(4, -1)).logits
    rows, mask = torch.cat(documents((30, 30, 30))), torch.ones(3, 30, dtype=torch.long)
    rows[:, 0], mask[0, 20:] = 1, 0
    places = torch.arange(9).expand(4, -1) + torch.arange(4)[:, None]
    for call, computed in (
        ({"input_ids": ids.expand(4, -1)}, 9),
        ({"input_ids": rows, "attention_mask": mask}, 80),
        ({"input_ids": ids.expand(4, -1), "position_ids": places}, 36),
    ):
        with tritonpack.patch(model, share_prefixes=True) as handle:
            got = model(**call).logits
        assert handle.saved.tokens_computed == computed
        assert computed != 9 or apart([want], [got]) < EXACT
    for call in ({"input_ids": rows}, {"input_ids": rows, "attention_mask": torch.ones_like(rows)}):
        with tritonpack.patch(model):
            stay = model(**call)
        with tritonpack.patch(model, share_prefixes=True) as handle:
            output = model(**call)
        assert torch.equal(stay.logits, output.logits)
        assert output.past_key_values is not None
        assert str(handle.saved) == "90 of 90 tokens computed, 0.0% saved"


@BOTH_WAYS
def test_labels_at_the_edges(options: dict[str, bool]) -> None:
    """No label at all; and labels of first tokens behind padding, which are predicted from the padding before them, as
    without the options. Stock's padding sees other tokens, so a patched model is the standard."""
    model, batch = tiny_model("llama"), padded_batch(0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with tritonpack.patch(model, **options):
        assert model(**batch).loss.isnan()
        loss = model(**batch, num_items_in_batch=5).loss
        loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters())
    batch = padded_batch(1)
    first = (batch["attention_mask"].diff(dim=1) == 1).nonzero() + torch.tensor([0, 1])
    batch["labels"][tuple(first.T)] = batch["input_ids"][tuple(first.T)]
    with tritonpack.patch(model):
        want, gradients = results(model, batch)
    with tritonpack.patch(model, **options):
        got, found = results(model, batch)
    assert apart([want.loss.detach(), *gradients], [got.loss.detach(), *found]) < EXACT


# Wrapped models


def checkpointed(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def prepared(model: Any, **options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options).prepare_model(model)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "reentrant checkpoints": lambda model: checkpointed(model, True),
    "checkpoints": lambda model: checkpointed(model, False),
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
def test_recomputation(reentrant: bool, options: dict[str, bool]) -> None:
    """Of layers of a batch after the forward pass of another; and of the whole model, which removes padding again."""
    model, batches, runs = training_model("mistral"), [padded_batch(number) for number in (0, 1)], []
    embeddings = model.get_input_embeddings()(batches[0]["input_ids"]).detach()

    def gradient() -> Tensor:
        x = embeddings.clone().requires_grad_()
        told = {name: batches[0][name] for name in ("attention_mask", "labels")}
        checkpoint(lambda x: model(inputs_embeds=x, **told).loss, x, use_reentrant=reentrant).backward()
        assert x.grad is not None
        return x.grad

    of_whole = gradient()
    model.zero_grad()
    for batch in batches:
        OBJECTIVES["both"](model(**batch), batch).backward()
    want = gradients_of(model)
    with tritonpack.patch(model, **options):
        assert apart([of_whole], [gradient()]) < EXACT
        model.zero_grad()
        checkpointed(model, reentrant)
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
        for loss in [OBJECTIVES["both"](model(**batch), batch) for batch in batches]:
            loss.backward()
    assert len(runs) == 4  # each batch forward and again
    assert apart(list(want.values()), list(gradients_of(model).values())) < EXACT


@WAYS
@pytest.mark.parametrize("by", ["autocast", "accelerate"])
def test_mixed_precision(by: str, options: dict[str, bool]) -> None:
    """accelerate runs the forward under autocast, and converts every output to float32, logits when they are read."""
    batch, found = padded_batch(0), []
    for patched in (False, True):
        model = training_model(dtype=torch.float32)
        handle = tritonpack.patch(model, **options) if patched else None
        called = prepared(model, mixed_precision="bf16") if by == "accelerate" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
            found.append(step(called, batch, "both"))
            assert called(**batch).logits.dtype == (torch.bfloat16 if by == "autocast" else torch.float32)
    require_as_exact(step(training_model(), batch, "both"), *found)
    assert handle is not None
    require_saved(handle.saved, batch, batch, options=options)
    if by == "accelerate":
        prepared(model)


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
