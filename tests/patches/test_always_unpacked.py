"""Models that can't keep several documents in a row apart: each document runs in a row of its own."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import ConvBertForMaskedLM, DebertaV2ForMaskedLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

import tritonpack
from tests.patches import zoo
from tests.patches.foreign import attends_by_itself
from tests.patches.models import tiny_model
from tests.patches.sweep import difference
from tritonpack import notices
from tritonpack.patches.trial.comparison import gradients_of, tolerance
from tritonpack.patches.trial.packed_forms import FORMS, lay_out
from tritonpack.patches.trial.small_copy import spread

LENGTHS = (7, 1, 3, 11)
EXACT = tolerance(torch.float64)
PADDED, LENGTH = "DebertaV2ForMaskedLM", "ConvBertForMaskedLM"
TYPES = {
    "DebertaV2ForMaskedLM": "deberta-v2",
    "DebertaV2Model": "deberta-v2",
    "ConvBertForSequenceClassification": "convbert",
    "ConvBertForMaskedLM": "convbert",
    "FNetForPreTraining": "fnet",
    "CLIPModel": "clip",
    "WhisperForConditionalGeneration": "whisper",
    "BltForCausalLM": "blt",
    "CpmAntForCausalLM": "cpmant",
    "SiglipModel": "siglip",
    "LongT5ForConditionalGeneration": "longt5",
    "DebertaV2ForSequenceClassification": "deberta-v2",
    "DebertaV2ForMultipleChoice": "deberta-v2",
    "FNetForMaskedLM": "fnet",
}

both = pytest.mark.parametrize("name", [PADDED, LENGTH])


def build(name: str, **options: Any) -> Any:
    """A tiny model of a class, in float64."""
    torch.manual_seed(0)
    config = zoo.tiny_config(TYPES[name], num_labels=3)
    model = getattr(transformers, name)._from_config(config, **options)
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()


def packed(form: str = "position_ids", lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    batch = FORMS[form](zoo.documents(lengths))
    return {"input_ids": batch.ids, **batch.arguments}


def alone(model: Any, **more: Any) -> list[Any]:
    return [model(input_ids=ids, **more) for ids in zoo.documents(LENGTHS)]


def labels_of(ids: Tensor) -> Tensor:
    """Labels for all tokens except the first one of each document."""
    return torch.cat([torch.full_like(ids[:, :1], -100), ids[:, 1:]], dim=1)


@both
@pytest.mark.parametrize("form", FORMS)
def test_each_document_equals_alone(name: str, form: str) -> None:
    model = build(name)
    documents = zoo.documents(LENGTHS)
    values = torch.cat([out.logits[0] for out in alone(model)])
    expected = values.detach(), gradients_of(model, values)
    batch = FORMS[form](documents)
    known = {key: x for key, x in batch.arguments.items() if key != "use_cache"}
    with tritonpack.patch(model):
        got = batch.gather(model(input_ids=batch.ids, **known).logits)
    assert difference(expected, (got.detach(), gradients_of(model, got))) < EXACT


@both
def test_every_output_is_laid_back(name: str) -> None:
    model = build(name)
    expected = [
        torch.cat(x, dim=1)
        for x in zip(*(o.hidden_states for o in alone(model, output_hidden_states=True)), strict=True)
    ]
    with tritonpack.patch(model):
        output = model(**packed(), output_hidden_states=True)
        first, second = model(**packed(), output_hidden_states=True, return_dict=False)[:2]
    assert len(output.hidden_states) == len(expected)
    for a, b in zip(expected, output.hidden_states, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert torch.equal(first, output.logits)
    assert torch.equal(second[-1], output.hidden_states[-1])


@both
def test_attention_weights_have_a_row_for_each_document(name: str) -> None:
    model = build(name)
    expected = alone(model, output_attentions=True)
    with tritonpack.patch(model):
        got = model(**packed(), output_attentions=True).attentions
    assert [x.shape[2:] for x in got] == [(max(LENGTHS), max(LENGTHS))] * len(expected[0].attentions)
    for i, (n, one) in enumerate(zip(LENGTHS, expected, strict=True)):
        for a, b in zip(one.attentions, got, strict=True):
            torch.testing.assert_close(a[0], b[i, :, :n, :n], rtol=0, atol=1e-9)
            assert not b[i, :, :n, n:].any()


def test_attention_weights_without_a_row_for_each_document_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(LENGTH)
    run = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = run(self, *args, **kwargs)
        output["attentions"] = tuple(x.flatten(0, 1) for x in output["attentions"])
        return output

    forward.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
    with tritonpack.patch(model):
        monkeypatch.setattr(type(model), "forward", forward)
        with pytest.raises(ValueError, match=r"attentions of shapes .*\(2, 1, 1\).*Leave output_attentions out"):
            model(**packed(), output_attentions=True)


@both
@pytest.mark.parametrize("form", ["position_ids", "segments_padded", "two_rows_padded"])
def test_the_loss_is_a_mean_over_labels(name: str, form: str) -> None:
    model = build(name)
    documents = zoo.documents(LENGTHS)
    counts = [int((labels_of(ids) != -100).sum()) for ids in documents]
    assert min(counts) == 0  # a mean over no labels is NaN
    losses = [model(input_ids=ids, labels=labels_of(ids)).loss for ids, n in zip(documents, counts, strict=True) if n]
    expected = sum(n * loss for n, loss in zip([n for n in counts if n], losses, strict=True)) / sum(counts)
    batch = FORMS[form](documents)
    labels = torch.full_like(batch.ids, -100)
    for (row, span), ids in zip(batch.spans, documents, strict=True):
        labels[row, span] = labels_of(ids)[0]
    with tritonpack.patch(model):
        got = model(input_ids=batch.ids, labels=labels, **batch.arguments).loss
    torch.testing.assert_close(expected, got, rtol=1e-9, atol=0)
    want = torch.autograd.grad(expected, model.get_input_embeddings().weight)
    have = torch.autograd.grad(got, model.get_input_embeddings().weight)
    torch.testing.assert_close(want, have, rtol=0, atol=1e-9)


def test_a_loss_of_two_kinds_of_labels_needs_one_batch() -> None:
    model = build("FNetForPreTraining")
    ids = packed()["input_ids"]
    with tritonpack.patch(model), pytest.raises(ValueError, match=r"loss of next_sentence_label can't be combined"):
        model(**packed(), labels=ids, next_sentence_label=torch.tensor([0, 1, 0, 1]))


def test_nan_gradients_count_as_different() -> None:
    """Longformer's gradients are NaN in float64 if padding fills a window."""
    values, bad = torch.ones(2, 3), torch.full((4,), float("nan"))
    assert difference((values, [torch.ones(4)]), (values, [bad])) == float("inf")
    assert difference((values, [torch.ones(4)]), (values, [torch.ones(4)])) == 0


