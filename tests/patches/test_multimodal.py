"""Images and sounds in packed documents: positions of three axes (Qwen), image tokens that see their whole image (Gemma
3), prompts that see both ways (PaliGemma)."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import tritonpack
from tests.patches.calls import EXACT, relative
from tests.patches.comparison import apart, gradients_of
from tests.patches.models import COMMON
from tests.patches.zoo import spread
from tritonpack.testing import check_isolation

IMAGE, BEGIN, END = 60, 58, 59


def build(kind: Any, config: Any) -> PreTrainedModel:
    """A model with weights so large that attention matters."""
    torch.manual_seed(0)
    model = kind._from_config(config, experts_implementation="eager")
    spread(model, torch.Generator().manual_seed(0))
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


@pytest.fixture(scope="module")
def qwen() -> dict[str, Any]:
    """A tiny Qwen2-VL, three documents of one image each, their logits alone, and the call that packs them."""
    layers = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2, "embed_dim": 32, "depth": 1}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config={**COMMON, "rope_parameters": rope}, vision_config=layers, image_token_id=IMAGE, video_token_id=61,
        vision_start_token_id=BEGIN, vision_end_token_id=END,
    )  # fmt: skip
    model = build(Qwen2VLForConditionalGeneration, config)
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
    assert relative(qwen["alone"], model(**qwen["call"], **told).logits) > 0.1  # stock leaks in each form
    with tritonpack.patch(model) as handle:
        assert relative(qwen["alone"], model(**qwen["call"], **told).logits) < EXACT
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

    assert relative(qwen["alone"], run()) > 0.1
    with tritonpack.patch(model):
        assert relative(qwen["alone"], run()) < EXACT


def test_text_positions_without_images(qwen: dict[str, Any]) -> None:
    model, documents = qwen["model"], [text(n, torch.Generator().manual_seed(n)) for n in (7, 1, 4)]
    expected = torch.cat([model(ids).logits for ids in documents], dim=1)
    with tritonpack.patch(model):
        ids = torch.cat(documents, dim=1)
        assert relative(expected, model(ids, position_ids=counted(documents)).logits) < EXACT
        embeds = model.get_input_embeddings()(ids)
        assert relative(expected, model(inputs_embeds=embeds, position_ids=counted(documents)).logits) < EXACT
        rows = torch.cat([documents[0], documents[0]])
        places = torch.arange(7).expand(2, -1)
        assert relative(expected[:, :7], model(rows, position_ids=places).logits[1:]) < EXACT


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
            assert relative(torch.cat(alone, dim=1), model(ids, **call, **told).logits) < EXACT


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
    return build(Gemma3ForConditionalGeneration, config)


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
        assert relative(alone, model(**packed, **told).logits) > 0.1
        with tritonpack.patch(model, attention=attention):
            assert relative(alone, model(**packed, **told).logits) < EXACT


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
    assert relative(torch.stack(expected.logits), torch.stack(got.logits)) < EXACT


# Other families of Qwen

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


def family_of(family: str) -> PreTrainedModel:
    name, prefix, parts = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(module, f"{prefix}Config")(**parts, **TOKENS)
    for token, number in {**TOKENS, **SOUNDS}.items():
        setattr(config, token, number)
    return build(getattr(module, f"{prefix}ForConditionalGeneration"), config)


@pytest.mark.fast("qwen3_vl")
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_with_images(family: str) -> None:
    model, generator = family_of(family), torch.Generator().manual_seed(1)
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
    assert relative(alone, run(row, torch.cat(pixels), grids, position_ids=counted(documents))) > 0.1
    with tritonpack.patch(model):
        for told in (
            {"position_ids": counted(documents)},
            {"attention_mask": numbered(documents)},
            {"cu_seq_lens_q": offsets, "position_ids": counted(documents)},
        ):
            assert relative(alone, run(row, torch.cat(pixels), grids, **told)) < EXACT, list(told)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_documents_with_sounds_and_one_with_an_image(family: str) -> None:
    model, generator = family_of(family), torch.Generator().manual_seed(1)
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
            assert relative(torch.cat(alone, dim=1), got) < EXACT, list(told)


# PaliGemma: by token_type_ids, image and prompt of a document see each other, and its answer is causal

PROMPTS, ANSWERS = (3, 1, 6), (4, 7, 1)  # tokens of each document, after those of its image
GEMMA2 = {"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
PALI = {"gemma": {}, "gemma2": GEMMA2}


def pali(family: str) -> PaliGemmaConfig:
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    return PaliGemmaConfig(
        text_config={**COMMON, **PALI[family], "model_type": family},
        vision_config={**vision, "model_type": "siglip_vision_model"},
        image_token_index=IMAGE, projection_dim=32, hidden_size=32, vocab_size=64,
    )  # fmt: skip


def prompts() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Tokens, their types, and an image for each."""
    generator = torch.Generator().manual_seed(1)
    ids = [
        torch.cat([torch.full((1, 4), IMAGE), text(prompt + answer, generator)], dim=1)
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
    ]
    types = [(torch.arange(x.shape[1]) >= 4 + prompt).long()[None] for x, prompt in zip(ids, PROMPTS, strict=True)]
    return ids, types, torch.randn(len(ids), 3, 8, 8, generator=generator, dtype=torch.float64)


