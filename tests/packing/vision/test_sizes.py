"""Tokens of images of any size, against those that models of the published sizes make."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlavaNextConfig, LlavaNextModel, LlavaOnevisionConfig, LlavaOnevisionModel
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from tritonpack.packing.vision import sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "model", "options"),
    [
        (LlavaNextConfig(), LlavaNextModel, {"vision_feature_select_strategy": "default"}),
        (LlavaOnevisionConfig(), LlavaOnevisionModel, {"vision_aspect_ratio": "anyres_max_9"}),
    ],
    ids=["llava_next", "llava_onevision"],
)
def test_tiled_images(config: Any, model: Any, options: dict[str, str]) -> None:
    """The model's own method lays out features of one value; it reads nothing but the configuration."""
    tile, scaled = config.vision_config.image_size, 0
    side = tile // config.vision_config.patch_size
    config.image_grid_pinpoints = config.image_grid_pinpoints[::-1]  # so that the first isn't the least
    draw = torch.Generator().manual_seed(0)
    drawn = torch.cat([torch.randint(1, most, (150, 2), generator=draw) for most in (400, 3000)])
    for height, width in drawn.tolist():
        size = torch.tensor([[height, width]])
        tiles = image_size_to_num_patches((height, width), config.image_grid_pinpoints, tile)
        _, expected = model.pack_image_features(
            SimpleNamespace(config=config),
            [torch.zeros(tiles, side**2, 1)],
            size,
            image_newline=torch.zeros(1),
            **options,
        )
        pixels = torch.zeros(1, 1, 1, 1, 1).expand(1, tiles, 3, tile, tile)
        made = sizes.of_tiled_images(config, {"pixel_values": pixels, "image_sizes": size})
        assert made == (int(expected), tiles * side**2), (height, width)
        scaled += tiles > 10
    assert scaled > 20 or not hasattr(config, "vision_aspect_ratio")  # images of more tiles than the model keeps
