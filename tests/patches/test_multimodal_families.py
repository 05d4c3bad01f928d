"""Families that make positions of tokens and images themselves: packed documents with images and text positions."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches.models import COMMON
from tests.patches.test_multimodal import BEGIN, EXACT, IMAGE, counted, differs, document, numbered, text
from tests.small_copies.small_copy import spread

ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
TEXT: dict[str, Any] = {**COMMON, "rope_parameters": ROPE}
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [0]}
DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
    "output_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": BEGIN, "vision_end_token_id": 59}
SOUNDS = {"audio_token_id": 62, "audio_start_token_id": 57, "audio_end_token_id": 56}

# The module, the prefix of its classes, and the parts of the configuration.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VL", {"text_config": TEXT, "vision_config": {**VISION, **WINDOWS}}),
    "qwen3_vl": ("qwen3_vl", "Qwen3VL", {"text_config": TEXT, "vision_config": {**VISION, **DEEP}}),
    "qwen2_5_omni": (
        "qwen2_5_omni",
        "Qwen2_5OmniThinker",
        {"text_config": TEXT, "vision_config": {**VISION, **WINDOWS}, "audio_config": AUDIO},
    ),
    "qwen3_omni": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinker",
        {"text_config": {**TEXT, **EXPERTS}, "vision_config": {**VISION, **DEEP}, "audio_config": AUDIO},
    ),
}


def build(family: str) -> PreTrainedModel:
    name, prefix, parts = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(module, f"{prefix}Config")(**parts, **TOKENS)
    for token, number in {**TOKENS, **SOUNDS}.items():
        setattr(config, token, number)
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}ForConditionalGeneration")._from_config(config, experts_implementation="eager")
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()


@pytest.mark.fast("qwen3_vl")
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_with_images(family: str) -> None:
    model, generator = build(family), torch.Generator().manual_seed(1)
    grids = [(1, 4, 6), (1, 6, 4), (1, 4, 4)]
    documents = [document([h * w // 4], generator) for _, h, w in grids]
    pixels = [torch.randn(h * w, 3 * 2 * 16, generator=generator, dtype=torch.float64) for _, h, w in grids]

    def run(ids: Tensor, patches: Tensor, sizes: list[tuple[int, int, int]], **told: Tensor) -> Tensor:
        kinds = {} if "omni" in family else {"mm_token_type_ids": (ids == IMAGE).int()}
        return model(
            input_ids=ids, pixel_values=patches, image_grid_thw=torch.tensor(sizes), **kinds, **told
        ).logits.detach()

    alone = torch.cat(
        [
            run(ids, patches, [grid], attention_mask=torch.ones_like(ids))
            for ids, patches, grid in zip(documents, pixels, grids, strict=True)
        ],
        dim=1,
    )
    row, offsets = torch.cat(documents, dim=1), torch.tensor([0, *(d.shape[1] for d in documents)]).cumsum(0)
    assert differs(alone, run(row, torch.cat(pixels), grids, position_ids=counted(documents))) > 0.1
    with tritonpack.patch(model):
        for told in (
            {"position_ids": counted(documents)},
            {"attention_mask": numbered(documents)},
            {"cu_seq_lens_q": offsets, "position_ids": counted(documents)},
        ):
            assert differs(alone, run(row, torch.cat(pixels), grids, **told)) < EXACT, list(told)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_documents_with_sounds_and_one_with_an_image(family: str) -> None:
    model, generator = build(family), torch.Generator().manual_seed(1)
    frames, grid = (40, 64, 24), torch.tensor([[1, 4, 4]])
    sounds = torch.randn(3, 8, max(frames), generator=generator, dtype=torch.float64)
    heard = (torch.arange(max(frames)) < torch.tensor(frames)[:, None]).long()
    pixels = torch.randn(16, 3 * 2 * 16, generator=generator, dtype=torch.float64)
    documents, alone = [], []
    for sound, inside in zip(sounds[:, None], heard[:, None], strict=True):
        given = {"input_features": sound, "feature_attention_mask": inside}
        length = model.model.get_audio_features(**given, return_dict=True).last_hidden_state.shape[-2]
        begin, middle, end = text(3, generator), torch.full((1, length), SOUNDS["audio_token_id"]), text(5, generator)
        ids = torch.cat([begin, torch.tensor([[57]]), middle, torch.tensor([[56]]), end], dim=1)
        documents.append(ids)
        alone.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits)
    ids, image = document([4], generator), {"pixel_values": pixels, "image_grid_thw": grid}
    documents.append(ids)
    alone.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), **image).logits)
    call = {"input_features": sounds, "feature_attention_mask": heard, **image}
    with tritonpack.patch(model):
        for told in ({"position_ids": counted(documents)}, {"attention_mask": numbered(documents)}):
            got = model(input_ids=torch.cat(documents, dim=1), **told, **call).logits
            assert differs(torch.cat(alone, dim=1), got) < EXACT, list(told)
