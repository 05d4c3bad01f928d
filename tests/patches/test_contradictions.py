"""Calls whose arguments begin documents at different tokens are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.test_patching import EXACT, LENGTHS, alone, documents, offsets, positions, segments

COARSE = torch.tensor([[1] * 8 + [2] * 14])  # two documents of LENGTHS each
OTHERS = torch.tensor([[1] * 3 + [2] * 5 + [3] * 8 + [4] * 6])  # as many documents, at other tokens

CONTRADICTIONS: dict[str, tuple[dict[str, Tensor], str]] = {
    "offsets of one document, numbers of four": (
        {"cu_seq_lens_q": torch.tensor([0, 22]), "seq_idx": segments()},
        r"cu_seq_lens_q and seq_idx contradict each other \(row 0, token 7: .*by cu_seq_lens_q documents begin at 0, "
        r"by seq_idx at 0, 7, 8, 11\.",
    ),
    "offsets of two documents, numbers of four": (
        {"cu_seq_lens_q": torch.tensor([0, 8, 22]), "seq_idx": segments()},
        "by cu_seq_lens_q documents begin at 0, 8, by seq_idx at 0, 7, 8, 11",
    ),
    "numbers elsewhere than offsets": (
        {"cu_seq_lens_q": offsets(), "seq_idx": OTHERS},
        "by cu_seq_lens_q documents begin at 0, 7, 8, 11, by seq_idx at 0, 3, 8, 16",
    ),
    "a numbered mask elsewhere than offsets": (
        {"cu_seq_lens_q": offsets(), "attention_mask": OTHERS},
        "attention_mask and cu_seq_lens_q contradict each other.*by attention_mask documents begin at 0, 3, 8, 16, by "
        "cu_seq_lens_q at 0, 7, 8, 11",
    ),
    "a coarser mask than offsets": (
        {"cu_seq_lens_q": offsets(), "attention_mask": COARSE},
        "by attention_mask documents begin at 0, 8, by cu_seq_lens_q at 0, 7, 8, 11",
    ),
    "a finer mask than offsets": (
        {"cu_seq_lens_q": torch.tensor([0, 8, 22]), "attention_mask": segments()},
        "by attention_mask documents begin at 0, 7, 8, 11, by cu_seq_lens_q at 0, 8",
    ),
    "a numbered mask, numbers of one document": (
        {"seq_idx": torch.zeros_like(segments()), "attention_mask": segments()},
        "attention_mask and seq_idx contradict each other.*at 0, 7, 8, 11, by seq_idx at 0",
    ),
    "a coarser mask than numbers": (
        {"seq_idx": segments(), "attention_mask": COARSE},
        "attention_mask and seq_idx contradict each other.*at 0, 8, by seq_idx at 0, 7, 8, 11",
    ),
    "positions of a document of one token, numbers of none": (
        {
            "position_ids": torch.cat([torch.zeros(1, 1, dtype=torch.long), torch.arange(21)[None]], 1),
            "seq_idx": torch.ones_like(segments()),
        },
        "by seq_idx documents begin at 0, by position_ids at 0, 1",
    ),
    "a coarser mask than positions": (
        {"position_ids": positions(), "attention_mask": COARSE},
        "attention_mask and position_ids contradict each other.*at 0, 8, by position_ids at 0, 7, 8, 11",
    ),
}


@pytest.mark.parametrize("family", ["llama", "mamba"])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused(family: str, name: str) -> None:
    arguments, message = CONTRADICTIONS[name]
    model = zoo.tiny_model(family, dtype=torch.float64)
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(torch.cat(documents(), 1), use_cache=False, **arguments)


PADDED = torch.cat([segments(), torch.zeros(1, 3, dtype=torch.long)], dim=1)
ONES = (PADDED != 0).long()
LAST_GOES_ON = torch.cat([segments(), segments()[:, -1:].expand(1, 3)], dim=1)

AGREE: dict[str, dict[str, Any]] = {
    "mask of ones": {"seq_idx": PADDED, "attention_mask": ONES},
    "padding as the last document's": {"seq_idx": LAST_GOES_ON, "attention_mask": PADDED},
    "padding as a document": {"cu_seq_lens_q": torch.tensor([0, *LENGTHS, 3]).cumsum(0), "attention_mask": PADDED},
    "padding in the last document": {
        "cu_seq_lens_q": torch.tensor([0, 7, 8, 11, 25]),
        "seq_idx": LAST_GOES_ON,
        "attention_mask": ONES,
    },
    "offsets and numbers differ in padding": {
        "cu_seq_lens_q": torch.tensor([0, 7, 8, 11, 25]),
        "seq_idx": PADDED,
        "attention_mask": ONES,
    },
    "empty documents": {"cu_seq_lens_q": torch.tensor([0, 0, 7, 8, 8, 11, 22, 25, 25]), "seq_idx": PADDED},
    "positions beside numbers": {
        "position_ids": torch.cat([positions(), torch.zeros(1, 3, dtype=torch.long)], dim=1),
        "seq_idx": PADDED,
        "attention_mask": PADDED,
    },
}


def off(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", AGREE)
def test_consistent_arguments_are_exact(name: str) -> None:
    model = tiny_model("llama")
    expected = alone(model)[0]
    ids = torch.cat([*documents(), torch.zeros(1, 3, dtype=torch.long)], 1)
    with tritonpack.patch(model):
        got = model(ids, **AGREE[name]).logits[:, :-3]
    assert off(got, expected) < EXACT


def test_padding_between_documents_may_belong_to_either() -> None:
    model = tiny_model("llama")
    first, second = documents((4, 5))
    expected = torch.cat([model(first).logits, model(second).logits], dim=1)
    filler = torch.zeros(1, 2, dtype=torch.long)
    ids = torch.cat([first, filler, second], 1)
    mask, numbers = torch.tensor([[1] * 4 + [0] * 2 + [2] * 5]), torch.tensor([[0] * 4 + [1] * 7])
    with tritonpack.patch(model):
        got = model(ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 6, 11])).logits
        kept = torch.cat([got[:, :4], got[:, 6:]], dim=1)
        assert off(kept, expected) < EXACT
        with pytest.raises(ValueError, match="padding inside a document"):
            model(ids, attention_mask=(mask != 0).long(), seq_idx=numbers)
