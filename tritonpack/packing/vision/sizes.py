"""The number of tokens of the images, or the videos, of an example, by the configuration of its model.

Each function takes the configuration and the columns of the images, or of the videos, of one example, pixels first. It
raises ValueError if columns contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Media = Mapping[str, Tensor]
CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # embeddings of a tower that aren't of patches


def of_grids(config: Any, media: Media) -> int:
    """Rows of patches, with the grid of each image or video (Qwen-VL)."""
    (pixels, rows), (grids, grid), *_ = media.items()
    if int(grid.prod(1).sum()) != len(rows):
        raise ValueError(
            f"has {len(rows)} rows of {pixels}, but its {grids} {grid.tolist()!r:.100} have {int(grid.prod(1).sum())} "
            "patches. Pass both as the processor returns them: their first axis isn't that of a batch, so don't take "
            "[0] of it."
        )
    merge = config.vision_config.spatial_merge_size
    return int((grid[:, 0] * (grid[:, 1] // merge) * (grid[:, 2] // merge)).sum())


def of_squares(config: Any, media: Media, tokens: Callable[[Any, int], int]) -> int:
    """Images, or tiles, of the one size that a tower takes.

    Args:
        tokens: returns the tokens of an image, by the configuration and the patches of an image.
    """
    pixels, size = media["pixel_values"], _side(config.vision_config.image_size)
    if pixels.shape[2:] != (size, size):
        raise ValueError(f"has images of {tuple(pixels.shape[2:])} pixels; this model takes {size} x {size}.")
    patches = (size // _side(config.vision_config.patch_size)) ** 2
    return len(pixels) * tokens(config, patches)


def of_llava(config: Any, media: Media) -> int:
    """Images of one size with a token for each patch; with Pixtral's tower, images of any size."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        return of_merged_images(config, media)
    if "image_sizes" in media:
        raise ValueError(f"has image_sizes, which a model with the tower {vision.model_type!r} doesn't take.")
    left_out = config.vision_feature_select_strategy == "default"  # the first embedding of the tower
    return of_squares(config, media, lambda _, patches: patches + CLASS_TOKENS[vision.model_type] - left_out)


def of_merged_images(config: Any, media: Media) -> int:
    """Images of any size, padded to one; the tower cuts out what `image_sizes` says (Pixtral, Mistral 3)."""
    if "image_sizes" not in media:
        raise ValueError("has pixel_values but no 'image_sizes'; pass all columns that the processor returns.")
    sizes, (height, width) = media["image_sizes"], media["pixel_values"].shape[2:]
    if (sizes > sizes.new_tensor([height, width])).any():
        raise ValueError(
            f"has image_sizes {sizes.tolist()!r:.100} for pixel_values of {height} x {width} pixels; an image lies "
            "within its pixel_values."
        )
    return int(
        (sizes // (_side(config.vision_config.patch_size) * getattr(config, "spatial_merge_size", 1))).prod(1).sum()
    )


def of_rows(config: Any, media: Media) -> int:
    """Images resampled to a fixed number of tokens (Idefics 2), or with several patches a token (Idefics 3, SmolVLM).

    Images that are zero everywhere are padding for these models.
    """
    pixels, side = media["pixel_values"], _side(config.vision_config.patch_size)
    images, (height, width) = int((pixels != 0).flatten(1).any(1).sum()), pixels.shape[2:]
    if (resampled := getattr(config, "perceiver_config", None)) is not None:
        return images * int(resampled.resampler_n_latents)
    return images * ((height // side) * (width // side) // config.scale_factor**2)


def of_places(config: Any, media: Media) -> int:
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
