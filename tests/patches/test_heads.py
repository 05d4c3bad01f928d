"""Heads on packed rows: the model inside gets the packing, and a row does not count as one document."""

import gc
import inspect
import warnings
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tritonpack
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.sweep import difference
from tests.small_copies.comparison import tolerance
from tests.small_copies.packed_forms import FORMS, lay_out
from tests.small_copies.small_copy import spread

LENGTHS = (7, 1, 3, 11)
EXACT = tolerance(torch.float64)
LABELS = 3


def head(name: str, model_type: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model of a class, with three labels."""
    torch.manual_seed(0)
    config = zoo.tiny_config(model_type, **{"num_labels": LABELS, "pad_token_id": 0, **overrides})
    model = getattr(transformers, name)._from_config(config, experts_implementation="eager")
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return zoo.documents(lengths)


def padded(pieces: list[Tensor], *, left: bool = False) -> dict[str, Tensor]:
    batch = lay_out([[i] for i in range(len(pieces))], pieces, left=left)
    return {"input_ids": batch.ids, "attention_mask": batch.arguments["attention_mask"]}


def packed(form: str, pieces: list[Tensor]) -> dict[str, Any]:
    batch = FORMS[form](pieces)
    return {"input_ids": batch.ids, **batch.arguments}


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters, allow_unused=True))


def relative(expected: Tensor, got: Tensor) -> float:
    assert expected.shape == got.shape
    return float((expected - got).detach().abs().max() / expected.detach().abs().max())


# The ways to tell documents apart.
TOLD = ("position_ids", "collator", "offsets_alone", "segments_alone", "two_rows")

# Heads that pass on neither offsets nor numbers.
KEEPING = {
    "GPTNeoForTokenClassification": ("gpt_neo", ("logits",)),
    "GPTNeoForQuestionAnswering": ("gpt_neo", ("start_logits", "end_logits")),
    "BigBirdForTokenClassification": ("big_bird", ("logits",)),
    "XLNetForTokenClassification": ("xlnet", ("logits",)),
}


@pytest.mark.fast(
    "GPTNeoForTokenClassification-collator",
    "GPTNeoForTokenClassification-two_rows",
    "GPTNeoForQuestionAnswering-offsets_alone",
    "BigBirdForTokenClassification-offsets_alone",
    "XLNetForTokenClassification-position_ids",
    "XLNetForTokenClassification-segments_alone",
)
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in KEEPING for form in TOLD if (name, form) != ("XLNetForTokenClassification", "two_rows")],
)  # XLNet's causal mask has room for one row
def test_heads_that_pass_on_only_some_arguments(name: str, form: str) -> None:
    model_type, outputs = KEEPING[name]
    model, pieces = head(name, model_type, num_labels=2), documents()
    alone = [model(ids) for ids in pieces]
    with tritonpack.patch(model):
        batch = FORMS[form](pieces)
        output = model(input_ids=batch.ids, **batch.arguments)
    for key in outputs:
        expected = torch.cat([one[key] for one in alone], dim=1)[0]
        got = batch.gather(output[key])
        assert float((expected - got).abs().max()) < EXACT * float(expected.abs().max()), key


class Silent(LlamaForCausalLM):
    """A head that passes on only tokens."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return self.lm_head(self.model(input_ids).last_hidden_state)


class Lengthening(LlamaForCausalLM):
    """A head that puts a token of its own before every row."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return self.lm_head(self.model(torch.cat([input_ids[:, :1], input_ids], dim=1)).last_hidden_state)


class Counting(LlamaForCausalLM):
    """A head that counts the tokens of the row."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        places = torch.arange(input_ids.shape[1])[None]
        return self.lm_head(self.model(input_ids, attention_mask, places).last_hidden_state)


WITHOUT_POSITIONS = ("offsets_alone", "segments_alone")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("kind", "form"), [*((Silent, form) for form in TOLD), *((Counting, form) for form in WITHOUT_POSITIONS)]
)
def test_heads_that_pass_on_no_packing_or_positions_of_the_row(kind: type[LlamaForCausalLM], form: str) -> None:
    model, pieces = kind(zoo.tiny_config("llama")).double().eval(), documents()
    expected = torch.cat([model(ids) for ids in pieces], dim=1)[0]
    with tritonpack.patch(model):
        batch = FORMS[form](pieces)
        assert relative(expected, batch.gather(model(batch.ids, **batch.arguments))) < EXACT


