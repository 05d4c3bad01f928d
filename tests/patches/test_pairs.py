"""Encoders with decoders: packed pairs of documents, labels, states of an encoder, padding without a mask.

All classes are in test_sweep.py, generation, checkpoints and copies in test_every_type.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches.calls import FORMS, alone, documents, relative
from tests.patches.comparison import tolerance
from tests.patches.sweep.subject import Subject
from tests.patches.zoo import PAIRS, tiny_model, tiny_pair_model

FORM = "segments_alone"


def call_of(model: PreTrainedModel, form: str = FORM) -> dict[str, Any]:
    subject = Subject(model)
    return subject.arguments(subject.lay_out(FORMS[form], documents()))


@pytest.mark.fast("False-bart", "False-umt5", "True-mbart", "True-blenderbot-small", "True-plbart")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("ignored", [False, True])
def test_labels_are_shifted_within_each_document(name: str, ignored: bool) -> None:
    """Labels of a prompt may be ignored, and rows are padded by -100. MBart and PLBart put a document's last label
    first."""
    model = tiny_pair_model(name)
    labels = Subject(model).targets(documents())
    for label in labels if ignored else ():
        label[:, : label.shape[1] // 2] = -100
    masks = [{"decoder_attention_mask": torch.ones_like(y)} if ignored else {} for y in labels]  # some mask them
    told = zip(documents(), labels, masks, strict=True)
    outputs = [model(input_ids=a, labels=y, **mask) for a, y, mask in told]
    sizes = torch.tensor([(y != -100).sum() for y in labels])
    loss = (torch.stack([output.loss for output in outputs]) * sizes).sum() / sizes.sum()
    form = "two_rows" if ignored else FORM
    batch = FORMS[form](labels)
    row = torch.full_like(batch.ids, -100)
    for span, label in zip(batch.spans, labels, strict=True):
        row[span] = label[0]
    with tritonpack.patch(model):
        output = model(**call_of(model, form) | {"labels": row, "decoder_input_ids": None})
    expected = torch.cat([output.logits for output in outputs], 1)
    assert relative(expected, batch.gather(output.logits)[None]) < tolerance(model.dtype)
    torch.testing.assert_close(output.loss, loss)


def test_inner_model_and_states_of_the_encoder() -> None:
    """The whole model may be called with states of the encoder, and the model inside may be called directly."""
    model = tiny_pair_model("bart")
    expected, call = alone(model, gradients=False).values, call_of(model)
    with tritonpack.patch(model):
        states = model.get_encoder()(call["input_ids"], attention_mask=call["attention_mask"])
        again = model(encoder_outputs=states, **{name: x for name, x in call.items() if name != "input_ids"}).logits
        for got in (again, model.lm_head(model.model(**call)[0]), model.forward(**call).logits):
            assert relative(expected, got[0]) < tolerance(model.dtype)


def test_decoder_called_with_states_of_an_encoder() -> None:
    """A causal model with cross-attention to states of several documents, which have a mask of their own."""
    model = tiny_model("bert", dtype=torch.float64, add_cross_attention=True)
    sources = documents((4, 2, 5, 3))
    states: list[Tensor] = [torch.randn(1, source.shape[1], 32, dtype=torch.float64) for source in sources]
    pairs = zip(documents(), states, strict=True)
    expected = torch.cat([model(d, encoder_hidden_states=x).logits for d, x in pairs], 1)
    row, other = FORMS[FORM](documents()), FORMS[FORM](sources).arguments["attention_mask"]
    with tritonpack.patch(model):
        given = {"encoder_hidden_states": torch.cat(states, 1), "encoder_attention_mask": other}
        assert relative(expected, model(row.ids, **row.arguments, **given).logits) < tolerance(model.dtype)


@pytest.mark.fast("False-bigbird_pegasus", "False-mvp", "False-umt5", "True-blenderbot-small", "True-t5gemma2")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_decoder_padding_without_a_mask(name: str, use_cache: bool) -> None:
    """Some types treat padding tokens as padding, others as tokens after all others."""
    model = tiny_pair_model(name, dtype=torch.float32).requires_grad_(False)
    call = {**call_of(model, "padded_right"), "use_cache": use_cache}
    for told in ("decoder_attention_mask", "decoder_position_ids", "position_ids"):
        call.pop(told, None)
    expected = model(**call)
    with tritonpack.patch(model):
        got = model(**call)
    seen = call["decoder_input_ids"] != 0
    assert relative(expected.logits[seen], got.logits[seen]) < tolerance(model.dtype)
