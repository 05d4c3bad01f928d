"""Tiny image-text models, and examples in the columns of their processors: no image, one, several, and videos."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.patches.zoo import spread, tiny_config

BEGIN, END, IMAGE, VIDEO = 58, 59, 60, 61
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
INDICES = {"image_token_index": IMAGE, "video_token_index": VIDEO}
PIECES = {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}

Example = dict[str, Any]
Part = tuple[list[int], dict[str, Tensor]]  # the tokens of one image or video, and its columns
Draw = torch.Generator


def randoms(draw: Draw, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def grid(prefix: str, token: int) -> Callable[..., Part]:
    """Make an image or a video of rows of patches, of time x height x width patches, in tokens of 2 x 2."""
    pixels, name = f"pixel_values{'_videos' if prefix == 'video' else ''}", f"{prefix}_grid_thw"

    def make(draw: Draw, time: int, height: int, width: int) -> Part:
        columns = {pixels: randoms(draw, time * height * width, 96), name: torch.tensor([[time, height, width]])}
        tokens = [token] * (time * height * width // 4)
        return [BEGIN, *tokens, END], columns

    return make


def stamped(draw: Draw, time: int, height: int, width: int) -> Part:
    """A video of Qwen3-VL: a few tokens with the time before each frame."""
    _, columns = grid("video", VIDEO)(draw, time, height, width)
    frame = [BEGIN, *[VIDEO] * (height * width // 4), END]
    return [token for at in range(time) for token in (7, 8 + at, *frame)], columns


def framed(draw: Draw, time: int, height: int, width: int) -> Part:
    """A video of GLM-4V, whose frames have the token of images."""
    tokens, columns = stamped(draw, time, height, width)
    return [IMAGE if token == VIDEO else token for token in tokens], columns


def timed(draw: Draw, time: int, height: int, width: int) -> Part:
    """A video of Qwen2.5-VL, with the seconds between its frames."""
    tokens, columns = grid("video", VIDEO)(draw, time, height, width)
    return tokens, columns | {"second_per_grid_ts": torch.tensor([0.5 * time])}


def square(tokens: int, side: int = 8) -> Callable[..., Part]:
    """Make images of one size, each or each of its tiles in so many tokens."""

    def make(draw: Draw, tiles: int = 1) -> Part:
        return [BEGIN, *[IMAGE] * tokens * tiles, END], {"pixel_values": randoms(draw, tiles, 3, side, side)}

    return make


def sized(merge: int) -> Callable[..., Part]:
    """Make images of any size, in patches of 4 x 4 pixels."""

    def make(draw: Draw, height: int, width: int) -> Part:
        tokens = (height // 4 // merge) * (width // 4 // merge)
        columns = {"pixel_values": randoms(draw, 1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
        return [BEGIN, *[IMAGE] * tokens, END], columns

    return make


def rows(tokens: int) -> Callable[..., Part]:
    """Make images with a mask of their pixels."""

    def make(draw: Draw, height: int = 8, width: int = 8) -> Part:
        columns = {
            "pixel_values": randoms(draw, 1, 3, height, width),
            "pixel_attention_mask": torch.ones(1, height, width, dtype=torch.int64),
        }
        return [BEGIN, *[IMAGE] * tokens, END], columns

    return make


def placed(names: tuple[str, str], token: int) -> Callable[..., Part]:
    """Make images of Gemma 4: patches with places, padded to 36, pooled by 9."""

    def make(draw: Draw, height: int, width: int, count: int = 1) -> Part:
        places = torch.full((36, 2), -1)
        places[: height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        pixels = torch.rand(count, 36, 48, generator=draw, dtype=torch.float64)
        pixels[:, height * width :] = 0
        columns = {names[0]: pixels, names[1]: places.expand(count, -1, -1).clone()}
        if token == VIDEO:
            columns["num_frames_per_video"] = torch.tensor([count])
        return [BEGIN, *[token] * (count * height * width // 9), END], columns

    return make


@dataclass(frozen=True)
class Kind:
    """How the tests build one family.

    Attributes:
        settings: of the tiny configuration.
        documents: the images and videos of each document: functions of a generator.
        types: the column of types of tokens; "answers": PaliGemma's token_type_ids; "frames": GLM-4V's of videos.
        model_type: if it isn't the name of the row.
    """

    settings: dict[str, Any]
    documents: list[list[Callable[[Draw], Part]]]
    types: str | None = None
    model_type: str = ""


def parts(make: Callable[..., Part], *arguments: Any) -> Callable[[Draw], Part]:
    return lambda draw: make(draw, *arguments)


def grids(video: Callable[..., Part] | None, *, both: bool = True) -> list[list[Callable[[Draw], Part]]]:
    image = grid("image", IMAGE)
    documents = [[], [parts(image, 1, 4, 6)], [parts(image, 1, 6, 4), parts(image, 1, 4, 4)], [parts(image, 1, 2, 8)]]
    if video is not None and both:
        documents += [[parts(video, 3, 4, 4)], [parts(video, 2, 2, 4), parts(image, 1, 4, 4)]]
    return documents


QWEN: dict[str, Any] = {**TOKENS, **PIECES}
IMAGES_OF_GRIDS = grids(grid("video", VIDEO))
PIXTRAL = [[], [parts(sized(2), 16, 8)], [parts(sized(2), 8, 8), parts(sized(2), 8, 24)], [parts(sized(2), 24, 16)]]
SQUARES = [[], [parts(square(4))], [parts(square(4)), parts(square(4))], [parts(square(4))]]
PLACES = placed(("pixel_values", "image_position_ids"), IMAGE)
FILMS = placed(("pixel_values_videos", "video_position_ids"), VIDEO)

QWEN3_5 = Kind({**QWEN, "vision_config": {"num_position_embeddings": 64}}, grids(stamped), "mm_token_type_ids")
QWEN3_VL = Kind(
    {**QWEN, "vision_config": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}}, grids(stamped),
    "mm_token_type_ids",
)  # fmt: skip
GLM4V = Kind(
    {**QWEN, "vision_config": {"image_size": 32}, "image_start_token_id": BEGIN, "image_end_token_id": END},
    grids(None), "mm_token_type_ids",
)  # fmt: skip

KINDS: dict[str, Kind] = {
    "qwen2_vl": Kind({**QWEN}, IMAGES_OF_GRIDS, "mm_token_type_ids"),
    "qwen2_5_vl": Kind(
        {**QWEN, "vision_config": {"window_size": 16, "fullatt_block_indexes": [1]}}, grids(timed), "mm_token_type_ids"
    ),
    "qwen3_vl": QWEN3_VL,
    "llava": Kind({**INDICES, "vision_config": {"model_type": "clip_vision_model"}}, SQUARES),
    "llava_siglip": Kind(
        {**INDICES, "vision_config": SIGLIP, "vision_feature_select_strategy": "full"}, SQUARES, model_type="llava"
    ),
    "llava_pixtral": Kind(
        {**INDICES, "vision_config": {"model_type": "pixtral", "head_dim": 8}, "vision_feature_layer": -1,
         "vision_feature_select_strategy": "full"},
        [[], [parts(sized(1), 16, 8)], [parts(sized(1), 8, 8), parts(sized(1), 8, 12)]], model_type="llava",
    ),
    "gemma3": Kind({**INDICES, "mm_tokens_per_image": 4, "vision_config": SIGLIP}, SQUARES, "token_type_ids"),
    "paligemma": Kind(
        {**INDICES, "vision_config": {**SIGLIP, "projection_dim": 32}},
        SQUARES, "answers",
    ),
    "internvl": Kind(
        {**TOKENS, "vision_feature_layer": -1}, [[], [parts(square(1), 3)], [parts(square(1)), parts(square(1), 2)]]
    ),
    "idefics3": Kind({**TOKENS}, [[], [parts(rows(1))], [parts(rows(1))] * 3]),
    "smolvlm": Kind({**TOKENS}, [[], [parts(rows(1))], [parts(rows(1))] * 3]),
    "idefics2": Kind(
        {**TOKENS, "perceiver_config": {"resampler_n_latents": 3}},
        [[], [parts(rows(3), 16, 8)], [parts(rows(3), 12, 12)] * 2, [parts(rows(3), 18, 10)]],
    ),
    "mistral3": Kind({**INDICES, "spatial_merge_size": 2, "vision_feature_layer": -1}, PIXTRAL),
    "glm4v": GLM4V,
    "glm4v_videos": Kind(
        GLM4V.settings,
        [[], [parts(framed, 3, 4, 4)], [parts(framed, 1, 4, 6), parts(framed, 2, 2, 4)]], "frames", model_type="glm4v",
    ),
    "llama4": Kind(
        {**INDICES, "vision_config": {"intermediate_size": 128}},
        [[], [parts(square(1), 3)], [parts(square(1)), parts(square(1), 2)], [parts(square(1))]],
    ),
    "qwen3_vl_moe": QWEN3_VL,
    "glm4v_moe": GLM4V,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_5": QWEN3_5,
    "gemma4": Kind(
        {**TOKENS, "audio_token_id": 62, "text_config": {"use_bidirectional_attention": "vision"}},
        [[], [parts(PLACES, 3, 6)], [parts(PLACES, 6, 6), parts(PLACES, 6, 3)], [parts(FILMS, 3, 6, 3)]],
        "mm_token_type_ids",
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """A tiny random model of a family, in float64."""
    kind = KINDS[name]
    model_type = kind.model_type or name
    settings = dict(kind.settings)
    tower = dict(settings.get("vision_config", {}))
    if "model_type" in tower:
        del settings["vision_config"]
    config = tiny_config(model_type, **settings)
    if "model_type" in tower:
        config.vision_config = tiny_config(tower.pop("model_type"), **tower)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager")
    spread(model, torch.Generator().manual_seed(0))
    return model.double()


def examples(name: str) -> list[Example]:
    """Documents of a family, each as its processor would return it, without the axis of a batch."""
    kind, draw = KINDS[name], torch.Generator().manual_seed(1)
    return [_example(kind, [make(draw) for make in makes], draw) for makes in kind.documents]


def _example(kind: Kind, made: list[Part], draw: Draw) -> Example:
    def text(count: int) -> list[int]:
        return torch.randint(6, 50, (count,), generator=draw).tolist()

    ids = text(3)
    for tokens, _ in made:
        ids += [*tokens, *text(4)]
    row = torch.tensor(ids)
    example: Example = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if kind.types == "answers":
        example["token_type_ids"] = (torch.arange(len(row)) >= len(row) - 3).long()
    elif kind.types == "frames":
        example["mm_token_type_ids"] = 2 * (row == IMAGE).long()
    elif kind.types is not None:
        example[kind.types] = (row == IMAGE).long() + 2 * (row == VIDEO).long()
    for column in dict.fromkeys(name for _, columns in made for name in columns):
        values = [columns[column] for _, columns in made if column in columns]
        example[column] = torch.cat(_padded(values))
    return example


def _padded(values: list[Tensor]) -> list[Tensor]:
    """Values with zeros up to the largest in every axis but the first, as a processor pads the images of one call."""
    most = [max(one.shape[axis] for one in values) for axis in range(1, values[0].ndim)]
    filled = []
    for one in values:
        whole = one.new_zeros(len(one), *most)
        whole[tuple(slice(size) for size in one.shape)] = one
        filled.append(whole)
    return filled
