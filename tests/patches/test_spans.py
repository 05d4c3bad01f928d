"""Question answering on packed rows: the loss is the mean over documents of the loss that each has alone."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import BertForQuestionAnswering, PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.sweep import difference
from tests.patches.test_heads import EXACT, LENGTHS, TOLD, documents, gradients, head, packed, padded, relative
from tests.small_copies.packed_forms import FORMS

HEADS = {
    "BertForQuestionAnswering": "bert",
    "LlamaForQuestionAnswering": "llama",  # calls its loss_function
    "GPTNeoForQuestionAnswering": "gpt_neo",  # passes on no offsets
    "ModernBertForQuestionAnswering": "modernbert",
    "Qwen3MoeForQuestionAnswering": "qwen3_moe",
    "XLMForQuestionAnsweringSimple": "xlm",
    "BartForQuestionAnswering": "bart",  # shifts the encoder's tokens for its decoder
    "T5ForQuestionAnswering": "t5",
}
START, END = torch.tensor([2, 0, 1, 4]), torch.tensor([5, 0, 2, 10])
ANSWERS = {"start_positions": START, "end_positions": END}


def answering(name: str = "BertForQuestionAnswering", **overrides: Any) -> PreTrainedModel:
    return head(name, HEADS.get(name, "bert"), num_labels=2, **overrides)


def alone(model: PreTrainedModel, pieces: list[Tensor], start: Tensor = START, end: Tensor = END) -> Tensor:
    """The mean over documents of the loss that each has in a call of its own."""
    calls = zip(pieces, start[:, None], end[:, None], strict=True)
    return torch.stack([model(ids, start_positions=s, end_positions=e).loss for ids, s, e in calls]).mean()


@pytest.mark.parametrize("form", TOLD)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.fast(
    "BertForQuestionAnswering-position_ids",
    "ModernBertForQuestionAnswering-two_rows",
    "Qwen3MoeForQuestionAnswering-offsets_alone",
    "BartForQuestionAnswering-collator",
    "T5ForQuestionAnswering-two_rows",
)
def test_loss_and_gradients_are_those_of_documents_alone(name: str, form: str) -> None:
    model, pieces = answering(name), documents()
    loss = alone(model, pieces)
    expected = loss.detach()[None], gradients(model, loss)
    with tritonpack.patch(model):
        output = model(**packed(form, pieces), **ANSWERS)
        assert output.start_logits.shape == packed(form, pieces)["input_ids"].shape
        got = output.loss.detach()[None], gradients(model, output.loss)
    assert difference(expected, got) < EXACT


def cross_entropy(model: PreTrainedModel, pieces: list[Tensor], name: str, places: dict[int, int]) -> Tensor:
    """The mean over some documents, by number, of the loss at one place in each."""
    losses = [
        torch.nn.functional.cross_entropy(model(pieces[i])[name], torch.tensor([place])) for i, place in places.items()
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "LlamaForQuestionAnswering"])
def test_positions_outside_of_their_document(name: str) -> None:
    """Positions at or after the end are ignored. Negative positions count as 0."""
    model, pieces = answering(name), documents()
    of_start = cross_entropy(model, pieces, "start_logits", {0: 0, 3: 0})
    of_end = cross_entropy(model, pieces, "end_logits", {0: 6, 2: 2})
    start, end = torch.tensor([-1, 1, 3, 0]), torch.tensor([6, 5, 2, 11])
    with tritonpack.patch(model):
        call = packed("position_ids", pieces)
        loss = model(**call, start_positions=start, end_positions=end).loss
        columns = model(**call, start_positions=start[:, None], end_positions=end[:, None]).loss
    assert relative((of_start + of_end) / 2, loss) < EXACT
    assert torch.equal(loss, columns)


def test_positions_in_padding_are_ignored() -> None:
    """Padding of packed rows, and of rows with one document beside rows with several."""
    model, pieces = answering(), documents()
    expected = alone(model, pieces)
    with tritonpack.patch(model):
        for form in ("segments_padded", "padded_end_mask", "two_rows_padded"):
            assert relative(expected, model(**packed(form, pieces), **ANSWERS).loss) < EXACT, form


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padded_batches(left: bool) -> None:
    """The loss leaves out padding. Positions are places in the row, as without a patch, and ignored in padding."""
    model, pieces = answering(), documents()
    of_start = cross_entropy(model, pieces, "start_logits", dict(enumerate(START.tolist())))
    of_end = cross_entropy(model, pieces, "end_logits", {2: 2, 3: 10})
    pad = max(LENGTHS) - torch.tensor(LENGTHS) if left else torch.zeros(4, dtype=torch.long)
    end = torch.cat([torch.tensor([0, 0] if left else [7, 99]), (pad + END)[2:]])
    with tritonpack.patch(model):
        got = model(**padded(pieces, left=left), start_positions=START + pad, end_positions=end).loss
    assert relative((of_start + of_end) / 2, got) < EXACT


def test_rows_of_padding_alone() -> None:
    model, pieces = answering(), documents((7, 4))
    expected = alone(model, pieces, torch.tensor([2, 1]), torch.tensor([5, 3]))
    call = {name: x[[0, 0, 1]] for name, x in padded(pieces).items()}
    call["attention_mask"][1] = 0
    with tritonpack.patch(model):
        places = {"start_positions": torch.tensor([2, 3, 1]), "end_positions": torch.tensor([5, 3, 3])}
        assert relative(expected, model(**call, **places).loss) < EXACT


def test_one_document_without_padding_runs_in_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pieces = answering(), documents()
    expected = model(pieces[3], start_positions=START[3:], end_positions=END[3:]).loss
    monkeypatch.setattr("tritonpack.patches.targets._in_documents", None)
    with tritonpack.patch(model):
        for told in ({"position_ids": torch.arange(LENGTHS[3])[None]}, {"attention_mask": torch.ones(1, LENGTHS[3])}):
            got = model(pieces[3], **told, start_positions=START[3:], end_positions=END[3:]).loss
            assert relative(expected, got) < EXACT


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "BloomForQuestionAnswering"])
def test_the_loss_comes_first_in_a_tuple(name: str) -> None:
    model, pieces = head(name, name[:5].lower().removesuffix("f"), num_labels=2), documents()
    with tritonpack.patch(model):
        call = packed("position_ids", pieces)
        output = model(**call, **ANSWERS, output_hidden_states=True)
        as_tuple = model(**call, **ANSWERS, output_hidden_states=True, return_dict=False)
        assert list(output)[:3] == ["loss", "start_logits", "end_logits"]
    assert torch.equal(as_tuple[0], output.loss)
    assert torch.equal(as_tuple[1], output.start_logits)
    assert len(as_tuple) == len(output)


def test_a_replaced_loss_function_is_called() -> None:
    model, pieces = answering("LlamaForQuestionAnswering"), documents()
    stock = model.loss_function
    model.loss_function = lambda *args, **kwargs: 2 * stock(*args, **kwargs)
    expected = alone(model, pieces)
    with tritonpack.patch(model):
        assert relative(expected, model(**packed("position_ids", pieces), **ANSWERS).loss) < EXACT


@pytest.mark.parametrize("name", ["BertForQuestionAnswering", "LlamaForQuestionAnswering"])
def test_losses_divided_by_num_items_in_batch(name: str) -> None:
    """Heads that call their loss_function divide by the count; others ignore it."""
    model, pieces = answering(name), documents()
    losses = [
        model(ids, start_positions=s, end_positions=e, num_items_in_batch=8).loss
        for ids, s, e in zip(pieces, START[:, None], END[:, None], strict=True)
    ]
    expected = sum(losses) if name.startswith("Llama") else sum(losses) / 4
    with tritonpack.patch(model):
        assert relative(expected, model(**packed("position_ids", pieces), **ANSWERS, num_items_in_batch=8).loss) < EXACT


def test_positions_count_in_the_decoders_documents() -> None:
    """The logits belong to the decoder's documents."""
    model, pieces = answering("BartForQuestionAnswering"), documents()
    targets = zoo.documents((5, 2, 6, 4))
    start, end = torch.tensor([1, 0, 5, 3]), torch.tensor([4, 1, 5, 3])
    pairs = zip(pieces, targets, start[:, None], end[:, None], strict=True)
    losses = [model(a, decoder_input_ids=b, start_positions=s, end_positions=e).loss for a, b, s, e in pairs]
    source, target = FORMS["segments_alone"](pieces), FORMS["segments_alone"](targets)
    call = {
        "input_ids": source.ids, "attention_mask": source.arguments["attention_mask"],
        "decoder_input_ids": target.ids, "decoder_attention_mask": target.arguments["attention_mask"],
    }  # fmt: skip
    with tritonpack.patch(model):
        got = model(**call, start_positions=start, end_positions=end).loss
    assert relative(torch.stack(losses).mean(), got) < EXACT


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "one for the row": (
        {"start_positions": torch.tensor([2]), "end_positions": torch.tensor([5])},
        r"start_positions has shape \(1,\), but the packed rows hold 4 documents. Pass start_positions of shape \(4,\)",
    ),
    "ends of other documents": (
        {"start_positions": START, "end_positions": torch.zeros(5, dtype=torch.long)},
        r"end_positions has shape \(5,\), but the packed rows hold 4 documents",
    ),
    "no ends": ({"start_positions": START}, "start_positions without end_positions; pass both"),
    "a cache": (
        {**ANSWERS, "past_key_values": transformers.DynamicCache()},
        r"packed rows can't use a cache.*Leave the cache out, or.* Documents in each row: \[4\]",
    ),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_with_positions_are_refused(call: str) -> None:
    answers, message = BAD_CALLS[call]
    model = answering("LlamaForQuestionAnswering")
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(**packed("position_ids", documents()), **answers)


