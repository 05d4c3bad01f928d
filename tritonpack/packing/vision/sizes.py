"""How many tokens and patches the images, or the videos, of an example have, by the configuration of its model.

Each function takes the configuration and the columns of one example, and raises ValueError if columns contradict each
other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

Media = Mapping[str, Tensor]
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # embeddings of a tower that aren't of patches


class ExampleSize(NamedTuple):
    """The size of an example, or of its images or videos.

    Attributes:
        tokens: the tokens of the row, those of images and videos included.
        patches: the squares of `patch_size` pixels that the vision tower embeds.
    """

    tokens: int
    patches: int


def of_grids(config: Any, media: Media, pixels: str, grids: str) -> ExampleSize:
    """Rows of patches, with the grid of each image or video (Qwen-VL)."""
    merge, grid, rows = config.vision_config.spatial_merge_size, media[grids], len(media[pixels])
    if grid.shape[1] != 3 or bool((grid < 1).any()) or bool((grid[:, 1:] % merge).any()):
        raise ValueError(
            f"has {grids} {grid.tolist()!r:.100}; it holds time, height and width of each in patches, at least 1, and "
            f"height and width are multiples of spatial_merge_size={merge}."
        )
    patches = int(grid.prod(1).sum())
    if patches != rows:
        raise ValueError(
            f"has {rows} rows of {pixels}, but its {grids} {grid.tolist()!r:.100} have {patches} patches. Pass both as "
            "the processor returns them: their first axis isn't that of a batch, so don't take [0] of it."
        )
    return ExampleSize(patches // merge**2, patches)


def of_plain_images(config: Any, media: Media) -> ExampleSize:
    """Images of one size with a token for each patch (LLaVA, PaliGemma). LLaVA with Pixtral's tower has any size."""
    vision, pixels = config.vision_config, media["pixel_values"]
    if vision.model_type == "pixtral":
        return of_merged_images(config, media)
    if "image_sizes" in media:
        raise ValueError(f"has image_sizes, which a model with the tower {vision.model_type!r} doesn't take.")
    patches = _square(config, pixels)
    extra = 0
    if (select := getattr(config, "vision_feature_select_strategy", None)) is not None:  # "default" drops the first
        extra = CLASS_TOKENS[vision.model_type] - (select == "default")
    return ExampleSize(len(pixels) * (patches + extra), len(pixels) * patches)


def of_pooled_images(config: Any, media: Media) -> ExampleSize:
    """Images of one size, pooled to a fixed number of tokens (Gemma 3)."""
    images = len(media["pixel_values"])
    return ExampleSize(images * config.mm_tokens_per_image, images * _square(config, media["pixel_values"]))


def of_shuffled_tiles(config: Any, media: Media) -> ExampleSize:
    """Tiles of one size; several neighbouring patches become one token (InternVL, Llama 4)."""
    tiles, patches = len(media["pixel_values"]), _square(config, media["pixel_values"])
    ratio = getattr(config, "downsample_ratio", None) or config.vision_config.pixel_shuffle_ratio
    return ExampleSize(tiles * round(patches * ratio**2), tiles * patches)


