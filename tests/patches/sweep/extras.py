"""Arguments that a few classes take beside plain text: images, sounds, leading tokens.

Images and sounds are the same for every row, or for every document, so that documents differ by their text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonpack.patches.measuring import Batch

Make = Callable[[Any, Batch], Any]  # of a configuration and a batch
MARK = 5  # a token that marks an image or a question; no document draws it


def _same(*shape: Any, per: str = "row") -> Make:
    """Make the same random numbers for every row, or for every document; the shape may be a function of the config."""

    def make(config: Any, batch: Batch) -> Tensor:
        sizes = shape[0](config) if callable(shape[0]) else shape
        values = torch.randn(sizes, generator=torch.Generator().manual_seed(4))
        return values.expand(_count(batch, per), *sizes)

    return make


def _count(batch: Batch, per: str) -> int:
    return batch.ids.shape[0] if per == "row" else len(batch.spans)


def _image(*before: int, per: str = "row") -> Make:
    """Make images [rows, *before, channels, height, width]."""

    def shape(config: Any) -> tuple[int, ...]:
        part = next((x for x in (getattr(config, n, None) for n in ("vision_config", "encoder")) if x), config)
        size = getattr(part, "image_size", None) or getattr(config, "image_size", None) or 8
        sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
        return *before, getattr(part, "num_channels", 3) or 3, *sides

    return _same(shape, per=per)


def _whole(value: int, *shape: int, per: str = "row") -> Make:
    """Make [rows, *shape] of one integer."""
    return lambda config, batch: torch.full((_count(batch, per), *shape), value)


def _tokens(*values: float) -> Make:
    """Make [b, t, n] with the same values for every token."""
    return lambda config, batch: torch.tensor(values).expand(*batch.ids.shape, len(values))


IMAGE = {"pixel_values": _image()}
LARGE_IMAGE = {"pixel_values": _same(3, 64, 64)}
BOXES = {"bbox": _tokens(0.1, 0.2, 0.5, 0.6)}
FRAMES = {"input_features": _same(lambda config: (24, config.encoder_config.num_mel_bins))}
IMAGES = {"pixel_values": _image(per="document")}  # a document begins with the tokens of its image


def _prompts(config: Any, batch: Batch) -> Tensor:
    """[b, t], 0 for the first half of a document, its prompt, and 1 for its answer and for padding."""
    types = torch.ones_like(batch.ids)
    for row, span in batch.spans:
        length = batch.ids[row, span].numel()
        types[row, span][: (length + 1) // 2] = 0
    return types


def _in_one_row(batch: Batch, values: list[int]) -> list[int]:
    if len(batch.ids) > 1:
        raise ValueError("it takes one row")
    return values


TYPES = {"token_type_ids": _prompts}
WITH_IMAGE = "blip sam3 owlv2 owlvit pp_formulanet".split()  # noqa: SIM905

# Classes that compare each text with each image, so they get as many images as texts.
AGAINST_IMAGES = """
    align chinese_clip clip clipseg metaclip_2 siglip groupvit vision-text-dual-encoder Owlv2Model OwlViTModel BlipModel
    blip-2
    """.split()  # noqa: SIM905

# {argument: the function that makes it}, by model type or class.
NEEDS: dict[str, dict[str, Make]] = {
    **dict.fromkeys(WITH_IMAGE, IMAGE),
    **dict.fromkeys(AGAINST_IMAGES, IMAGES),
    **dict.fromkeys(("paligemma", "ColPaliForRetrieval"), TYPES),
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), LARGE_IMAGE),
    "idefics": {"pixel_values": _image(1), "image_attention_mask": _tokens(1)},
    "siglip2": {
        "pixel_values": _same(4, 48, per="document"),
        "pixel_attention_mask": _whole(1, 4, per="document"),
        "spatial_shapes": _whole(2, 2, per="document"),
    },
    **dict.fromkeys(("udop", "bros"), BOXES),
    "pix2struct": {"flattened_patches": lambda config, batch: torch.ones(batch.ids.shape[0], 4, 14)},
    "whisper": {"input_features": _same(lambda config: (config.num_mel_bins, 2 * config.max_source_positions))},
    "moonshine_streaming": {"input_values": _same(1600)},
    "speech-encoder-decoder": {"input_values": _same(200)},
    **dict.fromkeys(("canary", "cohere_asr"), FRAMES),
    "jev": {
        "marks": lambda config, batch: torch.tensor([_in_one_row(batch, [span.stop for _, span in batch.spans])]),
        "num_options": lambda config, batch: torch.ones(1, len(batch.spans), dtype=torch.long),
        "question_type_ids": lambda config, batch: torch.zeros(1, len(batch.spans), dtype=torch.long),
    },
}

# The tokens at the beginning of every document, by model type.
LEADS: dict[str, tuple[int, ...]] = {"blip-2": (MARK,) * 2, "esm": (MARK,)}


def extras(model: Any) -> tuple[dict[str, Make], tuple[int, ...]]:
    """Return what a class takes beside plain text: {argument: what makes it}, and the tokens of every beginning."""
    name, kind = type(model).__name__, model.config.model_type
    arguments = NEEDS.get(name, NEEDS.get(kind, {}))
    if name not in NEEDS:  # some classes take fewer arguments than others of their type
        names = inspect.signature(model.forward).parameters
        arguments = {name: make for name, make in arguments.items() if name in names}
    return arguments, LEADS.get(kind, ())
