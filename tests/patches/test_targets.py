"""Labels of packed and padded rows, which raise a warning once, and losses of answers, which are means over documents.

All classes of transformers, with their outputs and losses, are in test_sweep.py; refusals in test_refusals.py.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.patches import zoo
from tests.patches.calls import EXACT, LENGTHS, alone, call_of, documents, relative, require_exact
from tritonpack import PackingCollator, PackingWarning, notices, patch
from tritonpack.patches.targets import shifts_labels

# Labels

IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 4]])
OFFSETS = torch.tensor([0, 3, 5, 8])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
MASKED = torch.tensor([[-100, 6, 7, -100, 9, -100, 4, 4]])  # the first of each document has no label
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
LEFT = RIGHT.flip(1)
BETWEEN = torch.tensor([[1, 1, 0, 0, 0, 1, 1, 1]])
FIRST = "first-label: a document begins at token 3 of row 0, and its first label is 8. LlamaForC"


def on_padding(place: int, label: int) -> str:
    return f"padding-label: the label {label} in row 0 is predicted at token {place}, "


# What is given beside ids, and how the warning begins; empty if there is none.
HEARD: dict[str, tuple[dict[str, Any], str]] = {
    "positions": ({"labels": IDS, "position_ids": PLACES}, FIRST),
    "offsets": ({"labels": IDS, "cu_seq_lens_q": OFFSETS}, FIRST),
    "numbers": ({"labels": IDS, "seq_idx": NUMBERS}, FIRST),
    "a numbered mask": ({"labels": IDS, "attention_mask": NUMBERS + 1}, FIRST),
    "no label of a first token": ({"labels": MASKED, "position_ids": PLACES}, ""),
    "no labels": ({"position_ids": PLACES}, ""),
    "labels that are shifted": ({"labels": IDS, "shift_labels": IDS, "position_ids": PLACES}, ""),
    "collated and padded": (PackingCollator(8, 0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]), ""),
    "padding on the right": ({"labels": MASKED, "attention_mask": RIGHT}, on_padding(5, 4)),
    "padding on the left": ({"labels": IDS, "attention_mask": LEFT}, on_padding(0, 6)),
    "padding of packed rows": ({"labels": MASKED, "attention_mask": RIGHT, "position_ids": PLACES}, on_padding(5, 4)),
    "padding of offsets": ({"labels": MASKED, "attention_mask": RIGHT, "cu_seq_lens_q": OFFSETS}, on_padding(5, 4)),
    "padding between": (
        {"labels": MASKED.where(BETWEEN > 0, IDS), "attention_mask": BETWEEN,
         "cu_seq_lens_q": torch.tensor([0, 2, 5, 8])}, on_padding(2, 8),
    ),
    "the end, from the last token": (
        {"labels": torch.tensor([[5, 6, 7, 8, 9, 2, -100, -100]]), "attention_mask": RIGHT}, ""
    ),
    "masked on the right": ({"labels": IDS.where(RIGHT > 0, -100), "attention_mask": RIGHT}, ""),
    "masked on the left": ({"labels": IDS.where(LEFT > 0, -100), "attention_mask": LEFT}, ""),
    "no padding": ({"labels": IDS, "attention_mask": torch.ones_like(IDS)}, ""),
    "no mask": ({"labels": IDS}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", HEARD)
def test_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever the attention, with the place and the remedy."""
    given, words = HEARD[name]
    for attention in ("tritonpack", "sdpa", "eager"):
        monkeypatch.setattr(notices, "said", {"unpatched-model": object()})
        with (
            warnings.catch_warnings(record=True) as found,
            patch(model := zoo.tiny_model("llama"), attention=attention),
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                model(**{"input_ids": IDS, **given})
        messages = [str(warning.message) for warning in found if warning.category is PackingWarning]
        remedy = "Set the first label of each document to -100" if words is FIRST else "Set labels of padding to -100"
        assert [message.startswith(words) and remedy in message for message in messages] == [True] * bool(words)
        assert words.partition(":")[0] in {"", *notices.said}


def test_which_losses_shift() -> None:
    shifting = {"LlamaForCausalLM/llama", "GPT2LMHeadModel/gpt2", "BertLMHeadModel/bert"}
    others = {"BertForMaskedLM/bert", "LlamaForSequenceClassification/llama", "XLNetLMHeadModel/xlnet"}
    kinds = shifting | others | {"BartForCausalLM/bart"}
    assert {spec for spec in kinds if shifts_labels(zoo.build(spec), {})} == shifting


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
def test_a_mask_that_numbers_documents_from_0_is_refused(attention: Any) -> None:
    """Document 0 would be padding."""
    words = r"label 6 in row 0 is predicted at token 0.* pass attention_mask \+ 1"
    with patch(model := zoo.tiny_model("llama"), attention=attention):
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                model(input_ids=IDS, labels=MASKED, attention_mask=NUMBERS)
        assert model(input_ids=IDS, labels=MASKED, attention_mask=NUMBERS + 1).loss.isfinite()
        assert model(input_ids=IDS, attention_mask=NUMBERS).logits.isfinite().all()


# Heads of users, which pass on nothing, or positions that contradict those that are given; and scores of rows


class Silent(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class Counting(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        places = torch.arange(input_ids.shape[1])[None]
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, attention_mask, places).last_hidden_state))


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("kind", "tried"), [(Silent, ("position_ids", "two_rows")), (Counting, ("segments_alone",))])
def test_heads_that_pass_on_only_some_arguments(kind: Any, tried: tuple[str, ...]) -> None:
    model = kind(zoo.tiny_config("llama")).double().eval()
    expected = alone(model)
    with patch(model):
        require_exact(model, expected, "offsets_alone", *tried)


