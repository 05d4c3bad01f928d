"""docs/vision.md: its blocks of Python run, and its table of families is that of the code."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import transformers

from tests.packing.vision.examples import build
from tests.packing.vision.processors import PROCESSORS, picture
from tests.test_guides import DOCS, blocks
from tritonpack.packing.vision.families import FAMILIES

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CONVERSATIONS = [
    ("user what is this ? assistant a dog .", []),
    (f"user {IMAGE} what is in this picture ? assistant the cat sees a dog .", [picture(12, 31)]),
    (f"user {IMAGE} a {IMAGE} cat ? assistant runs .", [picture(17, 9), picture(24, 24)]),
]


@pytest.fixture
def given() -> dict[str, Any]:
    """What the page assumes: conversations, and a processor and a model that `from_pretrained` returns."""
    return {"conversations": CONVERSATIONS, "processor": PROCESSORS["qwen2_vl"][0](), "model": build("qwen2_vl")}


def run(number: int, given: dict[str, Any]) -> dict[str, Any]:
    with (
        mock.patch.object(transformers.AutoProcessor, "from_pretrained", return_value=given["processor"]),
        mock.patch.object(transformers.AutoModelForImageTextToText, "from_pretrained", return_value=given["model"]),
    ):
        exec(compile(blocks("vision")[number], "vision.md", "exec"), given)
    return given


@pytest.mark.slow
def test_from_processor_to_training_step(given: dict[str, Any]) -> None:
    before = [parameter.detach().clone() for parameter in given["model"].parameters()]
    given = run(0, given)
    assert not any(torch.equal(a, b) for a, b in zip(before, given["model"].parameters(), strict=True))
    assert given["batch"]["position_ids"].shape[:2] == (4, 1)
    assert given["batch"]["cu_seq_lens_q"].numel() == 4


@pytest.mark.slow
def test_rows_by_tokens_and_patches(given: dict[str, Any]) -> None:
    given = run(1, run(0, given))
    assert sum(batch["input_ids"].shape[1] for batch in given["loader"]) == given["loader"].documents.units.tokens.sum()


def test_table_of_families_is_that_of_the_code() -> None:
    page = (DOCS / "vision.md").read_text(encoding="utf-8")
    cells = [re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if re.match(r"\| .* \| `", line)]
    listed = {}
    for _, types, images, videos, packed in cells:
        assert packed.startswith("exact")
        for model_type in re.findall(r"`(\w+)`", types):
            listed[model_type] = family = FAMILIES[model_type]
            pixels = family.columns["pixel_values"]
            assert ("positions of three axes" in images) == family.own_positions, model_type
            assert ("padded" in images) == bool(pixels.padded), model_type
            assert ("patches" in images) == (pixels.axes[-1] == "values"), model_type
            assert videos.startswith("yes") == ("videos" in family.parts), model_type
            assert ("second_per_grid_ts" in videos) == ("second_per_grid_ts" in family.columns), model_type
            assert ("images beside videos are refused" in packed) == (not family.both_kinds), model_type
    assert set(listed) == set(FAMILIES)
