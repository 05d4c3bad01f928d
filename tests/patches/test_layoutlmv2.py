"""LayoutLMv2: text and the patches of an image, whose features come from a replacement of detectron2."""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.layoutlmv2 import modeling_layoutlmv2

import tritonpack
from tests.patches.sweep import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import assumed
from tests.patches.sweep.running import judge_case
from tritonpack.patches.trial.undisturbed import quiet

CASES = {case.name: case for case in cases() if case.model_type == "layoutlmv2"}
PATCHES = 4  # of an image, after the tokens of its document
LENGTHS = (7, 3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(every=2)
@pytest.mark.heavy
def test_is_exact_with_each_document_in_a_row_of_its_own(name: str) -> None:
    losses = ["loss_position_ids"] if "For" in name else []
    chosen = ["position_ids", "segments_alone", "two_rows_padded", "hidden_states", *losses, "bfloat16"]
    with quiet():
        rows = judge_case(CASES[name], ("patch", "name"), chosen)
    assert [(row.verdict, row.layout, row.reason) for row in rows] == [("exact", "lengths", "")] * 2
    assert all({*row.forms} == {*chosen} for row in rows)
    assert all("its visual backbone was a stand-in for detectron2's" in row.note for row in rows)


def inputs(seed: int) -> dict[str, Tensor]:
    """One packed row of two documents, with a box for each token and an image for each document."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (1, sum(LENGTHS))
    corners = torch.randint(0, 400, (*tokens, 2), generator=generator)
    sizes = torch.randint(1, 400, (*tokens, 2), generator=generator)
    return {
        "input_ids": torch.randint(6, 60, tokens, generator=generator),
        "bbox": torch.cat([corners, corners + sizes], dim=-1),
        "image": 255 * torch.rand(len(LENGTHS), 3, 64, 64, generator=generator),
    }


def alone(model: torch.nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The states of each document's tokens, and of its image, in a call of its own."""
    ids, boxes = batch["input_ids"].split(LENGTHS, dim=1), batch["bbox"].split(LENGTHS, dim=1)
    images = batch["image"].split(1)
    with torch.no_grad():
        return [
            model(input_ids=i, bbox=box, image=image).last_hidden_state[0]
            for i, box, image in zip(ids, boxes, images, strict=True)
        ]


def packed(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        return model(**batch, position_ids=places).last_hidden_state


def test_each_document_sees_its_own_image_and_boxes() -> None:
    model = build.build(CASES["LayoutLMv2Model"], dtype=torch.float32)
    batch = inputs(1)
    expected = alone(model, batch)
    swapped = alone(model, {**batch, "image": batch["image"].flip(0)})
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(expected, swapped, strict=True))  # the images matter
    with assumed("LayoutLMv2Model", "lengths"), tritonpack.patch(model):
        got = packed(model, batch)
    assert got.shape[:2] == (len(LENGTHS), max(LENGTHS) + PATCHES)
    for row, states in zip(got, expected, strict=True):
        torch.testing.assert_close(row[: len(states)], states, rtol=0, atol=1e-5)
        assert not row[len(states) :].any()


def test_an_image_list_of_rows_is_shared_by_the_documents_of_each_row() -> None:
    """Two rows of two documents, which run by length: each call has two documents of one row, and needs its image."""
    model = build.build(CASES["LayoutLMv2Model"], dtype=torch.float32)
    rows = [inputs(seed) for seed in (1, 2)]
    arguments = {name: torch.cat([row[name][:, :6] for row in rows]) for name in ("input_ids", "bbox")}
    arguments["attention_mask"] = torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 0, 0]])
    image = rows[0]["image"]
    with assumed("LayoutLMv2Model", "lengths"), tritonpack.patch(model), torch.no_grad():
        expected, got = (model(**arguments, image=x).last_hidden_state for x in (image, SimpleNamespace(tensor=image)))
    assert torch.equal(got, expected)


def test_images_that_belong_to_no_document_are_refused() -> None:
    model = build.build(CASES["LayoutLMv2Model"], dtype=torch.float32)
    batch = inputs(1)
    batch["image"] = torch.cat([batch["image"], batch["image"][:1]])
    with (
        assumed("LayoutLMv2Model", "lengths"), tritonpack.patch(model),
        pytest.raises(ValueError, match=r"image has shape .*Pass one for each document, in order, or one for each"),
    ):  # fmt: skip
        packed(model, batch)


@pytest.mark.skipif(transformers.utils.is_detectron2_available(), reason="detectron2 itself is installed")
def test_the_stand_in_is_there_only_while_a_model_is_built() -> None:
    before = set(vars(modeling_layoutlmv2))
    config = build.build(CASES["LayoutLMv2Model"]).config
    assert set(vars(modeling_layoutlmv2)) == before
    assert "detectron2" not in sys.modules
    with pytest.raises(ImportError, match="requires the detectron2 library"):
        transformers.LayoutLMv2Model(config)
