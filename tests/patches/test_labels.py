"""Labels of packed and padded rows: a document's first label, unmasked where a loss shifts labels, and labels that are
predicted from padding. Both warn once, or are refused."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.patches import zoo
from tritonpack import PackingCollator, PackingWarning, notices, patch
from tritonpack.patches.targets import shifts_labels

IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 4]])
OFFSETS = torch.tensor([0, 3, 5, 8])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
MASKED = torch.tensor([[-100, 6, 7, -100, 9, -100, 4, 4]])  # the first of each document has no label
ONES = torch.ones_like(IDS)
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
LEFT = RIGHT.flip(1)
BETWEEN = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1]])
FIRST = "first-label: a document begins at token 3 of row 0, and its first label is 8. LlamaForC"


def on_padding(place: int, label: int) -> str:
    return f"padding-label: the label {label} in row 0 is predicted at token {place}, "


COLLATED = PackingCollator()([{"input_ids": ids} for ids in ([5, 6, 7], [8, 9], [3])])
# What is given beside ids, and how the warning begins; empty if there is none.
HEARD: dict[str, tuple[dict[str, Any], str]] = {
    "positions": ({"labels": IDS, "position_ids": PLACES}, FIRST),
    "offsets": ({"labels": IDS, "cu_seq_lens_q": OFFSETS}, FIRST),
    "numbers": ({"labels": IDS, "seq_idx": NUMBERS}, FIRST),
    "a numbered mask": ({"labels": IDS, "attention_mask": NUMBERS + 1}, FIRST),
    "no label of a first token": ({"labels": MASKED, "position_ids": PLACES}, ""),
    "no labels": ({"position_ids": PLACES}, ""),
    "labels that are shifted": ({"labels": IDS, "shift_labels": IDS, "position_ids": PLACES}, ""),
    "collated": (COLLATED, ""),
    "collated and padded": (PackingCollator(8, 0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]), ""),
    "padding on the right": ({"labels": MASKED, "attention_mask": RIGHT}, on_padding(5, 4)),
    "padding on the left": ({"labels": IDS, "attention_mask": LEFT}, on_padding(0, 6)),
    "padding of packed rows": ({"labels": MASKED, "attention_mask": RIGHT, "position_ids": PLACES}, on_padding(5, 4)),
    "padding of offsets": ({"labels": MASKED, "attention_mask": RIGHT, "cu_seq_lens_q": OFFSETS}, on_padding(5, 4)),
    "padding between": (
        {"labels": MASKED.where(BETWEEN > 0, IDS), "attention_mask": BETWEEN,
         "cu_seq_lens_q": torch.tensor([0, 2, 5, 8])}, on_padding(2, 8),
    ),
    "the end, from the last token": (
        {"labels": torch.tensor([[5, 6, 7, 8, 9, 2, -100, -100]]), "attention_mask": RIGHT}, ""
    ),
    "masked on the right": ({"labels": IDS.where(RIGHT > 0, -100), "attention_mask": RIGHT}, ""),
    "masked on the left": ({"labels": IDS.where(LEFT > 0, -100), "attention_mask": LEFT}, ""),
    "no padding": ({"labels": IDS, "attention_mask": ONES}, ""),
    "no mask": ({"labels": IDS}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HEARD)
def test_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever the attention, with the place and the remedy."""
    given, words = HEARD[name]
    for attention in ("tritonpack", "sdpa", "eager"):
        monkeypatch.setattr(notices, "said", {"unpatched-model": object()})
        with warnings.catch_warnings(record=True) as found, patch(model := tiny(), attention=attention):
            warnings.simplefilter("always")
            for _ in range(2):
                model(**{"input_ids": IDS, **given})
        messages = [str(warning.message) for warning in found if warning.category is PackingWarning]
        remedy = "Set the first label of each document to -100" if words is FIRST else "Set labels of padding to -100"
        assert [message.startswith(words) and remedy in message for message in messages] == [True] * bool(words)
        assert words.partition(":")[0] in {"", *notices.said}


def tiny(kind: str = "LlamaForCausalLM", **more: Any) -> Any:
    model_type = {"GPT2LMHeadModel": "gpt2"}.get(kind, kind.partition("For")[0].removesuffix("LMHeadModel").lower())
    return zoo.tiny_model(model_type, kind=kind, **more)


SHIFTING = ("LlamaForCausalLM", "GPT2LMHeadModel", "BertLMHeadModel")
OTHERS = ("BertForMaskedLM", "LlamaForSequenceClassification", "XLNetLMHeadModel", "BartForCausalLM")


def test_which_losses_shift() -> None:
    assert all(shifts_labels(tiny(kind), {}) for kind in SHIFTING)
    assert not any(shifts_labels(tiny(kind), {}) for kind in OTHERS)


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
def test_a_mask_that_numbers_documents_from_0_is_refused(attention: Any) -> None:
    """Document 0 would be padding."""
    words = r"label 6 in row 0 is predicted at token 0.* pass attention_mask \+ 1"
    with patch(model := tiny(), attention=attention):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                model(input_ids=IDS, labels=MASKED, attention_mask=NUMBERS)
        assert model(input_ids=IDS, labels=MASKED, attention_mask=NUMBERS + 1).loss.isfinite()
        assert model(input_ids=IDS, attention_mask=NUMBERS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("BertForMaskedLM", {"labels": MASKED}),
        ("LlamaForCausalLM", {"shift_labels": MASKED, "labels": MASKED}),
        ("T5ForConditionalGeneration", {"labels": MASKED}),
        ("T5ForConditionalGeneration", {"labels": MASKED, "decoder_input_ids": IDS}),
    ],
)
def test_labels_on_padding_of_numbered_documents_are_refused(kind: str, given: dict[str, Tensor]) -> None:
    """By each kind of loss."""
    numbers = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]])
    more = {"decoder_attention_mask": numbers} if kind[:2] == "T5" else {}
    with patch(model := tiny(kind)), pytest.raises(ValueError, match="label 4 in row 0 is predicted at token 6"):
        model(input_ids=IDS, attention_mask=numbers, **given, **more)
