"""What a few classes must be given beside text: the same for every row, so that documents differ by their text alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonpack.testing.packed_forms import Batch

Make = Callable[[Any, Batch], Any]  # of a configuration and a batch


def _rows(*shape: int) -> Make:
    """The same numbers for every row."""

    def make(config: Any, batch: Batch) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        return values.expand(batch.ids.shape[0], *shape)

    return make


def _image(config: Any, batch: Batch, frames: tuple[int, ...] = ()) -> Tensor:
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 8
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    return _rows(*frames, getattr(vision, "num_channels", 3) or 3, *sides)(config, batch)


def _frames(count: int) -> Make:
    return lambda config, batch: _image(config, batch, (count,))


def _boxes(config: Any, batch: Batch) -> Tensor:
    """[b, t, 4] the same box for every token."""
    return torch.tensor([1, 2, 5, 6]).expand(*batch.ids.shape, 4)


def _sounds(length: int, *, last: bool = True) -> Make:
    def make(config: Any, batch: Batch) -> Tensor:
        part = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
        bins = getattr(part, "num_mel_bins", None) or getattr(part, "input_feat_per_channel", None) or 8
        shape = (bins, length) if last else (length, bins)
        return _rows(*shape)(config, batch)

    return make


# {argument: what makes it} for each model type; "Class" and "type" are both keys.
IMAGE = {"pixel_values": _image}
NEEDS: dict[str, dict[str, Make]] = {
    **dict.fromkeys(
        "blip blip-2 kosmos-2 vision-encoder-decoder vilt align altclip chinese_clip clip clipseg metaclip_2 siglip "
        "grounding-dino mm-grounding-dino owlv2 owlvit aimv2 groupvit vision-text-dual-encoder sam3 sam3_lite_text "
        "pp_formulanet bridgetower".split(),
        IMAGE,
    ),
    **dict.fromkeys(
        ("instructblip", "instructblipvideo"),
        {**IMAGE, "qformer_input_ids": lambda config, batch: torch.full((batch.ids.shape[0], 3), 7)},
    ),
    "instructblipvideo": {
        "pixel_values": _frames(2),
        "qformer_input_ids": lambda config, batch: torch.full((batch.ids.shape[0], 3), 7),
    },
    "idefics": {"pixel_values": _frames(1)},
    "xclip": {"pixel_values": _frames(2)},
    "tvp": {"pixel_values": _frames(1)},
    "videoprism": {"pixel_values_videos": _frames(2)},
    "udop": {"bbox": lambda config, batch: torch.tensor([0.1, 0.2, 0.5, 0.6]).expand(*batch.ids.shape, 4)},
    "bros": {"bbox": lambda config, batch: torch.tensor([0.1, 0.2, 0.5, 0.6]).expand(*batch.ids.shape, 4)},
    "lxmert": {"visual_feats": _rows(3, 2048), "visual_pos": _rows(3, 4)},
    "whisper": {"input_features": lambda config, batch: _sounds(2 * config.max_source_positions)(config, batch)},
    "speech_to_text": {"input_features": _sounds(24, last=False)},
    "moonshine": {"input_values": _rows(2000)},
    "moonshine_streaming": {"input_values": _rows(1600)},
    "pix2struct": {
        "flattened_patches": lambda config, batch: _rows(4, config.vision_config.patch_embed_hidden_size)(config, batch)
    },
    "canary": {"input_features": _sounds(24, last=False)},
    "cohere_asr": {"input_features": _sounds(24, last=False)},
    "voxtral_realtime": {"input_features": _sounds(24)},
    "jev": {
        "marks": lambda config, batch: torch.tensor([[span.stop for _, span in batch.spans]]),
        "num_options": lambda config, batch: torch.ones(1, len(batch.spans), dtype=torch.long),
        "question_type_ids": lambda config, batch: torch.zeros(1, len(batch.spans), dtype=torch.long),
    },
}


def extras(model: Any) -> dict[str, Make]:
    """{argument: what makes it}, for the class of a model."""
    found = NEEDS.get(type(model).__name__, NEEDS.get(model.config.model_type, {}))
    from inspect import signature

    names = signature(model.forward).parameters
    return {name: make for name, make in found.items() if name in names}