def test_logits_to_keep_count_tokens_of_the_row() -> None:
    model = build("BltForCausalLM")
    with tritonpack.patch(model):
        whole = model(**packed()).logits
        assert torch.equal(model(**packed(), logits_to_keep=2).logits, whole[:, -2:])
        assert torch.equal(model(**packed(), logits_to_keep=torch.tensor([0, 9])).logits, whole[:, [0, 9]])


def test_one_score_for_each_document() -> None:
    model = build("ConvBertForSequenceClassification")
    expected = torch.cat([out.logits for out in alone(model)])
    with tritonpack.patch(model):
        torch.testing.assert_close(model(**packed()).logits, expected, rtol=0, atol=1e-9)
        model(**packed(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        with pytest.raises(ValueError, match=r"labels has shape \(1, 22\).*4 documents"):
            model(**packed(), labels=torch.zeros(1, 22))


def test_texts_are_compared_with_images() -> None:
    """Texts of one row, and two images: the output has all pairs."""
    model = build("CLIPModel")
    size = model.config.vision_config.image_size
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    texts = [model(input_ids=ids, pixel_values=images).logits_per_text for ids in zoo.documents(LENGTHS)]
    with tritonpack.patch(model) as handle:
        assert handle.report.attention == "padded"
        output = model(**packed(), pixel_values=images)
    torch.testing.assert_close(output.logits_per_text, torch.cat(texts), rtol=0, atol=1e-9)
    torch.testing.assert_close(output.logits_per_image, torch.cat(texts).T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("each", ["row", "document"])
def test_sounds_for_each_row_or_each_document(each: str) -> None:
    model = build("WhisperForConditionalGeneration")
    documents = zoo.documents((5, 3, 4))
    batch = lay_out([[0, 1], [2]], documents)
    shape = (model.config.num_mel_bins, 2 * model.config.max_source_positions)
    sounds = torch.randn(2 if each == "row" else 3, *shape, dtype=torch.float64)
    of = [0, 0, 1] if each == "row" else [0, 1, 2]
    with torch.no_grad():
        expected = [
            model(input_features=sounds[[i]], decoder_input_ids=ids).logits[0]
            for i, ids in zip(of, documents, strict=True)
        ]
        with tritonpack.patch(model):
            got = model(
                input_features=sounds,
                decoder_input_ids=batch.ids,
                decoder_position_ids=batch.arguments["position_ids"],
                decoder_attention_mask=batch.arguments["attention_mask"],
            ).logits
    torch.testing.assert_close(batch.gather(got), torch.cat(expected), rtol=0, atol=1e-9)


class TestMessages:
    """Reports, warnings and refusals."""

    def test_the_report(self) -> None:
        assert "each document in a row of its own, in a padded batch" in str(tritonpack.patch(build(PADDED)).report)
        assert "in batches of one length" in str(tritonpack.patch(build(LENGTH)).report)

    def test_a_warning_with_the_first_packed_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(notices, "_said", {})
        model = build(PADDED)
        with tritonpack.patch(model):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model(**packed("padded_right"))
                model(input_ids=zoo.documents((5,))[0])
            with pytest.warns(tritonpack.PackingWarning, match="can't keep several documents in a row apart"):
                model(**packed())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                model(**packed())

    @pytest.mark.parametrize("options", [{"attention": "eager"}, {"backend": "reference"}, {"unpad": True}])
    def test_attention_and_backend_without_effect_are_refused(self, options: Any) -> None:
        with pytest.raises(ValueError, match=r"would do nothing\. Leave these options out"):
            tritonpack.patch(build(PADDED), **options)

    def test_a_cache(self) -> None:
        model = build("BltForCausalLM")
        with tritonpack.patch(model), pytest.raises(ValueError, match="packed rows can't use a cache"):
            model(**packed(), past_key_values=transformers.DynamicCache())

    def test_positions_that_begin_elsewhere(self) -> None:
        model = build(LENGTH)
        ids = packed()["input_ids"]
        positions = 5 + packed()["position_ids"]
        with tritonpack.patch(model):
            shifted = model(input_ids=ids, position_ids=positions, seq_idx=packed("seq_idx_alone")["seq_idx"]).logits
            usual = model(**packed()).logits
        assert (shifted - usual).abs().max() > 0.01
        expected = [
            model(input_ids=one, position_ids=5 + torch.arange(one.shape[1])[None]).logits
            for one in zoo.documents(LENGTHS)
        ]
        torch.testing.assert_close(shifted, torch.cat(expected, dim=1), rtol=0, atol=1e-9)

    def test_a_mask_of_four_dimensions_is_refused(self) -> None:
        with tritonpack.patch(model := build(PADDED)), pytest.raises(ValueError, match="must be two-dimensional"):
            model(input_ids=packed()["input_ids"], attention_mask=torch.ones(1, 1, 22, 22))

    def test_ambiguous_padding_is_refused(self) -> None:
        model = build("ConvBertForSequenceClassification")
        ids = torch.tensor([[7, 8, 9, 5, 5]])
        positions = torch.tensor([[0, 1, 2, 0, 0]])
        with tritonpack.patch(model):
            with pytest.raises(ValueError, match="nothing says whether they are padding"):
                model(input_ids=ids, position_ids=positions)
            assert model(input_ids=ids, position_ids=positions, attention_mask=(ids != 5).long()).logits.shape[0] == 1

    def test_sequence_parallelism_is_refused(self) -> None:
        from tritonpack.parallel.validate import require_shardable

        model = build(PADDED)
        with pytest.raises(
            tritonpack.UnsupportedModelError, match="each gets a row of its own, which ranks can't share"
        ):
            require_shardable(model, tritonpack.patch(model).report)


def test_padded_batches_run_unchanged() -> None:
    model = build("BltForCausalLM")
    batch = packed("padded_right")
    expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    with tritonpack.patch(model):
        got = model(**batch).logits
    live = batch["attention_mask"].bool()
    torch.testing.assert_close(expected[live], got[live], rtol=0, atol=1e-6)


def test_the_model_inside_may_be_called() -> None:
    model = build(PADDED)
    expected = [model.deberta(input_ids=ids).last_hidden_state for ids in zoo.documents(LENGTHS)]
    with tritonpack.patch(model):
        got = model.deberta(**packed()).last_hidden_state
    torch.testing.assert_close(torch.cat(expected, dim=1), got, rtol=0, atol=1e-9)


def test_unpatching_copies_and_names() -> None:
    model = build(PADDED)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    own = model.config._attn_implementation
    handle = tritonpack.patch(model)
    twin = copy.deepcopy(model)
    expected = model(**packed()).logits
    handle.unpatch()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert torch.equal(twin(**packed()).logits, expected)
    tritonpack.unpatch(twin)
    named = build(PADDED, attn_implementation="tritonpack")
    assert torch.equal(named(**packed()).logits, expected)
    assert named.config._attn_implementation == own
    named.set_attn_implementation("eager")
    assert (named(**packed()).logits - expected).abs().max() > 0.01


class Stranger(DebertaV2ForMaskedLM):
    """A class in no table."""


class OddStranger(ConvBertForMaskedLM):
    """A class in no table, whose results depend on padding."""


@pytest.mark.parametrize(("kind", "layout"), [(Stranger, "padded"), (OddStranger, "lengths")])
def test_a_trial_finds_the_layout(kind: type[PreTrainedModel], layout: str) -> None:
    name = kind.__mro__[1].__name__
    torch.manual_seed(0)
    model: Any = kind._from_config(zoo.tiny_config(TYPES[name])).double().eval()
    expected = [out.logits for out in alone(model)]
    with tritonpack.patch(model) as handle:
        assert handle.report.attention == layout
        torch.testing.assert_close(model(**packed()).logits, torch.cat(expected, dim=1), rtol=0, atol=1e-9)


def test_replaced_attention_gets_rows_of_its_own(monkeypatch: pytest.MonkeyPatch, trials: list[Any]) -> None:
    """The new attention takes no mask, as in other projects."""
    monkeypatch.setattr(LlamaAttention, "forward", attends_by_itself)
    model = tiny_model("llama")
    expected = torch.cat([out.logits for out in alone(model)], dim=1)
    with tritonpack.patch(model) as handle:
        assert handle.report.attention == "padded"
        torch.testing.assert_close(model(**packed()).logits, expected, rtol=0, atol=1e-9)
    assert len(trials) == 2


def test_packed_layout_is_preferred() -> None:
    assert tritonpack.patch(tiny_model("llama")).report.attention == "tritonpack"


@pytest.mark.parametrize("told", [{}, {"position_ids": None}, {"attention_mask": torch.ones(1, 5).long()}])
def test_arguments_that_the_model_does_not_take(told: dict[str, Any]) -> None:
    """FNet takes no mask. Position ids that are None are ignored."""
    model = build("FNetForPreTraining")
    ids = zoo.documents((5,))[0]
    expected = model(ids).prediction_logits
    with tritonpack.patch(model):
        assert torch.equal(model(ids, **told).prediction_logits, expected)


def test_a_mask_of_sounds_as_long_as_the_text_stays_whole() -> None:
    model = build("WhisperForConditionalGeneration")
    (ids,) = zoo.documents((8,))
    sounds = torch.randn(1, model.config.num_mel_bins, 2 * model.config.max_source_positions, dtype=torch.float64)
    given: list[Tensor] = []
    own = type(model.model).forward
    model.model.forward = lambda *args, attention_mask=None, **kwargs: (
        given.append(attention_mask) or own(model.model, *args, attention_mask=attention_mask, **kwargs)
    )
    mask = torch.ones(1, 8).long()
    from tritonpack.patches.packing_context import PackingContext
    from tritonpack.patches.unpacking.always_unpacked import AlwaysUnpacked

    rows = AlwaysUnpacked(model, PackingContext(), by_length=False)
    rows.install()
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    rows(input_features=sounds, attention_mask=mask, decoder_input_ids=ids, decoder_position_ids=places)
    assert given[0] is mask


class Divided(transformers.FNetForMaskedLM):
    """Its loss is a sum, divided by the number of labels in all batches of a step."""

    def forward(self, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, labels=labels, **kwargs)
        if num_items_in_batch is not None:
            output.loss = output.loss * (labels != -100).sum() / num_items_in_batch
        return output


class TestRegressions:
    """Calls that once gave wrong results without an error."""

    @pytest.mark.parametrize("name", ["FNetForMaskedLM", LENGTH])
    def test_a_count_that_the_loss_ignores(self, name: str) -> None:
        model = build(name)
        batch = packed()
        labels = labels_of(batch["input_ids"])
        with tritonpack.patch(model):
            mean = model(**batch, labels=labels).loss
            counted = model(**batch, labels=labels, num_items_in_batch=100).loss
        assert torch.equal(mean, counted)

    def test_a_count_that_the_loss_is_divided_by(self) -> None:
        model = build("FNetForMaskedLM")
        model.__class__ = Divided
        batch = packed()
        labels = labels_of(batch["input_ids"])
        with tritonpack.patch(model) as handle, torch.no_grad():
            assert handle.report.attention == "lengths"
            mean, counted = (model(**batch, labels=labels, num_items_in_batch=n).loss for n in (None, 100))
        torch.testing.assert_close(mean * (labels != -100).sum() / 100, counted)

    def test_labels_of_documents_that_are_ignored(self) -> None:
        """All documents of one length have ignored labels."""
        model = build("ConvBertForSequenceClassification")
        logits = torch.cat([out.logits for out in alone(model)])
        labels = torch.tensor([0, -100, 2, 1])
        with tritonpack.patch(model):
            got = model(**packed(), labels=labels).loss
        torch.testing.assert_close(torch.nn.functional.cross_entropy(logits, labels), got)

    def test_an_image_for_each_document_of_several_lengths(self) -> None:
        model = build("SiglipModel")
        size = model.config.vision_config.image_size
        images = torch.randn(4, 3, size, size, dtype=torch.float64)
        texts = [model(input_ids=ids, pixel_values=images).logits_per_text for ids in zoo.documents(LENGTHS)]
        with tritonpack.patch(model):
            output = model(**packed(), pixel_values=images)
            with pytest.raises(ValueError, match="Compute it from logits_per_text"):
                model(**packed(), pixel_values=images, return_loss=True)
        torch.testing.assert_close(output.logits_per_text, torch.cat(texts), rtol=0, atol=1e-9)
        torch.testing.assert_close(output.logits_per_image, torch.cat(texts).T, rtol=0, atol=1e-9)
        assert output.image_embeds.shape[0] == 4

    def test_wrong_number_of_sounds_is_refused(self) -> None:
        model = build("WhisperForConditionalGeneration")
        batch = packed()
        sounds = torch.zeros(2, model.config.num_mel_bins, 2 * model.config.max_source_positions, dtype=torch.float64)
        with tritonpack.patch(model), pytest.raises(ValueError, match=r"4 documents in 1 rows\. Pass one for each"):
            model(sounds, decoder_input_ids=batch["input_ids"], decoder_position_ids=batch["position_ids"])

    @pytest.mark.parametrize("form", ["position_ids", "seq_idx_alone", "segments_alone"])
    def test_documents_of_the_encoder_without_tokens_are_refused(self, form: str) -> None:
        model = build("WhisperForConditionalGeneration")
        batch = packed(form)
        sounds = torch.zeros(1, model.config.num_mel_bins, 2 * model.config.max_source_positions, dtype=torch.float64)
        with tritonpack.patch(model), pytest.raises(ValueError, match=r"tokens of the decoder alone\. Pass decoder_"):
            model(sounds, decoder_input_ids=batch.pop("input_ids"), **batch)

    def test_encoder_states_of_packed_rows_are_refused(self) -> None:
        model = build("LongT5ForConditionalGeneration")
        batch = packed()
        decoder = {f"decoder_{name}": x for name, x in batch.items()}
        with tritonpack.patch(model), pytest.raises(ValueError, match="leave encoder_outputs out"):
            model(encoder_outputs=(torch.zeros(1, 22, model.config.d_model),), **decoder)

    @pytest.mark.parametrize("name", ["DebertaV2ForSequenceClassification", "DebertaV2ForMultipleChoice"])
    def test_the_model_inside_a_head_of_documents(self, name: str) -> None:
        model = build(name)
        expected = [model.deberta(input_ids=ids).last_hidden_state for ids in zoo.documents(LENGTHS)]
        with tritonpack.patch(model) as handle:
            assert handle.report.attention == "padded"
            got = model.deberta(**packed()).last_hidden_state
        torch.testing.assert_close(torch.cat(expected, dim=1), got, rtol=0, atol=1e-9)