def test_a_head_that_adds_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pieces = Lengthening(zoo.tiny_config("llama")).double().eval(), documents()
    with pytest.raises(tritonpack.UnsupportedModelError, match="Train it on padded rows, unpatched"):
        tritonpack.patch(model).prove()
    monkeypatch.setattr("tritonpack.patches.proof.Proof.require", lambda *_: None)
    with tritonpack.patch(model):
        assert model(**padded(pieces)).shape[1] == max(LENGTHS) + 1
        with pytest.raises(ValueError, match=r"runs on \(1, 23\) tokens where the model around it was given \(1, 22\)"):
            model(**packed("position_ids", pieces))


# One score a document ------------------------------------------------------------------------------------------------

SCORING = {
    "LlamaForSequenceClassification": "llama",
    "GPT2ForSequenceClassification": "gpt2",
    "MistralForSequenceClassification": "mistral",
    "Qwen3ForSequenceClassification": "qwen3",
    "GptOssForSequenceClassification": "gpt_oss",
    "BloomForSequenceClassification": "bloom",
    "JambaForSequenceClassification": "jamba",
    "Gemma3ForSequenceClassification": "gemma3",
    "BertForSequenceClassification": "bert",
    "RobertaForSequenceClassification": "roberta",
    "ElectraForSequenceClassification": "electra",
    "BigBirdForSequenceClassification": "big_bird",
    "BertForNextSentencePrediction": "bert",
    "XLMForSequenceClassification": "xlm",
}


@pytest.mark.parametrize("name", [*SCORING, "XLNetForSequenceClassification"])
@pytest.mark.fast("BertForNextSentencePrediction", "MistralForSequenceClassification", "XLNetForSequenceClassification")
def test_one_score_a_row(name: str) -> None:
    """Logits, loss and gradients of padded rows equal those of the unpatched model. Packed rows are refused."""
    model_type = SCORING.get(name, "xlnet")
    model, pieces = head(name, model_type), documents()
    alone = torch.cat([model(ids).logits for ids in pieces])
    labels, call = torch.tensor([1, 0, 0, 1]), padded(pieces, left=model_type == "xlnet")
    expected = model(**call, labels=labels)
    with tritonpack.patch(model):
        got = model(**call, labels=labels)
        assert relative(alone, got.logits) < EXACT
        pairs = ((model, expected), (model, got))
        before, after = ((x.loss[None].detach(), gradients(m, x.loss)) for m, x in pairs)
        for form in TOLD:
            with pytest.raises(ValueError, match=rf"{name} gives one result for each row.*padded rows.*unpad=True"):
                model(**packed(form, pieces))
    assert difference(before, after) < EXACT


@pytest.mark.parametrize("form", TOLD)
def test_a_search_for_the_first_separator_of_a_row(form: str) -> None:
    model = head("BigBirdForQuestionAnswering", "big_bird", num_labels=2)
    with tritonpack.patch(model), pytest.raises(ValueError, match="BigBirdForQuestionAnswering gives one result for"):
        model(**packed(form, documents()))


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "attention_mask", "left"])
def test_one_document_with_padding_gets_one_score(told: str) -> None:
    model, (ids,) = head("LlamaForSequenceClassification", "llama"), documents((5,))
    expected, zeros = model(ids).logits, torch.zeros(1, 3, dtype=torch.long)
    row, places = torch.cat([ids, zeros], 1), torch.cat([torch.arange(5)[None], zeros], 1)
    calls: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": places},
        "cu_seq_lens_q": {"position_ids": places, "cu_seq_lens_q": torch.tensor([0, 5, 8])},
        "attention_mask": {"attention_mask": (row != 0).long()},
        "left": {"attention_mask": (row != 0).long().flip(1)},
    }
    with tritonpack.patch(model):
        got = model(torch.cat([zeros, ids], 1) if told == "left" else row, **calls[told])
    assert relative(expected, got.logits) < EXACT


