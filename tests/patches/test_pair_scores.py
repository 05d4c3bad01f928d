"""Sequence classification by encoders with decoders: one score for each row, at its end-of-sequence token."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.sweep import difference
from tests.patches.test_heads import EXACT, TOLD, documents, gradients, padded, relative
from tests.small_copies.packed_forms import FORMS
from tests.small_copies.small_copy import spread
from tritonpack.patches import proof

HEADS = {
    "BartForSequenceClassification": "bart",
    "BigBirdPegasusForSequenceClassification": "bigbird_pegasus",
    "MBartForSequenceClassification": "mbart",
    "MT5ForSequenceClassification": "mt5",
    "MvpForSequenceClassification": "mvp",
    "PLBartForSequenceClassification": "plbart",
    "T5ForSequenceClassification": "t5",
    "UMT5ForSequenceClassification": "umt5",
}
PADDING_MATTERS = {
    "T5GemmaForSequenceClassification": "t5gemma",
    "T5Gemma2ForSequenceClassification": "t5gemma2",
}
LABELS = torch.tensor([1, 0, 2, 1])


def scoring(name: str) -> tuple[PreTrainedModel, list[Tensor]]:
    """A tiny model in evaluation mode, and documents that end with its end-of-sequence token."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(zoo.tiny_config({**HEADS, **PADDING_MATTERS}[name], num_labels=3))
    spread(model, torch.Generator().manual_seed(0))
    pieces = documents()
    for ids in pieces:
        ids[:, -1] = model.config.eos_token_id
    return model.double().eval(), pieces


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.fast("BartForSequenceClassification", "T5ForSequenceClassification")
def test_one_score_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows give what documents alone give, and packed rows are refused. The proof accepts the class."""
    monkeypatch.setattr(proof, "is_shown", lambda kind, **_: False)
    model, pieces = scoring(name)
    logits = torch.cat([model(ids).logits for ids in pieces])
    loss = torch.nn.functional.cross_entropy(logits, LABELS)
    expected = loss.detach()[None], gradients(model, loss)
    with tritonpack.patch(model):
        got = model(**padded(pieces), labels=LABELS)
        assert relative(logits, got.logits) < EXACT
        assert difference(expected, (got.loss.detach()[None], gradients(model, got.loss))) < EXACT
        for form in TOLD:
            batch = FORMS[form](pieces)
            with pytest.raises(ValueError, match=rf"{name} gives one result for each row"):
                model(batch.ids, **batch.arguments)


@pytest.mark.parametrize("name", PADDING_MATTERS)
@pytest.mark.usefixtures("untried")
def test_scores_that_padding_on_the_right_changes(name: str) -> None:
    """Unpatched, these heads read one token later if a row is padded on the right. On the left they see padding."""
    model, pieces = scoring(name)
    expected = torch.cat([model(ids).logits for ids in pieces])
    with tritonpack.patch(model):
        assert relative(expected, model(**padded(pieces, left=True)).logits) < EXACT
        with pytest.raises(ValueError, match=rf"{name} scores a row behind its last token.* Pad on the left"):
            model(**padded(pieces))
        for form in TOLD:
            batch = FORMS[form](pieces)
            with pytest.raises(ValueError, match=rf"{name} gives one result for each row"):
                model(batch.ids, **batch.arguments)
