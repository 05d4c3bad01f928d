"""Tiny image-text models, and examples in the columns of their processors: no image, one, several, and videos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.patches.zoo import spread, tiny_config

BEGIN, END, IMAGE, VIDEO = 58, 59, 60, 61
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
INDICES = {"image_token_index": IMAGE, "video_token_index": VIDEO}
PIECES = {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False}

Example = dict[str, Any]
Part = tuple[list[int], dict[str, Tensor]]  # the tokens of one image or video, and its columns
Make = Callable[..., Part]  # of a generator and sizes
Documents = list[list[tuple[Any, ...]]]  # of each document the images and videos: what makes them, and sizes


def patches(prefix: str, token: int, *, stamps: bool = False, seconds: bool = False) -> Make:
    """Make an image or a video of time x height x width patches, in tokens of 2 x 2.

    `stamps`: a few tokens with the time before each frame (Qwen3-VL, GLM-4V). `seconds`: between frames (Qwen2.5-VL).
    """

    def make(draw: torch.Generator, time: int, height: int, width: int) -> Part:
        pixels = torch.randn(time * height * width, 96, generator=draw, dtype=torch.float64)
        grid = torch.tensor([[time, height, width]])
        columns = {"pixel_values" + "_videos" * (prefix == "video"): pixels, f"{prefix}_grid_thw": grid}
        frame = [token] * (height * width // 4)
        stamped = [each for at in range(time) for each in (7, 8 + at, BEGIN, *frame, END)]
        columns |= {"second_per_grid_ts": torch.tensor([0.5 * time])} if seconds else {}
        return stamped if stamps else [BEGIN, *frame * time, END], columns

    return make


def pictures(side: int, *, fixed: int = 0, column: str = "") -> Make:
    """Make images, or tiles of one, in a token for each square of `side` pixels or in a fixed number of tokens."""

    def make(draw: torch.Generator, height: int = 8, width: int = 8, tiles: int = 1) -> Part:
        columns = {"pixel_values": torch.randn(tiles, 3, height, width, generator=draw, dtype=torch.float64)}
        if column:
            is_mask = column == "pixel_attention_mask"
            columns[column] = torch.ones(1, height, width).long() if is_mask else torch.tensor([[height, width]])
        return [BEGIN, *[IMAGE] * (fixed or (height // side) * (width // side)) * tiles, END], columns

    return make


def placed(names: tuple[str, str], token: int) -> Make:
    """Make images of Gemma 4: patches with places, padded to 36, pooled by 9."""

    def make(draw: torch.Generator, height: int, width: int, count: int = 1) -> Part:
        places = torch.full((36, 2), -1)
        places[: height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        pixels = torch.rand(count, 36, 48, generator=draw, dtype=torch.float64)
        pixels[:, height * width :] = 0
        columns = {names[0]: pixels, names[1]: places.expand(count, -1, -1).clone()}
        if token == VIDEO:
            columns["num_frames_per_video"] = torch.tensor([count])
        return [BEGIN, *[token] * (count * height * width // 9), END], columns

    return make


class Kind(NamedTuple):
    """How the tests build one family: settings of the tiny configuration, documents, and its model type.

    `types` is the column of types of tokens; "answers": PaliGemma's token_type_ids; "frames": GLM-4V's of videos.
    """

    settings: dict[str, Any]
    documents: Documents
    types: str | None = None
    model_type: str = ""


def grids(**video: Any) -> Documents:
    """Documents with images of patches, and with a video and an image beside it if there are settings of videos."""
    image, film = patches("image", IMAGE), patches("video", VIDEO, **video)
    documents: Documents = [[], [(image, 1, 4, 6)], [(image, 1, 6, 4), (image, 1, 4, 4)], [(image, 1, 2, 8)]]
    return documents + [[(film, 3, 4, 4)], [(film, 2, 2, 4), (image, 1, 4, 4)]] * bool(video)


def squares(make: Make, *tiles: int) -> Documents:
    """Documents with no image, with one, and with two; of these numbers of tiles."""
    one, two, three = tiles or (1, 1, 1)
    return [[], [(make, 8, 8, one)], [(make, 8, 8, two), (make, 8, 8, three)], [(make, 8, 8, one)]]


QWEN: dict[str, Any] = {**TOKENS, **PIECES}
MERGED, PIXTRAL = pictures(8, column="image_sizes"), pictures(4, column="image_sizes")
ROWS, LATENTS = (pictures(8, fixed=fixed, column="pixel_attention_mask") for fixed in (1, 3))
PLACES = placed(("pixel_values", "image_position_ids"), IMAGE)
FILMS = placed(("pixel_values_videos", "video_position_ids"), VIDEO)
FRAMES = patches("video", IMAGE, stamps=True)

MODALITIES, EMBEDDINGS = "mm_token_type_ids", {"num_position_embeddings": 64}
QWEN3_5 = Kind({**QWEN, "vision_config": EMBEDDINGS}, grids(stamps=True), MODALITIES)
QWEN3_VL = QWEN3_5._replace(settings={**QWEN, "vision_config": {**EMBEDDINGS, "deepstack_visual_indexes": [0]}})
BOUNDS = {"image_start_token_id": BEGIN, "image_end_token_id": END}
GLM4V = Kind({**QWEN, **BOUNDS, "vision_config": {"image_size": 32}}, grids(), MODALITIES)
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}

KINDS: dict[str, Kind] = {
    "qwen2_vl": Kind(QWEN, grids(stamps=False), MODALITIES),
    "qwen2_5_vl": Kind({**QWEN, "vision_config": WINDOWS}, grids(seconds=True), MODALITIES),
    "qwen3_vl": QWEN3_VL,
    "llava": Kind({**INDICES, "vision_config": {"model_type": "clip_vision_model"}}, squares(pictures(4))),
    "llava_siglip": Kind(
        {**INDICES, "vision_config": SIGLIP, "vision_feature_select_strategy": "full"}, squares(pictures(4)),
        model_type="llava",
    ),
    "llava_pixtral": Kind(
        {**INDICES, "vision_config": {"model_type": "pixtral", "head_dim": 8}, "vision_feature_layer": -1,
         "vision_feature_select_strategy": "full"},
        [[], [(PIXTRAL, 16, 8)], [(PIXTRAL, 8, 8), (PIXTRAL, 8, 12)]], model_type="llava",
    ),
    "gemma3": Kind(
        {**INDICES, "mm_tokens_per_image": 4, "vision_config": SIGLIP}, squares(pictures(4)), "token_type_ids"
    ),
    "paligemma": Kind({**INDICES, "vision_config": {**SIGLIP, "projection_dim": 32}}, squares(pictures(4)), "answers"),
    "internvl": Kind({**TOKENS, "vision_feature_layer": -1}, squares(pictures(8), 3, 1, 2)),
    "idefics3": Kind(TOKENS, squares(ROWS)),
    "smolvlm": Kind(TOKENS, squares(ROWS)),
    "idefics2": Kind(
        {**TOKENS, "perceiver_config": {"resampler_n_latents": 3}},
        [[], [(LATENTS, 16, 8)], [(LATENTS, 12, 12)] * 2, [(LATENTS, 18, 10)]],
    ),
    "mistral3": Kind(
        {**INDICES, "spatial_merge_size": 2, "vision_feature_layer": -1},
        [[], [(MERGED, 16, 8)], [(MERGED, 8, 8), (MERGED, 8, 24)], [(MERGED, 24, 16)]],
    ),
    "glm4v": GLM4V,
    "glm4v_videos": Kind(
        GLM4V.settings, [[], [(FRAMES, 3, 4, 4)], [(FRAMES, 1, 4, 6), (FRAMES, 2, 2, 4)]], "frames", "glm4v"
    ),
    "llama4": Kind({**INDICES, "vision_config": {"intermediate_size": 128}}, squares(pictures(8), 3, 1, 2)),
    "qwen3_vl_moe": QWEN3_VL,
    "glm4v_moe": GLM4V,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_5": QWEN3_5,
    "gemma4": Kind(
        {**TOKENS, "audio_token_id": 62, "text_config": {"use_bidirectional_attention": "vision"}},
        [[], [(PLACES, 3, 6)], [(PLACES, 6, 6), (PLACES, 6, 3)], [(FILMS, 3, 6, 3)]], MODALITIES,
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """A tiny random model of a family, in float64."""
    settings = dict(KINDS[name].settings)
    tower = dict(settings.get("vision_config", {}))
    if "model_type" in tower:
        del settings["vision_config"]
    config = tiny_config(KINDS[name].model_type or name, **settings)
    if "model_type" in tower:
        config.vision_config = tiny_config(tower.pop("model_type"), **tower)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager")
    spread(model, torch.Generator().manual_seed(0))
    return model.double()


def examples(name: str) -> list[Example]:
    """Documents of a family, each as its processor would return it, without the axis of a batch."""
    kind, draw = KINDS[name], torch.Generator().manual_seed(1)
    return [_example(kind, [make(draw, *sizes) for make, *sizes in made], draw) for made in kind.documents]


def _example(kind: Kind, made: list[Part], draw: torch.Generator) -> Example:
    ids = torch.randint(6, 50, (3,), generator=draw).tolist()
    for tokens, _ in made:
        ids += [*tokens, *torch.randint(6, 50, (4,), generator=draw).tolist()]
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
        # As a processor pads the images of one call.
        most = [max(one.shape[axis] for one in values) for axis in range(1, values[0].ndim)]
        missing = [[width for axis in reversed(range(len(most))) for width in (0, most[axis] - one.shape[axis + 1])]
                   for one in values]  # fmt: skip
        example[column] = torch.cat([pad(one, each) for one, each in zip(values, missing, strict=True)])
    return example
