"""Heads on packed rows: a result for each document, a loss that is the mean over documents, or a refusal.

All classes of transformers, with their outputs and losses, are in test_sweep.py.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import BertForQuestionAnswering, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel, PreTrainedModel
from transformers.utils import ModelOutput

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, FORMS, LENGTHS, call_of, documents, relative
from tests.patches.comparison import apart
from tests.patches.foreign import Output, OwnPooler
from tritonpack import UnsupportedModelError

TOLD = ("position_ids", "collator", "offsets_alone", "segments_alone", "two_rows")


def head(name: str, model_type: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model of a class, with three labels."""
    settings = {"num_labels": 3, "pad_token_id": 0, **overrides}
    return zoo.tiny_model(model_type, kind=name, dtype=torch.float64, **settings)


def padded(pieces: list[Tensor], left: bool = False) -> dict[str, Tensor]:
    call = call_of("padded_left" if left else "padded_right", pieces)
    return {name: call[name] for name in ("input_ids", "attention_mask")}


# Heads of users: they pass on nothing, or positions of the row, add a token, or give a result for each row.


def own(kind: Any) -> Any:
    config = zoo.tiny_config("bert", is_decoder=False) if kind is OwnPooler else zoo.tiny_config("llama")
    return kind(config).double().eval()


class Silent(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return Output(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class Counting(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        places = torch.arange(input_ids.shape[1])[None]
        return Output(logits=self.lm_head(self.model(input_ids, attention_mask, places).last_hidden_state))


class Lengthening(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return self.lm_head(self.model(torch.cat([input_ids[:, :1], input_ids], dim=1)).last_hidden_state)


class Rater(LlamaPreTrainedModel):
    """Rates a row only if it has labels, so the proof accepts it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model, self.score = LlamaModel(config), nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, *args: Any, labels: Any = None, **told: Any) -> ModelOutput:
        states = self.model(*args, **told).last_hidden_state
        loss = None if labels is None else nn.functional.cross_entropy(self.score(states[:, 0]), labels)
        return Output(loss=loss, value=states)


# Positions that a head makes contradict those that are given.
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("kind", "forms"), [(Silent, TOLD), (Counting, ("offsets_alone", "segments_alone"))])
def test_heads_that_pass_on_only_some_arguments(kind: Any, forms: tuple[str, ...]) -> None:
    model, pieces = own(kind), documents()
    expected = torch.cat([model(ids).logits for ids in pieces], dim=1)[0]
    with tritonpack.patch(model):
        for form in forms:
            batch = FORMS[form](pieces)
            got = batch.gather(model(input_ids=batch.ids, **batch.arguments).logits)
            assert relative(expected, got) < EXACT, form


def test_a_head_that_adds_tokens_is_refused_by_its_proof() -> None:
    with pytest.raises(UnsupportedModelError, match="Train it on padded rows, unpatched"):
        tritonpack.patch(own(Lengthening)).prove()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    ("kind", "labels", "words"),
    [
        (Lengthening, None, r"runs on \(1, 23\) tokens, but the model around it was given \(1, 22\)"),
        (OwnPooler, None, r"returns pooler_output with one value for each row.*Documents in each row: \[4\]"),
        (Rater, torch.tensor([0, 1, 2, 0]), r"failed with labels .* for each of 4 documents.*Pass padded rows"),
    ],
)
def test_results_of_rows_in_heads_of_users_are_refused(kind: Any, labels: Any, words: str) -> None:
    model = own(kind)
    with tritonpack.patch(model):
        assert model(**padded(documents())) is not None
        with pytest.raises(ValueError, match=words):
            model(**call_of(), **({} if labels is None else {"labels": labels}))


# One result a document

SCORING = {"MistralForSequenceClassification": "mistral", "BertForNextSentencePrediction": "bert",
           "BartForSequenceClassification": "bart"}  # fmt: skip


@pytest.mark.parametrize("name", SCORING)
def test_one_score_a_row(name: str) -> None:
    """Padded rows have the scores of documents alone. Packed rows are refused."""
    model, pieces = head(name, SCORING[name]), documents()
    for piece in pieces:  # encoders with decoders score the end-of-sequence token
        piece[:, -1] = model.config.eos_token_id if model.config.is_encoder_decoder else piece[:, -1]
    call, expected = padded(pieces), torch.cat([model(ids).logits for ids in pieces])
    with tritonpack.patch(model):
        assert relative(expected, model(**call).logits) < EXACT
        assert relative(expected, model(**call, return_dict=False)[0]) < EXACT
        for form in TOLD:
            with pytest.raises(ValueError, match=rf"{name} gives one result for each row.*padded rows.*unpad=True"):
                model(**call_of(form, pieces))


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
        with pytest.raises(ValueError, match=r"Documents in each row: \[4\]"):
            model(**call_of(), past_key_values=transformers.DynamicCache())
    assert relative(expected, got.logits) < EXACT


def test_multiple_choice() -> None:
    """Each choice holds one document. Packed rows are refused."""
    model, pieces = head("BertForMultipleChoice", "bert"), documents((4, 7))
    call = {name: x[None] for name, x in padded(pieces).items()}  # (1, 2, 7)
    expected = model(**call).logits
    packed = {
        "position_ids": torch.tensor([*range(4), *range(7)]).expand(1, 2, -1),
        "attention_mask": torch.tensor([1] * 4 + [2] * 7).expand(1, 2, -1),
        "cu_seq_lens_q": torch.tensor([0, 4, 11, 15, 22]),
    }
    with tritonpack.patch(model):
        assert relative(expected, model(**call).logits) < EXACT
        for name, value in packed.items():
            with pytest.raises(ValueError, match="BertForMultipleChoice gives one result for each row"):
                model(input_ids=torch.cat(pieces, 1)[None].repeat(1, 2, 1), **{name: value})


# Spans of answers: the loss is the mean over documents of the loss that each has alone

START, END = torch.tensor([2, 0, 1, 4]), torch.tensor([5, 0, 2, 10])
ANSWERS = {"start_positions": START, "end_positions": END}
PADDED = ("segments_padded", "padded_end_mask", "two_rows_padded")  # positions in padding are ignored


def answering(name: str = "BertForQuestionAnswering", model_type: str = "bert") -> PreTrainedModel:
    return head(name, model_type, num_labels=2)


def mean_loss(model: PreTrainedModel, pieces: list[Tensor], **more: Any) -> Tensor:
    """The mean over documents of the loss that each has in a call of its own."""
    calls = zip(pieces, START[:, None], END[:, None], strict=True)
    return torch.stack([model(ids, start_positions=s, end_positions=e, **more).loss for ids, s, e in calls]).mean()


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "LlamaForQuestionAnswering", "BartForQuestionAnswering"])
def test_loss_of_spans(name: str) -> None:
    """Heads that call their loss_function divide by the number of items; others ignore it."""
    model, pieces = answering(name, name[: -len("ForQuestionAnswering")].lower()), documents()
    loss, by_items = mean_loss(model, pieces), mean_loss(model, pieces, num_items_in_batch=8)
    parameters = list(model.parameters())
    with tritonpack.patch(model):
        for form in (*TOLD, *PADDED):
            output = model(**call_of(form), **ANSWERS)
            assert output.start_logits.shape == call_of(form)["input_ids"].shape
            assert relative(loss, output.loss) < EXACT
        both = [torch.autograd.grad(x, parameters, allow_unused=True) for x in (loss, output.loss)]
        assert apart(*both) < EXACT
        times = len(LENGTHS) if name == "LlamaForQuestionAnswering" else 1
        assert relative(times * by_items, model(**call_of(), **ANSWERS, num_items_in_batch=8).loss) < EXACT
        assert relative(loss, model(**call_of(), **ANSWERS, return_dict=False)[0]) < EXACT


def cross_entropy(model: PreTrainedModel, name: str, places: dict[int, int]) -> Tensor:
    """The mean over some documents, by number, of the loss at one place in each."""
    losses = [nn.functional.cross_entropy(model(documents()[i])[name], torch.tensor([at])) for i, at in places.items()]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "LlamaForQuestionAnswering"])
def test_positions_outside_of_their_document(name: str) -> None:
    """Positions at or after the end are ignored. Negative positions count as 0."""
    model = answering(name, name[:-20].lower())
    of_start = cross_entropy(model, "start_logits", {0: 0, 3: 0})
    of_end = cross_entropy(model, "end_logits", {0: 6, 2: 2})
    start, end = torch.tensor([-1, 1, 3, 0]), torch.tensor([6, 5, 2, 11])
    with tritonpack.patch(model):
        loss = model(**call_of(), start_positions=start, end_positions=end).loss
        assert torch.equal(loss, model(**call_of(), start_positions=start[:, None], end_positions=end[:, None]).loss)
    assert relative((of_start + of_end) / 2, loss) < EXACT


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_spans_in_padded_batches(left: bool) -> None:
    """The loss leaves out padding, and rows of padding alone. Positions are places in the row, as without a patch, and
    ignored in padding."""
    model, pieces = answering(), documents()
    of_start = cross_entropy(model, "start_logits", dict(enumerate(START.tolist())))
    of_end = cross_entropy(model, "end_logits", {2: 2, 3: 10})
    pad = max(LENGTHS) - torch.tensor(LENGTHS) if left else torch.zeros(4, dtype=torch.long)
    end = torch.cat([torch.tensor([0, 0] if left else [7, 99]), (pad + END)[2:]])
    call = padded(pieces, left)
    with tritonpack.patch(model):
        got = model(**call, start_positions=START + pad, end_positions=end).loss
        assert relative((of_start + of_end) / 2, got) < EXACT
        more = {name: torch.cat([x, x[:1] * (name != "attention_mask")]) for name, x in call.items()}
        places = {"start_positions": torch.cat([START + pad, START[:1]]), "end_positions": torch.cat([end, END[:1]])}
        assert relative(got, model(**more, **places).loss) < EXACT


def test_positions_count_in_the_decoders_documents() -> None:
    """The logits belong to the decoder's documents."""
    model, targets = answering("BartForQuestionAnswering", "bart"), zoo.documents((5, 2, 6, 4))
    start, end = torch.tensor([1, 0, 5, 3]), torch.tensor([4, 1, 5, 3])
    pairs = zip(documents(), targets, start[:, None], end[:, None], strict=True)
    losses = [model(a, decoder_input_ids=b, start_positions=s, end_positions=e).loss for a, b, s, e in pairs]
    other = {f"decoder_{name}": x for name, x in call_of("segments_alone", targets).items()}
    with tritonpack.patch(model):
        got = model(**call_of("segments_alone"), **other, start_positions=start, end_positions=end).loss
    assert relative(torch.stack(losses).mean(), got) < EXACT


class Smoothing(BertForQuestionAnswering):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = None if output.loss is None else output.loss + output.start_logits.var()
        return output


def test_losses_of_spans_that_are_replaced() -> None:
    """A replaced loss_function is called. A loss of a head's own is refused."""
    model = answering("LlamaForQuestionAnswering", "llama")
    stock = model.loss_function
    model.loss_function = lambda *args, **kwargs: 2 * stock(*args, **kwargs)
    expected = mean_loss(model, documents())
    with tritonpack.patch(model):
        assert relative(expected, model(**call_of(), **ANSWERS).loss) < EXACT
    model = Smoothing(zoo.tiny_config("bert", num_labels=2)).double().eval()
    with tritonpack.patch(model):
        assert model(**call_of()).loss is None
        assert model(**padded(documents()), **ANSWERS).loss.isfinite()  # the head computes it
        with pytest.raises(ValueError, match=r"Smoothing has a loss of its own.*Pass padded rows"):
            model(**call_of(), **ANSWERS)


# a class of question answering and its type, what is given beside packed rows, words
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("LlamaForQuestionAnswering", "llama",
     {"start_positions": torch.tensor([2]), "end_positions": torch.tensor([5])},
     r"start_positions has shape \(1,\), but the packed rows hold 4 documents. Pass start_positions of shape \(4,\)"),
    ("LlamaForQuestionAnswering", "llama",
     {"start_positions": START, "end_positions": torch.zeros(5, dtype=torch.long)},
     r"end_positions has shape \(5,\), but the packed rows hold 4 documents"),
    ("LlamaForQuestionAnswering", "llama", ANSWERS | {"past_key_values": transformers.DynamicCache()},
     r"packed rows can't use a cache.*Leave the cache out, or.* Documents in each row: \[4\]"),
    ("BertForQuestionAnswering", "bert", {"start_positions": START},
     "start_positions without end_positions; pass both"),
    ("XLNetForQuestionAnswering", "xlnet", {}, "one value for each row.*Pass padded rows"),
    ("XLMForQuestionAnswering", "xlm", ANSWERS, "XLMForQuestionAnswering has a loss of its own.*Pass padded rows"),
    ("BigBirdForQuestionAnswering", "big_bird", {}, "BigBirdForQuestionAnswering gives one result for"),
]  # fmt: skip


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("name", "model_type", "given", "words"), REFUSED)
def test_refusals_of_spans(name: str, model_type: str, given: dict[str, Any], words: str) -> None:
    model = head(name, model_type, num_labels=2, start_n_top=2, end_n_top=2)
    with tritonpack.patch(model), pytest.raises(ValueError, match=words):
        model(**call_of(), **given)
