"""Warnings about the first label of a document: unmasked where a loss shifts labels, masked where it does not."""

import warnings

import pytest
import torch

from tritonpack import PackingCollator, PackingWarning, notices, patch
from tritonpack.patches.packed_batch import Serving
from tritonpack.patches.parse_inputs import make_packed_batch
from tritonpack.patches.targets import check_padding_labels, shifts_labels, warn_of_first_labels

pytest.importorskip("transformers")

import transformers

DOCUMENTS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3]}]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(notices, "_said", {"unpatched-model": object()})


def tiny(name="LlamaForCausalLM", **options):
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(kind.config_class(**sizes, intermediate_size=8, **options))


def batch_of(**changes):
    """A packed batch with unmasked labels."""
    batch = PackingCollator()(DOCUMENTS)
    return batch | {"labels": batch["input_ids"].clone()} | changes


def heard(batch, model=None, shape=None):
    ids = batch["input_ids"]
    packed_batch = make_packed_batch(batch, shape or ids.shape, ids.device, Serving("tritonpack", "auto"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            warn_of_first_labels(model or tiny(), batch, packed_batch)
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


def test_warns_once_and_names_the_place():
    (message,) = heard(batch_of())
    assert message.startswith("first-label: a document begins at token 3 of row 0, and its first label is 8. LlamaForC")
    assert "Set the first label of each document to -100, as tritonpack.PackingCollator does." in message


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "seq_idx", "attention_mask"])
def test_warns_for_each_way_to_tell_documents(told):
    batch = batch_of(attention_mask=torch.tensor([[1, 1, 1, 2, 2, 3]]))
    assert len(heard({name: batch[name] for name in ("input_ids", "labels", told)})) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": torch.tensor([[-100, 6, 7, -100, 9, -100]])},
        {"labels": None},
        {"shift_labels": torch.zeros(1, 6, dtype=torch.int64)},
        {"labels": torch.empty(1, 6, dtype=torch.int64, device="meta")},
        {"labels": torch.tensor([1, 0])},
    ],
    ids=["masked", "none", "shifted", "on a device", "of documents"],
)
def test_silent_where_nothing_is_wrong_or_known(changes):
    assert not heard(batch_of(**changes))


def trained(model, batch):
    """The warnings while a patched model computes its loss twice."""
    with warnings.catch_warnings(record=True) as found, patch(model):
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch)
    return [str(warning.message) for warning in found if warning.category is PackingWarning]


def test_a_patched_model_warns_in_its_call():
    (message,) = trained(tiny(), batch_of())
    assert message.startswith("first-label: ")
    assert notices.is_said("first-label")


def test_a_patched_model_is_silent_with_the_collators_labels():
    assert not trained(tiny(), PackingCollator()(DOCUMENTS))
    assert not trained(tiny(), PackingCollator(8, 0)(DOCUMENTS))


def test_a_patched_model_that_predicts_tokens_themselves_is_silent():
    documents = [document | {"labels": document["input_ids"]} for document in DOCUMENTS]
    assert not trained(tiny("BertForMaskedLM"), PackingCollator(objective="tokens")(documents))


@pytest.mark.parametrize(
    ("name", "options"), [("BertForMaskedLM", {}), ("BertForTokenClassification", {"num_labels": 16})]
)
def test_a_patched_model_that_predicts_tokens_themselves_warns_of_the_causal_collator(name, options):
    documents = [document | {"labels": document["input_ids"]} for document in DOCUMENTS]
    assert not trained(tiny(name, **options), PackingCollator(objective="tokens")(documents))
    (message,) = trained(tiny(name, **options), PackingCollator()(documents))
    assert message.startswith(f"first-label-lost: the first label of each of the 3 documents is -100. {name} predicts ")
    assert "PackingCollator(objective='tokens')" in message


def test_warns_of_the_causal_collator_for_an_encoder_with_a_decoder():
    model = tiny("T5ForConditionalGeneration", d_kv=4, d_ff=8, decoder_start_token_id=0, pad_token_id=0)
    (message,) = heard(PackingCollator()(DOCUMENTS), model)
    assert message.startswith("first-label-lost: ")
    assert not heard(batch_of(), model)


