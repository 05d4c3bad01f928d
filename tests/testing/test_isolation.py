"""check_isolation passes exact models, names the layer of a leak, and leaves the model unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonpack
from tests.patches import zoo
from tests.patches.models import FAMILIES, tiny_model
from tritonpack.testing import check_isolation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.fast("llama-torch.float32")
def test_patched_models_pass(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    with tritonpack.patch(model):
        report = check_isolation(model)
    assert report.moved_by_others == 0.0
    assert report.gradient_to_others == 0.0
    assert report.packed_against_alone < report.allowed


@pytest.mark.fast("gpt_neox", "phi3", "starcoder2")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stock_models_fail_in_the_first_layer(family: str) -> None:
    name = "gpt_neox" if family == "gpt_neox" else "model"
    with pytest.raises(tritonpack.IsolationError, match=rf"leak begins in {name}\.layers\.0"):
        check_isolation(tiny_model(family, dtype=torch.float32))


def test_a_leak_in_a_later_layer_is_named() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    model.model.layers[1].register_forward_hook(lambda m, args, out: out + out.mean(1, keepdim=True) * 1e-3)
    with tritonpack.patch(model), pytest.raises(tritonpack.IsolationError, match=r"begins in model\.layers\.1\b"):
        check_isolation(model)


def test_float64_models_that_compute_in_float32_inside() -> None:
    """Bloom's softmax and ALiBi are float32; a leak of 1e-10 is found all the same."""
    model: Any = zoo.tiny_model("bloom", dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data *= 3
    with tritonpack.patch(model):
        report = check_isolation(model)
        assert report.moved_by_others == report.gradient_to_others == 0.0
        assert report.packed_against_alone < report.allowed < 1e-3  # the difference depends on the processor
        norm = [module for module in model.modules() if isinstance(module, nn.LayerNorm)][2]
        norm.register_forward_hook(lambda m, args, out: out + out.mean(1, keepdim=True) * 1e-10)
        with pytest.raises(tritonpack.IsolationError, match="see each other"):
            check_isolation(model)


def test_a_patched_model_that_chooses_among_equal_scores_is_not_told_to_be_patched() -> None:
    """As indexers do: what each document gives depends on the row's length, and no document on another."""
    model: Any = tiny_model("llama", dtype=torch.float64)
    with tritonpack.patch(model):
        model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out * (1 + out.shape[1]))
        with pytest.raises(tritonpack.IsolationError, match=r"precision.* No document sees another.* equal ones"):
            check_isolation(model)


def test_the_model_is_unchanged() -> None:
    model = tiny_model("llama", dtype=torch.float32).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with tritonpack.patch(model):
        assert check_isolation(model, lengths=torch.tensor([3, 5])).lengths == (3, 5)
    assert torch.equal(torch.rand(1), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "lengths", "message"),
    [
        (None, (3, 5), "expected a model, an instance of torch.nn.Module; got None"),
        (torch.nn.Linear(2, 2), (3, 5), "expected a transformers model; got Linear"),
        ("llama", (5,), "at least two documents"),
        ("llama", (4, 0), "at least two documents"),
        ("llama", [5.0, 3], "lengths must hold integers; got "),
    ],
)
def test_refusals(model: Any, lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_isolation(tiny_model("llama", dtype=torch.float32) if model == "llama" else model, lengths=lengths)


class OfLimitedCapacity(nn.Module):
    """A module that drops tokens beyond a capacity, as some mixtures of experts do."""

    def __init__(self, own: nn.Module, capacity: int) -> None:
        super().__init__()
        self.own, self.capacity = own, capacity

    def forward(self, x: Tensor) -> Tensor:
        scores = x.sum(-1, keepdim=True)
        places = min(self.capacity, scores.numel())
        least = scores.flatten().topk(places).values[-1]
        return self.own(x) * (scores >= least)


def test_leaks_that_depend_on_sizes_need_documents_of_real_size() -> None:
    """A short first call of a patched model doesn't find the leak (docs/patching.md)."""
    model = tiny_model("llama", dtype=torch.float32)
    model.model.layers[0].mlp = OfLimitedCapacity(model.model.layers[0].mlp, 32)
    with tritonpack.patch(model):
        model(torch.arange(3, 13)[None], position_ids=torch.tensor([[*range(4), *range(6)]]))
        assert check_isolation(model, lengths=(7, 1, 3, 11)).moved_by_others == 0.0
        with pytest.raises(tritonpack.IsolationError, match=r"begins in model\.layers\.0\b"):
            check_isolation(model, lengths=(20, 15, 30))


def test_models_that_need_more_than_tokens_are_refused_with_a_remedy() -> None:
    model = tiny_model("llama")
    with tritonpack.patch(model), pytest.raises(tritonpack.UnsupportedModelError, match=r"Give lengths that") as info:
        check_isolation(model, vocab_size=10**6)
    assert "IndexError" in str(info.value)
