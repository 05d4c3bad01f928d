"""Families of image-text models, as a table: the columns of their processors, and how examples are joined in each.

A family is added with a row in `FAMILIES`, a row in tests/packing/vision/examples.py, and a row in docs/vision.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

Media = Mapping[str, Tensor]
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


_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # embeddings of a tower that aren't of patches


def _of_grids(config: Any, media: Media) -> int:
    """Rows of patches, with the grid of each image or video (Qwen-VL)."""
    (pixels, rows), (grids, grid), *_ = media.items()
    if int(grid.prod(1).sum()) != len(rows):
        raise ValueError(
            f"has {len(rows)} rows of {pixels}, but its {grids} {grid.tolist()!r:.100} have {int(grid.prod(1).sum())} "
            "patches. Pass both as the processor returns them."
        )
    merge = config.vision_config.spatial_merge_size
    return int((grid[:, 0] * (grid[:, 1] // merge) * (grid[:, 2] // merge)).sum())


def _of_squares(config: Any, media: Media, tokens: Callable[[Any, int], int]) -> int:
    """Images, or tiles, of the one size that a tower takes; `tokens` counts one's by configuration and patches."""
    pixels, size = media["pixel_values"], _side(config.vision_config.image_size)
    if pixels.shape[2:] != (size, size):
        raise ValueError(f"has images of {tuple(pixels.shape[2:])} pixels; this model takes {size} x {size}.")
    patches = (size // _side(config.vision_config.patch_size)) ** 2
    return len(pixels) * tokens(config, patches)


def _of_llava(config: Any, media: Media) -> int:
    """Images of one size with a token for each patch; with Pixtral's tower, images of any size."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        return _of_merged_images(config, media)
    if "image_sizes" in media:
        raise ValueError(f"has image_sizes, which a model with the tower {vision.model_type!r} doesn't take.")
    left_out = config.vision_feature_select_strategy == "default"  # the first embedding of the tower
    return _of_squares(config, media, lambda _, patches: patches + _CLASS_TOKENS[vision.model_type] - left_out)


def _of_merged_images(config: Any, media: Media) -> int:
    """Images of any size, padded to one; the tower cuts out what `image_sizes` says (Pixtral, Mistral 3)."""
    if "image_sizes" not in media:
        raise ValueError("has pixel_values but no 'image_sizes'; pass all columns that the processor returns.")
    sizes, (height, width) = media["image_sizes"], media["pixel_values"].shape[2:]
    if (sizes > sizes.new_tensor([height, width])).any():
        raise ValueError(f"has image_sizes {sizes.tolist()!r:.100} for pixel_values of {height} x {width} pixels.")
    return int(
        (sizes // (_side(config.vision_config.patch_size) * getattr(config, "spatial_merge_size", 1))).prod(1).sum()
    )


def _of_rows(config: Any, media: Media) -> int:
    """Images resampled to a fixed number of tokens (Idefics 2), or with several patches a token (Idefics 3, SmolVLM).

    Images that are zero everywhere are padding for these models.
    """
    pixels, side = media["pixel_values"], _side(config.vision_config.patch_size)
    images, (height, width) = int((pixels != 0).flatten(1).any(1).sum()), pixels.shape[2:]
    if (resampled := getattr(config, "perceiver_config", None)) is not None:
        return images * int(resampled.resampler_n_latents)
    return images * ((height // side) * (width // side) // config.scale_factor**2)


def _of_places(config: Any, media: Media) -> int:
    """Images, or frames of all videos, of patches with a position each, padded; patches are pooled (Gemma 4)."""
    (_, values), (_, positions), *_ = media.items()
    counts = media.get("num_frames_per_video")
    if counts is not None and int(counts.sum()) != len(values):
        raise ValueError(f"has num_frames_per_video {counts.tolist()!r:.100} for {len(values)} frames.")
    used = (positions != -1).all(-1).sum(-1)
    return int((used // config.vision_config.pooling_kernel_size**2).sum())


def _side(size: Any) -> int:
    """The side of a square, of which some configurations have both."""
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _images(columns: Mapping[str, Column], count: Count, **settings: Any) -> Family:
    """A family that takes images alone."""
    return Family({IMAGES: Part(columns, count)}, **settings)


def _squares(tokens: Callable[[Any, int], int], **settings: Any) -> Family:
    """A family with images of one size, whose tokens are counted by the configuration and the patches of an image."""
    columns = {"pixel_values": Column("images channels height width")}
    return _images(columns, partial(_of_squares, tokens=tokens), **settings)


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
    parts = {IMAGES: Part(_IMAGE_GRIDS, _of_grids), VIDEOS: Part(videos, _of_grids, token)}
    return Family(parts, own_positions=True, types=MODALITIES, **settings)


_QWEN2_VL, _GLM4V = _grids(_VIDEO_GRIDS), _grids(_VIDEO_GRIDS, "image_token_id", both_kinds=False)
_GEMMA4 = {
    IMAGES: Part(_IMAGE_PLACES, _of_places),
    VIDEOS: Part(_VIDEO_PLACES, _of_places, "video_token_id"),
}

# By the model type of the whole model's configuration.
FAMILIES: dict[str, Family] = {
    "gemma3": _squares(lambda config, _: config.mm_tokens_per_image, types="token_type_ids"),
    "gemma4": Family(_GEMMA4, types=MODALITIES),
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "idefics2": _images(_PADDED_ROWS, _of_rows),
    "idefics3": _images(_ROWS, _of_rows),
    "internvl": _squares(lambda config, patches: round(patches * config.downsample_ratio**2)),
    "llama4": _squares(lambda config, patches: round(patches * config.vision_config.pixel_shuffle_ratio**2)),
    "llava": _images(
        {"pixel_values": _PADDED, "image_sizes": replace(_SIZES, optional=True)},
        _of_llava,
        towers=("pixtral", *_CLASS_TOKENS),
    ),
    "mistral3": _images({"pixel_values": _PADDED, "image_sizes": _SIZES}, _of_merged_images),
    "paligemma": _squares(lambda _, patches: patches, towers=("siglip_vision_model",), types_of_answers=True),
    "qwen2_5_vl": _grids(_TIMED_GRIDS),
    "qwen2_vl": _QWEN2_VL,
    "qwen3_5": _QWEN2_VL,
    "qwen3_5_moe": _QWEN2_VL,
    "qwen3_vl": _QWEN2_VL,
    "qwen3_vl_moe": _QWEN2_VL,
    "smolvlm": _images(_ROWS, _of_rows),
}
