"""Images and sounds in packed documents: positions of three axes (Qwen), image tokens that see their whole image (Gemma
3), prompts that see both ways (PaliGemma)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, relative
from tests.patches.sweep.forms import FORMS
from tests.patches.zoo import apart, gradients_of

IMAGE, BEGIN, END, SOUND = 60, 58, 59, 62
PER_TOKEN = ("input_ids", "mm_token_type_ids", "token_type_ids")
Call = dict[str, Tensor]
Made = tuple[PreTrainedModel, list[Call]]  # a model, and a call for each document


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def text(count: int) -> Tensor:
    return torch.randint(6, 50, (1, count))


def document(*patches: int) -> Tensor:
    """Text around images of these numbers of tokens."""
    images = [[torch.tensor([[BEGIN] + [IMAGE] * count + [END]]), text(6)] for count in patches]
    return torch.cat([text(3), *(piece for image in images for piece in image)], dim=1)


# Qwen: the prefix of its classes, by model type.
QWEN = {
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinker", "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinker",
}  # fmt: skip
PARTS = {
    "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}},
    "vision_config": {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0], "num_position_embeddings": 64,
                      "deepstack_visual_indexes": [0]},
    "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                     "num_mel_bins": 8, "output_dim": 32},
}  # fmt: skip
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
    "audio_token_id": SOUND, "audio_start_token_id": 57, "audio_end_token_id": 56,
}  # fmt: skip


def qwen_model(family: str, attention: str | None = None) -> PreTrainedModel:
    parts = {name: part for name, part in PARTS.items() if "omni" in family or name != "audio_config"}
    model = zoo.build(f"{QWEN[family]}ForConditionalGeneration/{family}", attention=attention, **parts)
    for token, number in TOKENS.items():
        setattr(model.config, token, number)
    return model


def qwen_call(family: str, ids: Tensor, height: int, width: int) -> Call:
    kinds = {} if "omni" in family else {"mm_token_type_ids": (ids == IMAGE).int()}
    pixels, grid = floats(height * width, 3 * 2 * 16), torch.tensor([[1, height, width]])
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, **kinds}


def qwen(family: str = "qwen2_vl", attention: str | None = None) -> Made:
    """One image in each document; of Qwen 2 at the end of a document, and at the beginning of the next."""
    model, sizes, image = qwen_model(family, attention), ((4, 6), (6, 4), (4, 4)), torch.full((1, 6), IMAGE)
    ids = [document(h * w // 4) for h, w in sizes]
    if family == "qwen2_vl":
        ids[:2] = torch.cat([text(3), image], 1), torch.cat([image, text(4)], 1)
    return model, [qwen_call(family, one, *size) for one, size in zip(ids, sizes, strict=True)]


def sounds(family: str) -> Made:
    """Documents with sounds, and one with an image."""
    model, calls = qwen_model(family), []
    for count in (40, 64, 24):
        heard = {"input_features": floats(1, 8, 64), "feature_attention_mask": (torch.arange(64) < count).long()[None]}
        length = model.model.get_audio_features(**heard, return_dict=True).last_hidden_state.shape[-2]
        ids = torch.cat([text(3), torch.tensor([[57] + [SOUND] * length + [56]]), text(5)], dim=1)
        calls.append({"input_ids": ids, **heard})
    return model, [*calls, qwen_call(family, document(4), 4, 4)]


def gemma(attention: str | None = None) -> Made:
    """One image in the first and last document, two in the middle; windows shorter than an image."""
    tokens = {"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    vision = {"image_size": 16}
    model = zoo.build("Gemma3ForConditionalGeneration/gemma3", attention=attention, vision_config=vision, **tokens)
    calls = []
    for number in (1, 2, 1):
        ids = document(*[4] * number)
        types = (ids == IMAGE).long()
        calls.append({"input_ids": ids, "pixel_values": floats(number, 3, 16, 16), "token_type_ids": types})
    return model, calls


def pali(family: str = "gemma", kind: str = "PaliGemmaForConditionalGeneration/paligemma", **config: Any) -> Made:
    """By token_type_ids, image and prompt of a document see each other, and its answer is causal."""
    parts: dict[str, Any] = {"image_token_index": IMAGE, "text_config": zoo.tiny_config(family, **config)}
    if "colpali" in kind:
        parts = {"vlm_config": zoo.tiny_config("paligemma", image_token_index=IMAGE), "embedding_dim": 8}
    calls = []
    for prompt, answer in ((3, 4), (1, 7), (6, 1)):
        ids = torch.cat([torch.full((1, 4), IMAGE), text(prompt + answer)], dim=1)
        types = (torch.arange(ids.shape[1]) >= 4 + prompt).long()[None]
        calls.append({"input_ids": ids, "token_type_ids": types, "pixel_values": floats(1, 3, 8, 8)})
    return zoo.build(kind, **parts), calls


MODELS: dict[str, Callable[[], Made]] = {
    **{family: lambda family=family: qwen(family) for family in QWEN},
    **{f"sounds {family}": lambda family=family: sounds(family) for family in QWEN if "omni" in family},
    "text": lambda: (qwen_model("qwen2_vl"), [{"input_ids": text(n)} for n in (7, 1, 4)]),
    "gemma3": gemma, "paligemma": pali, "paligemma2": lambda: pali("gemma2"),
    "colpali": lambda: pali(kind="ColPaliForRetrieval/colpali"),
}  # fmt: skip


def call_in(form: str, calls: list[Call]) -> tuple[Any, dict[str, Any]]:
    """The documents of several calls laid out in a form, and the arguments of one call of them."""
    batch = FORMS[form]([call["input_ids"] for call in calls])
    given: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for call in calls for name in call):
        values = [call[name] for call in calls if name in call]
        given[name] = FORMS[form](values).ids if name in PER_TOKEN else torch.cat(values)
    return batch, {**batch.arguments, **given}


def main_of(output: Any) -> Tensor:
    return output["embeddings"] if "embeddings" in output else output["logits"]


def alone(model: PreTrainedModel, calls: list[Call]) -> Tensor:
    """(tokens, n), the logits or embeddings of each document in a call of its own."""
    more = [{} if "token_type_ids" in one else {"attention_mask": torch.ones_like(one["input_ids"])} for one in calls]
    return torch.cat([main_of(model(**one, **mask))[0] for one, mask in zip(calls, more, strict=True)])


TOLD = ("position_ids", "segments_alone", "offsets_alone", "all_ones_mask", "two_rows", "padded_right", "padded_left")


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.fast(*(f"{name}-tritonpack" for name in MODELS), "gemma3-sdpa", "gemma3-eager", "qwen3_vl-eager")
def test_documents_with_images_and_sounds(name: str, attention: Any) -> None:
    """In rows told by positions, offsets or numbers, and in padded rows; the model makes positions of images itself."""
    if (name, attention) == ("paligemma2", "sdpa"):
        pytest.skip("Gemma 2 doesn't support sdpa")
    model, calls = MODELS[name]()
    expected = alone(model, calls)
    gradients = gradients_of(model, expected) if "pali" in name else None
    for form in TOLD:
        batch, call = call_in(form, calls)
        if form == "position_ids" and name not in ("text", "qwen2_vl"):  # stock takes both for one image
            unmarked = {key: x for key, x in call.items() if key != "position_ids"}
            assert relative(expected, batch.gather(main_of(model(**unmarked)))) > 0.1
        with tritonpack.patch(model, attention=attention) as handle:
            got = batch.gather(main_of(model(**call)))
            assert relative(expected, got) < EXACT, form
            if gradients is not None:
                assert apart(gradients, gradients_of(model, got)) < EXACT
            if name in QWEN:
                inner = model.lm_head(model.model(**call)[0])
                assert relative(expected, batch.gather(inner)) < EXACT, form
                assert any("visual" in part for part in handle.report.left)


def test_positions_of_three_axes() -> None:
    """A collator may give them, with text positions in front, too."""
    model, calls = qwen()
    expected = alone(model, calls)
    axes = [
        model.model.get_rope_index(one["input_ids"], one["mm_token_type_ids"], image_grid_thw=one["image_grid_thw"])[0]
        for one in calls
    ]
    three = {"position_ids": torch.cat(axes, dim=2)}
    four = {"position_ids": torch.cat([call_in("position_ids", calls)[1]["position_ids"][None], three["position_ids"]])}
    offsets, numbers = (call_in(form, calls)[1] for form in ("offsets_alone", "segments_alone"))
    plain = {name: x for name, x in offsets.items() if name != "cu_seq_lens_q"}
    for call in (plain | three, plain | four, offsets | three, numbers | three):
        with tritonpack.patch(model):
            assert relative(expected, model(**call).logits[0]) < EXACT


@pytest.mark.parametrize("make", [gemma, lambda attention: qwen("qwen2_5_vl", attention)], ids=["gemma3", "qwen2_5_vl"])
def test_towers_loaded_by_name_compute_what_sdpa_computes(make: Callable[[str], Made]) -> None:
    """A tower whose rows are images, and one that takes images of different sizes in one row, with offsets."""
    results = []
    for attention in ("sdpa", "tritonpack"):
        model, calls = make(attention)
        results.append(model(**calls[0]).logits)
        assert model.config.vision_config._attn_implementation == attention
    assert relative(*results) < EXACT


@torch.no_grad()
def test_a_call_without_types_is_refused() -> None:
    """Without types, stock sees both directions in a batch without padding, and one direction in a batch with it."""
    for both_ways in (True, False):
        model, calls = pali(use_bidirectional_attention=both_ways)
        for one in calls:
            del one["token_type_ids"]
        expected, (_, row) = torch.cat([model(**one).logits for one in calls], 1), call_in("position_ids", calls)
        with tritonpack.patch(model):
            if both_ways:
                with pytest.raises(ValueError, match="Pass token_type_ids"):
                    model(**row)
            else:
                assert relative(expected, model(**row).logits) < EXACT


@pytest.mark.parametrize("make", [qwen, gemma, pali])
def test_generation(make: Callable[[], Made]) -> None:
    """After an image, and of a batch of prompts that is padded on the left."""
    model, calls = make()
    call: dict[str, Any] = dict(calls[0])
    if make is pali:
        call = call_in("padded_left", calls)[1] | {"position_ids": None}
        call["token_type_ids"] *= 0
    options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True, "eos_token_id": -1}
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**call, **options, **outputs)
    with tritonpack.patch(model):
        got = model.generate(**call, **options, **outputs)
    assert torch.equal(expected.sequences, got.sequences)
    assert relative(torch.stack(expected.logits), torch.stack(got.logits)) < EXACT
