"""Configurations and modules that a patched model shares with other models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForTokenClassification, LlamaModel, PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.test_every_model import state
from tests.patches.test_patching import EXACT, documents, offsets, positions
from tritonpack.patches.applied_patch import applied_to


def build(kind: type[PreTrainedModel] = LlamaForCausalLM, config: Any = None) -> PreTrainedModel:
    return kind(config or zoo.tiny_config("llama")).double().eval()


def row() -> Tensor:
    return torch.cat(documents(), 1)


@pytest.mark.parametrize("family", ["llama", "bloom"])  # attention in transformers' interface, and outside of it
def test_a_shared_configuration_is_refused_with_a_remedy(family: str) -> None:
    policy = zoo.tiny_model(family, dtype=torch.float64)
    stock = copy.deepcopy(policy.config)
    reference, apart = type(policy)(policy.config).double().eval(), type(policy)(stock).double().eval()
    apart.load_state_dict(reference.state_dict())
    expected = reference(row()).logits
    with tritonpack.patch(policy):
        message = r"configuration.* shared with a patched model.*copy\.deepcopy\(config\).*patch this model, too"
        with pytest.raises(ValueError, match=message):
            reference(row())
        assert torch.equal(apart(row()).logits, expected)
        with tritonpack.patch(reference):
            assert float((reference(row()).logits - expected).abs().max().detach()) < EXACT
    assert torch.equal(reference(row()).logits, expected)


ON_A_PATCHED_PART = r"LlamaModel.*belongs to LlamaForCausalLM, which is patched.*unpatch.*build.*patch the whole"


def head_around(model: PreTrainedModel, config: Any) -> PreTrainedModel:
    head = build(LlamaForTokenClassification, config)
    head.model = model.model
    return head


@pytest.mark.parametrize("by_name", [True, False])
def test_a_head_around_a_patched_model_is_refused(by_name: bool) -> None:
    """A head that is built from a patched model's configuration is patched by name. Then it gets the patched model."""
    model = build()
    own_config, before = copy.deepcopy(model.config), state(model)
    expected = torch.cat([model(d).logits for d in documents()], 1)
    handle = tritonpack.patch(model)
    head = head_around(model, model.config if by_name else own_config)
    assert len(applied_to(head)) == 1 + by_name
    if by_name:
        for arguments in ({}, {"position_ids": positions()}):
            with pytest.raises(tritonpack.UnsupportedModelError, match=r"LlamaForTokenClassification.*replaced since"):
                head(row(), **arguments)
    during = state(model)
    with pytest.raises(tritonpack.UnsupportedModelError, match=ON_A_PATCHED_PART):
        tritonpack.patch(head)
    with pytest.raises(ValueError, match=ON_A_PATCHED_PART):
        tritonpack.unpatch(head)
    assert state(model) == during
    got = model(row(), position_ids=positions()).logits
    assert float((got - expected).abs().max().detach()) < EXACT
    handle.unpatch()
    assert state(model) == before
    if by_name:
        tritonpack.unpatch(head)
    assert not applied_to(head)
    with tritonpack.patch(head):  # the remedy
        alone = torch.cat([head(d).logits for d in documents()], 1)
        got = head(row(), position_ids=positions()).logits
    assert float((got - alone).abs().max().detach()) < EXACT
    assert state(model) == before


def test_a_replaced_part_is_refused() -> None:
    """A call is refused whether the old part still exists or not, and whether the new part is patched or not."""
    model = build()
    old, new = model.model, build(LlamaModel)
    calls: list[dict[str, Any]] = [{"position_ids": positions()}, {"cu_seq_lens_q": offsets()}, {}]
    with tritonpack.patch(model):
        model(row(), position_ids=positions())
        model.model = new
        for arguments in calls:
            with pytest.raises(
                tritonpack.UnsupportedModelError, match=r"LlamaModel.*replaced since.*tritonpack\.patch"
            ):
                model(row(), **arguments)
        model.model = old
        model(row(), position_ids=positions())
        model.model = new
    assert not applied_to(model)
    assert old.config._attn_implementation == "sdpa"
    assert not applied_to(old)


def test_unpatching_after_a_part_is_gone() -> None:
    model = build()
    before = model.config._attn_implementation
    tritonpack.patch(model)
    model.model = build(LlamaModel)
    with pytest.raises(tritonpack.UnsupportedModelError, match="replaced since"):
        model(row())
    tritonpack.unpatch(model)
    assert (model.config._attn_implementation, applied_to(model)) == (before, [])
    with tritonpack.patch(model):
        assert model(row(), position_ids=positions()).logits.isfinite().all()


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapped_part_is_accepted() -> None:
    """FSDP and others wrap parts of a model."""
    model = build()
    expected = torch.cat([model(d).logits for d in documents()], 1)
    with tritonpack.patch(model):
        model.model = Wrapper(model.model)
        got = model(row(), position_ids=positions()).logits
        model.model = model.model.inner
    assert float((got - expected).abs().max().detach()) < EXACT


@pytest.mark.parametrize("unpatched_first", [False, True])
def test_unpatching_a_part_that_outlives_its_model(unpatched_first: bool) -> None:
    model = build()
    head = head_around(model, copy.deepcopy(model.config))
    before, expected = state(head), torch.cat([head(d).logits for d in documents()], 1)
    tritonpack.patch(model)
    del model
    if unpatched_first:
        tritonpack.unpatch(head)
        assert state(head) == before
    with tritonpack.patch(head):
        got = head(row(), position_ids=positions()).logits
    assert float((got - expected).abs().max().detach()) < EXACT
    if not unpatched_first:
        tritonpack.unpatch(head)
    assert state(head) == before