@pytest.mark.slow
def test_packed_rows_are_refused_in_a_graph() -> None:
    model, pieces = head("LlamaForSequenceClassification", "llama"), documents()
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend="eager", dynamic=True)
        expected = model(**padded(pieces)).logits
        assert relative(expected, compiled(**padded(pieces)).logits) < EXACT
        with pytest.raises(RuntimeError, match="gives one result for each row"):
            compiled(**packed("position_ids", pieces))


def test_packed_rows_with_an_empty_cache_are_refused() -> None:
    model = head("LlamaForSequenceClassification", "llama")
    with tritonpack.patch(model), pytest.raises(ValueError, match=r"Documents in each row: \[4\]"):
        model(**packed("position_ids", documents()), past_key_values=transformers.DynamicCache())


def test_scores_in_tuples() -> None:
    model, call = head("LlamaForSequenceClassification", "llama"), padded(documents())
    columns = list(inspect.signature(model.forward).parameters)
    expected = model(**call).logits
    with tritonpack.patch(model):
        assert list(inspect.signature(model.forward).parameters) == columns
        assert relative(expected, model(**call, return_dict=False)[0]) < EXACT
        assert relative(expected, model.forward(**call)[0]) < EXACT


class Named(transformers.BertForMultipleChoice):
    """A subclass with another name."""


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("told", ["position_ids", "attention_mask", "cu_seq_lens_q"])
@pytest.mark.parametrize("kind", [transformers.BertForMultipleChoice, Named])
def test_multiple_choice(kind: Any, told: str) -> None:
    """Each choice holds one document. Packed rows are refused."""
    torch.manual_seed(0)
    model, pieces = kind(zoo.tiny_config("bert")).double().eval(), documents((4, 7))
    call = {name: x[None] for name, x in padded(pieces).items()}  # (1, 2, 7)
    expected = model(**call).logits
    rows = torch.cat(pieces, 1)[None].repeat(1, 2, 1)
    documents_of = {
        "position_ids": torch.tensor([*range(4), *range(7)]).expand(1, 2, -1),
        "attention_mask": torch.tensor([1] * 4 + [2] * 7).expand(1, 2, -1),
        "cu_seq_lens_q": torch.tensor([0, 4, 11, 15, 22]),
    }
    with tritonpack.patch(model):
        assert relative(expected, model(**call).logits) < EXACT
        with pytest.raises(ValueError, match=rf"{kind.__name__} gives one result for each row"):
            model(input_ids=rows, **{told: documents_of[told]})


# Vectors of documents ------------------------------------------------------------------------------------------------

POOLING = {
    "BertModel": "bert", "RobertaModel": "roberta", "AlbertModel": "albert", "BigBirdModel": "big_bird",
    "RemBertModel": "rembert",
}  # fmt: skip


@pytest.mark.fast(
    "AlbertModel-collator",
    "AlbertModel-segments_alone",
    "BigBirdModel-position_ids",
    "BigBirdModel-offsets_alone",
    "BigBirdModel-two_rows",
    "RemBertModel-offsets_alone",
    "RemBertModel-two_rows",
)
@pytest.mark.parametrize("form", TOLD)
@pytest.mark.parametrize("name", POOLING)
def test_one_vector_a_document(name: str, form: str) -> None:
    model, pieces = head(name, POOLING[name]), documents()
    alone = [model(ids) for ids in pieces]
    with tritonpack.patch(model):
        batch = FORMS[form](pieces)
        output = model(input_ids=batch.ids, **batch.arguments)
        as_tuple = model(input_ids=batch.ids, **batch.arguments, return_dict=False)
    expected = torch.cat([one.pooler_output for one in alone])
    assert relative(expected, output.pooler_output) < EXACT
    assert relative(expected, as_tuple[1]) < EXACT
    states = torch.cat([one.last_hidden_state for one in alone], dim=1)[0]
    assert relative(states, batch.gather(output.last_hidden_state)) < EXACT


