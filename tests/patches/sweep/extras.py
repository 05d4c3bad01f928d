"""Arguments that a few classes take beside plain text: images, sounds, leading tokens, columns of tokens.

Images and sounds are the same for every row, or for every document, so that documents differ by their text alone.
"""

from __future__ import annotations

import dataclasses
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
IMAGES = {"pixel_values": _image(per="document")}  # a document begins with the tokens of its image
QUESTION = {"qformer_input_ids": _whole(7, 3, per="document")}
FRAMES = {"input_features": _same(lambda config: (24, config.encoder_config.num_mel_bins))}
BOX = _tokens(0.1, 0.2, 0.5, 0.6)


def _boxes(config: Any, batch: Batch) -> Tensor:
    """[b, t, 4] int64, each token's place on a page of 1000 x 1000: left, top, right, bottom."""
    left, top = batch.ids * 37 % 500, batch.ids * 53 % 500
    return torch.stack([left, top, left + 1 + batch.ids % 400, top + 1 + batch.ids % 300], dim=-1)


def _prompts(config: Any, batch: Batch) -> Tensor:
    """[b, t], 0 for the first half of a document, its prompt, and 1 for its answer and for padding."""
    types = torch.ones_like(batch.ids)
    for row, span in batch.spans:
        length = batch.ids[row, span].numel()
        types[row, span][: (length + 1) // 2] = 0
    return types


TYPES = {"token_type_ids": _prompts}
WITH_IMAGE = "blip vision-encoder-decoder vilt sam3 sam3_lite_text bridgetower owlv2 owlvit".split()  # noqa: SIM905

# Classes that compare each text with each image, so they get as many images as texts.
AGAINST_IMAGES = """
    align altclip chinese_clip clip clipseg metaclip_2 siglip aimv2 groupvit vision-text-dual-encoder
    """.split()  # noqa: SIM905

# {argument: the function that makes it}, by model type or class.
NEEDS: dict[str, dict[str, Make]] = {
    **dict.fromkeys(WITH_IMAGE, IMAGE),
    **dict.fromkeys(AGAINST_IMAGES, IMAGES),
    **dict.fromkeys(("Owlv2Model", "OwlViTModel", "BlipModel"), IMAGES),
    **dict.fromkeys(("paligemma", "ColPaliForRetrieval"), TYPES),
    "grounding-dino": {"pixel_values": _same(3, 64, 64)},
    "mm-grounding-dino": {"pixel_values": _same(3, 64, 64)},
    "blip-2": IMAGES,
    "Blip2ForImageTextRetrieval": {**IMAGE, "attention_mask": lambda config, batch: torch.ones_like(batch.ids)},
    "instructblip": {**IMAGES, **QUESTION},
    "instructblipvideo": {"pixel_values": _image(2, per="document"), **QUESTION},
    "kosmos-2": {
        **IMAGES,
        "image_embeds_position_mask": lambda config, batch: (batch.ids == MARK).long(),
    },
    "idefics": {"pixel_values": _image(1), "image_attention_mask": _tokens(1)},
    "xclip": {"pixel_values": _image(2, per="document")},
    "tvp": {"pixel_values": _same(1, 3, 64, 64)},
    "videoprism": {"pixel_values_videos": _image(16, per="document")},
    "siglip2": {
        "pixel_values": _same(4, 48, per="document"),
        "pixel_attention_mask": _whole(1, 4, per="document"),
        "spatial_shapes": _whole(2, 2, per="document"),
    },
    "pp_formulanet": IMAGE,
    "pi0": {
        "state": _same(4), "noise": _same(3, 4), "timestep": _whole(1), "action_embeds": _same(4, 32),
        "pixel_values": _image(1), "pixel_attention_mask": lambda config, batch: torch.ones(len(batch.ids), 1) > 0,
    },
    "udop": {"bbox": BOX},
    "bros": {"bbox": BOX},
    "layoutlmv2": {"bbox": _boxes, "image": _same(3, 64, 64)},
    "lxmert": {"visual_feats": _same(3, 2048), "visual_pos": _same(3, 4)},
    "pix2struct": {"flattened_patches": lambda config, batch: torch.ones(batch.ids.shape[0], 4, 14)},
    "whisper": {"input_features": _same(lambda config: (config.num_mel_bins, 2 * config.max_source_positions))},
    "speech_to_text": {"input_features": _same(lambda config: (24, config.input_feat_per_channel))},
    "moonshine": {"input_values": _same(2000)},
    "moonshine_streaming": {"input_values": _same(1600)},
    "speech-encoder-decoder": {"input_values": _same(200)},
    "SpeechT5ForSpeechToText": {"input_values": _same(200)},
    "SpeechT5ForTextToSpeech": {"decoder_input_values": _same(6, 8)},
    "pe_audio": {"input_values": _same(1, 4000, per="document")},
    "pe_video": {"pixel_values_videos": _same(2, 3, 8, 8, per="document")},
    "pe_audio_video": {
        "input_values": _same(1, 4000, per="document"),
        "pixel_values_videos": _same(2, 3, 8, 8, per="document"),
    },
    "clap": {"input_features": _same(1, 64, 8, per="document")},
    "clvp": {"input_features": _same(80, 24, per="document")},
    "SeamlessM4TForSpeechToText": {"input_features": _same(24, 16)},
    "SeamlessM4Tv2ForSpeechToText": {"input_features": _same(24, 16)},
    **dict.fromkeys(("canary", "cohere_asr"), FRAMES),
    # It requires as many frames of sound as tokens; all frames are the same.
    "voxtral_realtime": {
        "input_features": lambda config, batch: torch.ones(
            batch.ids.shape[0], config.audio_config.num_mel_bins, 2 * config.downsample_factor * batch.ids.shape[1]
        )
    },
    "jev": {
        "marks": lambda config, batch: torch.tensor([[span.stop for _, span in batch.spans]]),
        "num_options": lambda config, batch: torch.ones(1, len(batch.spans), dtype=torch.long),
        "question_type_ids": lambda config, batch: torch.zeros(1, len(batch.spans), dtype=torch.long),
    },
}  # fmt: skip

# The tokens at the beginning of every document, by model type or class.
LEADS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("blip-2", "instructblip", "kosmos-2"), (MARK,) * 2),
    "instructblipvideo": (MARK,) * 4,
    "SplinterForPreTraining": (MARK,),
    "esm": (MARK,),
    "LongformerForQuestionAnswering": (3, 3, 3),
    "LongformerForMultipleChoice": (3, 3, 3),
}

# Classes whose tokens are columns (B, T, n): the name of the argument, n, and the size of a vocabulary.
COLUMNS: dict[str, tuple[str, int, int]] = {
    "kyutai_speech_to_text": ("input_ids", 3, 16),
    "dia": ("decoder_input_ids", 2, 64),
}


@dataclasses.dataclass(frozen=True)
class Extras:
    """The extra arguments of one class.

    Attributes:
        arguments: {argument: what makes it}.
        lead: tokens that every document begins with.
        columns: as in `COLUMNS`, or None.
    """

    arguments: dict[str, Make]
    lead: tuple[int, ...]
    columns: tuple[str, int, int] | None


def extras(model: Any) -> Extras:
    """Return what the class of a model takes beside plain text."""

    def of(table: dict[str, Any], otherwise: Any) -> Any:
        return table.get(type(model).__name__, table.get(model.config.model_type, otherwise))

    arguments = of(NEEDS, {})
    if type(model).__name__ not in NEEDS:  # some classes take fewer arguments than others of their type
        names = inspect.signature(model.forward).parameters
        arguments = {name: make for name, make in arguments.items() if name in names}
    return Extras(arguments, of(LEADS, ()), of(COLUMNS, None))