class Smoothing(BertForQuestionAnswering):
    """A head with a loss of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = None if output.loss is None else output.loss + output.start_logits.var()
        return output


@pytest.mark.usefixtures("untried")
def test_unknown_losses_are_refused() -> None:
    model, pieces = Smoothing(zoo.tiny_config("bert", num_labels=2)).double().eval(), documents()
    with tritonpack.patch(model):
        assert model(**packed("position_ids", pieces)).loss is None
        assert model(**padded(pieces), **ANSWERS).loss.isfinite()  # the head computes it
        with pytest.raises(ValueError, match=r"Smoothing has a loss of its own.*Pass padded rows"):
            model(**packed("position_ids", pieces), **ANSWERS)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["XLNetForQuestionAnswering", "XLMForQuestionAnswering"])
def test_heads_that_search_a_row_are_refused(name: str) -> None:
    model = head(name, name.removesuffix("ForQuestionAnswering").lower(), start_n_top=2, end_n_top=2)
    with tritonpack.patch(model):
        assert model(**padded(documents()), **ANSWERS).loss.isfinite()
        with pytest.raises(ValueError, match=r"one for each row.*Pass padded rows"):
            model(**packed("position_ids", documents()))
        with pytest.raises(ValueError, match=f"{name} has a loss of its own.*Pass padded rows"):
            model(**packed("position_ids", documents()), **ANSWERS)
