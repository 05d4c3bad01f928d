"""The proof of an unknown class compares each of its outputs, and its loss, with documents alone."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    Siglip2TextConfig,
    Siglip2TextModel,
    SiglipTextConfig,
    SiglipTextModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import ModelOutput

import tritonpack
from tests.patches import zoo
from tests.small_copies.packed_forms import FORMS
from tests.small_copies.small_copy import spread
from tritonpack.patches import proof

LENGTHS = (9, 4, 6, 4)
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def filled(model: Any) -> Any:
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()


def batch(documents: list[Tensor]) -> dict[str, Any]:
    laid_out = FORMS["position_ids"](documents)
    return {"input_ids": laid_out.ids, **laid_out.arguments}


@pytest.mark.parametrize(
    ("kind", "config"), [(SiglipTextModel, SiglipTextConfig), (Siglip2TextModel, Siglip2TextConfig)]
)
def test_a_pooled_last_token_is_refused(kind: Any, config: Any) -> None:
    """No auto class leads to these classes, so the table of known classes does not list them."""
    model = filled(kind(config(vocab_size=64, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, **SIGLIP)))
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"don't stay apart.*Train it on padded rows, unpatched"):
        tritonpack.patch(model).prove()


@dataclasses.dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    value: Any = None


class TwoOutputs(LlamaForCausalLM):
    """A language model with another output: here a constant, which depends on no document."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        labels: Any = None,
        **more: Any,
    ) -> Output:
        told = {"attention_mask": attention_mask, "position_ids": position_ids, **more}
        states = self.model(input_ids, **told).last_hidden_state
        logits = self.lm_head(states)
        loss = None if labels is None else self.own_loss(logits, labels)
        return Output(loss=loss, logits=logits, value=self.value(states))

    def value(self, states: Tensor) -> Any:
        return states.new_ones(1, 5, 2)

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OfEachToken(TwoOutputs):
    def value(self, states: Tensor) -> Any:
        return {"scores": [states.square(), states[None].repeat(3, 1, 1, 1)]}


class Mean(TwoOutputs):
    def value(self, states: Tensor) -> Any:
        return states.mean(1)


class LastToken(TwoOutputs):
    def value(self, states: Tensor) -> Any:
        return states[:, -1]


class KeptDimension(TwoOutputs):
    """With a dimension of one token, so it does not look like a result of a row."""

    def value(self, states: Tensor) -> Any:
        return states.mean(1, keepdim=True)


class TokenBefore(TwoOutputs):
    def value(self, states: Tensor) -> Any:
        return self.lm_head(states + states.roll(1, dims=1))


class Sum(TwoOutputs):
    """The sum of all states before a token, in a list. Padding that follows does not change it."""

    def value(self, states: Tensor) -> Any:
        return [states, states.cumsum(1)]


class OfTheBatch(TwoOutputs):
    def value(self, states: Tensor) -> Any:
        return states - states.mean((0, 1))


def tiny(kind: type[TwoOutputs]) -> Any:
    return filled(kind(zoo.tiny_config("llama")))


@pytest.mark.parametrize("kind", [TwoOutputs, OfEachToken])
def test_harmless_outputs_leave_rows_packed(kind: type[TwoOutputs]) -> None:
    with tritonpack.patch(tiny(kind)) as handle:
        handle.prove()
        assert handle.report.attention == "tritonpack"


@pytest.mark.parametrize("kind", [Mean, LastToken, KeptDimension, TokenBefore, Sum, OfTheBatch])
@pytest.mark.fast("Mean", "OfTheBatch")
def test_an_output_that_mixes_documents_is_refused_by_its_name(kind: type[TwoOutputs]) -> None:
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"don't stay apart: .*value"):
        tritonpack.patch(tiny(kind)).prove()


class EncoderMixed(T5ForConditionalGeneration):
    """A model that also returns states of its encoder, mixed with those of the token before."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        decoder_input_ids: Any = None,
        decoder_attention_mask: Any = None,
        encoder_outputs: Any = None,
        **more: Any,
    ) -> Any:
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            **more,
        )
        output.encoder_last_hidden_state = self.given(output.encoder_last_hidden_state)
        return output

    def given(self, states: Tensor) -> Tensor:
        return states + states.roll(1, dims=1)


class EncoderPlain(EncoderMixed):
    def given(self, states: Tensor) -> Tensor:
        return 2 * states


@pytest.mark.parametrize("kind", [EncoderPlain, EncoderMixed])
def test_states_of_the_encoder_are_compared(kind: type[EncoderMixed]) -> None:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    model = filled(kind(T5Config(vocab_size=64, decoder_start_token_id=0, pad_token_id=0, **sizes)))
    if kind is EncoderMixed:
        with pytest.raises(tritonpack.UnsupportedModelError, match="encoder_last_hidden_state"):
            tritonpack.patch(model).prove()
    else:
        tritonpack.patch(model).prove()


# Classes with their own losses, compared with the losses of documents alone.


class Summed(TwoOutputs):
    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


class SecondToken(Summed):
    """Predicts the token after the next one as well, which may lie in another document."""

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        second = nn.functional.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten(), reduction="sum")
        return super().own_loss(logits, labels) + second


class ShiftedTwice(LlamaForCausalLM):
    """The loss of Moshi's decoder up to transformers 5.16."""

    def forward(self, *args: Any, labels: Any = None, **more: Any) -> Any:
        output = super().forward(*args, **more)
        if labels is not None:
            logits = output.logits[:, :-1].contiguous()
            output.loss = self.loss_function(logits, labels[:, 1:].contiguous(), vocab_size=self.config.vocab_size)
        return output


