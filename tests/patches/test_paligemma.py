"""PaliGemma: by token_type_ids, image and prompt of a document see each other, and its answer is causal."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ColPaliConfig,
    ColPaliForRetrieval,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
)

import tritonpack
from tests.patches.models import COMMON
from tests.patches.sweep import difference
from tests.patches.test_multimodal import EXACT, counted, differs, numbered, text
from tests.small_copies.comparison import gradients_of
from tests.small_copies.small_copy import spread
from tritonpack.testing import check_isolation

IMAGE = 60
PROMPTS, ANSWERS = (3, 1, 6), (4, 7, 1)  # tokens of each document, after those of its image
GEMMA2 = {"sliding_window": 4, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {"gemma": {}, "gemma2": GEMMA2}


def config(family: str) -> PaliGemmaConfig:
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    return PaliGemmaConfig(
        text_config={**COMMON, **FAMILIES[family], "model_type": family},
        vision_config={**vision, "model_type": "siglip_vision_model"},
        image_token_index=IMAGE, projection_dim=32, hidden_size=32, vocab_size=64,
    )  # fmt: skip


def build(kind: type[PreTrainedModel], settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind._from_config(settings)
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()


def documents() -> tuple[list[Tensor], list[Tensor], Tensor]:
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
        for ids, types, image in zip(documents()[0], documents()[1], documents()[2][:, None], strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_with_an_image_each(family: str) -> None:
    model = build(PaliGemmaForConditionalGeneration, config(family))
    ids, types, images = documents()
    expected = torch.cat([output.logits for output in alone(model)], dim=1)
    gradients = gradients_of(model, expected)
    row = {"input_ids": torch.cat(ids, 1), "token_type_ids": torch.cat(types, 1), "pixel_values": images}
    assert differs(expected.detach(), model(**row).logits.detach()) > 0.1
    with tritonpack.patch(model):
        for told in (
            {"position_ids": counted(ids)},
            {"position_ids": counted(ids) + 1},  # as the model counts them
            {"attention_mask": numbered(ids)},
            {"cu_seq_lens_q": torch.tensor([0, *(x.shape[1] for x in ids)]).cumsum(0).int()},
        ):
            got = model(**row, **told).logits
            assert differs(expected.detach(), got.detach()) < EXACT, list(told)
    assert difference((expected, gradients), (got, gradients_of(model, got))) < EXACT


@torch.no_grad()
def test_rows_of_one_document_padded_and_not() -> None:
    model = build(PaliGemmaForConditionalGeneration, config("gemma"))
    ids, types, images = documents()
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
        assert differs(torch.cat(expected), got[mask.bool()]) < EXACT


@torch.no_grad()
def test_a_call_without_types_is_refused() -> None:
    """Without types, stock sees both directions in a batch without padding, and one direction in a batch with it."""
    model = build(PaliGemmaForConditionalGeneration, config("gemma"))
    ids, _, images = documents()
    call = {"input_ids": torch.cat(ids, 1), "pixel_values": images, "position_ids": counted(ids)}
    with tritonpack.patch(model), pytest.raises(ValueError, match="Pass token_type_ids"):
        model(**call)
    settings = config("gemma")
    settings.text_config.use_bidirectional_attention = False
    model = build(PaliGemmaForConditionalGeneration, settings)
    expected = [model(input_ids=x, pixel_values=image).logits for x, image in zip(ids, images[:, None], strict=True)]
    with tritonpack.patch(model):
        assert differs(torch.cat(expected, 1), model(**call).logits) < EXACT


def test_isolation_is_checked_with_prompts() -> None:
    model = build(PaliGemmaForConditionalGeneration, config("gemma")).float()
    with pytest.raises(tritonpack.IsolationError):
        check_isolation(model)
    with tritonpack.patch(model):
        check_isolation(model)


@pytest.mark.parametrize("family", ["gemma", "gemma2"])
def test_decoders_without_their_model_are_refused(family: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, use_bidirectional_attention=True))
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"nothing to be equal to\. Set it to False"):
        tritonpack.patch(model)


@pytest.mark.parametrize(("family", "cache"), [("gemma", "dynamic"), ("gemma", "static"), ("gemma2", "dynamic")])
def test_generation(family: str, cache: str) -> None:
    """A batch of prompts, padded on the left. Stock PaliGemma 2 can't use a static cache."""
    model = build(PaliGemmaForConditionalGeneration, config(family))
    ids, _, images = documents()
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
    model = build(ColPaliForRetrieval, ColPaliConfig(vlm_config=config("gemma").to_dict(), embedding_dim=8))
    ids, types, images = documents()
    expected = torch.cat([output.embeddings for output in alone(model)], dim=1)
    row = {"input_ids": torch.cat(ids, 1), "token_type_ids": torch.cat(types, 1), "pixel_values": images}
    with tritonpack.patch(model):
        for told in ({"position_ids": counted(ids)}, {"attention_mask": numbered(ids)}):
            assert differs(expected, model(**row, **told).embeddings) < EXACT
