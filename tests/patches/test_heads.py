"""Heads on packed rows: heads of users, and answers of documents, whose loss is the mean over documents.

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
from tests.patches.calls import EXACT, LENGTHS, alone, call_of, documents, relative, require_exact
from tests.patches.foreign import Output, OwnPooler
from tritonpack import UnsupportedModelError


def padded(pieces: list[Tensor], left: bool = False) -> dict[str, Tensor]:
    return call_of("padded_left_mask_alone" if left else "padded_right_mask_alone", pieces)


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
@pytest.mark.parametrize(("kind", "tried"), [(Silent, ("position_ids", "two_rows")), (Counting, ("segments_alone",))])
def test_heads_that_pass_on_only_some_arguments(kind: Any, tried: tuple[str, ...]) -> None:
    model = own(kind)
    expected = alone(model)
    with tritonpack.patch(model):
        require_exact(model, expected, "offsets_alone", *tried)


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


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "attention_mask", "left"])
def test_one_document_with_padding_gets_one_score(told: str) -> None:
    model, (ids,) = zoo.tiny_model("llama", kind="LlamaForSequenceClassification"), documents((5,))
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
        with pytest.raises(ValueError, match=r"one result for each row.*padded rows.*unpad=True.*Documents in each ro"):
            model(**call_of(), past_key_values=transformers.DynamicCache())


# Answers: the loss is the mean over documents of the loss that each has alone

START, END = torch.tensor([2, 0, 1, 4]), torch.tensor([5, 0, 2, 10])
ANSWERS = {"start_positions": START, "end_positions": END}
# What is given, and the tokens in documents that the losses of the starts and of the ends are of: positions at or after
# the end are ignored, and negative ones count as 0.
PLACES = {
    "inside": (START, END, dict(enumerate(START.tolist())), dict(enumerate(END.tolist()))),
    "outside": (torch.tensor([-1, 1, 3, 0]), torch.tensor([6, 5, 2, 11]), {0: 0, 3: 0}, {0: 6, 2: 2}),
}


def answering(name: str, **more: Any) -> PreTrainedModel:
    kind = {"BigBird": "big_bird"}.get(name, name.lower())
    return zoo.tiny_model(kind, kind=f"{name}ForQuestionAnswering", dtype=torch.float64, num_labels=2, **more)


def cross_entropy(model: PreTrainedModel, name: str, places: dict[int, int]) -> Tensor:
    """The mean over some documents, by number, of the loss at one place in each."""
    losses = [nn.functional.cross_entropy(model(documents()[i])[name], torch.tensor([at])) for i, at in places.items()]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_loss_of_spans(name: str, places: str) -> None:
    """Heads that call their loss_function divide by the number of items; others ignore it."""
    model, (start, end, of_start, of_end) = answering(name), PLACES[places]
    expected = (cross_entropy(model, "start_logits", of_start) + cross_entropy(model, "end_logits", of_end)) / 2
    given = {"start_positions": start, "end_positions": end}
    columns = {key: x[:, None] for key, x in given.items()}
    with tritonpack.patch(model):
        for form in ("position_ids", "padded_end_mask", "two_rows_padded"):
            assert relative(expected, model(**call_of(form), **columns).loss) < EXACT
        assert relative(expected, model(**call_of(), **given, return_dict=False)[0]) < EXACT
        summed = len(of_start) / 8 if name == "Llama" else 1
        if len(of_start) == len(LENGTHS):
            assert relative(summed * expected, model(**call_of(), **given, num_items_in_batch=8).loss) < EXACT


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_spans_in_padded_batches(left: bool) -> None:
    """The loss leaves out padding, and rows of padding alone. Positions are places in the row, as without a patch, and
    ignored in padding."""
    model, pieces = answering("Bert"), documents()
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
    model, targets = answering("Bart"), zoo.documents((5, 2, 6, 4))
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
    model = answering("Llama")
    stock = model.loss_function
    with tritonpack.patch(model):
        expected = 2 * model(**call_of(), **ANSWERS).loss
    model.loss_function = lambda *args, **kwargs: 2 * stock(*args, **kwargs)
    with tritonpack.patch(model):
        assert relative(expected, model(**call_of(), **ANSWERS).loss) < EXACT
    model = Smoothing(zoo.tiny_config("bert", num_labels=2)).double().eval()
    with tritonpack.patch(model):
        assert model(**call_of()).loss is None
        assert model(**padded(documents()), **ANSWERS).loss.isfinite()  # the head computes it
        with pytest.raises(ValueError, match=r"Smoothing has a loss of its own.*Pass padded rows"):
            model(**call_of(), **ANSWERS)


# a class of question answering, what is given beside packed rows, words
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"start_positions": torch.tensor([2]), "end_positions": torch.tensor([5])},
     r"start_positions has shape \(1,\), but the packed rows hold 4 documents. Pass start_positions of shape \(4,\)"),
    ("Llama", {"start_positions": START, "end_positions": torch.zeros(5, dtype=torch.long)},
     r"end_positions has shape \(5,\), but the packed rows hold 4 documents"),
    ("Llama", ANSWERS | {"past_key_values": transformers.DynamicCache()},
     r"packed rows can't use a cache.*Leave the cache out, or.* Documents in each row: \[4\]"),
    ("Bert", {"start_positions": START}, "start_positions without end_positions; pass both"),
    ("XLNet", {}, "one value for each row.*Pass padded rows"),
    ("XLM", ANSWERS, "XLMForQuestionAnswering has a loss of its own.*Pass padded rows"),
    ("BigBird", {}, "BigBirdForQuestionAnswering gives one result for"),
]  # fmt: skip


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("name", "given", "words"), REFUSED)
def test_refusals_of_spans(name: str, given: dict[str, Any], words: str) -> None:
    model = answering(name, start_n_top=2, end_n_top=2)
    with tritonpack.patch(model), pytest.raises(ValueError, match=words):
        model(**call_of(), **given)
