"""Real processors of transformers, made without a download: default image processors and a tokenizer of a few words."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.packing.vision.examples import BEGIN, END, IMAGE, VIDEO

WORDS = "<pad> <unk> <s> </s> user assistant the a cat dog sees runs what is in this picture ? .".split()  # noqa: SIM905


def tokenizer(**special: Any) -> Any:
    """A tokenizer of words between spaces. `special` names its tokens: their text, and their number."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    numbers = {word: number for number, word in enumerate(WORDS)} | dict(special.values())
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens={name: text for name, (text, _) in special.items()},
    )  # fmt: skip


def picture(height: int, width: int) -> Any:
    values = np.random.default_rng(height * width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return pytest.importorskip("PIL.Image").fromarray(values)


def qwen2_vl() -> Any:
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    words = tokenizer(
        image_token=("<|image_pad|>", IMAGE), video_token=("<|video_pad|>", VIDEO),
        vision_bos_token=("<|vision_start|>", BEGIN), vision_eos_token=("<|vision_end|>", END),
    )  # fmt: skip
    with mock.patch.object(Qwen2VLProcessor, "check_argument_for_proper_class"):  # videos need torchvision
        return Qwen2VLProcessor(images, words, video_processor=None)


def gemma3() -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    words = tokenizer(
        image_token=("<image_soft_token>", IMAGE), boi_token=("<start_of_image>", BEGIN),
        eoi_token=("<end_of_image>", END),
    )  # fmt: skip
    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 8, "width": 8}), words, image_seq_length=4)


# By the row of `examples.KINDS`: what makes the processor, and what stands for an image in its text.
PROCESSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen2_vl": (qwen2_vl, "<|vision_start|> <|image_pad|> <|vision_end|>"),
    "gemma3": (gemma3, "<start_of_image>"),
}


def conversations(image: str) -> list[tuple[str, list[Any]]]:
    """Texts and their images: no image, one, two, and one."""
    return [
        ("user what is this ? assistant a dog .", []),
        (f"user {image} what is in this picture ? assistant the cat sees a dog .", [picture(12, 31)]),
        (f"user {image} a {image} cat ? assistant runs .", [picture(17, 9), picture(24, 24)]),
        (f"{image} the dog runs", [picture(9, 16)]),
    ]


def processed(name: str, **options: Any) -> list[Any]:
    """The conversations as a processor returns them, one by one."""
    make, image = PROCESSORS[name]
    processor = make()
    return [processor(text=text, images=images or None, **options) for text, images in conversations(image)]
