"""Outputs whose logits are laid back when they are read: read, copied and saved like any other output."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import BertConfig, BertLMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import tritonpack
from tests.patches.models import tiny_model
from tests.patches.test_heads_on_rows import completions, is_read_later
from tests.patches.test_unpad import padded

READ: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.logits,
    "getattr": lambda x: getattr(x, "logits"),  # noqa: B009
    "name": lambda x: x["logits"],
    "place": lambda x: x[1],
    "last place": lambda x: x[-1],
    "slice": lambda x: x[1:][0],
    "get": lambda x: x.get("logits"),
    "tuple": lambda x: x.to_tuple()[1],
    "dict": lambda x: {**x}["logits"],
    "values": lambda x: torch.stack([*x.values()][1:2])[0],
    "items": lambda x: dict(x.items())["logits"] * 1,
    "copy": lambda x: copy.copy(x).logits,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).logits,
    "tree": lambda x: _through_a_tree(x).logits,
}


def _through_a_tree(output: Any) -> Any:
    leaves, spec = tree_flatten(output)
    return tree_unflatten(leaves, spec)


def patched(**options: Any) -> Any:
    model = tiny_model("llama")
    tritonpack.patch(model, unpad=True, **options)
    return model


@pytest.mark.parametrize("way", READ)
def test_every_way_to_read_them(way: str) -> None:
    model = patched()
    with torch.no_grad():
        want = model(**completions()).logits
    output = model(**completions())
    assert isinstance(output, CausalLMOutputWithPast)
    assert is_read_later(output)
    assert list(output) == ["loss", "logits"]
    got = READ[way](output)
    assert type(got) is Tensor
    assert torch.equal(got, want)


def test_evaluation_has_plain_logits() -> None:
    model = patched()
    with torch.no_grad():
        assert not is_read_later(model(**completions()))
    assert not is_read_later(model.requires_grad_(requires_grad=False)(**completions()))


def test_what_reads_no_logits_lays_none_back() -> None:
    output = patched()(**completions())
    for read in (lambda x: x.loss, lambda x: x["loss"], lambda x: x[0], list, len, lambda x: [*x.items()]):
        read(output)
    assert "logits" in output
    assert is_read_later(_through_a_tree(output))  # as DDP flattens outputs
    assert vars(output)["logits"].data is None


def test_copies_and_files_hold_plain_logits() -> None:
    output = patched()(**completions())
    for twin in (copy.copy(output), pickle.loads(pickle.dumps(output))):
        assert type(twin) is CausalLMOutputWithPast
        assert not is_read_later(twin)
        assert torch.equal(twin.logits, output.logits)
    torch.save(output.logits, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), output.logits)


def test_logits_can_be_replaced() -> None:
    output = patched()(**completions())
    output.logits = torch.zeros(1)
    assert torch.equal(output["logits"], torch.zeros(1))
    output["logits"] = torch.ones(1)
    assert torch.equal(output.logits, torch.ones(1))


@pytest.mark.parametrize("option", ["unpad", "share_prefixes"])
def test_a_loss_of_ones_own_has_the_gradients_of_plain_logits(option: str) -> None:
    """BERT's head holds its bias under two names."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, is_decoder=True, **sizes)
    gradients = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = BertLMHeadModel(config).double().eval()
        if patched:
            tritonpack.patch(model, **{option: True})
        batch = padded()
        logits = model(**batch).logits
        live = batch["attention_mask"][..., None]
        (logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits) * live).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in gradients[0].items():
        assert want is None or torch.allclose(gradients[1][name], want, rtol=1e-9, atol=1e-12), name