class Smooth(TwoOutputs):
    """Neighbouring tokens shall have like logits. It hardly moves the loss of new weights."""

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 0.1 * (logits[:, 1:] - logits[:, :-1]).square().mean()


class MeanOfRows(TwoOutputs):
    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        return (losses.sum(1) / (labels[:, 1:] >= 0).sum(1)).mean()


class OfMeans(TwoOutputs):
    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.mean(1).square().sum()


class LeftAlone(LlamaForCausalLM):
    """A class with the loss of transformers."""


def labelled(documents: list[Tensor]) -> dict[str, Any]:
    labels = [document.clone() for document in documents]
    for one in labels:
        one[:, 0] = -100
    return {**batch(documents), "labels": torch.cat(labels, dim=1)}


@pytest.mark.parametrize("kind", [TwoOutputs, Summed, LeftAlone])
def test_losses_that_are_means_or_sums_over_labels(kind: type[TwoOutputs]) -> None:
    model, documents = tiny(kind), zoo.documents(LENGTHS)
    with torch.no_grad():
        alone = torch.stack([model(**labelled([document])).loss for document in documents])
        with tritonpack.patch(model):
            got = model(**labelled(documents)).loss
    counts = torch.tensor([n - 1 for n in LENGTHS])
    expected = alone.sum() if kind is Summed else (alone * counts).sum() / counts.sum()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [SecondToken, OfMeans, ShiftedTwice, Smooth, MeanOfRows])
def test_a_loss_that_mixes_documents_is_refused_in_the_call(
    kind: type[PreTrainedModel], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "has_known_loss", lambda model: kind is ShiftedTwice)  # as of transformers' own classes
    model, documents = tiny(kind).to(dtype), zoo.documents(LENGTHS)
    with torch.no_grad():
        expected = model(**labelled(documents[:1])).loss
        with tritonpack.patch(model):
            assert model(**batch(documents)).logits.shape[:2] == (1, sum(LENGTHS))
            for _ in range(2):
                with pytest.raises(ValueError, match=rf"{kind.__name__} has a loss of its own.*Leave labels out"):
                    model(**labelled(documents))
            with tritonpack.patch(model), pytest.raises(ValueError, match="has a loss of its own"):  # a second handle
                model(**labelled(documents))
            assert model(**labelled(documents[:1])).loss.item() == pytest.approx(expected.item(), rel=0.02)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_loss_is_accepted_and_leaves_no_trace(dtype: torch.dtype, context: Any) -> None:
    with torch.inference_mode(context is torch.inference_mode):
        model = tiny(Summed).to(dtype)
    hooks = len(model.lm_head._forward_hooks), len(model._forward_hooks)
    with context(), tritonpack.patch(model):
        loss = model(**labelled(zoo.documents(LENGTHS))).loss
        assert torch.is_grad_enabled() == (context is torch.enable_grad)
    assert loss.requires_grad == (context is torch.enable_grad)
    assert hooks == (len(model.lm_head._forward_hooks), len(model._forward_hooks))
    assert all(parameter.grad is None for parameter in model.parameters())


class Routed(MixtralForCausalLM):
    """The loss of its routers is a mean over all tokens of a call, so documents alone have another loss."""

    def forward(self, *args: Any, labels: Any = None, **more: Any) -> Any:
        return super().forward(*args, labels=labels, output_router_logits=labels is not None, **more)


def test_router_loss_equals_that_of_a_padded_batch() -> None:
    model, documents = filled(Routed(zoo.tiny_config("mixtral"))), zoo.documents(LENGTHS)
    rows = FORMS["padded_right"](documents)
    labels = torch.where(rows.arguments["attention_mask"] > 0, rows.ids, -100)
    labels[:, 0] = -100
    with torch.no_grad():
        expected = model(rows.ids, attention_mask=rows.arguments["attention_mask"], labels=labels).loss
        with tritonpack.patch(model):
            got = model(**labelled(documents)).loss
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
