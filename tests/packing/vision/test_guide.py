"""docs/vision.md: its blocks of Python run, and its table of families is that of the code. Columns of processors."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import transformers

import tritonpack
from tests.packing.vision.examples import build
from tests.packing.vision.processors import PROCESSORS, conversations, processed
from tests.patches.zoo import apart, tolerance
from tests.test_guides import DOCS, blocks
from tritonpack.packing.vision.families import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSORS)
def test_packed_equals_what_the_processor_returns(name: str) -> None:
    """With `return_tensors="pt"` an output is a call of the model. Lists, arrays and rows of a table are the same."""
    model, outputs = build(name).eval(), processed(name, return_tensors="pt")
    with torch.no_grad():
        expected = torch.cat([model(**one).logits[0] for one in outputs])
    collate = tritonpack.VisionPackingCollator(model)
    tables = [{"pixel_values": None} | {column: values.tolist() for column, values in one.items()} for one in outputs]
    with tritonpack.patch(model), torch.no_grad():
        row = collate(outputs)
        assert apart([expected], [model(**row).logits[0]]) < tolerance(torch.float64)
        for others in (processed(name), tables):
            same = collate(others)
            assert same.keys() == row.keys()
            for column, values in row.items():
                assert torch.equal(torch.as_tensor(same[column]), torch.as_tensor(values)), column


@pytest.mark.slow
def test_blocks() -> None:
    """From a processor to a training step, and to rows by tokens. `from_pretrained` returns what is here."""
    model, processor = build("qwen2_vl"), PROCESSORS["qwen2_vl"][0]()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    given: dict[str, Any] = {"conversations": conversations("<|vision_start|><|image_pad|><|vision_end|>")[:3]}
    with (
        mock.patch.object(transformers.AutoProcessor, "from_pretrained", return_value=processor),
        mock.patch.object(transformers.AutoModelForImageTextToText, "from_pretrained", return_value=model),
    ):
        for block in blocks("vision"):
            exec(compile(block, "vision.md", "exec"), given)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert given["batch"]["position_ids"].shape[:2] == (4, 1)
    assert given["batch"]["cu_seq_lens_q"].numel() == 4
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