def test_one_document_with_padding_gets_one_score() -> None:
    model, (ids,) = zoo.tiny_model("llama", kind="LlamaForSequenceClassification"), documents((5,))
    expected, zeros = model(ids).logits, torch.zeros(1, 3, dtype=torch.long)
    row, places = torch.cat([ids, zeros], 1), torch.cat([torch.arange(5)[None], zeros], 1)
    with patch(model):
        for one, given in (
            (row, {"position_ids": places}),
            (row, {"position_ids": places, "cu_seq_lens_q": torch.tensor([0, 5, 8])}),
            (row, {"attention_mask": (row != 0).long()}),
            (torch.cat([zeros, ids], 1), {"attention_mask": (row != 0).long().flip(1)}),
        ):
            assert relative(expected, model(one, **given).logits) < EXACT
        with pytest.raises(ValueError, match=r"one result for each row.*padded rows.*unpad=True.*Documents in each ro"):
            model(**call_of())


# Answers: the loss is the mean over documents of the loss that each has alone

START, END = torch.tensor([2, 0, 1, 4]), torch.tensor([5, 0, 2, 10])
ANSWERS = {"start_positions": START, "end_positions": END}
# What is given, and the tokens in documents that the losses of the starts and of the ends are of: positions at or after
# the end are ignored, and negative ones count as 0.
SPANS = {
    "inside": (START, END, dict(enumerate(START.tolist())), dict(enumerate(END.tolist()))),
    "outside": (torch.tensor([-1, 1, 3, 0]), torch.tensor([6, 5, 2, 11]), {0: 0, 3: 0}, {0: 6, 2: 2}),
}


def answering(name: str) -> PreTrainedModel:
    return zoo.build(f"{name}ForQuestionAnswering/{name.lower()}", num_labels=2)


def cross_entropy(model: PreTrainedModel, name: str, places: dict[int, int]) -> Tensor:
    """The mean over some documents, by number, of the loss at one place in each."""
    losses = [nn.functional.cross_entropy(model(documents()[i])[name], torch.tensor([at])) for i, at in places.items()]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("places", SPANS)
@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_loss_of_spans(name: str, places: str) -> None:
    """Heads that call their loss_function divide by the number of items; others ignore it."""
    model, (start, end, of_start, of_end) = answering(name), SPANS[places]
    expected = (cross_entropy(model, "start_logits", of_start) + cross_entropy(model, "end_logits", of_end)) / 2
    given = {"start_positions": start, "end_positions": end}
    columns = {key: x[:, None] for key, x in given.items()}
    with patch(model):
        for form in ("position_ids", "padded_end_mask", "two_rows_padded"):
            assert relative(expected, model(**call_of(form), **columns).loss) < EXACT
        assert relative(expected, model(**call_of(), **given, return_dict=False)[0]) < EXACT
        summed = len(of_start) / 8 if name == "Llama" else 1
        if len(of_start) == len(LENGTHS):
            assert relative(summed * expected, model(**call_of(), **given, num_items_in_batch=8).loss) < EXACT
        if name == "Llama":  # a replaced loss_function is called
            model.loss_function = lambda *args, own=model.loss_function, **kwargs: 2 * own(*args, **kwargs)
            assert relative(2 * expected, model(**call_of(), **given).loss) < EXACT


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_spans_in_padded_batches(left: bool) -> None:
    """The loss leaves out padding, and rows of padding alone. Positions are places in the row, as without a patch, and
    ignored in padding."""
    model = answering("Bert")
    of_start = cross_entropy(model, "start_logits", dict(enumerate(START.tolist())))
    of_end = cross_entropy(model, "end_logits", {2: 2, 3: 10})
    pad = max(LENGTHS) - torch.tensor(LENGTHS) if left else torch.zeros(4, dtype=torch.long)
    end = torch.cat([torch.tensor([0, 0] if left else [7, 99]), (pad + END)[2:]])
    call = call_of("padded_left_mask_alone" if left else "padded_right_mask_alone")
    with patch(model):
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
    with patch(model):
        got = model(**call_of("segments_alone"), **other, start_positions=start, end_positions=end).loss
    assert relative(torch.stack(losses).mean(), got) < EXACT
