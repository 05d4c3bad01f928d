"""Families of image-text models, as a table: the columns of their processors, and how examples are joined in each.

A family is added with a row in `FAMILIES`, a row in tests/packing/vision/examples.py, and a row in docs/vision.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tritonpack.packing.vision import sizes
from tritonpack.packing.vision.sizes import ExampleSize, Media

Measure = Callable[[Any, Media], ExampleSize]  # of a model's configuration and the images, or the videos, of an example
IMAGES, VIDEOS = "images", "videos"
MODALITIES = "mm_token_type_ids"  # of each token: 0 text, 1 image, 2 video


@dataclass(frozen=True)
class Column:
    """A column of pixels, or of what describes them. Examples are joined along the first axis.

    Attributes:
        axes: what the axes of one example are, for messages.
        kind: IMAGES or VIDEOS.
        padded: axes that are padded with zeros at their end to the largest example. The model leaves out this padding
            by another column. On all other axes examples must have one size.
        optional: whether a processor may leave it out.
        of_rows: whether the model takes the column with one more axis in front, of the rows of a batch.
    """

    axes: tuple[str, ...]
    kind: str = IMAGES
    padded: tuple[int, ...] = ()
    optional: bool = False
    of_rows: bool = False


@dataclass(frozen=True)
class Family:
    """The inputs of an image-text model beside tokens.

    Attributes:
        columns: the columns of images and videos, by name.
        images, videos: count the tokens and the patches of an example; None if the model takes none of them.
        video_token: the name, in the configuration, of the token whose embedding is replaced by a video's.
        own_positions: whether the model makes positions of three axes by `get_rope_index`.
        both_kinds: whether images and videos may share a row.
        types: the column from which the model reads which tokens are of images (1) and of videos (2); None if it reads
            none. Without it the model would make other positions, or masks in which images are causal.
        towers: the types of vision towers whose tokens are counted; none if any is.
        types_of_answers: whether only tokens with `token_type_ids` of 1 have labels, if labels are made.
    """

    columns: Mapping[str, Column]
    images: Measure
    videos: Measure | None = None
    video_token: str = "video_token_id"
    own_positions: bool = False
    both_kinds: bool = True
    types: str | None = None
    towers: tuple[str, ...] = ()
    types_of_answers: bool = False


PIXELS = ("channels", "height", "width")
GRID = ("3: time, height, width",)
SIZE = ("2: height, width",)
PLACE = ("patches", "2: x, y")

PATCHES = {
    "pixel_values": Column(("patches", "values")),
    "image_grid_thw": Column((IMAGES, *GRID)),
    "pixel_values_videos": Column(("patches", "values"), VIDEOS),
    "video_grid_thw": Column((VIDEOS, *GRID), VIDEOS),
}
TIMED = PATCHES | {"second_per_grid_ts": Column((VIDEOS,), VIDEOS, optional=True)}
SQUARES = {"pixel_values": Column((IMAGES, *PIXELS))}
SIZED = {"pixel_values": Column((IMAGES, *PIXELS), padded=(2, 3)), "image_sizes": Column((IMAGES, *SIZE))}
SIZED_OR_NOT = SIZED | {"image_sizes": Column((IMAGES, *SIZE), optional=True)}
ROWS = {
    "pixel_values": Column((IMAGES, *PIXELS), of_rows=True),
    "pixel_attention_mask": Column((IMAGES, "height", "width"), optional=True, of_rows=True),
}
PADDED_ROWS = {
    "pixel_values": Column((IMAGES, *PIXELS), padded=(2, 3), of_rows=True),
    "pixel_attention_mask": Column((IMAGES, "height", "width"), padded=(1, 2), of_rows=True),
}
PLACED = {
    "pixel_values": Column((IMAGES, "patches", "values")),
    "image_position_ids": Column((IMAGES, *PLACE)),
    "pixel_values_videos": Column(("frames", "patches", "values"), VIDEOS),
    "video_position_ids": Column(("frames", *PLACE), VIDEOS),
    "num_frames_per_video": Column((VIDEOS,), VIDEOS),
}


def _squares(tokens: Callable[[Any, int], int]) -> Measure:
    return partial(sizes.of_squares, tokens=tokens)


_QWEN2_VL = Family(
    PATCHES,
    partial(sizes.of_grids, pixels="pixel_values", grids="image_grid_thw"),
    partial(sizes.of_grids, pixels="pixel_values_videos", grids="video_grid_thw"),
    own_positions=True,
    types=MODALITIES,
)
_GLM4V = replace(_QWEN2_VL, video_token="image_token_id", both_kinds=False)
_GEMMA4 = Family(
    PLACED,
    partial(sizes.of_places, pixels="pixel_values", places="image_position_ids"),
    partial(sizes.of_places, pixels="pixel_values_videos", places="video_position_ids"),
    types=MODALITIES,
)
_IDEFICS3 = Family(ROWS, sizes.of_rows)

# By the model type of the whole model's configuration.
FAMILIES: dict[str, Family] = {
    "gemma3": Family(SQUARES, _squares(lambda config, _: config.mm_tokens_per_image), types="token_type_ids"),
    "gemma4": _GEMMA4,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "idefics2": Family(PADDED_ROWS, sizes.of_rows),
    "idefics3": _IDEFICS3,
    "internvl": Family(SQUARES, _squares(lambda config, patches: round(patches * config.downsample_ratio**2))),
    "llama4": Family(
        SQUARES, _squares(lambda config, patches: round(patches * config.vision_config.pixel_shuffle_ratio**2))
    ),
    "llava": Family(SIZED_OR_NOT, sizes.of_llava, towers=("pixtral", *sizes.CLASS_TOKENS)),
    "mistral3": Family(SIZED, sizes.of_merged_images),
    "paligemma": Family(
        SQUARES, _squares(lambda _, patches: patches), towers=("siglip_vision_model",), types_of_answers=True
    ),
    "qwen2_5_vl": replace(_QWEN2_VL, columns=TIMED),
    "qwen2_vl": _QWEN2_VL,
    "qwen3_5": _QWEN2_VL,
    "qwen3_5_moe": _QWEN2_VL,
    "qwen3_vl": _QWEN2_VL,
    "qwen3_vl_moe": _QWEN2_VL,
    "smolvlm": _IDEFICS3,
}