@pytest.mark.parametrize("name", ["BertForPreTraining", "AlbertForPreTraining", "BigBirdForPreTraining"])
def test_pretraining_heads(name: str) -> None:
    """The loss of tokens, and the loss of pairs of sentences."""
    model_type = {"Be": "bert", "Al": "albert", "Bi": "big_bird"}[name[:2]]
    model, pieces = head(name, model_type, num_labels=2), documents()
    pairs = torch.tensor([1, 0, 0, 1])
    target = {"sentence_order_label" if model_type == "albert" else "next_sentence_label": pairs}
    call = padded(pieces)
    expected = model(**call, labels=torch.where(call["attention_mask"] == 1, call["input_ids"], -100), **target).loss
    with tritonpack.patch(model):
        call = packed("collator", pieces)
        got = model(**call, labels=call["input_ids"], **target).loss
    assert relative(expected[None], got[None]) < EXACT


class Averaging(LlamaModel):
    """A model with a vector for each row."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        states = super().forward(input_ids, attention_mask, **kwargs).last_hidden_state
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=states.mean(1))


@pytest.mark.usefixtures("untried")
def test_vectors_of_rows_are_refused() -> None:
    model, pieces = Averaging(zoo.tiny_config("llama")).double().eval(), documents()
    with tritonpack.patch(model):
        assert model(**padded(pieces)).pooler_output.shape[0] == len(LENGTHS)
        with pytest.raises(ValueError, match=r"returns pooler_output, one for each row.*Documents in each row: \[4\]"):
            model(**packed("position_ids", pieces))


def test_poolers_read_the_first_token() -> None:
    """Documents are pooled by this convention of transformers."""
    known = {"VJEPA2", "Hiera", "LlavaNextVideo", "PoolFormer", "Gemma4"}  # of images
    import pathlib
    import re

    folder = pathlib.Path(transformers.__file__).parent / "models"
    found = 0
    for path in folder.glob("*/modeling_*.py"):
        for name, body in re.findall(r"^class (\w+Pooler)\(.*?\n(.*?)(?=^\S|\Z)", path.read_text(), re.S | re.M):
            if not any(name.startswith(prefix) for prefix in known):
                forward = body[body.index("def forward(self, hidden_states") :]
                assert re.search(r"hidden_states\[:, 0(, :)?\]", forward), name
                found += 1
    assert found > 40


# How models are called -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LlamaModel", "BertModel", "MambaModel"])
def test_the_forward_of_a_model_without_a_head(name: str) -> None:
    """PEFT calls the forward without hooks."""
    model, pieces = head(name, name.removesuffix("Model").lower()), documents()
    expected = torch.cat([model(ids).last_hidden_state for ids in pieces], dim=1)
    with tritonpack.patch(model):
        for form in ("position_ids", "offsets_alone", "segments_alone"):
            got = model.forward(**packed(form, pieces)).last_hidden_state
            assert relative(expected, got) < EXACT, form


def test_a_patched_model_is_freed() -> None:
    model = tiny_model("llama")
    reference = weakref.ref(model)
    tritonpack.patch(model)
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_unmasked_first_labels_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonpack.notices, "_said", {})
    model, call = tiny_model("llama"), packed("position_ids", documents())
    masked = call["input_ids"].clone()
    masked[:, [0, *torch.tensor(LENGTHS).cumsum(0)[:-1].tolist()]] = -100
    with tritonpack.patch(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**call, labels=masked)
        with pytest.raises(tritonpack.PackingWarning, match="a document begins at token 7 of row 0"):
            model.forward(**call, labels=call["input_ids"])
        model(**call, labels=call["input_ids"])
