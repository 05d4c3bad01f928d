"""Warnings about labels: a document's first label, unmasked where a loss shifts labels; labels that are predicted from
padding."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tritonpack import PackingCollator, PackingWarning, notices, patch
from tritonpack.patches.targets import shifts_labels

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3]}]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "said", {"unpatched-model": object()})


def tiny(name: str = "LlamaForCausalLM", **options: Any) -> Any:
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(kind.config_class(**sizes, intermediate_size=8, **options))


def t5() -> Any:
    return tiny("T5ForConditionalGeneration", d_kv=4, d_ff=8, decoder_start_token_id=0, pad_token_id=0)


def heard(batch: dict[str, Any], model: Any = None, **options: Any) -> list[str]:
    """The warnings while a patched model is called twice."""
    model = model or tiny()
    with warnings.catch_warnings(record=True) as found, patch(model, **options):
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch)
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


def batch_of(**changes: Any) -> dict[str, Any]:
    """A packed batch with unmasked labels."""
    batch = PackingCollator()(DOCUMENTS)
    return batch | {"labels": batch["input_ids"].clone()} | changes


def test_a_first_label_warns_once_and_names_the_place() -> None:
    (message,) = heard(batch_of())
    assert message.startswith("first-label: a document begins at token 3 of row 0, and its first label is 8. LlamaForC")
    assert "Set the first label of each document to -100, as tritonpack.PackingCollator does." in message
    assert "first-label" in notices.said


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "seq_idx", "attention_mask"])
def test_each_way_to_tell_documents_warns(told: str) -> None:
    batch = batch_of(attention_mask=torch.tensor([[1, 1, 1, 2, 2, 3]]))
    assert len(heard({name: batch[name] for name in ("input_ids", "labels", told)})) == 1


ROWS = {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
SILENT = {
    "masked": lambda: heard(batch_of(labels=torch.tensor([[-100, 6, 7, -100, 9, -100]]))),
    "none": lambda: heard(batch_of(labels=None)),
    "shifted": lambda: heard(batch_of(shift_labels=torch.zeros(1, 6, dtype=torch.int64))),
    "collator": lambda: heard(PackingCollator()(DOCUMENTS)) + heard(PackingCollator(8, 0)(DOCUMENTS)),
    "rows": lambda: heard(ROWS | {"labels": ROWS["input_ids"].masked_fill(ROWS["attention_mask"] == 0, -100)}),
}


@pytest.mark.parametrize("name", SILENT)
def test_silent_where_nothing_is_wrong_or_known(name: str) -> None:
    assert SILENT[name]() == []


@pytest.mark.parametrize(
    ("name", "options", "shifted"),
    [
        ("LlamaForCausalLM", {}, True),
        ("GPT2LMHeadModel", {}, True),
        ("BertLMHeadModel", {"is_decoder": True}, True),
        ("BertForMaskedLM", {}, False),
        ("BertForTokenClassification", {}, False),
        ("LlamaForSequenceClassification", {}, False),
        ("XLNetLMHeadModel", {"d_inner": 8, "d_head": 4}, False),
        ("BartForCausalLM", {"decoder_attention_heads": 2, "decoder_layers": 1, "decoder_ffn_dim": 8}, False),
    ],
)
def test_which_losses_shift(name: str, options: dict[str, Any], shifted: bool) -> None:
    assert shifts_labels(tiny(name, **options), {}) is shifted


IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 4]])
ONES = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
MASKED = torch.tensor([[-100, 6, 7, -100, 9, -100, 4, 4]])  # labels on padding; the first of each document has none
# Layouts with padding, and the token from which a label on padding is predicted first; None if none is.
PADDED: dict[str, tuple[dict[str, Tensor], Tensor, int | None]] = {
    "right": ({"attention_mask": ONES}, MASKED, 5),
    "left": ({"attention_mask": ONES.flip(1)}, IDS, 0),
    "packed": ({"attention_mask": ONES, "position_ids": PLACES}, MASKED, 5),
    "offsets": ({"attention_mask": ONES, "cu_seq_lens_q": torch.tensor([0, 3, 5, 8])}, MASKED, 5),
    "between": (
        {"attention_mask": torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1]]), "cu_seq_lens_q": torch.tensor([0, 2, 5, 8])},
        IDS, 2,
    ),
    "the end, from the last token": (
        {"attention_mask": ONES}, torch.tensor([[5, 6, 7, 8, 9, 2, -100, -100]]), None
    ),
    "masked on the left": ({"attention_mask": ONES.flip(1)}, torch.tensor([[-100] * 3 + [8, 9, 3, 4, 4]]), None),
    "no padding": ({"attention_mask": torch.ones_like(ONES)}, IDS, None),
    "no mask": ({}, IDS, None),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
@pytest.mark.parametrize("name", PADDED)
def test_labels_on_padding(name: str, attention: str) -> None:
    told, labels, place = PADDED[name]
    warned = heard({"input_ids": IDS, "labels": labels, **told}, attention=attention)
    messages = [one for one in warned if "padding-label" in one]
    assert len(messages) == (place is not None)
    if place is not None:
        label = int(labels[0, place + 1])
        assert messages[0].startswith(f"padding-label: the label {label} in row 0 is predicted at token {place}, ")
        assert "Set labels of padding to -100" in messages[0]


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
def test_a_mask_that_numbers_documents_from_0_is_refused(attention: Any) -> None:
    """Document 0 would be padding."""
    numbers, model = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]), tiny()
    words = r"label 6 in row 0 is predicted at token 0.* pass attention_mask \+ 1"
    with patch(model, attention=attention):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                model(input_ids=IDS, labels=MASKED, attention_mask=numbers)
        assert model(input_ids=IDS, labels=MASKED, attention_mask=numbers + 1).loss.isfinite()
        assert model(input_ids=IDS, attention_mask=numbers).logits.isfinite().all()


def test_labels_on_padding_of_numbered_documents_are_refused() -> None:
    """By each kind of loss."""
    numbers = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]])
    pair = {"labels": MASKED, "decoder_attention_mask": numbers}
    for model, call in (
        (tiny("BertForMaskedLM"), {"labels": MASKED}),
        (tiny(), {"shift_labels": MASKED, "labels": MASKED}),
        (t5(), pair),
        (t5(), pair | {"decoder_input_ids": IDS}),
    ):
        with patch(model), pytest.raises(ValueError, match="label 4 in row 0 is predicted at token 6"):
            model(input_ids=IDS, attention_mask=numbers, **call)