def test_first_labels_that_are_ignored_among_others_are_no_mistake():
    """Masked language models have labels for a few tokens, and not for the special token at the beginning."""
    documents = [
        {"input_ids": [1, 6, 7, 2], "labels": [-100, 6, -100, -100]},
        {"input_ids": [1, 9], "labels": [-100, 9]},
    ]
    assert not trained(tiny("BertForMaskedLM"), PackingCollator(objective="tokens")(documents))


def test_silent_for_padding_and_for_rows():
    """Nothing predicts the first token of a row, and labels of padding do not matter."""
    rows = {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    assert not heard(rows | {"labels": rows["input_ids"]})


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
def test_which_losses_shift(name, options, shifted):
    assert shifts_labels(tiny(name, **options), {}) is shifted


IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 4]])
ONES = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
MASKED = torch.tensor([[-100, 6, 7, -100, 9, -100, 4, 4]])  # labels on padding; the first of each document has none
# Layouts with padding, and the token from which a label on padding is predicted first.
PADDED = {
    "right": ({"attention_mask": ONES}, MASKED, 5),
    "left": ({"attention_mask": ONES.flip(1)}, IDS, 0),
    "packed": ({"attention_mask": ONES, "position_ids": PLACES}, MASKED, 5),
    "offsets": ({"attention_mask": ONES, "cu_seq_lens_q": torch.tensor([0, 3, 5, 8])}, MASKED, 5),
    "between": (
        {"attention_mask": torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1]]), "cu_seq_lens_q": torch.tensor([0, 2, 5, 8])},
        IDS,
        2,
    ),
}


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
@pytest.mark.parametrize("name", PADDED)
def test_labels_on_padding_warn_in_every_layout(name, attention):
    told, labels, place = PADDED[name]
    model = tiny()
    with warnings.catch_warnings(record=True) as found, patch(model, attention=attention):
        warnings.simplefilter("always")
        for _ in range(2):
            model(input_ids=IDS, labels=labels, **told)
    (message,) = [str(one.message) for one in found if "padding-label" in str(one.message)]
    label = int(labels[0, place + 1])
    assert message.startswith(f"padding-label: the label {label} in row 0 is predicted at token {place}, which ")
    assert "Set labels of padding to -100" in message


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
def test_a_mask_that_numbers_documents_from_0_is_refused(attention):
    """Document 0 would be padding."""
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    model = tiny()
    with patch(model, attention=attention):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"label 6 in row 0 is predicted at token 0.* pass attention_mask \+ 1"
            ):
                model(input_ids=IDS, labels=MASKED, attention_mask=numbers)
        assert model(input_ids=IDS, labels=MASKED, attention_mask=numbers + 1).loss.isfinite()
        assert model(input_ids=IDS, attention_mask=numbers).logits.isfinite().all()


def test_labels_on_padding_of_other_losses():
    numbers = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0]])
    own, shifted = tiny("BertForMaskedLM"), {"shift_labels": MASKED, "labels": MASKED}
    for model, call in ((own, {"labels": MASKED}), (tiny(), shifted)):
        with patch(model), pytest.raises(ValueError, match="label 4 in row 0 is predicted at token 6"):
            model(input_ids=IDS, attention_mask=numbers, **call)
    pair = tiny("T5ForConditionalGeneration", d_kv=4, d_ff=8, decoder_start_token_id=0, pad_token_id=0)
    told = {"attention_mask": numbers, "decoder_attention_mask": numbers, "labels": MASKED}
    for more in ({}, {"decoder_input_ids": IDS}):
        with patch(pair), pytest.raises(ValueError, match="label 4 in row 0 is predicted at token 6"):
            pair(input_ids=IDS, **told, **more)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (torch.tensor([[5, 6, 7, 8, 9, 2, -100, -100]]), {"attention_mask": ONES}),  # the end, from the last token
        (torch.tensor([[-100, -100, -100, 8, 9, 3, 4, 4]]), {"attention_mask": ONES.flip(1)}),
        (IDS, {"attention_mask": torch.ones_like(ONES)}),
        (IDS, {}),
        (IDS.to("meta"), {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])}),
    ],
    ids=["end", "left", "no padding", "no mask", "on a device"],
)
def test_silent_without_labels_from_padding(labels, told):
    call = {"input_ids": IDS, "labels": labels, **told}
    packed_batch = make_packed_batch(call, IDS.shape, IDS.device, Serving("tritonpack", "auto"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackingWarning)
        check_padding_labels(tiny(), call, packed_batch)
