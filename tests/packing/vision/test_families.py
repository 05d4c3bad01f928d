"""Each family trained on packed rows with images and videos, against each document in a call of its own."""

import copy
import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import tritonpack
from tests.packing.vision.examples import IMAGE, KINDS, VIDEO, Example, build, examples
from tests.patches.zoo import apart, tolerance
from tritonpack.packing.vision.families import FAMILIES

LIMIT = tolerance(torch.float64)
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
REFUSED_BY_STOCK = ("qwen3_5", "qwen3_5_moe")  # layers that can't keep documents apart without a package
APART_IN_STOCK = ("paligemma",)  # since transformers 5.24


def alone(example: Example, model_type: str) -> dict[str, Tensor]:
    """The call of one document by itself, made without the collator. Labels leave out images and prompts."""
    columns = FAMILIES[model_type].columns
    call = {
        name: values[None] if name in OF_TOKENS or columns[name].of_rows else values for name, values in example.items()
    }
    labels = call["input_ids"].clone()
    labels[(labels == IMAGE) | (labels == VIDEO)] = -100
    if model_type == "paligemma":
        labels[call["token_type_ids"] == 0] = -100
    return call | {"labels": labels}


def made(name: str) -> tuple[PreTrainedModel, list[Example], list[dict[str, Tensor]]]:
    """The family's model, its documents, and a call for each; skips Llama 4 in 5.24.0, where every call fails."""
    model, documents = build(name), examples(name)
    calls = [alone(document, KINDS[name].model_type or name) for document in documents]
    if name == "llama4":
        try:
            with torch.no_grad():
                model(**calls[0])
        except AttributeError as error:
            if "image_outputs" not in str(error):
                raise
            pytest.skip(f"transformers {transformers_version} can't run its own {type(model).__name__}: {error}")
    return model, documents, calls


def in_tower(model: Any) -> list[bool]:
    return [any(part in name for part in ("visual", "vision")) for name, _ in model.named_parameters()]


def learn(model: Any, calls: list[dict[str, Any]]) -> tuple[Tensor, list[Tensor | None]]:
    """The loss over all documents, and its gradients, by one call for each."""
    model.zero_grad()
    counts = [int((call["labels"][:, 1:] != -100).sum()) for call in calls]
    losses = []
    for call, count in zip(calls, counts, strict=True):
        loss = model(**call).loss * (count / sum(counts))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.fast("qwen2_vl")
@pytest.mark.parametrize("name", KINDS)
def test_training_equals_each_document_alone(name: str) -> None:
    """Losses and all gradients of some steps, the vision tower's by themselves."""
    packed, documents, calls = made(name)
    single, inside = copy.deepcopy(packed.train()), in_tower(packed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tritonpack.PackingWarning)  # the patch comes later
        row = tritonpack.VisionPackingCollator(packed)(documents)
    if name not in (*REFUSED_BY_STOCK, *APART_IN_STOCK):  # stock lets documents see each other
        assert apart(learn(single, calls)[1], learn(packed, [row])[1]) > 0.05
    with tritonpack.patch(packed):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (single, packed)]
        for _ in range(3):
            (loss, gradients), (packed_loss, packed_gradients) = learn(single, calls), learn(packed, [row])
            assert math.isfinite(loss)
            assert apart([loss], [packed_loss]) < LIMIT
            for part in (True, False):
                chosen = [i for i, each in enumerate(inside) if each is part]
                own = [gradients[i] for i in chosen]
                assert any(one is not None and bool(one.any()) for one in own)
                assert apart(own, [packed_gradients[i] for i in chosen]) < LIMIT
            for optimizer in optimizers:
                optimizer.step()
            assert apart(list(single.parameters()), list(packed.parameters())) < LIMIT
            packed.load_state_dict(single.state_dict())  # so the next step doesn't magnify the rounding of this one


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rows_with_padding_and_rows_without_images(name: str) -> None:
    model, documents, calls = made(name)
    collate = tritonpack.VisionPackingCollator(model, pad_to_multiple_of=32)
    texts = [number for number, one in enumerate(documents) if not any("pixel" in column for column in one)]
    with tritonpack.patch(model), torch.no_grad():
        for chosen in (range(len(documents))[::-1], texts * 2):
            row = collate([documents[number] for number in chosen])
            assert row["input_ids"].shape[1] % 32 == 0
            assert any("pixel" in column for column in row) == (chosen != texts * 2)
            expected = torch.cat([model(**calls[number]).logits[0] for number in chosen])
            assert apart([expected], [model(**row).logits[0, : len(expected)]]) < LIMIT
        with torch.enable_grad():
            learn(model, [collate([documents[number] for number in texts])])
        towers = [p for p, inside in zip(model.parameters(), in_tower(model), strict=True) if inside]
        assert all(p.grad is None for p in towers)  # docs/vision.md warns of that


def test_every_family_is_tried_and_every_other_type_refused_by_name() -> None:
    """All model types that transformers calls image-text: those of the table, and others."""
    assert {kind.model_type or name for name, kind in KINDS.items()} == set(FAMILIES)
    types = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert set(FAMILIES) <= types
    for model_type in types - set(FAMILIES):
        model = torch.nn.Module()
        model.config = SimpleNamespace(model_type=model_type)
        with pytest.raises(ValueError, match=f"doesn't know model type '{model_type}'"):
            tritonpack.VisionPackingCollator(model)
