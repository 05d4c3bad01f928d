"""Each family trained on packed rows, against each document in a call of its own; setup, which weighs targets alike."""

import copy
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import Trainer, TrainingArguments
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import tritonpack
from tests.ecosystem.training import EXACT, arguments, distance, trained
from tests.packing.vision.examples import IMAGE, KINDS, VIDEO, Example, build, examples
from tests.patches.zoo import apart, tolerance
from tests.test_guides import DOCS
from tritonpack.packing.vision.families import FAMILIES

LIMIT = tolerance(torch.float64)
OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# Stock refuses layers that can't keep documents apart without a package; PaliGemma is apart since transformers 5.24.
NOT_LEAKING = ("qwen3_5", "qwen3_5_moe", "paligemma")


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
    """Losses and gradients of some steps, the vision tower's by themselves; rows with padding and without images."""
    if name == "llama4" and transformers_version.startswith("5.24.0"):
        pytest.skip("transformers 5.24.0 can't run its own Llama 4: output.image_outputs")
    packed, documents = build(name), examples(name)
    calls = [alone(document, KINDS[name].model_type or name) for document in documents]
    single = copy.deepcopy(packed.train())
    towers = [any(part in each for part in ("visual", "vision")) for each, _ in packed.named_parameters()]
    collate = tritonpack.VisionPackingCollator(packed, pad_to_multiple_of=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tritonpack.PackingWarning)  # the patch comes later
        row = tritonpack.VisionPackingCollator(packed)(documents)
    if name not in NOT_LEAKING:  # stock lets documents see each other
        assert apart(learn(single, calls)[1], learn(packed, [row])[1]) > 0.05
    with tritonpack.patch(packed):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (single, packed)]
        for batch in (row, collate(documents), row):
            (loss, gradients), (packed_loss, packed_gradients) = learn(single, calls), learn(packed, [batch])
            assert math.isfinite(loss)
            assert apart([loss], [packed_loss]) < LIMIT
            for part in (True, False):
                chosen = [i for i, each in enumerate(towers) if each is part]
                own = [gradients[i] for i in chosen]
                assert any(one is not None and bool(one.any()) for one in own)
                assert apart(own, [packed_gradients[i] for i in chosen]) < LIMIT
            for optimizer in optimizers:
                optimizer.step()
            assert apart(list(single.parameters()), list(packed.parameters())) < LIMIT
            packed.load_state_dict(single.state_dict())  # so the next step doesn't magnify the rounding of this one
        texts = [number for number, one in enumerate(documents) if not any("pixel" in column for column in one)] * 2
        loss, gradients = learn(packed, [collate([documents[number] for number in texts])])
        assert apart([learn(single, [calls[number] for number in texts])[0]], [loss]) < LIMIT
        assert not any(
            inside and one is not None for inside, one in zip(towers, gradients, strict=True)
        )  # docs/vision.md


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


# transformers' classes with accepts_loss_kwargs = False
UNWEIGHTED = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "gemma4")


def trainer(folder: Path, name: str, rows: int, accepts: bool = True) -> Trainer:
    pytest.importorskip("accelerate")
    given, model = arguments(folder, max_steps=1, gradient_accumulation_steps=rows, max_grad_norm=0.0), build(name)
    assert not model.accepts_loss_kwargs, "transformers means Trainer to take the mean of the rows' means"
    model.accepts_loss_kwargs = accepts
    return Trainer(model, TrainingArguments(**given), train_dataset=examples(name))


@pytest.mark.slow
def test_page_names_the_classes_that_trainer_averages() -> None:
    models = {name: type(build(name)) for name in FAMILIES.keys() & KINDS.keys()}
    held_back = {name for name, model in models.items() if not getattr(model, "accepts_loss_kwargs", True)}
    page = (DOCS / "vision.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`accepts_loss_kwargs = False` \(([^)]*)\)", page.replace("\n", " "))
    assert set(re.findall(r"`(\w+)`", line)) == held_back == set(UNWEIGHTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNWEIGHTED)
def test_accumulated_rows_train_as_one(name: str, tmp_path: Path) -> None:
    whole, parts = trainer(tmp_path, name, 1), trainer(tmp_path, name, 100)
    longest = max(len(example["input_ids"]) for example in examples(name))
    for one, tokens in ((whole, 4096), (parts, longest)):
        tritonpack.setup(one, tokens, collate_fn=tritonpack.VisionPackingCollator(one.model))
    assert len(parts.get_train_dataloader()) > 1 == len(whole.get_train_dataloader())
    assert distance(trained(parts), trained(whole)) <= EXACT


def test_accumulation_without_counts_of_targets_is_refused(tmp_path: Path) -> None:
    own = trainer(tmp_path, "qwen2_5_vl", 4, accepts=False)
    with pytest.raises(ValueError, match=r"set model\.accepts_loss_kwargs = True before the trainer is made"):
        tritonpack.setup(own, 256, collate_fn=tritonpack.VisionPackingCollator(own.model))
