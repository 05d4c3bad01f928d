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
        layout: the axes of one example, such as "images channels height* width*". An axis that begins with a digit has
            this size. Columns of an example have one size on axes of one name. Axes with a star are padded with zeros
            at their end to the largest example; the model leaves out this padding by another column. On all other axes
            but the first, examples must have one size.
        optional: whether a processor may leave it out.
        of_rows: whether the model takes the column with one more axis in front, of the rows of a batch.
    """

    layout: str
    optional: bool = False
    of_rows: bool = False

    @property
    def axes(self) -> list[str]:
        """The names of the axes."""
        return self.layout.replace("*", "").split()

    @property
    def padded(self) -> list[int]:
        """The axes that are padded."""
        return [number for number, axis in enumerate(self.layout.split()) if axis.endswith("*")]


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
    columns = {"pixel_values": Column("images channels height width")}
    return _images(columns, partial(sizes.of_squares, tokens=tokens), **settings)


_PADDED, _SIZES = Column("images channels height* width*"), Column("images 2:height,width")
_ROWS = {
    "pixel_values": Column("images channels height width", of_rows=True),
    "pixel_attention_mask": Column("images height width", of_rows=True, optional=True),
}
_PADDED_ROWS = {
    "pixel_values": replace(_PADDED, of_rows=True),
    "pixel_attention_mask": Column("images height* width*", of_rows=True),
}
_IMAGE_GRIDS = {"pixel_values": Column("patches values"), "image_grid_thw": Column("images 3:time,height,width")}
_VIDEO_GRIDS = {"pixel_values_videos": Column("patches values"), "video_grid_thw": Column("videos 3:time,height,width")}
_TIMED_GRIDS = {**_VIDEO_GRIDS, "second_per_grid_ts": Column("videos", optional=True)}
_IMAGE_PLACES = {"pixel_values": Column("images patches values"), "image_position_ids": Column("images patches 2:x,y")}
_VIDEO_PLACES = {
    "pixel_values_videos": Column("frames patches values"),
    "video_position_ids": Column("frames patches 2:x,y"),
    "num_frames_per_video": Column("videos"),
}


def _grids(videos: Mapping[str, Column], token: str = "video_token_id", **settings: Any) -> Family:
    """A family with rows of patches and the grid of each image and video, and positions of three axes."""
    parts = {IMAGES: Part(_IMAGE_GRIDS, sizes.of_grids), VIDEOS: Part(videos, sizes.of_grids, token)}
    return Family(parts, own_positions=True, types=MODALITIES, **settings)


_QWEN2_VL, _GLM4V = _grids(_VIDEO_GRIDS), _grids(_VIDEO_GRIDS, "image_token_id", both_kinds=False)
_GEMMA4 = {
    IMAGES: Part(_IMAGE_PLACES, sizes.of_places),
    VIDEOS: Part(_VIDEO_PLACES, sizes.of_places, "video_token_id"),
}

# By the model type of the whole model's configuration.
FAMILIES: dict[str, Family] = {
    "gemma3": _squares(lambda config, _: config.mm_tokens_per_image, types="token_type_ids"),
    "gemma4": Family(_GEMMA4, types=MODALITIES),
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "idefics2": _images(_PADDED_ROWS, sizes.of_rows),
    "idefics3": _images(_ROWS, sizes.of_rows),
    "internvl": _squares(lambda config, patches: round(patches * config.downsample_ratio**2)),
    "llama4": _squares(lambda config, patches: round(patches * config.vision_config.pixel_shuffle_ratio**2)),
    "llava": _images(
        {"pixel_values": _PADDED, "image_sizes": replace(_SIZES, optional=True)},
        sizes.of_llava,
        towers=("pixtral", *sizes.CLASS_TOKENS),
    ),
    "mistral3": _images({"pixel_values": _PADDED, "image_sizes": _SIZES}, sizes.of_merged_images),
    "paligemma": _squares(lambda _, patches: patches, towers=("siglip_vision_model",), types_of_answers=True),
    "qwen2_5_vl": _grids(_TIMED_GRIDS),
    "qwen2_vl": _QWEN2_VL,
    "qwen3_5": _QWEN2_VL,
    "qwen3_5_moe": _QWEN2_VL,
    "qwen3_vl": _QWEN2_VL,
    "qwen3_vl_moe": _QWEN2_VL,
    "smolvlm": _images(_ROWS, sizes.of_rows),
}
