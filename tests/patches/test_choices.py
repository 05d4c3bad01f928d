"""Multiple choice on packed rows: scores, losses and gradients are those of each question alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertForMultipleChoice

import tritonpack
from tests.patches import zoo
from tests.patches.sweep import difference
from tests.patches.test_heads import EXACT, gradients, head, relative
from tritonpack.patches.trial.packed_forms import lay_out

CHOICES = 3
# Tokens of each option of four questions; the first three questions lie in one row.
LENGTHS = ((7, 2, 5), (1, 4, 3), (3, 3, 6), (9, 8, 1))
LABELS = torch.tensor([2, 0, 1, 1])
ROWS = ((0, 1, 2), (3,))
HEADS = {
    "BertForMultipleChoice": "bert",
    "RobertaForMultipleChoice": "roberta",  # counts positions from 1
    "DistilBertForMultipleChoice": "distilbert",
    "ElectraForMultipleChoice": "electra",
    "ModernBertForMultipleChoice": "modernbert",
    "RoCBertForMultipleChoice": "roc_bert",
    "XLMForMultipleChoice": "xlm",
    "XLNetForMultipleChoice": "xlnet",  # reads the last token
    "RoFormerForMultipleChoice": "roformer",  # reads the last token, and takes no position ids
}
TOLD = {
    "position_ids": ("position_ids", "attention_mask"),
    "segments": ("segments",),
    "seq_idx": ("seq_idx", "attention_mask"),
    "cu_seq_lens_q": ("cu_seq_lens_q",),
}


def questions() -> list[list[Tensor]]:
    """The options `[1, n]` of each question."""
    drawn = iter(zoo.documents(tuple(n for lengths in LENGTHS for n in lengths)))
    return [[next(drawn) for _ in range(CHOICES)] for _ in LENGTHS]


def alone(options: list[Tensor]) -> dict[str, Tensor]:
    """One question: (1, C, longest), padded."""
    batch = lay_out([[i] for i in range(CHOICES)], options)
    return {"input_ids": batch.ids[None], "attention_mask": batch.arguments["attention_mask"][None]}


def packed(told: str, rows: tuple[tuple[int, ...], ...] = ROWS) -> dict[str, Any]:
    """(B, C, T) rows of questions."""
    pieces = questions()
    documents = [pieces[q][c] for row in rows for c in range(CHOICES) for q in row]
    numbers = iter(range(len(documents)))
    batch = lay_out([[next(numbers) for _ in row] for row in rows for _ in range(CHOICES)], documents)
    segments, starts = torch.zeros_like(batch.ids), []
    for number, (row, span) in enumerate(batch.spans):
        segments[row, span] = number + 1
        starts.append(row * batch.ids.shape[1] + span.start)
        if (batch.ids.shape[1] != span.stop) and (number + 1 == len(documents) or batch.spans[number + 1][0] != row):
            starts.append(row * batch.ids.shape[1] + span.stop)  # padding
    offsets = torch.tensor([*starts, batch.ids.numel()], dtype=torch.int32)
    every = {**batch.arguments, "segments": segments, "seq_idx": segments}
    given = {
        name.replace("segments", "attention_mask"): every[name].unflatten(0, (-1, CHOICES))
        for name in TOLD[told]
        if name in every
    }
    if told == "cu_seq_lens_q":
        given["cu_seq_lens_q"] = offsets
    return {"input_ids": batch.ids.unflatten(0, (-1, CHOICES)), **given}


def expected_of(model: Any) -> tuple[Tensor, Tensor]:
    """The logits of each option alone, without padding, and the mean loss of the questions."""
    logits = torch.cat([torch.cat([model(ids[None]).logits for ids in options], dim=1) for options in questions()])
    return logits, torch.nn.functional.cross_entropy(logits, LABELS)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.sampled(every=2)
def test_one_score_a_choice(name: str, told: str) -> None:
    model = head(name, HEADS[name], num_labels=1)
    logits, loss = expected_of(model)
    expected = loss.detach()[None], gradients(model, loss)
    with tritonpack.patch(model):
        got = model(**packed(told), labels=LABELS)
        assert relative(logits, got.logits) < EXACT
        assert difference(expected, (got.loss.detach()[None], gradients(model, got.loss))) < EXACT


@pytest.mark.usefixtures("untried")
def test_other_values_of_tokens_are_cut_too() -> None:
    model = head("BertForMultipleChoice", "bert")
    kinds = [[(ids % 2) for ids in options] for options in questions()]
    outputs = []
    for options, kind in zip(questions(), kinds, strict=True):
        call = alone(options)
        outputs.append(model(**call, token_type_ids=lay_out([[i] for i in range(CHOICES)], kind).ids[None]))
    with tritonpack.patch(model):
        call = packed("position_ids")
        got = model(**call, token_type_ids=call["input_ids"] % 2 * call["attention_mask"], return_dict=False)
    assert relative(torch.cat([x.logits for x in outputs]), got[0]) < EXACT


@pytest.mark.usefixtures("untried")
def test_hidden_states_lie_in_the_rows() -> None:
    model = head("BertForMultipleChoice", "bert")
    pieces = questions()
    states = model(**alone(pieces[1]), output_hidden_states=True).hidden_states[-1]
    with tritonpack.patch(model):
        call = packed("segments")
        got = model(**call, output_hidden_states=True).hidden_states[-1]
    assert got.shape[:2] == call["input_ids"].flatten(0, 1).shape
    for choice, (n, before) in enumerate(zip(LENGTHS[1], LENGTHS[0], strict=True)):
        assert relative(states[choice, :n], got[choice, before : before + n]) < EXACT


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("told", ["position_ids", "segments"])
def test_one_document_in_each_choice_runs_in_the_head(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = head("BertForMultipleChoice", "bert")
    call = packed(told, ((0,), (3,)))
    call["attention_mask"] = (call["attention_mask"] != 0).long()
    expected = model(**call, labels=LABELS[[0, 3]])
    monkeypatch.setattr("tritonpack.patches.unpacking.unpacking_forward.UnpackingForward.run_by_document", None)
    with tritonpack.patch(model):
        got = model(**call, labels=LABELS[[0, 3]])
    assert relative(expected.logits, got.logits) < EXACT
    assert relative(expected.loss, got.loss) < EXACT


@pytest.mark.usefixtures("untried")
def test_offsets_of_one_document_in_each_choice() -> None:
    model = head("BertForMultipleChoice", "bert")
    expected = torch.cat([model(**alone(questions()[q])).logits for q in (0, 3)])
    with tritonpack.patch(model):
        for told in ("cu_seq_lens_q", "seq_idx"):
            assert relative(expected, model(**packed(told, ((0,), (3,)))).logits) < EXACT


@pytest.mark.usefixtures("untried")
def test_choices_with_different_numbers_of_documents() -> None:
    model = head("BertForMultipleChoice", "bert")
    call = packed("segments", ((0, 1),))
    call["attention_mask"] = call["attention_mask"].clamp(max=5)  # one document less in the last choice
    with tritonpack.patch(model), pytest.raises(ValueError, match=r"by row: \[\[2, 2, 1\]\]\. Give each choice"):
        model(**call)


@pytest.mark.usefixtures("untried")
def test_labels_need_one_value_for_each_question() -> None:
    model = head("BertForMultipleChoice", "bert")
    message = r"hold 4 questions, and BertForMultipleChoice gives one result a question.*of shape \(4,\)"
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(**packed("position_ids"), labels=LABELS[:2])


class Picking(BertForMultipleChoice):
    """A class that is not known, with the same forward."""


class Mixing(BertForMultipleChoice):
    """A head whose scores depend on other documents of the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits - output.logits.mean(0)
        return output


@pytest.mark.heavy
def test_an_unknown_class_is_tried_with_choices(trials: list[Any]) -> None:
    tritonpack.unpatch(tritonpack.patch(Picking(zoo.tiny_config("bert"))).model)
    assert trials
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"don't stay apart: position_ids"):
        tritonpack.patch(Mixing(zoo.tiny_config("bert")))
