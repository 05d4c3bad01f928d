"""docs/vision.md: its Python runs with a real processor, and its table of families is that of the code."""

import re
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import tritonpack
from tests.packing.vision.examples import BEGIN, END, IMAGE, VIDEO, build
from tests.patches.zoo import apart, tolerance
from tests.test_guides import DOCS, blocks
from tritonpack.packing.vision.families import FAMILIES

WORDS = "<pad> <unk> <s> </s> user assistant the a cat dog sees runs what is in this picture ? .".split()  # noqa: SIM905
SPECIAL = {
    "image_token": ("<|image_pad|>", IMAGE), "video_token": ("<|video_pad|>", VIDEO),
    "vision_bos_token": ("<|vision_start|>", BEGIN), "vision_eos_token": ("<|vision_end|>", END),
}  # fmt: skip


def qwen2_vl() -> Any:
    """A processor that is made without a download: a default image processor, and a tokenizer of words."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    numbers = {word: number for number, word in enumerate(WORDS)} | dict(SPECIAL.values())
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens={name: text for name, (text, _) in SPECIAL.items()},
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    with mock.patch.object(transformers.Qwen2VLProcessor, "check_argument_for_proper_class"):  # videos need torchvision
        return transformers.Qwen2VLProcessor(images, tokenizer, video_processor=None)


def picture(height: int, width: int) -> Any:
    values = np.random.default_rng(height * width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return pytest.importorskip("PIL.Image").fromarray(values)


@pytest.mark.slow
def test_blocks() -> None:
    """From a processor, whose outputs are calls of the model, to a training step, and to rows by tokens."""
    model, single, image = build("qwen2_vl"), build("qwen2_vl").eval(), "<|vision_start|> <|image_pad|> <|vision_end|>"
    given: dict[str, Any] = {"conversations": [
        ("user what is this ? assistant a dog .", []),
        (f"user {image} what is in this picture ? assistant the cat sees a dog .", [picture(12, 31)]),
        (f"user {image} a {image} cat ? assistant runs .", [picture(17, 9), picture(24, 24)]),
    ]}  # fmt: skip
    with (
        mock.patch.object(transformers.AutoProcessor, "from_pretrained", return_value=qwen2_vl()),
        mock.patch.object(transformers.AutoModelForImageTextToText, "from_pretrained", return_value=model),
    ):
        for block in blocks("vision"):
            exec(compile(block, "vision.md", "exec"), given)
    assert not any(torch.equal(a, b) for a, b in zip(single.parameters(), model.parameters(), strict=True))
    assert sum(batch["input_ids"].shape[1] for batch in given["loader"]) == given["loader"].documents.units.tokens.sum()
    row, outputs = given["batch"], given["examples"]
    tables = [{"pixel_values": None} | {column: values.tolist() for column, values in one.items()} for one in outputs]
    arrays = [{column: values.numpy() for column, values in one.items()} for one in outputs]
    for same in map(given["collate"], (tables, arrays)):
        assert same.keys() == row.keys()
        assert all(torch.equal(torch.as_tensor(same[column]), torch.as_tensor(row[column])) for column in row)
    with torch.no_grad():
        expected = torch.cat([single(**one).logits[0] for one in outputs])
        with tritonpack.patch(single):
            assert apart([expected], [single(**row).logits[0]]) < tolerance(torch.float64)


def test_table_of_families_is_that_of_the_code() -> None:
    page = (DOCS / "vision.md").read_text(encoding="utf-8")
    cells = [re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if re.match(r"\| .* \| `", line)]
    listed = {}
    for _, types, images, videos, packed in cells:
        for model_type in re.findall(r"`(\w+)`", types):
            listed[model_type] = family = FAMILIES[model_type]
            assert ("positions of three axes" in images) == family.own_positions, model_type
            assert ("padded" in images) == bool(family.columns["pixel_values"].padded), model_type
            assert videos.startswith("yes") == ("videos" in family.parts), model_type
            assert ("images beside videos are refused" in packed) == (not family.both_kinds), model_type
    assert set(listed) == set(FAMILIES)
