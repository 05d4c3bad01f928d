"""Entering and leaving SequenceParallel: models are restored; contexts nest and pause; copies and base models work."""

import copy
import gc
from functools import partial

import pytest
import torch

from tests.parallel.models import close, logits_of, make_known_model, make_model, numbers, packed, state_of
from tritonpack import SequenceParallel, patch


def restores(patched):
    """After a batch, an error in the context and an error in a layer."""
    model = make_known_model()
    if patched:
        patch(model, backend="blocked")
    before = state_of(model)
    with SequenceParallel(model):
        model(**packed()).loss.backward()
        assert (state_of(model) == before) == patched  # the pipeline of a patch gets a stage
    assert state_of(model) == before
    handle = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), SequenceParallel(model):
        model(**packed())
    handle.remove()
    assert state_of(model) == before


def a_model_in_two_contexts():
    model = make_model()
    before = state_of(model)
    with SequenceParallel(model) as outer:
        mine = logits_of(model)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is in another SequenceParallel context\. Leave"):
            SequenceParallel(model, gather_outputs=True).__enter__()
        close(logits_of(model), mine, "in the context that was there")
        assert outer.shard(packed()["input_ids"]).shape[1] == mine.shape[1]
    assert state_of(model) == before


def paused_contexts():
    """While a context is paused, every rank runs the whole batch, and models can generate."""
    model = make_model().eval()
    with SequenceParallel(model) as context:
        with context.paused():
            assert logits_of(model).shape[1] == packed()["input_ids"].shape[1]
            assert model.generate(numbers(1, 5), max_new_tokens=4, do_sample=False).shape == (1, 9)
        assert logits_of(model).shape[1] < packed()["input_ids"].shape[1]


def base_models_are_sharded_once():
    """A patched base model reads the shard inside of contexts, and the whole batch outside."""
    base, batch = make_model().model, {name: x for name, x in packed().items() if name != "labels"}
    with patch(base):
        wanted, before = base(**batch).last_hidden_state, state_of(base)
        with SequenceParallel(base) as context:
            mine = base(**batch).last_hidden_state
            close(mine, context.shard(wanted), "own rows")
            for call in (base.forward, copy.deepcopy(base)):  # `forward` runs no hooks
                close(call(**batch).last_hidden_state, mine, "forward, or a copy")
        close(base(**batch).last_hidden_state, wanted, "outside")
        assert state_of(base) == before


def several_models():
    """A policy and a reference model in one context, and a copy, which runs whole batches afterwards."""
    models, wanted = [make_model(), make_model("mistral")], []
    for model in models:
        with patch(model):
            wanted.append(logits_of(model))
    with SequenceParallel(models, gather_outputs=True, exchange="ulysses"):
        for model, logits in zip(models, wanted, strict=True):
            close(logits_of(model), logits, type(model).__name__)
        other = copy.deepcopy(models[0])
        close(logits_of(other), wanted[0], "copy")
    close(logits_of(other), wanted[0], "copy outside")


def tensors_are_freed_without_garbage_collection():
    """No cycle of references holds the tensors of a batch."""
    model = make_model()
    model.gradient_checkpointing_enable()
    with SequenceParallel(model, exchange="ring"):
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            model(**packed()).loss.backward()
            gc.collect()
            assert not [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


def rotary(family, rope, **more):
    """The longest document sets the frequencies on all ranks, also on those that have only its first tokens."""
    rope |= {"rope_theta": 10000.0}
    model = make_model(family, rope_parameters=rope, max_position_embeddings=24, **more)
    long, short = {"input_ids": numbers(1, 40)}, {"input_ids": numbers(1, 12)}
    with patch(model):
        wanted = [model(**batch).logits for batch in (long, short)]
    with SequenceParallel(model, layout="contiguous", gather_outputs=True):
        for batch, logits in zip((long, short), wanted, strict=True):
            close(model(**batch).logits, logits, family)
        with pytest.raises(ValueError, match="documents packed with a longer one"):
            logits_of(model)
    assert "forward" not in vars(model.model.rotary_emb)


LONG = {"original_max_position_embeddings": 24}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
CASES = {
    "restores unpatched models": partial(restores, False),
    "restores patched models": partial(restores, True),
    "a model in two contexts": a_model_in_two_contexts,
    "paused contexts": paused_contexts,
    "base models are sharded once": base_models_are_sharded_once,
    "several models": several_models,
    "tensors are freed": tensors_are_freed_without_garbage_collection,
    "rotary, dynamic": partial(rotary, "llama", {"rope_type": "dynamic", "factor": 2.0}),
    "rotary, longrope": partial(rotary, "phi3", {"rope_type": "longrope", **LONG, **FACTORS}, **LONG),
}
ALSO_ON_FOUR = ["restores unpatched models", "a model in two contexts", "several models", "rotary, dynamic"]
