"""The first packed call shows whether code of others that gets no mask keeps documents apart."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonpack
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.pairs import pairs_subject, targets, tiny_pair_model

LENGTHS = (7, 1, 3, 11)


def packed() -> dict[str, Tensor]:
    return {
        "input_ids": torch.cat(zoo.documents(LENGTHS), 1),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    }


class Convolution(nn.Module):
    """A wrapper of a module that adds each token's neighbour to it."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(x)
        return y + 0.1 * y.roll(1, dims=1)


class Scaled(nn.Module):
    """A module that computes each token by itself, with dropout."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.drop = own, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(2 * self.own(x))


def sums(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x).cumsum(1)


def wrap_mlp(model: Any) -> None:
    model.model.layers[1].mlp = Convolution(model.model.layers[1].mlp)


def replace_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = sums.__get__(model.model.layers[0].mlp)


def wrap_norm(model: Any) -> None:
    model.model.norm = nn.Sequential(model.model.norm, Convolution(nn.Identity()))


def wrap_head(model: Any) -> None:
    model.lm_head = Convolution(model.lm_head)


WRONG = {
    "model.layers.1.mlp": wrap_mlp, "model.layers.0.mlp": replace_forward, "model.norm.1": wrap_norm,
    "lm_head": wrap_head,
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_mixes_documents_is_named(name: str, when: str) -> None:
    model = tiny_model("llama")
    if when == "before":
        WRONG[name](model)
    tritonpack.patch(model)
    if when == "after":
        WRONG[name](model)
    model(input_ids=packed()["input_ids"])  # one document shows nothing
    for _ in range(2):
        with pytest.raises(tritonpack.UnsupportedModelError, match=rf"{name} \(.*lets tokens of one document change"):
            model(**packed())


@pytest.mark.parametrize("padded", [False, True])
def test_modules_added_before_the_first_packed_call_are_tried(padded: bool) -> None:
    """Calls without packed rows, such as an evaluation, don't count as the first."""
    model = tiny_model("llama")
    tritonpack.patch(model)
    ids = torch.cat(zoo.documents((8, 8)))
    model(ids, attention_mask=torch.tensor([[1] * 8, [0] * 3 + [1] * 5]) if padded else None)
    wrap_mlp(model)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"layers\.1\.mlp"):
        model(**packed())


@pytest.mark.parametrize("where", ["model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1", "lm_head"])
def test_both_sides_of_an_encoder_decoder_model_are_tried(where: str) -> None:
    model: Any = tiny_pair_model("bart")
    own = model.get_submodule(where)
    model.set_submodule(where, Convolution(own))
    batch = pairs_subject(model).forms["segments_alone"](targets())
    call = {**batch.arguments, "decoder_input_ids": batch.ids}
    with tritonpack.patch(model):
        for _ in range(2):
            with pytest.raises(tritonpack.UnsupportedModelError, match=r"(fc1|lm_head) \(Convolution\)"):
                model(**call)
        model.set_submodule(where, own)
        model(**call)


def test_modules_that_run_token_by_token_are_accepted() -> None:
    model = tiny_model("llama").train()
    model.model.layers[1].mlp = Scaled(model.model.layers[1].mlp)
    with tritonpack.patch(model):
        torch.manual_seed(0)
        first = model(**packed()).logits
        torch.manual_seed(0)
        second = model(**packed()).logits
    assert torch.equal(first, second)  # the random state is as it was
    assert not model.model.layers[1].mlp._forward_hooks


class Counted(Scaled):
    """A module that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_each_side_of_an_encoder_decoder_model_is_watched_once(side: str) -> None:
    """A module runs once for the call and three times for the watch, and once in later calls."""
    model: Any = tiny_pair_model("bart")
    layer = getattr(model.model, side).layers[0]
    layer.fc1 = Counted(layer.fc1)
    batch = pairs_subject(model).forms["segments_alone"](targets())
    call = {**batch.arguments, "decoder_input_ids": batch.ids}
    assert batch.ids.shape != call["input_ids"].shape
    counts = []
    with tritonpack.patch(model):
        for _ in range(2):
            model(**call)
            counts.append(layer.fc1.calls)
    assert counts[0] - (counts[1] - counts[0]) == 3
