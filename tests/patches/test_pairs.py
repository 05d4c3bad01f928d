"""Encoders with decoders: packed pairs of documents are exact in every form, or the call is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, PreTrainedModel

import tritonpack
from tests.patches import pairs
from tests.patches.models import COMMON, Graphs
from tests.patches.pairs import EXACT, STOCK_FAILS, pairs_subject, targets, tiny_pair_model
from tests.patches.sweep import difference
from tests.patches.test_every_model import state, without_dropout
from tests.small_copies.comparison import tolerance
from tests.small_copies.judge import alone, judge
from tests.small_copies.packed_forms import FORMS
from tests.small_copies.small_copy import spread
from tests.small_copies.subject import Subject

WITHOUT_SDPA = {"bigbird_pegasus", "nllb-moe", "switch_transformers", "t5gemma"}
# Stock transformers contradicts itself: its router treats the empty places of a static cache as padding.
STATIC_DIFFERS = {"nllb-moe"}

ENCODERS = (
    "MT5EncoderModel", "MT5ForTokenClassification", "SwitchTransformersEncoderModel", "T5EncoderModel",
    "T5ForTokenClassification", "UMT5EncoderModel", "UMT5ForTokenClassification",
)  # fmt: skip

FEW = ("bart", "encoder-decoder", "seamless_m4t_v2", "t5")

every_type = pytest.mark.parametrize("name", EXACT)
mostly_slow = pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in EXACT]
)


@pytest.mark.fast("t5")
@mostly_slow
def test_packed_equals_alone(name: str) -> None:
    model, documents = tiny_pair_model(name), targets()
    subject = pairs_subject(model)
    expected = alone(subject, documents)
    with tritonpack.patch(model):
        for form in (form for form in FORMS if form not in STOCK_FAILS.get(name, ())):
            found = judge(subject, form, documents, expected, tolerance(model.dtype))
            assert (found.verdict, found.reason) == ("exact", ""), form


@pytest.mark.fast("bart", "mt5", "t5gemma")
@every_type
def test_stock_leaks_in_the_same_test(name: str) -> None:
    """In float32, because padding gives NaN in float64 in some types."""
    model, documents = tiny_pair_model(name, dtype=torch.float32), targets()
    subject = pairs_subject(model, stock=True)
    expected = alone(subject, documents, gradients=False)
    found = judge(subject, "segments_alone", documents, expected, 1e-3)
    assert found.verdict == "leak"
    if name != "encoder-decoder":  # RoBERTa takes position ids from 0 for others
        limit = tolerance(model.dtype)
        assert judge(subject, "padded_right", documents, expected, limit).verdict == "exact"


def packed(name: str, **more: Any) -> tuple[PreTrainedModel, list[Tensor], dict[str, Tensor]]:
    """A model, its targets, and a packed call with labels instead of the decoder's tokens."""
    model, documents = tiny_pair_model(name, **more), targets()
    batch = pairs_subject(model).forms["segments_alone"](documents)
    return model, documents, {**batch.arguments, "labels": batch.ids}


@pytest.mark.fast("bart", "mvp", "umt5")
@every_type
def test_labels_are_shifted_within_each_document(name: str) -> None:
    model, documents, call = packed(name)
    outputs = [model(input_ids=pairs.source_of(d), labels=d) for d in documents]
    expected = torch.cat([output.logits for output in outputs], dim=1)
    sizes = torch.tensor([d.numel() for d in documents])
    loss = (torch.stack([output.loss for output in outputs]) * sizes).sum() / sizes.sum()
    with tritonpack.patch(model):
        output = model(**call)
    assert relative(output.logits, expected) < tolerance(model.dtype)
    torch.testing.assert_close(output.loss, loss)


