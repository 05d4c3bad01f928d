"""A known class is tried if it runs code that isn't transformers' own."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

import tritonpack
from tests.patches.foreign import AnyArguments, Replacement, attends_by_itself, attends_by_the_interface, mixes_rows
from tests.patches.models import tiny_model
from tritonpack.patches.forwards import _is_genuine
from tritonpack.testing import check_isolation

pytestmark = pytest.mark.usefixtures("trials")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaced_attention_of_a_class_is_refused(
    dtype: torch.dtype, trials: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tritonpack.patch(tiny_model("llama", dtype=dtype)).unpatch()
    assert not trials
    monkeypatch.setattr(LlamaAttention, "forward", attends_by_itself)
    message = r"LlamaForCausalLM runs code that isn't transformers' own in model.layers.0.self_attn \(LlamaAttention\)"
    with pytest.raises(tritonpack.UnsupportedModelError, match=f"{message}.*don't stay apart: position_ids"):
        tritonpack.patch(tiny_model("llama", dtype=dtype))
    monkeypatch.undo()
    tritonpack.patch(tiny_model("llama", dtype=dtype)).unpatch()


@pytest.mark.heavy
def test_replaced_attention_that_uses_the_interface_is_tried(trials: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", attends_by_the_interface)
    check_isolation(tritonpack.patch(tiny_model("llama")).model)
    assert len(trials) == 1


@pytest.mark.parametrize("how", ["instance", "module", "any arguments", "head"])
def test_replaced_code_of_an_instance_is_tried_with_the_model_itself(how: str, trials: list[Any]) -> None:
    """A small copy doesn't have that code."""
    model = tiny_model("llama")
    layers = model.model.layers
    if how == "instance":
        layers[1].self_attn.forward = attends_by_itself.__get__(layers[1].self_attn)
    elif how == "module":
        layers[1].self_attn = Replacement(layers[1].self_attn)
    elif how == "any arguments":
        layers[1].self_attn = AnyArguments(layers[1].self_attn)
    else:
        model.forward = mixes_rows.__get__(model)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"isn't transformers' own in .*don't stay apart"):
        tritonpack.patch(model)
    assert len(trials) == 2


def test_attention_of_another_class_is_tried(trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is transformers' own, but of another class."""
    monkeypatch.setattr(LlamaAttention, "forward", MistralAttention.forward)
    tritonpack.patch(tiny_model("llama")).unpatch()
    assert len(trials) == 1


def test_replaced_norms_are_not_tried(trials: list[Any]) -> None:
    """A module without arguments about the row can't mix its documents."""
    model = tiny_model("llama")
    model.model.norm.forward = (lambda self, x: x).__get__(model.model.norm)
    model.lm_head = Scaled()
    tritonpack.patch(model).unpatch()
    assert not trials


class Scaled(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 2


@pytest.mark.slow
def test_every_class_of_transformers_has_its_own_forward() -> None:
    """Otherwise an unchanged class would be tried, or its attention wouldn't be watched."""
    homes = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    wrong, count = [], 0
    for home in homes:
        name = f"transformers.models.{home.parent.name}.{home.stem}"
        try:
            module = importlib.import_module(name)
        except ImportError:  # a package that isn't installed
            continue
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == name:
                count += 1
                wrong += [] if _is_genuine(kind) else [kind.__name__]
    assert not wrong
    assert count > 4000
