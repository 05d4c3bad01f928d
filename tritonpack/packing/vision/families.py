"""Families of image-text models, as a table: the columns of their processors, and how examples are joined in each.

A family is added with a row in `FAMILIES`, a row in tests/packing/vision/examples.py, and a row in docs/vision.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tritonpack.packing.vision import sizes
from tritonpack.packing.vision.sizes import Media

Count = Callable[[Any, Media], int]  # tokens, by a model's configuration and the images, or the videos, of an example
IMAGES, VIDEOS = "images", "videos"
MODALITIES = "mm_token_type_ids"  # of each token: 0 text, 1 image, 2 video


@dataclass(frozen=True)
class Column:
    """A column of pixels, or of what describes them. Examples are joined along the first axis.

    Attributes:
        axes: what the axes of one example are, for messages.
        padded: axes that are padded with zeros at their end to the largest example. The model leaves out this padding
            by another column. On all other axes examples must have one size.
        optional: whether a processor may leave it out.
        of_rows: whether the model takes the column with one more axis in front, of the rows of a batch.
    """

    axes: tuple[str, ...]
    padded: tuple[int, ...] = ()
    optional: bool = False
    of_rows: bool = False


class Part(NamedTuple):
    """The images, or the videos, of an example.

    Attributes:
        columns: by name, pixels first.
        count_tokens: by the configuration and these columns.
        token: the name, in the configuration, of the token whose embedding is replaced.
    """

    columns: Mapping[str, Column]
    count_tokens: Count
    token: str = "image_token_id"


@dataclass(frozen=True)
class Family:
    """The inputs of an image-text model beside tokens.

    Attributes:
        parts: what it takes, by IMAGES and VIDEOS.
        own_positions: whether the model makes positions of three axes by `get_rope_index`.
        both_kinds: whether images and videos may share a row.
        types: the column from which the model reads which tokens are of images (1) and of videos (2); None if it reads
            none. Without it the model would make other positions, or masks in which images are causal.
        towers: the types of vision towers whose tokens are counted; none if any is.
        types_of_answers: whether only tokens with `token_type_ids` of 1 have labels, if labels are made.
    """

    parts: Mapping[str, Part]
    own_positions: bool = False
    both_kinds: bool = True
    types: str | None = None
    towers: tuple[str, ...] = ()
    types_of_answers: bool = False

    @property
    def columns(self) -> dict[str, Column]:
        """The columns of images and videos, by name."""
        return {name: column for part in self.parts.values() for name, column in part.columns.items()}


def _images(columns: Mapping[str, Column], count: Count, **settings: Any) -> Family:
    """A family that takes images alone."""
    return Family({IMAGES: Part(columns, count)}, **settings)


def _squares(tokens: Callable[[Any, int], int], **settings: Any) -> Family:
    """A family with images of one size, whose tokens are counted by the configuration and the patches of an image."""
    return _images({"pixel_values": Column((IMAGES, *PIXELS))}, partial(sizes.of_squares, tokens=tokens), **settings)


PIXELS = ("channels", "height", "width")
MASK = "pixel_attention_mask"
SIZES = Column((IMAGES, "2: height, width"))
PADDED = Column((IMAGES, *PIXELS), padded=(2, 3))
ROWS = {
    "pixel_values": Column((IMAGES, *PIXELS), of_rows=True),
    MASK: Column((IMAGES, "height", "width"), optional=True, of_rows=True),
}
PADDED_ROWS = {
    "pixel_values": replace(PADDED, of_rows=True),
    MASK: Column((IMAGES, "height", "width"), padded=(1, 2), of_rows=True),
}
GRID = ("3: time, height, width",)
IMAGE_GRIDS = {"pixel_values": Column(("patches", "values")), "image_grid_thw": Column((IMAGES, *GRID))}
VIDEO_GRIDS = {"pixel_values_videos": Column(("patches", "values")), "video_grid_thw": Column((VIDEOS, *GRID))}
TIMED_GRIDS = VIDEO_GRIDS | {"second_per_grid_ts": Column((VIDEOS,), optional=True)}
PLACES = ("patches", "2: x, y")
IMAGE_PLACES = {
    "pixel_values": Column((IMAGES, "patches", "values")),
    "image_position_ids": Column((IMAGES, *PLACES)),
}
VIDEO_PLACES = {
    "pixel_values_videos": Column(("frames", "patches", "values")),
    "video_position_ids": Column(("frames", *PLACES)),
    "num_frames_per_video": Column((VIDEOS,)),
}

_GRIDS = Part(IMAGE_GRIDS, sizes.of_grids)
_QWEN2_VL = Family(
    {IMAGES: _GRIDS, VIDEOS: Part(VIDEO_GRIDS, sizes.of_grids, "video_token_id")}, own_positions=True, types=MODALITIES
)
_QWEN2_5_VL = replace(_QWEN2_VL, parts={IMAGES: _GRIDS, VIDEOS: Part(TIMED_GRIDS, sizes.of_grids, "video_token_id")})
_GLM4V = replace(_QWEN2_VL, parts={IMAGES: _GRIDS, VIDEOS: Part(VIDEO_GRIDS, sizes.of_grids)}, both_kinds=False)
_GEMMA4 = Family(
    {
        IMAGES: Part(IMAGE_PLACES, sizes.of_places),
        VIDEOS: Part(VIDEO_PLACES, sizes.of_places, "video_token_id"),
    },
    types=MODALITIES,
)

# By the model type of the whole model's configuration.
FAMILIES: dict[str, Family] = {
    "gemma3": _squares(lambda config, _: config.mm_tokens_per_image, types="token_type_ids"),
    "gemma4": _GEMMA4,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "idefics2": _images(PADDED_ROWS, sizes.of_rows),
    "idefics3": _images(ROWS, sizes.of_rows),
    "internvl": _squares(lambda config, patches: round(patches * config.downsample_ratio**2)),
    "llama4": _squares(lambda config, patches: round(patches * config.vision_config.pixel_shuffle_ratio**2)),
    "llava": _images(
        {"pixel_values": PADDED, "image_sizes": replace(SIZES, optional=True)},
        sizes.of_llava,
        towers=("pixtral", *sizes.CLASS_TOKENS),
    ),
    "mistral3": _images({"pixel_values": PADDED, "image_sizes": SIZES}, sizes.of_merged_images),
    "paligemma": _squares(lambda _, patches: patches, towers=("siglip_vision_model",), types_of_answers=True),
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3_5": _QWEN2_VL,
    "qwen3_5_moe": _QWEN2_VL,
    "qwen3_vl": _QWEN2_VL,
    "qwen3_vl_moe": _QWEN2_VL,
    "smolvlm": _images(ROWS, sizes.of_rows),
}
