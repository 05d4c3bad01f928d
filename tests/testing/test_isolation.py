"""check_isolation passes exact models, names the layer of a leak, and leaves the model unchanged."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonpack
from tests.patches import zoo
from tests.patches.models import FAMILIES, tiny_model
from tritonpack import IsolationError
from tritonpack.testing import check_isolation


def llama(dtype: torch.dtype = torch.float32) -> Any:
    return tiny_model("llama", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.fast("llama-torch.float32", "gpt_neox-torch.float32", "phi3-torch.float32")
def test_stock_models_leak_in_the_first_layer_and_patched_ones_pass(family: str, dtype: torch.dtype) -> None:
    model, name = tiny_model(family, dtype=dtype), "gpt_neox" if family == "gpt_neox" else "model"
    if dtype == torch.float32:  # in bfloat16 some leaks count as rounding
        with pytest.raises(IsolationError, match=rf"leak begins in {name}\.layers\.0"):
            check_isolation(model)
    with tritonpack.patch(model):
        report = check_isolation(model)
    assert report.moved_by_others == report.gradient_to_others == 0.0
    assert report.packed_against_alone < report.allowed


def test_a_leak_in_a_later_layer_is_named() -> None:
    model = llama()
    model.model.layers[1].register_forward_hook(lambda m, args, out: out + out.mean(1, keepdim=True) * 1e-3)
    with tritonpack.patch(model), pytest.raises(IsolationError, match=r"begins in model\.layers\.1\b"):
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
        with pytest.raises(IsolationError, match="see each other"):
            check_isolation(model)


def test_a_patched_model_that_chooses_among_equal_scores_is_not_told_to_be_patched() -> None:
    """As indexers do: what each document gives depends on the row's length, and no document on another."""
    model = llama(torch.float64)
    with tritonpack.patch(model):
        model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: out * (1 + out.shape[1]))
        with pytest.raises(IsolationError, match=r"precision.* No document sees another.* equal ones"):
            check_isolation(model)


def test_the_model_is_unchanged() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    modes, state = [module.training for module in model.modules()], torch.random.get_rng_state()
    with tritonpack.patch(model):
        assert check_isolation(model, lengths=torch.tensor([3, 5])).lengths == (3, 5)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: None, {}, "expected a model, an instance of torch.nn.Module; got None"),
        (lambda: torch.nn.Linear(2, 2), {}, "expected a transformers model; got Linear"),
        (llama, {"lengths": (5,)}, "at least two documents"),
        (llama, {"lengths": (4, 0)}, "at least two documents"),
        (llama, {"lengths": [5.0, 3]}, "lengths must hold integers; got "),
        (llama, {"seed": "0"}, "must be integers; got '0' and None"),
        (llama, {"vocab_size": -1}, "must be integers; got 0 and -1"),
        (lambda: tritonpack.patch(llama()).model, {"vocab_size": 10**6}, "IndexError.* Give lengths that the model"),
    ],
)
def test_refusals(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_isolation(make(), **options)


class OfLimitedCapacity(nn.Module):
    """A module that drops tokens beyond a capacity, as some mixtures of experts do."""

    def __init__(self, own: nn.Module, capacity: int) -> None:
        super().__init__()
        self.own, self.capacity = own, capacity

    def forward(self, x: Tensor) -> Tensor:
        scores = x.sum(-1, keepdim=True)
        least = scores.flatten().topk(min(self.capacity, scores.numel())).values[-1]
        return self.own(x) * (scores >= least)


def test_leaks_that_depend_on_sizes_need_documents_of_real_size() -> None:
    """A short first call of a patched model doesn't find the leak (docs/patching.md)."""
    model = llama()
    model.model.layers[0].mlp = OfLimitedCapacity(model.model.layers[0].mlp, 32)
    with tritonpack.patch(model):
        model(torch.arange(3, 13)[None], position_ids=torch.tensor([[*range(4), *range(6)]]))
        assert check_isolation(model, lengths=(7, 1, 3, 11)).moved_by_others == 0.0
        with pytest.raises(IsolationError, match=r"begins in model\.layers\.0\b"):
            check_isolation(model, lengths=(20, 15, 30))
