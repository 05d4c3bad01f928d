"""Packed calls beside those of the sweep: continued, under autocast, with arguments that agree, with long rows."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

import tritonpack
from tests.patches import zoo
from tests.patches.calls import (
    EXACT,
    FORMS,
    LENGTHS,
    alone,
    call_of,
    difference,
    documents,
    packed,
    relative,
    require_exact,
    told,
)  # fmt: skip
from tests.patches.comparison import tolerance
from tests.patches.models import COMMON, FAMILIES, NAMES_OF_CACHE, tiny_model
from tests.patches.sweep.classes import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import difference as differences
from tests.patches.sweep.subject import Subject


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_continuing_from_the_cache_of_a_packed_row(name: str) -> None:
    """The last document of a packed row continues; its positions separate it from those before."""
    model = tiny_model("mistral")
    more = documents((5,))[0]
    expected = model(torch.cat([documents()[-1], more], 1)).logits[:, -5:]
    with tritonpack.patch(model):
        cache = model(**call_of(use_cache=True))[name]
        got = model(more, position_ids=torch.arange(LENGTHS[-1], LENGTHS[-1] + 5)[None], **{name: cache}).logits
    assert relative(expected, got) < EXACT


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_inner_model(kind: Any) -> None:
    """It may be called with packed rows, also in a classifier, which refuses them."""
    torch.manual_seed(0)
    model = kind(LlamaConfig(**COMMON, num_labels=3)).double().eval()
    expected = alone(model.base_model)
    with tritonpack.patch(model):
        require_exact(model.base_model, expected, "position_ids", "collator", "two_rows")


@pytest.mark.parametrize("name", ["llama", "bloom", "gptj", "mamba", "xlnet"])
def test_forward_called_without_hooks(name: str) -> None:
    """PEFT calls models so. Some heads pass on only some of their arguments."""
    model = zoo.tiny_model(name, dtype=torch.float64)
    expected = torch.cat([model(d).logits for d in documents()], dim=1)
    columns = list(inspect.signature(model.forward).parameters)
    with tritonpack.patch(model):
        assert list(inspect.signature(model.forward).parameters) == columns  # trainers choose columns by them
        for form in ("position_ids", "offsets_alone", "segments_alone"):
            assert relative(expected, model.forward(**call_of(form)).logits) < EXACT, form


def test_arguments_by_position() -> None:
    model, call = tiny_model("llama"), call_of()
    with tritonpack.patch(model):
        by_name = model.model(**call)[0]
        assert torch.equal(model.model(call["input_ids"], None, call["position_ids"])[0], by_name)
        assert torch.equal(model.model(call["input_ids"], position_ids=call["position_ids"][0])[0], by_name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.fast("False-gpt_neox", "True-llama", "False-qwen3")
def test_mixed_precision_training(family: str, use_cache: bool) -> None:
    """Under autocast some families pass float32 queries and bfloat16 values to attention, which casts them."""
    model, ids = tiny_model(family, dtype=torch.float32).train(), torch.cat(documents(), 1)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=use_cache).loss
        loss.backward()
        return loss, model.get_input_embeddings().weight.grad

    expected, expected_gradient = loss_and_gradient()
    with tritonpack.patch(model):
        got, gradient = loss_and_gradient()
    assert torch.allclose(got, expected, rtol=1e-3)
    assert (gradient - expected_gradient).norm() < 0.05 * expected_gradient.norm()


def test_dropout_in_training() -> None:
    """The same random state drops the same pairs, also in the recomputation of a checkpoint."""
    model, call = tiny_model("llama", attention_dropout=0.5).train(), call_of("without_cache")

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(**call, labels=call["input_ids"]).loss
        loss.backward()
        return loss.detach(), model.get_input_embeddings().weight.grad

    with tritonpack.patch(model):
        loss, gradient = loss_and_gradient()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again, recomputed = loss_and_gradient()
        model.eval()
        without, _ = loss_and_gradient()
    assert torch.equal(loss, again)
    torch.testing.assert_close(gradient, recomputed)
    assert abs(float(loss - without)) > 1e-6


# Arguments that tell documents apart twice, and agree

PADDED = told("segments_padded")["attention_mask"]
ONES = (PADDED != 0).long()
LAST_GOES_ON = PADDED.where(PADDED != 0, len(LENGTHS))
OFFSETS = torch.tensor([0, 7, 8, 11, 25])  # padding is in the last document
AGREE: dict[str, dict[str, Any]] = {
    "mask of ones": {"seq_idx": PADDED, "attention_mask": ONES},
    "padding as the last document's": {"seq_idx": LAST_GOES_ON, "attention_mask": PADDED},
    "padding as a document": {"cu_seq_lens_q": torch.tensor([0, 7, 8, 11, 22, 25]), "attention_mask": PADDED},
    "padding in the last document": {"cu_seq_lens_q": OFFSETS, "seq_idx": LAST_GOES_ON, "attention_mask": ONES},
    "offsets and numbers differ in padding": {"cu_seq_lens_q": OFFSETS, "seq_idx": PADDED, "attention_mask": ONES},
    "empty documents": {"cu_seq_lens_q": torch.tensor([0, 0, 7, 8, 8, 11, 22, 25, 25]), "seq_idx": PADDED},
    "positions beside numbers": {**told("padded_end"), "seq_idx": PADDED, "attention_mask": PADDED},
}


@pytest.mark.parametrize("name", AGREE)
def test_consistent_arguments(name: str) -> None:
    model = tiny_model("llama")
    expected = alone(model, gradients=False).values
    with tritonpack.patch(model):
        got = model(FORMS["padded_end"](documents()).ids, **AGREE[name]).logits[0, :-3]
    assert relative(expected, got) < EXACT


def test_padding_between_documents_may_belong_to_either() -> None:
    model, pieces = tiny_model("llama"), documents((4, 5))
    expected = alone(model, pieces, gradients=False).values
    ids = torch.cat([pieces[0], torch.zeros(1, 2, dtype=torch.long), pieces[1]], 1)
    mask, numbers = torch.tensor([[1] * 4 + [0] * 2 + [2] * 5]), torch.tensor([[0] * 4 + [1] * 7])
    with tritonpack.patch(model):
        got = model(ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 6, 11])).logits[0]
        assert relative(expected, torch.cat([got[:4], got[6:]])) < EXACT
        with pytest.raises(ValueError, match="padding inside a document"):
            model(ids, attention_mask=(mask != 0).long(), seq_idx=numbers)


# Positions that a model counts along the row


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("falcon-alibi", (301, 40)),  # bfloat16, in which its slopes are rounded, is inexact beyond place 256
        ("bloom", (301, 40)),
        ("bart", (90, 30, 80)),  # longer than its table of 128 places
        ("trocr", (90, 30, 80)),
        ("llama4_text", (90, 30, 80)),
        ("roformer", (90, 30, 80)),
    ],
)
def test_long_rows(name: str, lengths: tuple[int, ...]) -> None:
    model, pieces = zoo.tiny_model(name, dtype=torch.float64), documents(lengths)
    expected = alone(model, pieces, gradients=False)
    with tritonpack.patch(model):
        require_exact(model, expected, pieces=pieces)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_longest_document(kind: str) -> None:
    """A long document would change a short one beside it. Documents on one side of the limit are exact."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8}
    model = zoo.tiny_model("llama", dtype=torch.float64)
    config = copy.deepcopy(model.config)
    config.rope_parameters, config.max_position_embeddings = rope, 8
    torch.manual_seed(0)
    model = type(model)(config).double().eval()

    def differs(lengths: tuple[int, ...]) -> float:
        expected = alone(model, documents(lengths), gradients=False)
        with tritonpack.patch(model):
            return difference(expected, packed(model, pieces=documents(lengths), gradients=False))

    assert differs((3, 8, 5)) < EXACT
    with pytest.raises(ValueError, match=f"'{kind}'.* more than 8 tokens.*in separate calls"):
        differs((3, 12, 5))
    if kind == "longrope":
        assert differs((9, 12)) < EXACT


@pytest.mark.parametrize("name", ["esm", "layoutlmv3", "luke", "m2m_100", "mpnet", "roberta", "xmod"])
@pytest.mark.fast("esm", "roberta", "m2m_100", "mpnet")
def test_padding_tokens_inside_documents(name: str) -> None:
    """These models don't count the padding token as a place, whatever the mask says."""
    model = build(next(case for case in cases() if case.model_type == name and "BASE" in case.mappings))
    subject = Subject(model)
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", model.config.pad_token_id)
    pieces = subject.draw((7, 4, 9, 2))
    for piece, places in zip(pieces, ([1, 4], [0, 3], [8], []), strict=True):
        piece[0, places] = padding
    expected = subject.alone(pieces)
    with torch.no_grad(), tritonpack.patch(model):
        for form in ("position_ids", "segments_alone", "two_rows_padded"):
            batch = subject.lay_out(FORMS[form], pieces)
            got = subject.gather(subject.call(batch), batch)
            assert not got.problems
            assert differences(expected, got.parts) < tolerance(model.dtype), form
