"""Heads on packed rows: the model inside gets the packing, and a row does not count as one document."""

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
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
from tritonpack.patches.trial.comparison import tolerance
from tritonpack.patches.trial.packed_forms import FORMS, lay_out
from tritonpack.patches.trial.small_copy import spread

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

# Heads that pass on neither offsets nor numbers, or look for the first special token of a row.
KEEPING = {
    "GPTNeoForTokenClassification": ("gpt_neo", ("logits",)),
    "GPTNeoForQuestionAnswering": ("gpt_neo", ("start_logits", "end_logits")),
    "BigBirdForQuestionAnswering": ("big_bird", ("start_logits", "end_logits")),
    "BigBirdForTokenClassification": ("big_bird", ("logits",)),
    "XLNetForTokenClassification": ("xlnet", ("logits",)),
}


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


@pytest.mark.heavy
def test_a_head_that_adds_tokens_runs_with_one_document_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pieces = Lengthening(zoo.tiny_config("llama")).double().eval(), documents()
    alone = [model(document) for document in pieces]
    with tritonpack.patch(model) as handle:  # packed rows don't work, so each document has a row
        assert handle.report.attention == "lengths"
        rows = model(**packed("position_ids", pieces))
    for row, expected in zip(rows, alone, strict=True):
        torch.testing.assert_close(row[: expected.shape[1]], expected[0])
        assert not row[expected.shape[1] :].any()
    monkeypatch.setattr("tritonpack.patches.choose_layout.require_evidence", lambda *args: None)
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


@pytest.mark.parametrize("form", TOLD)
@pytest.mark.parametrize("name", [*SCORING, "XLNetForSequenceClassification"])
@pytest.mark.sampled(every=2)
def test_one_score_a_document(name: str, form: str) -> None:
    """Logits, loss and gradients equal those of a padded batch, and the logits equal those of each document alone."""
    model_type = SCORING.get(name, "xlnet")
    model, pieces = head(name, model_type), documents()
    alone = torch.cat([model(ids).logits for ids in pieces])
    labels = torch.tensor([1, 0, 0, 1])
    expected = model(**padded(pieces, left=model_type == "xlnet"), labels=labels)
    with tritonpack.patch(model):
        got = model(**packed(form, pieces), labels=labels)
        assert relative(alone, got.logits) < EXACT
        assert relative(expected.logits, got.logits) < EXACT
        pairs = ((model, expected), (model, got))
        before, after = ((x.loss[None].detach(), gradients(m, x.loss)) for m, x in pairs)
    assert difference(before, after) < EXACT


@pytest.mark.parametrize("kind", ["regression", "multi_label_classification"])
def test_losses_of_other_kinds(kind: str) -> None:
    model = head("LlamaForSequenceClassification", "llama", num_labels=1 if kind == "regression" else LABELS)
    model.config.problem_type = kind
    pieces = documents()
    labels = torch.rand(4, dtype=torch.float64) if kind == "regression" else torch.eye(4, LABELS, dtype=torch.float64)
    expected = model(**padded(pieces), labels=labels)
    with tritonpack.patch(model):
        got = model(**packed("position_ids", pieces), labels=labels)
    assert relative(expected.loss[None], got.loss[None]) < EXACT


def test_heads_that_average_rows_are_refused() -> None:
    model, pieces = head("XLNetForSequenceClassification", "xlnet", summary_type="mean"), documents()
    same = documents((5, 5, 5))
    expected = torch.cat([model(ids).logits for ids in same])
    with tritonpack.patch(model):
        assert relative(expected, model(**packed("position_ids", same)).logits) < EXACT
        with pytest.raises(ValueError, match=r"averages all tokens of a row.*set summary_type to 'first' or 'last'"):
            model(**packed("position_ids", pieces))


@pytest.mark.parametrize("summary_type", ["last", "cls_index"])
@pytest.mark.parametrize("name", ["XLNetForSequenceClassification", "XLMForSequenceClassification"])
def test_heads_that_read_the_last_token(name: str, summary_type: str) -> None:
    model, pieces = head(name, name[:5].removesuffix("Fo").lower(), summary_type=summary_type), documents()
    expected = torch.cat([model(ids).logits for ids in pieces])
    with tritonpack.patch(model):
        assert relative(expected, model(**packed("position_ids", pieces)).logits) < EXACT