def of_merged_images(config: Any, media: Media) -> ExampleSize:
    """Images of any size, padded to one; the tower cuts out what `image_sizes` says (Pixtral, Mistral 3)."""
    if "image_sizes" not in media:
        raise ValueError("has pixel_values but no 'image_sizes'; pass all columns that the processor returns.")
    pixels, image_sizes = media["pixel_values"], media["image_sizes"]
    side, merge = _side(config.vision_config.patch_size), getattr(config, "spatial_merge_size", 1)
    _require_one_each(pixels, image_sizes, "image_sizes")
    height, width = pixels.shape[2:]
    if bool((image_sizes < side * merge).any()) or bool((image_sizes > image_sizes.new_tensor([height, width])).any()):
        raise ValueError(
            f"has image_sizes {image_sizes.tolist()!r:.100} for pixel_values of {height} x {width} pixels; an image "
            f"has at least {side * merge} pixels a side, and lies within its pixel_values."
        )
    patches = (image_sizes // side).prod(1)
    return ExampleSize(int((image_sizes // (side * merge)).prod(1).sum()), int(patches.sum()))


def of_tiled_images(config: Any, media: Media) -> ExampleSize:
    """Images in tiles, padded to the most tiles, with the image's own `image_sizes` (LLaVA-NeXT, LLaVA-OneVision)."""
    pixels, image_sizes = media["pixel_values"], media["image_sizes"]
    _require_one_each(pixels, image_sizes, "image_sizes")
    tile = _side(config.vision_config.image_size)
    if pixels.shape[3:] != (tile, tile):
        raise ValueError(f"has tiles of {tuple(pixels.shape[3:])} pixels; this model takes {tile} x {tile}.")
    counted = media.get("batch_num_images")
    if counted is not None and (bool((counted < 1).any()) or int(counted.sum()) != len(pixels)):
        raise ValueError(f"has batch_num_images {counted.tolist()} for {len(pixels)} images.")
    groups = [1] * len(pixels) if counted is None else [count for count in counted.tolist() for _ in range(count)]
    side = tile // _side(config.vision_config.patch_size)
    tokens, patches = 0, 0
    for size, group in zip(image_sizes.tolist(), groups, strict=True):
        if min(size) < 1:
            raise ValueError(f"has image_sizes {image_sizes.tolist()!r:.100}; heights and widths are at least 1.")
        tiles, unpadded = (0, 1) if group > 1 else _tiles(config, size, tile, side)  # of several: an overview, a mark
        if tiles + 1 > pixels.shape[1]:
            raise ValueError(
                f"has an image of {size[0]} x {size[1]} pixels, which is {tiles + 1} tiles, but {pixels.shape[1]} "
                "tiles in pixel_values; pass both as the processor returns them."
            )
        tokens += side**2 + unpadded
        patches += (tiles + 1) * side**2
    return ExampleSize(tokens, patches)


def _tiles(config: Any, size: list[int], tile: int, side: int) -> tuple[int, int]:
    """The tiles of an image beside its overview, and their tokens without padding, with a mark after each line."""
    height, width = size
    best = max(config.image_grid_pinpoints, key=lambda one: _fit(height, width, *one))
    rows, columns = (math.ceil(length / tile) for length in best)
    high, wide = best[0] // tile * side, best[1] // tile * side
    if width / height > wide / high:
        high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
    else:
        wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
    limit = getattr(config, "vision_aspect_ratio", None)  # such as anyres_max_9: at most 9 tiles, else scaled down
    if limit is not None:
        ratio = math.sqrt(high * wide / (int(limit.removeprefix("anyres_max_")) * side**2))
        if ratio > 1.1:
            high, wide = int(high // ratio), int(wide // ratio)
    return rows * columns, high * (wide + 1)


def _fit(height: int, width: int, best_height: int, best_width: int) -> tuple[int, int]:
    """Return the pixels of an image that a resolution keeps, then minus those it wastes; the largest is the best."""
    scale = min(best_width / width, best_height / height)
    kept = min(int(width * scale) * int(height * scale), width * height)
    return kept, kept - best_height * best_width


def of_pooled_videos(config: Any, media: Media) -> ExampleSize:
    """Frames of one size with a quarter of their patches, and a mark after each video (LLaVA-OneVision)."""
    videos, frames = media["pixel_values_videos"].shape[:2]
    side = _side(config.vision_config.image_size) // _side(config.vision_config.patch_size)
    return ExampleSize(videos * (frames * math.ceil(side / 2) ** 2 + 1), videos * frames * side**2)


def of_rows(config: Any, media: Media) -> ExampleSize:
    """Images resampled to a fixed number of tokens (Idefics 2), or with several patches a token (Idefics 3, SmolVLM).

    Images that are zero everywhere are padding for these models.
    """
    pixels, mask = media["pixel_values"], media.get("pixel_attention_mask")
    if mask is not None and mask.shape != (len(pixels), *pixels.shape[2:]):
        raise ValueError(
            f"has a pixel_attention_mask of shape {tuple(mask.shape)} for pixel_values of shape {tuple(pixels.shape)}."
        )
    height, width = pixels.shape[2:]
    side = _side(config.vision_config.patch_size)
    images, patches = int((pixels != 0).flatten(1).any(1).sum()), (height // side) * (width // side)
    resampled = getattr(config, "perceiver_config", None)
    tokens = patches // config.scale_factor**2 if resampled is None else resampled.resampler_n_latents
    return ExampleSize(images * tokens, images * patches)


def of_places(config: Any, media: Media, pixels_name: str, name: str) -> ExampleSize:
    """Images, or frames of all videos, of patches with a position each, padded; patches are pooled (Gemma 4)."""
    pixels, places, counts = media[pixels_name], media[name], media.get("num_frames_per_video")
    if pixels_name == "pixel_values_videos" and counts is not None and int(counts.sum()) != len(pixels):
        raise ValueError(f"has num_frames_per_video {counts.tolist()!r:.100} for {len(pixels)} frames.")
    if places.shape != (*pixels.shape[:2], 2):
        raise ValueError(f"has {name} of shape {tuple(places.shape)} for pixels of shape {tuple(pixels.shape)}.")
    used = (places != -1).all(-1).sum(-1)
    pooled = config.vision_config.pooling_kernel_size**2
    return ExampleSize(int((used // pooled).sum()), int(pixels.shape[0] * pixels.shape[1]))


def _square(config: Any, pixels: Tensor) -> int:
    """The number of patches of an image of the one size that a tower takes."""
    size = _side(config.vision_config.image_size)
    if pixels.shape[2:] != (size, size):
        raise ValueError(f"has images of {tuple(pixels.shape[2:])} pixels; this model takes {size} x {size}.")
    return int((size // _side(config.vision_config.patch_size)) ** 2)


def _side(size: Any) -> int:
    """The side of a square, of which some configurations have both."""
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _require_one_each(pixels: Tensor, values: Tensor, name: str) -> None:
    if values.shape != (len(pixels), 2):
        raise ValueError(
            f"has {name} of shape {tuple(values.shape)} for {len(pixels)} images; it holds height and width of each."
        )
