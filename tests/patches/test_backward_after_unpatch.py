"""A backward pass after the model was unpatched: exact, or refused where it recomputes layers."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.test_patching import documents, positions
from tests.small_copies.comparison import apart, tolerance


def loss_of(model: PreTrainedModel) -> Tensor:
    ids = torch.cat(documents(), 1)
    return model(ids, position_ids=positions(), labels=ids.masked_fill(positions() == 0, -100), use_cache=False).loss


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "tritonpack"), ("llama", "sdpa"), ("llama4_text", "tritonpack"), ("mamba2", "tritonpack")],
)
def test_recomputation_is_refused(family: str, attention: str, reentrant: bool) -> None:
    model = zoo.tiny_model(family, dtype=torch.float64).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with tritonpack.patch(model, attention=attention):
        want = gradients(model, loss_of(model))
        loss = loss_of(model)
    with pytest.raises(ValueError, match=r"Call backward\(\) before unpatch\(\)"):
        loss.backward()
    with tritonpack.patch(model, attention=attention):
        assert apart(want, gradients(model, loss_of(model))) < tolerance(torch.float64)


def test_a_copy_isnt_unpatched_with_its_original() -> None:
    model = zoo.tiny_model("mamba2", dtype=torch.float64).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with tritonpack.patch(model):
        want, other = gradients(model, loss_of(model)), copy.deepcopy(model)
    assert apart(want, gradients(other, loss_of(other))) < tolerance(torch.float64)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_without_recomputation(family: str) -> None:
    model = zoo.tiny_model(family, dtype=torch.float64)
    with tritonpack.patch(model):
        want, loss = gradients(model, loss_of(model)), loss_of(model)
    assert apart(want, gradients(model, loss)) < tolerance(torch.float64)
