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
        return values.expand(len(batch.ids if per == "row" else batch.spans), *sizes)

    return make


def _image_shape(config: Any) -> tuple[int, ...]:
    part = next((x for x in (getattr(config, n, None) for n in ("vision_config", "encoder")) if x), config)
    size = getattr(part, "image_size", None) or getattr(config, "image_size", None) or 8
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    return getattr(part, "num_channels", 3) or 3, *sides


def _whole(value: int, *shape: int) -> Make:
    """Make [documents, *shape] of one integer."""
    return lambda config, batch: torch.full((len(batch.spans), *shape), value)


def _tokens(*values: float) -> Make:
    """Make [b, t, n] with the same values for every token."""
    return lambda config, batch: torch.tensor(values).expand(*batch.ids.shape, len(values))


def _prompts(config: Any, batch: Batch) -> Tensor:
    """[b, t], 0 for the first half of a document, its prompt, and 1 for its answer and for padding."""
    types = torch.ones_like(batch.ids)
    for row, span in batch.spans:
        length = batch.ids[row, span].numel()
        types[row, span][: (length + 1) // 2] = 0
    return types


def _ends(config: Any, batch: Batch) -> Tensor:
    if len(batch.ids) > 1:
        raise ValueError("it takes one row")
    return torch.tensor([[span.stop for _, span in batch.spans]])


# {argument: the function that makes it}, by model types or classes.
TABLE: list[tuple[str, dict[str, Make]]] = [
    ("blip sam3 owlv2 owlvit pp_formulanet", {"pixel_values": _same(_image_shape)}),
    # They compare each text with each image, so they get as many images as texts.
    ("align chinese_clip clip clipseg metaclip_2 siglip groupvit vision-text-dual-encoder blip-2 Owlv2Model "
     "OwlViTModel BlipModel", {"pixel_values": _same(_image_shape, per="document")}),
    ("paligemma ColPaliForRetrieval", {"token_type_ids": _prompts}),
    ("grounding-dino mm-grounding-dino", {"pixel_values": _same(3, 64, 64)}),
    ("idefics", {"pixel_values": _same(lambda config: (1, *_image_shape(config))), "image_attention_mask": _tokens(1)}),
    ("siglip2", {"pixel_values": _same(4, 48, per="document"), "pixel_attention_mask": _whole(1, 4),
                 "spatial_shapes": _whole(2, 2)}),
    ("udop bros", {"bbox": _tokens(0.1, 0.2, 0.5, 0.6)}),
    ("pix2struct", {"flattened_patches": lambda config, batch: torch.ones(batch.ids.shape[0], 4, 14)}),
    ("whisper", {"input_features": _same(lambda config: (config.num_mel_bins, 2 * config.max_source_positions))}),
    ("moonshine_streaming", {"input_values": _same(1600)}),
    ("speech-encoder-decoder", {"input_values": _same(200)}),
    ("canary cohere_asr", {"input_features": _same(lambda config: (24, config.encoder_config.num_mel_bins))}),
    ("jev", {"marks": _ends, "num_options": lambda config, batch: torch.ones(1, len(batch.spans), dtype=torch.long),
             "question_type_ids": lambda config, batch: torch.zeros(1, len(batch.spans), dtype=torch.long)}),
]  # fmt: skip
NEEDS = {kind: arguments for kinds, arguments in TABLE for kind in kinds.split()}

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
