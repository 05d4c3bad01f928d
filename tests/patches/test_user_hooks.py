"""Hooks of users beside unpad and share_prefixes: they see what they see without, and run as often."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tritonpack
from tests.patches.models import tiny_model
from tests.patches.test_heads_on_rows import FLOAT32, completions
from tests.patches.test_unpad import WAYS, padded, real
from tests.small_copies.comparison import apart


def test_logits_that_are_read_later() -> None:
    gradients = []
    for options in ({}, {"unpad": True}):
        model, batch = tiny_model("llama"), completions()
        model.lm_head.weight.register_hook(lambda g: g * 2)
        tritonpack.patch(model, **options)
        output = model(**batch)
        (output.loss + real(output.logits, batch).square().mean()).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert apart(*gradients) < FLOAT32


@WAYS
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_forward_hooks_of_the_base_model(options: dict[str, bool], later: bool) -> None:
    """They see the states of all tokens and may change them, wherever the model computes the loss or logits."""
    batch, outputs, shapes = padded(), [], []

    def double(module: Any, args: Any, output: Any) -> Any:
        shapes.append(output.last_hidden_state.shape[:2])
        output = copy.copy(output)
        output["last_hidden_state"] = output.last_hidden_state * 2
        return output

    def with_hook(**more: Any) -> PreTrainedModel:
        model = tiny_model("llama")
        if not later:
            model.model.register_forward_hook(double)
        tritonpack.patch(model, **more)
        if later:
            model.model.register_forward_hook(double)
        return model

    for more in ({}, options):
        model = with_hook(**more)
        loss = model(**batch).loss
        loss.backward()
        with torch.no_grad():
            logits = real(model(**batch).logits + 0, batch)
        outputs.append([loss.detach(), logits, *(p.grad for p in model.parameters())])
        assert len(model.model._forward_hooks) == 1
    for got in outputs[1:]:
        assert apart(outputs[0], got) < FLOAT32
    assert set(shapes) == {batch["input_ids"].shape}


def test_a_hook_of_the_base_model_that_fails() -> None:
    model = tiny_model("llama")

    def fail(*_: Any) -> None:
        raise KeyError("of a user")

    with tritonpack.patch(model, unpad=True):
        handle = model.model.register_forward_hook(fail)
        with pytest.raises(KeyError, match="of a user"):
            model(**padded())
        handle.remove()
        assert not model.model._forward_hooks
        model(**padded())
