"""ESM: positions that begin after padding_idx, and embeddings that are scaled by the share of masked tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM, PreTrainedModel

import tritonpack
from tests.small_copies.small_copy import spread

PADDING, MASK = 1, 32
EXACT = 64 * torch.finfo(torch.float32).eps
LENGTHS, MASKED = (7, 4, 11), (1, 0, 5)  # tokens of each document, and how many of them are masked


def build(**settings: Any) -> PreTrainedModel:
    config = EsmConfig(
        vocab_size=33, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=PADDING, mask_token_id=MASK, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = EsmForMaskedLM(config)
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(4, 24, (1, n), generator=generator) for n in LENGTHS]
    for ids, masked in zip(drawn, MASKED, strict=True):
        ids[0, 1 : 1 + masked] = MASK
    return drawn


def differs(expected: Tensor, got: Tensor) -> float:
    return float((expected - got).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"unpad": True}], ids=["packed", "unpad"])
@pytest.mark.parametrize("kind", ["absolute", "rotary"])
def test_padding_tokens_within_documents(kind: str, options: dict[str, bool]) -> None:
    """A mask of ones says that they are tokens. Absolute positions leave them out, rotary positions count them."""
    model = build(position_embedding_type=kind, token_dropout=True, emb_layer_norm_before=False)
    drawn = documents()
    for ids, place in zip(drawn, (4, 0, 8), strict=True):
        ids[0, place] = PADDING
    expected = torch.cat([model(ids, attention_mask=torch.ones_like(ids)).logits for ids in drawn], dim=1)
    numbers = torch.cat([torch.full((1, n), i + 1) for i, n in enumerate(LENGTHS)], dim=1)
    padded = torch.full((len(LENGTHS), max(LENGTHS)), PADDING)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded[inside] = torch.cat(drawn, dim=1)[0]
    with tritonpack.patch(model, **options):
        assert differs(expected, model(torch.cat(drawn, dim=1), attention_mask=numbers).logits) < EXACT
        assert differs(expected[0], model(padded, attention_mask=inside.long()).logits[inside]) < EXACT


@torch.no_grad()
@pytest.mark.parametrize("token_dropout", [False, True])
@pytest.mark.parametrize("kind", ["absolute", "rotary"])
def test_masked_tokens_of_one_document_scale_no_other(kind: str, token_dropout: bool) -> None:
    model = build(position_embedding_type=kind, token_dropout=token_dropout, emb_layer_norm_before=False)
    drawn = documents()
    row, width = torch.cat(drawn, dim=1), sum(LENGTHS)
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    numbers = torch.cat([torch.full((1, n), i + 1) for i, n in enumerate(LENGTHS)], dim=1)
    alone = torch.cat([model(ids).logits for ids in drawn], dim=1)
    assert differs(alone, model(row, position_ids=places).logits) > 0.1
    padded = torch.nn.functional.pad(row, (0, 3), value=PADDING)
    with tritonpack.patch(model):
        assert differs(alone, model(row, position_ids=places).logits) < EXACT
        assert differs(alone, model(row, attention_mask=numbers).logits) < EXACT
        told = torch.nn.functional.pad(numbers, (0, 3))
        assert differs(alone, model(padded, attention_mask=told).logits[:, :width]) < EXACT
        one = model(drawn[2], attention_mask=torch.ones_like(drawn[2])).logits
        assert differs(alone[:, -LENGTHS[2] :], one) < EXACT
        embeddings = model.esm.embeddings.word_embeddings(row)
        packed = model(inputs_embeds=embeddings, position_ids=places).logits
    alone = torch.cat([model(inputs_embeds=x).logits for x in embeddings.split(LENGTHS, dim=1)], dim=1)
    assert differs(alone, packed) < EXACT
