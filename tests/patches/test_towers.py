"""Attention without documents: of towers in models that are patched by name, and among the states of one token."""

from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel, Qwen2_5_VLConfig
from transformers import Qwen2_5_VLForConditionalGeneration as Qwen2_5_VL

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.models import COMMON
from tests.patches.test_patching import EXACT

IMAGE = 5
VISION = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4}


def qwen(name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Two images of different sizes in one call of the tower, with offsets."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {
        **VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 1,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    tokens = {"image_token_id": IMAGE, "video_token_id": 4, "vision_start_token_id": 3, "vision_end_token_id": 6}
    config = Qwen2_5_VLConfig(text_config={**COMMON, "rope_parameters": rope}, vision_config=vision, **tokens)
    ids = torch.tensor([[7, 8, 3] + [IMAGE] * 16 + [9, 10, 3] + [IMAGE] * 8 + [11, 12]])
    call = {
        "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long(),
        "image_grid_thw": torch.tensor([[1, 8, 8], [1, 4, 8]]), "pixel_values": torch.randn(96, 48).double(),
    }  # fmt: skip
    return Qwen2_5_VL._from_config(config, attn_implementation=name), call


def gemma(name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A tower whose rows are images, and text in which image tokens see their whole image."""
    vision = {**VISION, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "vision_use_head": False}
    config = Gemma3Config(
        text_config={**COMMON, "sliding_window": 4, "model_type": "gemma3_text"},
        vision_config={**vision, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=6, eoi_token_index=7,
    )  # fmt: skip
    ids = torch.tensor([[8, 9, 6] + [IMAGE] * 4 + [7, 10, 11, 12, 13]])
    call = {
        "input_ids": ids, "token_type_ids": (ids == IMAGE).long(), "pixel_values": torch.randn(1, 3, 16, 16).double()
    }  # fmt: skip
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation=name), call


@pytest.mark.parametrize("make", [qwen, gemma])
def test_towers_loaded_by_name_compute_what_sdpa_computes(make: Any) -> None:
    results = []
    for attention in ("sdpa", "tritonpack"):
        torch.manual_seed(0)
        model, call = make(attention)
        model = model.double().eval()
        for parameter in model.parameters():
            torch.manual_seed(parameter.numel())
            parameter.data = 0.2 * torch.randn_like(parameter)
        assert model.config.vision_config._attn_implementation == attention
        torch.manual_seed(1)
        results.append(model(**make(attention)[1] | {"pixel_values": torch.randn_like(call["pixel_values"])}).logits)
    expected, got = (x.detach() for x in results)
    assert torch.isfinite(expected).all()
    assert float((expected - got).abs().max() / expected.abs().max()) < EXACT


@pytest.mark.fast("inkling2_text-eager")
@pytest.mark.parametrize("attention", ["tritonpack", "eager"])
@pytest.mark.parametrize("name", ["inkling2_text", "inkling2_loop_text"])
def test_attention_among_the_states_of_one_token(name: str, attention: Any) -> None:
    """It gets no mask, from the same function that layers call with one. Packed documents stay in one row."""
    model, pieces = zoo.tiny_model(name), zoo.documents(sweep.LENGTHS)
    expected = torch.cat([model(piece).logits for piece in pieces], dim=1)
    batch = sweep.FORMS["position_ids"](pieces)
    with tritonpack.patch(model, attention=attention) as handle:
        assert handle.report.attention == attention
        got = model(batch.ids, **batch.arguments).logits
    assert float((expected - got).abs().max() / expected.abs().max()) < sweep.tolerance(model)
