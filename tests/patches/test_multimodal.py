"""Images and sounds in packed documents: positions of three axes (Qwen), image tokens that see their whole image (Gemma
3), prompts that see both ways (PaliGemma)."""

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    ColPaliConfig,
    ColPaliForRetrieval,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
)

import tritonpack
from tests.patches.calls import EXACT, relative
from tests.patches.comparison import apart, gradients_of
from tests.patches.models import COMMON
from tests.patches.zoo import spread
from tritonpack.patches.measuring import lay_out
from tritonpack.testing import check_isolation

IMAGE, BEGIN, END, SOUND = 60, 58, 59, 62


def build(kind: Any, config: Any, attention: str | None = None) -> PreTrainedModel:
    """A model with weights so large that attention matters."""
    torch.manual_seed(0)
    model = kind._from_config(config, experts_implementation="eager", attn_implementation=attention)
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


def offsets(documents: list[Tensor]) -> Tensor:
    return torch.tensor([0, *(ids.shape[1] for ids in documents)]).cumsum(0).int()


# Qwen: the module, the prefix of its classes, and the parts of the configuration.
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
TEXT: dict[str, Any] = {**COMMON, "rope_parameters": ROPE}
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
}  # fmt: skip
FIRST = {"hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2, "embed_dim": 32, "depth": 1}
WINDOWS = {**VISION, "window_size": 16, "fullatt_block_indexes": [0]}
DEEP = {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
    "output_dim": 32,
}  # fmt: skip
EXPERTS = {**TEXT, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
    "audio_token_id": SOUND, "audio_start_token_id": 57, "audio_end_token_id": 56,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", {"text_config": TEXT, "vision_config": FIRST}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"text_config": TEXT, "vision_config": WINDOWS}),
    "qwen3_vl": ("Qwen3VL", {"text_config": TEXT, "vision_config": DEEP}),
    "qwen2_5_omni": ("Qwen2_5OmniThinker", {"text_config": TEXT, "vision_config": WINDOWS, "audio_config": AUDIO}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinker", {"text_config": EXPERTS, "vision_config": DEEP, "audio_config": AUDIO}),
}


class Images(NamedTuple):
    """A model of a family, documents of one image each, their logits alone, and the call that packs them."""

    model: PreTrainedModel
    documents: list[Tensor]
    alone: Tensor
    call: dict[str, Any]

    def run(self, **told: Any) -> Tensor:
        return self.model(**self.call, **told).logits.detach()


def kinds(family: str, ids: Tensor) -> dict[str, Tensor]:
    return {} if "omni" in family else {"mm_token_type_ids": (ids == IMAGE).int()}


def qwen(family: str = "qwen2_vl", attention: str | None = None) -> Images:
    prefix, parts = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(module, f"{prefix}Config")(**parts)
    for token, number in TOKENS.items():
        setattr(config, token, number)
    model = build(getattr(module, f"{prefix}ForConditionalGeneration"), config, attention)
    generator, grids = torch.Generator().manual_seed(1), [(1, 4, 6), (1, 6, 4), (1, 4, 4)]
    documents = [document([h * w // 4], generator) for _, h, w in grids]
    pixels = [torch.randn(h * w, 3 * 2 * 16, generator=generator, dtype=torch.float64) for _, h, w in grids]

    def call(ids: Tensor, patches: Tensor, sizes: list[Any]) -> dict[str, Any]:
        given = {"input_ids": ids, "pixel_values": patches, "image_grid_thw": torch.tensor(sizes)}
        return {**given, **kinds(family, ids)}

    calls = [call(ids, x, [grid]) for ids, x, grid in zip(documents, pixels, grids, strict=True)]
    alone = [model(**one, attention_mask=torch.ones_like(one["input_ids"])).logits.detach() for one in calls]
    row = torch.cat(documents, dim=1)
    return Images(model, documents, torch.cat(alone, dim=1), call(row, torch.cat(pixels), grids))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast("qwen2_vl", "qwen3_vl")
def test_a_row_of_documents_with_images(family: str) -> None:
    """Text positions, offsets and numbers tell documents apart; the model makes positions of images itself. A collator
    may give positions of three axes, with text positions in front, too."""
    images = qwen(family)
    model, documents = images.model, images.documents
    places, numbers = {"position_ids": counted(documents)}, {"attention_mask": numbered(documents)}
    both = {"cu_seq_lens_q": offsets(documents), "cu_seq_lens_k": offsets(documents)}
    forms = [
        places,
        numbers,
        both,
        {**both, **places},
        {**places, "attention_mask": torch.ones_like(counted(documents))},
    ]
    if family == "qwen2_vl":
        sizes = images.call["image_grid_thw"][:, None]
        axes = [
            model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=size)[0]
            for ids, size in zip(documents, sizes, strict=True)
        ]
        three = {"position_ids": torch.cat(axes, dim=2)}
        four = {"position_ids": torch.cat([counted(documents)[None], three["position_ids"]])}
        forms += [three, four, {**three, **both}, {**three, **numbers}]
    for told in forms:
        assert relative(images.alone, images.run(**told)) > 0.1  # stock leaks
        with tritonpack.patch(model) as handle:
            assert relative(images.alone, images.run(**told)) < EXACT, list(told)
            inner = model.lm_head(model.model(**images.call, **told)[0])
            assert relative(images.alone, inner) < EXACT, list(told)
            assert "visual" in handle.report.left[0] or "visual" in handle.report.left[-1]


@pytest.mark.parametrize("rows", [[[0, 1], [2]], [[0], [1], [2]]], ids=["two rows", "padded"])
def test_rows_of_documents_with_images(rows: list[list[int]]) -> None:
    images = qwen()
    batch = lay_out(rows, images.documents)
    call = {**images.call, "input_ids": batch.ids, **kinds("qwen2_vl", batch.ids), **batch.arguments}
    with tritonpack.patch(images.model):
        assert relative(images.alone[0], batch.gather(images.model(**call).logits)) < EXACT


def test_text_without_images_and_images_side_by_side() -> None:
    model, generator = qwen().model, torch.Generator().manual_seed(4)
    documents = [text(n, generator) for n in (7, 1, 4)]
    expected = torch.cat([model(ids).logits for ids in documents], dim=1)
    ids, told = torch.cat(documents, dim=1), {"position_ids": counted(documents)}
    with tritonpack.patch(model):
        assert relative(expected, model(ids, **told).logits) < EXACT
        assert relative(expected, model(inputs_embeds=model.get_input_embeddings()(ids), **told).logits) < EXACT
        rows = {"input_ids": documents[0].repeat(2, 1), "position_ids": torch.arange(7).expand(2, -1)}
        assert relative(expected[:, :7], model(**rows).logits[1:]) < EXACT
    image = torch.full((1, 6), IMAGE)
    documents = [torch.cat([text(3, generator), image], 1), torch.cat([image, text(4, generator)], 1)]
    pixels = torch.randn(48, 96, generator=generator, dtype=torch.float64)
    grids, ids = torch.tensor([[1, 4, 6], [1, 6, 4]]), torch.cat(documents, dim=1)
    each = zip(documents, pixels.split(24), grids[:, None], strict=True)
    alone = [model(ids, pixel_values=x, image_grid_thw=grid, **kinds("qwen2_vl", ids)).logits for ids, x, grid in each]
    with tritonpack.patch(model):
        for told in ({"position_ids": counted(documents)}, {"attention_mask": numbered(documents)}):
            call = {"pixel_values": pixels, "image_grid_thw": grids, **kinds("qwen2_vl", ids), **told}
            assert relative(torch.cat(alone, dim=1), model(ids, **call).logits) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_documents_with_sounds_and_one_with_an_image(family: str) -> None:
    model, generator = qwen(family).model, torch.Generator().manual_seed(1)
    frames, grid = (40, 64, 24), torch.tensor([[1, 4, 4]])
    sounds = torch.randn(3, 8, max(frames), generator=generator, dtype=torch.float64)
    heard = (torch.arange(max(frames)) < torch.tensor(frames)[:, None]).long()
    pixels = torch.randn(16, 3 * 2 * 16, generator=generator, dtype=torch.float64)
    documents, alone = [], []
    for sound, inside in zip(sounds[:, None], heard[:, None], strict=True):
        given = {"input_features": sound, "feature_attention_mask": inside}
        length = model.model.get_audio_features(**given, return_dict=True).last_hidden_state.shape[-2]
        begin, middle, end = text(3, generator), torch.full((1, length), SOUND), text(5, generator)
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


SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def gemma(attention: str | None = None) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config={**COMMON, "layer_types": kinds, "sliding_window": 4, "query_pre_attn_scalar": 16},
        vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=BEGIN,
        eoi_token_index=END,
    )  # fmt: skip
    return build(Gemma3ForConditionalGeneration, config, attention)


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
        places,
        {**places, "attention_mask": numbered(documents) * 0 + 1},
        {"attention_mask": numbered(documents)},
    ):
        assert relative(alone, model(**packed, **told).logits) > 0.1
        with tritonpack.patch(model, attention=attention):
            assert relative(alone, model(**packed, **told).logits) < EXACT


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_towers_loaded_by_name_compute_what_sdpa_computes(family: str) -> None:
    """A tower whose rows are images, and one that takes images of different sizes in one row, with offsets."""
    results = []
    for attention in ("sdpa", "tritonpack"):
        if family == "gemma3":
            model, generator = gemma(attention), torch.Generator().manual_seed(1)
            results.append(model(**with_images(document([4], generator), generator)).logits)
        else:
            images = qwen(family, attention)
            model = images.model
            results.append(images.run())
        assert model.config.vision_config._attn_implementation == attention
    assert relative(*results) < EXACT


# PaliGemma: by token_type_ids, image and prompt of a document see each other, and its answer is causal
PROMPTS, ANSWERS = (3, 1, 6), (4, 7, 1)  # tokens of each document, after those of its image
GEMMA2 = {"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
PALI: dict[str, dict[str, Any]] = {"gemma": {}, "gemma2": GEMMA2}


def pali(family: str) -> PaliGemmaConfig:
    vision = {**SIGLIP, "image_size": 8, "vision_use_head": False, "model_type": "siglip_vision_model"}
    return PaliGemmaConfig(
        text_config={**COMMON, **PALI[family], "model_type": family}, vision_config=vision, image_token_index=IMAGE,
        projection_dim=32, hidden_size=32, vocab_size=64,
    )  # fmt: skip


def prompts() -> list[dict[str, Tensor]]:
    """A call for each document."""
    generator, calls = torch.Generator().manual_seed(1), []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = torch.cat([torch.full((1, 4), IMAGE), text(prompt + answer, generator)], dim=1)
        types = (torch.arange(ids.shape[1]) >= 4 + prompt).long()[None]
        pixels = torch.randn(1, 3, 8, 8, generator=generator, dtype=torch.float64)
        calls.append({"input_ids": ids, "token_type_ids": types, "pixel_values": pixels})
    return calls


def together(calls: list[dict[str, Tensor]], left: bool | None = None) -> dict[str, Tensor]:
    """The documents of several calls in one row, or each in a row of its own, padded on one side."""
    if left is None:
        return {
            name: torch.cat([call[name] for call in calls], 0 if name == "pixel_values" else 1) for name in calls[0]
        }
    found: dict[str, list[Tensor]] = {}
    width = max(call["input_ids"].shape[1] for call in calls)
    for call in calls:
        fill = width - call["input_ids"].shape[1]
        for name, x in {**call, "attention_mask": torch.ones_like(call["input_ids"])}.items():
            padded = x if name == "pixel_values" else nn.functional.pad(x, (fill, 0) if left else (0, fill))
            found.setdefault(name, []).append(padded)
    return {name: torch.cat(values) for name, values in found.items()}


@pytest.mark.parametrize("family", PALI)
def test_prompts_with_an_image_each(family: str) -> None:
    model, calls = build(PaliGemmaForConditionalGeneration, pali(family)), prompts()
    expected = torch.cat([model(**call).logits for call in calls], dim=1)
    gradients, row, ids = gradients_of(model, expected), together(calls), [call["input_ids"] for call in calls]
    assert relative(expected, model(**row).logits) > 0.1
    with tritonpack.patch(model):
        for told in (
            {"position_ids": counted(ids)},
            {"position_ids": counted(ids) + 1},  # as the model counts them
            {"attention_mask": numbered(ids)},
            {"cu_seq_lens_q": offsets(ids)},
        ):
            got = model(**row, **told).logits
            assert relative(expected, got) < EXACT, list(told)
        assert apart(gradients, gradients_of(model, got)) < EXACT
        for left in (False, True):
            rows = together(calls, left)
            assert relative(expected[0], model(**rows).logits[rows["attention_mask"].bool()]) < EXACT
    model = build(ColPaliForRetrieval, ColPaliConfig(vlm_config=pali(family).to_dict(), embedding_dim=8))
    expected = torch.cat([model(**call).embeddings for call in calls], dim=1)
    with tritonpack.patch(model):
        assert relative(expected, model(**row, attention_mask=numbered(ids)).embeddings) < EXACT


@torch.no_grad()
def test_a_call_without_types_is_refused() -> None:
    """Without types, stock sees both directions in a batch without padding, and one direction in a batch with it."""
    settings, calls = pali("gemma"), prompts()
    row = together(calls) | {"position_ids": counted([call["input_ids"] for call in calls])}
    for call in (row, *calls):
        del call["token_type_ids"]
    model = build(PaliGemmaForConditionalGeneration, settings)
    with tritonpack.patch(model), pytest.raises(ValueError, match="Pass token_type_ids"):
        model(**row)
    settings.text_config.use_bidirectional_attention = False
    model = build(PaliGemmaForConditionalGeneration, settings)
    expected = torch.cat([model(**call).logits for call in calls], 1)
    with tritonpack.patch(model):
        assert relative(expected, model(**row).logits) < EXACT


def test_isolation_is_checked_with_prompts() -> None:
    model = build(PaliGemmaForConditionalGeneration, pali("gemma")).float()
    with pytest.raises(tritonpack.IsolationError):
        check_isolation(model)
    with tritonpack.patch(model):
        check_isolation(model)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["qwen", "gemma", "pali", "pali of gemma2"])
def test_generation(kind: str, cache: str) -> None:
    """After an image, and of a batch of prompts that is padded on the left."""
    if (kind, cache) == ("pali of gemma2", "static"):
        pytest.skip("stock PaliGemma 2 can't use a static cache")
    generator = torch.Generator().manual_seed(1)
    if kind == "qwen":
        images = qwen()
        model, call = images.model, {"input_ids": images.documents[0], **kinds("qwen2_vl", images.documents[0])}
        call |= {"pixel_values": images.call["pixel_values"][:24], "image_grid_thw": torch.tensor([[1, 4, 6]])}
    elif kind == "gemma":
        model, call = gemma(), with_images(document([4, 4], generator), generator)
    else:
        model = build(PaliGemmaForConditionalGeneration, pali("gemma2" if "2" in kind else "gemma"))
        call = together(prompts(), left=True)
        call["token_type_ids"] *= 0
    options = {
        "max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "disable_compile": True,
        "eos_token_id": -1, "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = model.generate(**call, **options)
    with tritonpack.patch(model):
        got = model.generate(**call, **options)
    assert torch.equal(expected.sequences, got.sequences)
    assert relative(torch.stack(expected.logits), torch.stack(got.logits)) < EXACT