def alone(model: PreTrainedModel, **more: Any) -> list[Any]:
    return [
        model(input_ids=ids, token_type_ids=types, pixel_values=image, **more)
        for ids, types, image in zip(prompts()[0], prompts()[1], prompts()[2][:, None], strict=True)
    ]


@pytest.mark.parametrize("family", PALI)
def test_packed_documents_with_an_image_each(family: str) -> None:
    model = build(PaliGemmaForConditionalGeneration, pali(family))
    ids, types, images = prompts()
    expected = torch.cat([output.logits for output in alone(model)], dim=1)
    gradients = gradients_of(model, expected)
    row = {"input_ids": torch.cat(ids, 1), "token_type_ids": torch.cat(types, 1), "pixel_values": images}
    assert relative(expected.detach(), model(**row).logits.detach()) > 0.1
    with tritonpack.patch(model):
        for told in (
            {"position_ids": counted(ids)},
            {"position_ids": counted(ids) + 1},  # as the model counts them
            {"attention_mask": numbered(ids)},
            {"cu_seq_lens_q": torch.tensor([0, *(x.shape[1] for x in ids)]).cumsum(0).int()},
        ):
            got = model(**row, **told).logits
            assert relative(expected.detach(), got.detach()) < EXACT, list(told)
    assert apart(gradients, gradients_of(model, got)) < EXACT


@torch.no_grad()
def test_rows_of_one_document_padded_and_not() -> None:
    model = build(PaliGemmaForConditionalGeneration, pali("gemma"))
    ids, types, images = prompts()
    expected = [output.logits[0] for output in alone(model)]
    width = max(x.shape[1] for x in ids)
    for left in (False, True):

        def rows(values: list[Tensor], left: bool = left) -> Tensor:
            fill = [width - x.shape[1] for x in values]
            sides = [(n, 0) if left else (0, n) for n in fill]
            return torch.cat([torch.nn.functional.pad(x, side) for x, side in zip(values, sides, strict=True)])

        mask = rows([torch.ones_like(x) for x in ids])
        call = {"input_ids": rows(ids), "token_type_ids": rows(types), "pixel_values": images, "attention_mask": mask}
        with tritonpack.patch(model):
            got = model(**call).logits
        assert relative(torch.cat(expected), got[mask.bool()]) < EXACT


@torch.no_grad()
def test_a_call_without_types_is_refused() -> None:
    """Without types, stock sees both directions in a batch without padding, and one direction in a batch with it."""
    model = build(PaliGemmaForConditionalGeneration, pali("gemma"))
    ids, _, images = prompts()
    call = {"input_ids": torch.cat(ids, 1), "pixel_values": images, "position_ids": counted(ids)}
    with tritonpack.patch(model), pytest.raises(ValueError, match="Pass token_type_ids"):
        model(**call)
    settings = pali("gemma")
    settings.text_config.use_bidirectional_attention = False
    model = build(PaliGemmaForConditionalGeneration, settings)
    expected = [model(input_ids=x, pixel_values=image).logits for x, image in zip(ids, images[:, None], strict=True)]
    with tritonpack.patch(model):
        assert relative(torch.cat(expected, 1), model(**call).logits) < EXACT


def test_isolation_is_checked_with_prompts() -> None:
    model = build(PaliGemmaForConditionalGeneration, pali("gemma")).float()
    with pytest.raises(tritonpack.IsolationError):
        check_isolation(model)
    with tritonpack.patch(model):
        check_isolation(model)


@pytest.mark.parametrize(("family", "cache"), [("gemma", "dynamic"), ("gemma", "static"), ("gemma2", "dynamic")])
def test_generation(family: str, cache: str) -> None:
    """A batch of prompts, padded on the left. Stock PaliGemma 2 can't use a static cache."""
    model = build(PaliGemmaForConditionalGeneration, pali(family))
    ids, _, images = prompts()
    width = max(x.shape[1] for x in ids)
    rows = torch.cat([torch.nn.functional.pad(x, (width - x.shape[1], 0)) for x in ids])
    call = {"input_ids": rows, "pixel_values": images, "token_type_ids": torch.zeros_like(rows)}
    call |= {"attention_mask": (rows != 0).long(), "max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    call |= {"cache_implementation": cache, "disable_compile": True}
    expected = model.generate(**call)
    with tritonpack.patch(model):
        assert torch.equal(model.generate(**call), expected)


@torch.no_grad()
def test_colpali() -> None:
    model = build(ColPaliForRetrieval, ColPaliConfig(vlm_config=pali("gemma").to_dict(), embedding_dim=8))
    ids, types, images = prompts()
    expected = torch.cat([output.embeddings for output in alone(model)], dim=1)
    row = {"input_ids": torch.cat(ids, 1), "token_type_ids": torch.cat(types, 1), "pixel_values": images}
    with tritonpack.patch(model):
        for told in ({"position_ids": counted(ids)}, {"attention_mask": numbered(ids)}):
            assert relative(expected, model(**row, **told).embeddings) < EXACT