def test_padding_gets_no_score() -> None:
    """Padding by a mask, and a last document of padding tokens alone, as some collators fill rows up."""
    model, pieces = head("LlamaForSequenceClassification", "llama"), documents()
    expected = torch.cat([model(ids).logits for ids in pieces])
    zeros = torch.zeros(1, 3, dtype=torch.long)
    ids = torch.cat([*pieces, zeros], dim=1)
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    offsets = torch.tensor([0, *LENGTHS, 3]).cumsum(0)
    for told in (
        {"position_ids": torch.cat([places, zeros], 1)},
        {"position_ids": torch.cat([places, torch.arange(3)[None]], 1), "cu_seq_lens_q": offsets},
        {"position_ids": torch.cat([places, zeros], 1), "attention_mask": (ids != 0).long()},
    ):
        with tritonpack.patch(model):
            assert relative(expected, model(ids, **told).logits) < EXACT


def test_scores_in_tuples_and_without_a_patch() -> None:
    model, pieces = head("LlamaForSequenceClassification", "llama"), documents()
    columns = list(inspect.signature(model.forward).parameters)
    expected = torch.cat([model(ids).logits for ids in pieces])
    with tritonpack.patch(model):
        assert list(inspect.signature(model.forward).parameters) == columns
        assert relative(expected, model(**packed("position_ids", pieces), return_dict=False)[0]) < EXACT
        assert relative(expected, model.forward(**packed("position_ids", pieces))[0]) < EXACT
    assert model(**packed("position_ids", pieces)).logits.shape == (1, LABELS)


def test_hidden_states_lie_in_the_packed_row() -> None:
    model, pieces = head("LlamaForSequenceClassification", "llama"), documents()
    expected = torch.cat([model(ids, output_hidden_states=True).hidden_states[-1] for ids in pieces], dim=1)
    with tritonpack.patch(model):
        output = model(**packed("position_ids", pieces), output_hidden_states=True)
    assert relative(expected, output.hidden_states[-1]) < EXACT


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "BertForSequenceClassification"])
def test_padded_batches_run_in_the_head(name: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pieces = head(name, SCORING[name]), documents()
    call = padded(pieces, left=left)
    expected = model(**call)
    called = []
    with tritonpack.patch(model):
        forward = "tritonpack.patches.model_forward.ModelForward.run_by_document"
        monkeypatch.setattr(forward, lambda *_: called.append(1))
        assert relative(expected.logits, model(**call).logits) < EXACT
    assert not called


BAD_CALLS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a label for each token": (
        lambda: {"labels": torch.zeros(1, 22, dtype=torch.long)},
        r"labels has shape \(1, 22\), but the packed rows hold 4 documents.*of shape \(4,\)",
    ),
    "a label for the row": (lambda: {"labels": torch.zeros(1, dtype=torch.long)}, "hold 4 documents"),
    "a cache": (
        lambda: {"past_key_values": transformers.DynamicCache()},
        r"can't use a cache.*Documents in each row: \[4\]",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_of_scoring_heads_are_refused(name: str) -> None:
    arguments, message = BAD_CALLS[name]
    model = head("LlamaForSequenceClassification", "llama")
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(**packed("position_ids", documents()), **arguments())


def test_scores_need_tokens_and_a_padding_token() -> None:
    model, pieces = head("LlamaForSequenceClassification", "llama"), documents()
    call = packed("position_ids", pieces)
    with tritonpack.patch(model):
        embeds = model.get_input_embeddings()(call["input_ids"])
        with pytest.raises(ValueError, match="pass packed rows as input_ids instead of inputs_embeds"):
            model(inputs_embeds=embeds, position_ids=call["position_ids"])
        model.config.pad_token_id = None
        with pytest.raises(ValueError, match=r"config\.pad_token_id, which is None"):
            model(**call)


# Vectors of documents ------------------------------------------------------------------------------------------------

POOLING = {
    "BertModel": "bert", "RobertaModel": "roberta", "AlbertModel": "albert", "BigBirdModel": "big_bird",
    "RemBertModel": "rembert", "CLIPTextModel": "clip_text_model",
}  # fmt: skip


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