@pytest.mark.fast("bart", "blenderbot-small", "mbart", "plbart")
@every_type
def test_labels_that_are_ignored_and_padding(name: str) -> None:
    """Labels of a prompt are ignored, and rows padded by -100. MBart and PLBart put a document's last label first."""
    model, documents = tiny_pair_model(name), targets()
    labels = [d.clone() for d in documents]
    for label in labels:
        label[:, : label.shape[1] // 2] = -100
    masked = [
        {"labels": y, "decoder_attention_mask": torch.ones_like(y)} for y in labels
    ]  # some models mask ignored labels
    both = zip(documents, masked, strict=True)
    expected = torch.cat([model(input_ids=pairs.source_of(d), **call).logits for d, call in both], 1)
    batch = pairs_subject(model).forms["two_rows"](documents)
    row = torch.full_like(batch.ids, -100)
    for span, label in zip(batch.spans, labels, strict=True):
        row[span] = label[0]
    with tritonpack.patch(model):
        got = batch.gather(model(**batch.arguments, labels=row).logits)
    assert relative(got[None], expected) < tolerance(model.dtype)


@pytest.mark.fast("sdpa-seamless_m4t_v2")
@mostly_slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_transformers_own_attention(name: str, attention: str) -> None:
    model, documents = tiny_pair_model(name), targets()
    subject = pairs_subject(model)
    expected = alone(subject, documents)
    if attention == "sdpa" and name in WITHOUT_SDPA:
        with pytest.raises(tritonpack.UnsupportedModelError, match="doesn't support sdpa"):
            tritonpack.patch(model, attention="sdpa")
        return
    with tritonpack.patch(model, attention=attention):
        for form in ("two_rows", "padded_left"):
            found = judge(subject, form, documents, expected, tolerance(model.dtype))
            assert (found.verdict, found.reason) == ("exact", ""), form


@mostly_slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.fast("False-encoder-decoder", "True-mvp", "True-t5")
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model, documents = without_dropout(tiny_pair_model(name)), targets()
    subject = pairs_subject(model)
    expected = alone(subject, documents)
    set_capacity(model, 64)  # NLLB-MoE's routers keep that of the last evaluation
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with tritonpack.patch(model):
        batch = subject.forms["without_cache"](documents)
        logits = batch.gather(subject.output(batch).logits)
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        (logits * weights).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert difference((expected.values, expected.gradients), (logits.detach(), gradients)) < tolerance(model.dtype)


@every_type
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.fast("1-dynamic-marian", "1-dynamic-t5", "1-static-encoder-decoder")
def test_generate_as_stock(name: str, cache: str, beams: int) -> None:
    """Two rows, one of them padded on the right."""
    if cache == "static" and name in STATIC_DIFFERS:
        pytest.skip("stock transformers is at odds with itself")
    model = tiny_pair_model(name)
    ids = torch.cat(targets((9, 9)))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 6, "cache_implementation": cache, "num_beams": beams,
        "do_sample": False, "disable_compile": True, "eos_token_id": -1, "decoder_start_token_id": 2,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    expected = model.generate(ids * mask, **options)
    with tritonpack.patch(model):
        got = model.generate(ids * mask, **options)
    assert torch.equal(expected.sequences, got.sequences)
    for want, have in zip(expected.logits, got.logits, strict=True):
        assert relative(have, want) < tolerance(model.dtype)


@every_type
@pytest.mark.fast("encoder-decoder", "switch_transformers")
def test_unpatching_copies_and_pickles(name: str) -> None:
    model, documents = tiny_pair_model(name), targets()
    before = state(model)
    expected = alone(pairs_subject(model), documents, gradients=False)
    handle = tritonpack.patch(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    handle.unpatch()
    assert state(model) == before
    for twin in copies:
        found = judge(pairs_subject(twin), "offsets_alone", documents, expected, 1e-6)
        assert (found.verdict, found.reason) == ("exact", "")


def test_inner_model_and_encoder_outputs_equal_alone() -> None:
    """The whole model may be called with states of the encoder, and the model inside may be called directly."""
    model, documents, _ = packed("bart")
    subject = pairs_subject(model)
    expected = alone(subject, documents, gradients=False).values
    batch = subject.forms["segments_alone"](documents)
    with tritonpack.patch(model):
        states = model.get_encoder()(batch.arguments["input_ids"], attention_mask=batch.arguments["attention_mask"])
        call = {name: x for name, x in batch.arguments.items() if name != "input_ids"}
        again = model(encoder_outputs=states, decoder_input_ids=batch.ids, **call).logits
        inner = model.model(decoder_input_ids=batch.ids, **batch.arguments)[0]
        past_hooks = model.forward(decoder_input_ids=batch.ids, **batch.arguments).logits
    for got in (again, model.lm_head(inner), past_hooks):
        assert relative(got[0], expected) < tolerance(model.dtype)


def test_decoder_called_with_states_of_an_encoder() -> None:
    """A causal model with cross-attention to states of several documents, which have a mask of their own."""
    model = BertLMHeadModel(BertConfig(**COMMON, is_decoder=True, add_cross_attention=True)).eval()
    spread(model, torch.Generator().manual_seed(0))
    model = model.double()
    documents = targets()
    states = [torch.randn(1, pairs.source_of(d).shape[1], 32, dtype=torch.float64) for d in documents]
    expected = torch.cat([model(d, encoder_hidden_states=x).logits for d, x in zip(documents, states, strict=True)], 1)
    numbers = [
        torch.cat([torch.full((1, x.shape[1]), i + 1) for i, x in enumerate(side)], 1) for side in (documents, states)
    ]
    call = {"encoder_hidden_states": torch.cat(states, 1), "attention_mask": numbers[0]}
    with tritonpack.patch(model):
        got = model(torch.cat(documents, 1), encoder_attention_mask=numbers[1], **call).logits
        with pytest.raises(ValueError, match="row 0 has 4 documents in the decoder and 1 in the encoder"):
            model(torch.cat(documents, 1), **call)
    assert relative(got, expected) < tolerance(model.dtype)


# Classes that shift the encoder's tokens to the right if the decoder gets none.
SHIFT_INPUTS = {
    "BartForConditionalGeneration": "bart", "BartForQuestionAnswering": "bart", "BartModel": "bart",
    "BigBirdPegasusForQuestionAnswering": "bigbird_pegasus", "MBartForConditionalGeneration": "mbart",
    "MBartForQuestionAnswering": "mbart", "MBartModel": "mbart", "MT5ForQuestionAnswering": "mt5",
    "MvpForConditionalGeneration": "mvp", "MvpForQuestionAnswering": "mvp", "MvpModel": "mvp", "PLBartModel": "plbart",
    "T5ForQuestionAnswering": "t5", "T5GemmaForTokenClassification": "t5gemma", "UMT5ForQuestionAnswering": "umt5",
}  # fmt: skip


@pytest.mark.fast("T5ForQuestionAnswering")
@pytest.mark.parametrize("kind", SHIFT_INPUTS)
def test_decoder_tokens_shifted_from_the_encoders(kind: str) -> None:
    model, documents = tiny_pair_model(SHIFT_INPUTS[kind], kind=kind), targets()
    subject = Subject(model, targets, values=states_or_scores)
    expected = alone(subject, documents)
    # It takes no use_cache, and its encoder takes padding tokens for padding.
    refused = ("with_cache", "without_cache", "padded_end", "two_rows_alone") if "Gemma" in kind else ()
    with tritonpack.patch(model):
        for form in (form for form in FORMS if form not in refused):
            found = judge(subject, form, documents, expected, tolerance(model.dtype))
            assert (found.verdict, found.reason) == ("exact", ""), form


def states_or_scores(output: Any) -> Tensor:
    scores = getattr(output, "start_logits", None)
    return output[0] if scores is None else torch.stack([scores, output.end_logits], dim=-1)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "numbers for the encoder alone": (
        {"decoder_attention_mask": None},
        "row 0 has 1 documents in the decoder and 4 in the encoder. Tell documents apart on both sides",
    ),
    "numbers for the decoder alone": (
        {"attention_mask": None},
        "row 0 has 4 documents in the decoder and 1 in the encoder. Tell documents apart on both sides",
    ),
    "other numbers": (
        {"decoder_attention_mask": torch.tensor([[1] * 7 + [2] + [4] * 3 + [5] * 11])},
        "document 4 of the decoder's mask would meet document 3 of the encoder's",
    ),
    "fewer documents": (
        {"decoder_attention_mask": torch.tensor([[1] * 8 + [2] * 3 + [3] * 11])},
        "row 0 has 3 documents in the decoder and 4 in the encoder",
    ),
    "seq_idx of the encoder alone": (
        {"attention_mask": None, "decoder_attention_mask": None, "seq_idx": torch.tensor([[0] * 11 + [1] * 15])},
        "row 0 has 1 documents in the decoder and 2 in the encoder",
    ),
    "offsets of another number of documents": (
        {"cu_seq_lens_q": torch.tensor([0, 7, 8, 11, 22]), "cu_seq_lens_k": torch.tensor([0, 11, 26])},
        "lists 4 documents of the decoder and cu_seq_lens_k 2 of the encoder",
    ),
    "an empty document": (
        {"cu_seq_lens_q": torch.tensor([0, 7, 7, 22]), "cu_seq_lens_k": torch.tensor([0, 11, 26, 26])},
        "a document is empty by cu_seq_lens_q and not by cu_seq_lens_k",
    ),
    "offsets without tokens": (
        {"cu_seq_lens_q": torch.tensor([0, 22]), "decoder_input_ids": None, "labels": None},
        "decoder_attention_mask was given without decoder_input_ids",
    ),
    "offsets too short": (
        {"cu_seq_lens_q": torch.tensor([0, 7, 8, 11, 20]), "cu_seq_lens_k": torch.tensor([0, 11, 15, 25, 26])},
        "documents of the decoder: .* end with the number of tokens, 22",
    ),
    "mask of another length": ({"attention_mask": torch.ones(1, 9)}, "attention_mask has shape"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name: str) -> None:
    changes, message = BAD_CALLS[name]
    model, documents, _ = packed("bart")
    batch = pairs_subject(model).forms["segments_alone"](documents)
    with tritonpack.patch(model), pytest.raises(ValueError, match=message):
        model(**{"decoder_input_ids": batch.ids, **batch.arguments, **changes})


def test_labels_without_documents_of_the_decoder_are_refused() -> None:
    model, _, call = packed("bart")
    with tritonpack.patch(model), pytest.raises(ValueError, match="row 0 has 1 documents in the decoder and 4"):
        model(**{**call, "decoder_attention_mask": None})


def test_continuing_from_a_cache_of_packed_rows_is_refused() -> None:
    model, documents, _ = packed("t5")
    batch = pairs_subject(model).forms["segments_alone"](documents)
    more = {"encoder_outputs": (torch.zeros(1, 26, 32, dtype=torch.float64),)}
    with tritonpack.patch(model):
        cache = model(decoder_input_ids=batch.ids, **batch.arguments).past_key_values
        with pytest.raises(ValueError, match="continues a cache must have one document on the encoder's side"):
            model(
                decoder_input_ids=batch.ids[:, :1], past_key_values=cache,
                attention_mask=batch.arguments["attention_mask"], **more,
            )  # fmt: skip


@pytest.mark.fast("bart", "t5")
@every_type
def test_by_name(name: str) -> None:
    subject = pairs_subject(tiny_pair_model(name, attention="tritonpack"))
    documents = targets()
    expected = alone(pairs_subject(tiny_pair_model(name)), documents)
    for form in ("segments_alone", "offsets_alone", "padded_left"):
        found = judge(subject, form, documents, expected, tolerance(torch.float64))
        assert (found.verdict, found.reason) == ("exact", ""), form


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # from the compiler
def test_one_graph_for_every_length(name: str) -> None:
    graphs = Graphs()
    model = tiny_pair_model(name, dtype=torch.float32)
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        for lengths in ((7, 1, 3, 11), (5, 9, 3), (12, 3, 4, 2, 6)):
            batch = pairs_subject(model).forms["without_cache"](targets(lengths))
            call = {**batch.arguments, "decoder_input_ids": batch.ids}
            assert torch.equal(compiled(**call).logits, model(**call).logits)
    assert graphs.count == 1


def set_capacity(model: PreTrainedModel, tokens: int) -> None:
    for module in model.modules():
        if type(module).__name__ == "NllbMoeTop2Router":
            module.expert_capacity = tokens


def test_experts_that_may_be_full_are_refused_in_packed_rows() -> None:
    """In training, NLLB-MoE's experts take a limited number of tokens of a batch, so documents of a row compete."""
    model, documents = tiny_pair_model("nllb-moe").train(), targets()
    forms = pairs_subject(model).forms
    set_capacity(model, 9)
    with tritonpack.patch(model):
        padded = forms["padded_right"](documents)
        model(decoder_input_ids=padded.ids, **padded.arguments)
        batch = forms["segments_alone"](documents)
        with pytest.raises(ValueError, match="an expert of this model takes 9 tokens of a batch, here of 26"):
            model(decoder_input_ids=batch.ids, **batch.arguments)


@pytest.mark.fast(
    "False-bigbird_pegasus", "False-mvp", "False-umt5", "True-blenderbot-small", "True-mvp", "True-switch_transformers"
)
@every_type
@pytest.mark.parametrize("use_cache", [False, True])
def test_decoder_padding_without_a_mask(name: str, use_cache: bool) -> None:
    """Some types treat padding tokens as padding, others as tokens after all others."""
    if use_cache and name == "switch_transformers":
        pytest.skip("stock transformers can't")
    model = tiny_pair_model(name, dtype=torch.float32).requires_grad_(False)
    batch = pairs_subject(model).forms["padded_right"](targets())
    call = {**batch.arguments, "decoder_input_ids": batch.ids, "use_cache": use_cache}
    for told in ("decoder_attention_mask", "decoder_position_ids", "position_ids"):
        del call[told]
    expected = model(**call)
    with tritonpack.patch(model):
        got = model(**call)
    seen = batch.ids != 0
    assert relative(got.logits[seen], expected.logits[seen]) < tolerance(model.dtype)


def test_encoder_padding_without_a_mask_is_refused() -> None:
    """T5Gemma's encoder treats padding tokens as padding, and its decoder as tokens."""
    model = tiny_pair_model("t5gemma", dtype=torch.float32)
    batch = pairs_subject(model).forms["padded_right"](targets())
    with tritonpack.patch(model), pytest.raises(ValueError, match="Pass attention_mask"):
        model(input_ids=batch.arguments["input_ids"], decoder_input_ids=batch.ids)


@pytest.mark.fast("MT5ForTokenClassification")
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_alone(kind: str) -> None:
    name = next(name for name in ("umt5", "mt5", "t5", "switch_transformers") if kind.lower().startswith(name[:6]))
    model, documents = tiny_pair_model(name, kind=kind), targets()
    subject = Subject(model, targets)
    expected = alone(subject, documents)
    with tritonpack.patch(model):
        for form in (form for form in FORMS if form != "with_cache"):  # which they refuse by themselves
            found = judge(subject, form, documents, expected, tolerance(model.dtype))
            assert (found.verdict, found.reason) == ("exact", ""), form


@torch.no_grad()
def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())
