"""Sequence classification by encoders with decoders: one score for each document, at its end-of-sequence token."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.sweep import difference
from tests.patches.test_heads import EXACT, TOLD, documents, gradients, relative
from tritonpack.patches import probe
from tritonpack.patches.trial.packed_forms import FORMS
from tritonpack.patches.trial.small_copy import spread

HEADS = {
    "BartForSequenceClassification": "bart",
    "BigBirdPegasusForSequenceClassification": "bigbird_pegasus",
    "MBartForSequenceClassification": "mbart",
    "MT5ForSequenceClassification": "mt5",
    "MvpForSequenceClassification": "mvp",
    "PLBartForSequenceClassification": "plbart",
    "T5ForSequenceClassification": "t5",
    "T5GemmaForSequenceClassification": "t5gemma",
    "T5Gemma2ForSequenceClassification": "t5gemma2",
    "UMT5ForSequenceClassification": "umt5",
}
LABELS = torch.tensor([1, 0, 2, 1])


def scoring(name: str) -> tuple[PreTrainedModel, list[Tensor]]:
    """A tiny model in evaluation mode, and documents that end with its end-of-sequence token."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(zoo.tiny_config(HEADS[name], num_labels=3))
    spread(model, torch.Generator().manual_seed(0))
    pieces = documents()
    for ids in pieces:
        ids[:, -1] = model.config.eos_token_id
    return model.double().eval(), pieces


@pytest.mark.heavy
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.sampled("BartForSequenceClassification", "T5ForSequenceClassification")
def test_one_score_a_document(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, loss and gradients equal those of documents alone. A trial accepts the class."""
    monkeypatch.setattr(probe, "shown_layout", lambda kind: None)
    model, pieces = scoring(name)
    logits = torch.cat([model(ids).logits for ids in pieces])
    loss = torch.nn.functional.cross_entropy(logits, LABELS)
    expected = loss.detach()[None], gradients(model, loss)
    with tritonpack.patch(model):
        for form in (*TOLD, "without_cache", "segments_padded"):
            batch = FORMS[form](pieces)
            got = model(batch.ids, **batch.arguments, labels=LABELS)
            assert relative(logits, got.logits) < EXACT, form
            assert difference(expected, (got.loss.detach()[None], gradients(model, got.loss))) < EXACT, form


@pytest.mark.parametrize("form", ["padded_right", "padded_left"])
@pytest.mark.parametrize("name", ["T5GemmaForSequenceClassification", "T5Gemma2ForSequenceClassification"])
def test_padding_changes_no_score(name: str, form: str) -> None:
    """Unpatched, these heads read one token later if a row is padded on the right."""
    model, pieces = scoring(name)
    expected = torch.cat([model(ids).logits for ids in pieces])
    batch = FORMS[form](pieces)
    call: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.arguments["attention_mask"]}
    assert not relative(expected, model(**call).logits) < 0.1  # or NaN
    with tritonpack.patch(model):
        assert relative(expected, model(**call).logits) < EXACT
