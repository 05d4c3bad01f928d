"""Images in packed documents: positions of three axes (Qwen2-VL), image tokens that see their whole image (Gemma 3)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import tritonpack
from tests.patches.models import COMMON

IMAGE, BEGIN, END = 60, 58, 59
EXACT = 64 * torch.finfo(torch.float32).eps  # as in tests/patches/sweep.py


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights so large that attention matters."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def text(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, 50, (1, count), generator=generator)


def document(patches: list[int], generator: torch.Generator) -> Tensor:
    """Text around images of these numbers of tokens."""
    pieces = [text(3, generator)]
    for count in patches:
        image = torch.full((1, count), IMAGE)
        pieces += [torch.tensor([[BEGIN]]), image, torch.tensor([[END]]), text(6, generator)]
    return torch.cat(pieces, dim=1)


def numbered(documents: list[Tensor]) -> Tensor:
    return torch.cat([torch.full_like(ids, i + 1) for i, ids in enumerate(documents)], dim=1)


def counted(documents: list[Tensor]) -> Tensor:
    return torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]


def differs(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def qwen() -> dict[str, Any]:
    """A tiny Qwen2-VL, three documents of one image each, their logits alone, and the call that packs them."""
    layers = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2, "embed_dim": 32, "depth": 1}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config={**COMMON, "rope_parameters": rope}, vision_config=layers, image_token_id=IMAGE, video_token_id=61,
        vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip
    model = spread(Qwen2VLForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    grids = [(1, 4, 6), (1, 6, 4), (1, 4, 4)]
    documents = [document([h * w // 4], generator) for _, h, w in grids]
    pixels = [torch.randn(h * w, 3 * 2 * 16, generator=generator, dtype=torch.float64) for _, h, w in grids]
    alone, places = [], []
    for ids, patches, grid in zip(documents, pixels, grids, strict=True):
        sizes, kinds = torch.tensor([grid]), (ids == IMAGE).int()
        alone.append(
            model(input_ids=ids, pixel_values=patches, image_grid_thw=sizes, mm_token_type_ids=kinds).logits.detach()
        )
        places.append(model.model.get_rope_index(ids, kinds, image_grid_thw=sizes)[0])
    ids = torch.cat(documents, dim=1)
    call = {
        "input_ids": ids, "pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }  # fmt: skip
    offsets = torch.tensor([0, *(d.shape[1] for d in documents)]).cumsum(0).int()
    return {
        "model": model, "alone": torch.cat(alone, dim=1), "call": call, "documents": documents,
        "places": torch.cat(places, dim=2), "offsets": offsets,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["three rows", "four rows", "offsets", "offsets alone", "segments", "segments alone"])
def test_positions_of_three_axes(qwen: dict[str, Any], form: str) -> None:
    """Positions by the collator, with text positions in front, and by the model for a whole row."""
    told: dict[str, Any] = {}
    if "alone" not in form:
        told["position_ids"] = qwen["places"]
    if form == "four rows":
        told["position_ids"] = torch.cat([counted(qwen["documents"])[None], qwen["places"]])
    if "offsets" in form:
        told |= {"cu_seq_lens_q": qwen["offsets"], "cu_seq_lens_k": qwen["offsets"]}
    if "segments" in form:
        told["attention_mask"] = numbered(qwen["documents"])
    model = qwen["model"]
    assert differs(qwen["alone"], model(**qwen["call"], **told).logits) > 0.1  # stock leaks in each form
    with tritonpack.patch(model) as handle:
        assert differs(qwen["alone"], model(**qwen["call"], **told).logits) < EXACT
        assert handle.report.left == ("model.visual",)


def row_of(qwen: dict[str, Any], numbers: list[int], width: int) -> dict[str, Tensor]:
    """Some of the documents in a row, filled up to a width."""
    ids = torch.cat([qwen["documents"][i] for i in numbers], dim=1)
    places = counted([qwen["documents"][i] for i in numbers])
    mask = torch.ones_like(ids)
    fill = (0, width - ids.shape[1])
    return {
        "input_ids": torch.nn.functional.pad(ids, fill), "position_ids": torch.nn.functional.pad(places, fill),
        "attention_mask": torch.nn.functional.pad(mask, fill),
    }  # fmt: skip


@pytest.mark.parametrize("inner", [False, True], ids=["head", "model"])
@pytest.mark.parametrize("form", ["a row", "a row and a mask", "a row and offsets", "two rows", "padded"])
def test_text_positions_with_images(qwen: dict[str, Any], form: str, inner: bool) -> None:
    """Position ids of two dimensions tell documents apart. The model makes positions of images itself."""
    model, documents = qwen["model"], qwen["documents"]
    call = dict(qwen["call"])
    if form.startswith("a row"):
        call["position_ids"] = counted(documents)
        spans = [(0, slice(None))]
    else:
        rows = [[0, 1], [2]] if form == "two rows" else [[0], [1], [2]]
        width = max(sum(documents[i].shape[1] for i in row) for row in rows)
        parts = [row_of(qwen, row, width) for row in rows]
        call |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        call["mm_token_type_ids"] = (call["input_ids"] == IMAGE).int()
        spans = [(r, slice(0, sum(documents[i].shape[1] for i in row))) for r, row in enumerate(rows)]
    if form == "a row and a mask":
        call["attention_mask"] = torch.ones_like(call["input_ids"])
    if form == "a row and offsets":
        call["cu_seq_lens_q"] = qwen["offsets"]

    def run() -> Tensor:
        values = model.lm_head(model.model(**call)[0]) if inner else model(**call).logits
        return torch.cat([values[row, span] for row, span in spans])[None]

    assert differs(qwen["alone"], run()) > 0.1
    with tritonpack.patch(model):
        assert differs(qwen["alone"], run()) < EXACT


def test_text_positions_without_images(qwen: dict[str, Any]) -> None:
    model, documents = qwen["model"], [text(n, torch.Generator().manual_seed(n)) for n in (7, 1, 4)]
    expected = torch.cat([model(ids).logits for ids in documents], dim=1)
    with tritonpack.patch(model):
        ids = torch.cat(documents, dim=1)
        assert differs(expected, model(ids, position_ids=counted(documents)).logits) < EXACT
        embeds = model.get_input_embeddings()(ids)
        assert differs(expected, model(inputs_embeds=embeds, position_ids=counted(documents)).logits) < EXACT
        rows = torch.cat([documents[0], documents[0]])
        places = torch.arange(7).expand(2, -1)
        assert differs(expected[:, :7], model(rows, position_ids=places).logits[1:]) < EXACT


def test_images_of_two_documents_side_by_side(qwen: dict[str, Any]) -> None:
    """Only the documents separate the two images."""
    model, generator = qwen["model"], torch.Generator().manual_seed(4)
    image = torch.full((1, 6), IMAGE)
    documents = [torch.cat([text(3, generator), image], 1), torch.cat([image, text(4, generator)], 1)]
    pixels = torch.randn(48, 96, generator=generator, dtype=torch.float64)
    grids = torch.tensor([[1, 4, 6], [1, 6, 4]])
    alone = [
        model(ids, pixel_values=patches, image_grid_thw=grid[None], mm_token_type_ids=(ids == IMAGE).int()).logits
        for ids, patches, grid in zip(documents, pixels.split(24), grids, strict=True)
    ]
    ids = torch.cat(documents, dim=1)
    call = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE).int()}
    for told in ({"position_ids": counted(documents)}, {"attention_mask": numbered(documents)}):
        with tritonpack.patch(model):
            assert differs(torch.cat(alone, dim=1), model(ids, **call, **told).logits) < EXACT


def test_generating_with_images_as_stock(qwen: dict[str, Any]) -> None:
    model, ids = qwen["model"], qwen["documents"][0]
    call = {
        "input_ids": ids, "pixel_values": qwen["call"]["pixel_values"][:24],
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "mm_token_type_ids": (ids == IMAGE).int(), "max_new_tokens": 4, "do_sample": False,
    }  # fmt: skip
    expected = model.generate(**call)
    with tritonpack.patch(model):
        assert torch.equal(model.generate(**call), expected)


def gemma() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4,
    }  # fmt: skip
    config = Gemma3Config(
        text_config={**COMMON, "layer_types": kinds, "sliding_window": 4, "query_pre_attn_scalar": 16},
        vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=BEGIN,
        eoi_token_index=END,
    )  # fmt: skip
    return spread(Gemma3ForConditionalGeneration(config))


def with_images(ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    count = int((ids == IMAGE).sum()) // 4
    pixels = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
def test_image_tokens_that_see_their_whole_image(attention: Any) -> None:
    """One image in the first and last document, two in the middle; windows shorter than an image."""
    model, generator = gemma(), torch.Generator().manual_seed(1)
    documents = [document([4] * n, generator) for n in (1, 2, 1)]
    calls = [with_images(ids, generator) for ids in documents]
    alone = torch.cat([model(**call).logits for call in calls], dim=1)
    packed = {key: torch.cat([call[key] for call in calls], 0 if key == "pixel_values" else 1) for key in calls[0]}
    places = {"position_ids": counted(documents)}
    for told in (
        places, {**places, "attention_mask": torch.ones_like(packed["input_ids"])},
        {"attention_mask": numbered(documents)},
    ):  # fmt: skip
        assert differs(alone, model(**packed, **told).logits) > 0.1
        with tritonpack.patch(model, attention=attention):
            assert differs(alone, model(**packed, **told).logits) < EXACT


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating_after_an_image(cache: str) -> None:
    model, generator = gemma(), torch.Generator().manual_seed(1)
    call = with_images(document([4, 4], generator), generator)
    options = {
        "max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "disable_compile": True,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = model.generate(**call, **options)
    with tritonpack.patch(model):
        got = model.generate(**call, **options)
    assert torch.equal(expected.sequences, got.sequences)
    assert differs(torch.stack(expected.logits), torch.stack(got.logits)) < EXACT
