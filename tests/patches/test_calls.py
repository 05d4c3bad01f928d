"""Packed calls beside those of the sweep: continued, under autocast, in trees, in pairs; labels that raise a warning,
heads of users, and losses of answers, which are means over documents."""

import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, FORMS, LENGTHS, alone, call_of, documents, relative, require_exact, told
from tests.patches.models import FAMILIES, NAMES_OF_CACHE, tiny_model
from tests.patches.sweep.classes import build, cases
from tests.patches.sweep.subject import Subject, difference
from tests.patches.zoo import PAIRS, apart, tolerance
from tritonpack import PackingCollator, PackingWarning, notices
from tritonpack.patches.targets import shifts_labels

LONG = (90, 30, 80)  # rows longer than the tables of 128 places
# a model, the lengths of its documents, forms
MODELS: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [
    ("LlamaModel/llama", LENGTHS, ("position_ids", "collator", "two_rows")),
    # Its classifier refuses packed rows, and the model in it doesn't.
    ("LlamaForSequenceClassification/llama", LENGTHS, ("position_ids", "collator")),
    # In bfloat16 their slopes are rounded, which is inexact beyond place 256.
    *((name, (301, 40), ("position_ids",)) for name in ("falcon-alibi", "bloom")),
    *((name, LONG, ("position_ids",)) for name in ("bart", "trocr", "llama4_text", "roformer")),
    # Attention among the states of one token, which gets no mask, from the function that layers call with one.
    *((name, LENGTHS, ("position_ids",)) for name in ("inkling2_text", "inkling2_loop_text")),
]


@pytest.mark.parametrize(("spec", "lengths", "tried"), MODELS)
def test_models(spec: str, lengths: tuple[int, ...], tried: tuple[str, ...]) -> None:
    model, pieces = zoo.build(spec), documents(lengths)
    model = model.base_model if "Sequence" in spec else model
    expected = alone(model, pieces, gradients=lengths == LENGTHS)
    for attention in ("tritonpack", "eager") if "inkling" in spec else ("tritonpack",):
        with tritonpack.patch(model, attention=attention) as handle:
            assert handle.report.attention in (attention, "dense")
            require_exact(model, expected, *tried, pieces=pieces)


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


@pytest.mark.parametrize("name", ["llama", "bloom", "gptj", "mamba", "xlnet"])
def test_forward_called_without_hooks(name: str) -> None:
    """PEFT calls models so. Some heads pass on only some of their arguments."""
    model = zoo.build(name)
    expected = torch.cat([model(d).logits for d in documents()], dim=1)
    columns = list(inspect.signature(model.forward).parameters)
    with tritonpack.patch(model):
        assert list(inspect.signature(model.forward).parameters) == columns  # trainers choose columns by them
        for form in ("position_ids", "offsets_alone", "segments_alone"):
            assert relative(expected, model.forward(**call_of(form)).logits) < EXACT, form


class OneName(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Any = None, *args: Any, **more: Any) -> Any:
        return super().forward(input_ids, *args, **more)


def test_arguments_by_position() -> None:
    """They are known by the names of the forward. A mask without a name would be lost."""
    model, call = tiny_model("llama"), call_of()
    ids, places, mask = call["input_ids"], call["position_ids"], told("segments_alone")["attention_mask"]
    unknown = OneName(model.config).eval()
    with tritonpack.patch(model), tritonpack.patch(unknown):
        by_name = model.model(**call)[0]
        assert torch.equal(model.model(ids, None, places)[0], by_name)
        assert torch.equal(model.model(ids, position_ids=places[0])[0], by_name)
        assert torch.equal(model(ids, mask).logits, model(input_ids=ids, attention_mask=mask).logits)
        for one, given, names in ((unknown, (ids, mask), {}), (model, (ids,), {"input_ids": ids})):
            with pytest.raises(ValueError, match=r"takes input_ids.*, each once\. Pass the others by name"):
                one(*given, **names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast("gpt_neox", "llama", "qwen3")
def test_mixed_precision_training(family: str) -> None:
    """Under autocast some families pass float32 queries and bfloat16 values to attention, which casts them."""
    model, ids = tiny_model(family, dtype=torch.float32).train(), torch.cat(documents(), 1)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        return loss, model.get_input_embeddings().weight.grad

    expected, expected_gradient = loss_and_gradient()
    with tritonpack.patch(model):
        got, gradient = loss_and_gradient()
    assert torch.allclose(got, expected, rtol=1e-3)
    assert (gradient - expected_gradient).norm() < 0.05 * expected_gradient.norm()


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


# Positions that a model counts along the row


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_longest_document(kind: str) -> None:
    """A long document would change a short one beside it. Documents on one side of the limit are exact."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 8}
    model = zoo.tiny_model("llama", dtype=torch.float64, rope_parameters=rope, max_position_embeddings=8)

    def require(lengths: tuple[int, ...]) -> None:
        expected = alone(model, documents(lengths))
        with tritonpack.patch(model):
            require_exact(model, expected, pieces=documents(lengths))

    require((3, 8, 5))
    with pytest.raises(ValueError, match=f"'{kind}'.* more than 8 tokens.*in separate calls"):
        require((3, 12, 5))
    if kind == "longrope":
        require((9, 12))


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
    with torch.no_grad():
        expected = subject.alone(pieces)
        with tritonpack.patch(model):
            for form in ("position_ids", "segments_alone", "two_rows_padded"):
                got = subject.call(subject.lay_out(FORMS[form], pieces))
                assert difference(expected, got) < tolerance(model.dtype), form


# Trees: `tree_ends` say that documents share their beginnings, as `TreeCollator` gives it


@pytest.mark.fast("gpt2", "mistral")
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gpt_oss", "llama4_text"])
def test_sequences_of_a_tree_equal_alone(family: str) -> None:
    begin, first, second, own = documents((4, 3, 5, 6))
    further = torch.cat([begin, first], 1)
    pieces = [torch.cat([begin, second], 1), own, further, torch.cat([further[:, :-1], second[:, :1]], 1), begin]
    model = zoo.build(family)
    want = alone(model, pieces, gradients=False).values
    tree = tritonpack.pack_tree([piece[0] for piece in pieces])
    call = {name: x for name, x in tree.inputs().items() if name in ("input_ids", "position_ids", "tree_ends")}
    for given in (call, {name: x for name, x in call.items() if name != "position_ids"}):
        with tritonpack.patch(model):
            output = model(**given)
        assert apart([want], [torch.cat(tree.gather(output.logits))]) < EXACT
        assert output.past_key_values is None


def test_positions_in_trees() -> None:
    """Depths, from any number in each tree, and any in padding: two rows of two trees, with padding and branches."""
    ends = torch.tensor([[5, 5, 2, 5, 5, 8, 8, 8], [0, 8, 8, 3, 8, 6, 8, 8]])
    depths = torch.tensor([[0, 1, 0, 2, 3, 0, 1, 2], [0, 0, 1, 0, 2, 3, 3, 4]])
    model, ids = tiny_model("llama", initializer_range=0.3), torch.arange(16).view(2, 8)
    others = depths.clone()
    others[0, :5] += 3
    others[0, 5:] += 50
    others[0, 2] = others[1, 0] = others[1, 3] = 77  # padding
    with tritonpack.patch(model), torch.no_grad():
        want = model(ids, tree_ends=ends).logits
        assert torch.equal(model(ids, tree_ends=ends, position_ids=depths.int()).logits, want)
        assert apart([want], [model(ids, tree_ends=ends, position_ids=others).logits]) < EXACT
        with pytest.raises(ValueError, match="token 14 of the flattened rows, 4 for a depth of 3"):
            model(ids, tree_ends=ends, position_ids=depths + (ids == 14))


# Pairs of an encoder and a decoder: labels, states of an encoder, padding without a mask


def pair_call(model: Any, form: str = "segments_alone") -> dict[str, Any]:
    subject = Subject(model)
    return subject.arguments(subject.lay_out(FORMS[form], documents()))


@pytest.mark.fast("bart", "mbart", "blenderbot-small", "plbart")
@pytest.mark.parametrize("name", PAIRS)
def test_labels_are_shifted_within_each_document(name: str) -> None:
    """Labels of a prompt may be ignored, and rows are padded by -100. MBart and PLBart put a document's last label
    first."""
    model = zoo.build(f"{name}+")
    for ignored in (False, True):
        labels = Subject(model).targets(documents())
        for label in labels if ignored else ():
            label[:, : label.shape[1] // 2] = -100
        masks = [{"decoder_attention_mask": torch.ones_like(y)} if ignored else {} for y in labels]  # some mask them
        given = zip(documents(), labels, masks, strict=True)
        outputs = [model(input_ids=a, labels=y, **mask) for a, y, mask in given]
        sizes = torch.tensor([(y != -100).sum() for y in labels])
        loss = (torch.stack([output.loss for output in outputs]) * sizes).sum() / sizes.sum()
        form = "two_rows" if ignored else "segments_alone"
        batch = FORMS[form](labels)
        row = torch.full_like(batch.ids, -100)
        for span, label in zip(batch.spans, labels, strict=True):
            row[span] = label[0]
        with tritonpack.patch(model):
            output = model(**pair_call(model, form) | {"labels": row, "decoder_input_ids": None})
        expected = torch.cat([output.logits for output in outputs], 1)
        assert relative(expected, batch.gather(output.logits)[None]) < tolerance(model.dtype)
        torch.testing.assert_close(output.loss, loss)


def test_inner_model_and_states_of_the_encoder() -> None:
    """The whole model may be called with states of the encoder, and the model inside may be called directly."""
    model = zoo.build("bart+")
    expected, call = alone(model, gradients=False).values, pair_call(model)
    with tritonpack.patch(model):
        states = model.get_encoder()(call["input_ids"], attention_mask=call["attention_mask"])
        again = model(encoder_outputs=states, **{name: x for name, x in call.items() if name != "input_ids"}).logits
        for got in (again, model.lm_head(model.model(**call)[0]), model.forward(**call).logits):
            assert relative(expected, got[0]) < tolerance(model.dtype)


def test_decoder_called_with_states_of_an_encoder() -> None:
    """A causal model with cross-attention to states of several documents, which have a mask of their own."""
    model = zoo.build("bert", add_cross_attention=True)
    sources = documents((4, 2, 5, 3))
    states: list[Tensor] = [torch.randn(1, source.shape[1], 32, dtype=torch.float64) for source in sources]
    pairs = zip(documents(), states, strict=True)
    expected = torch.cat([model(d, encoder_hidden_states=x).logits for d, x in pairs], 1)
    row, other = FORMS["segments_alone"](documents()), FORMS["segments_alone"](sources).arguments["attention_mask"]
    with tritonpack.patch(model):
        given = {"encoder_hidden_states": torch.cat(states, 1), "encoder_attention_mask": other}
        assert relative(expected, model(row.ids, **row.arguments, **given).logits) < tolerance(model.dtype)


@pytest.mark.fast("False-bigbird_pegasus", "False-mvp", "False-umt5", "True-blenderbot-small", "True-t5gemma2")
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_decoder_padding_without_a_mask(name: str, use_cache: bool) -> None:
    """Some types treat padding tokens as padding, others as tokens after all others."""
    model = zoo.build(f"{name}+", dtype=torch.float32).requires_grad_(False)
    call = {**pair_call(model, "padded_right"), "use_cache": use_cache}
    call = {key: x for key, x in call.items() if "position_ids" not in key and key != "decoder_attention_mask"}
    expected = model(**call)
    with tritonpack.patch(model):
        got = model(**call)
    seen = call["decoder_input_ids"] != 0
    assert relative(expected.logits[seen], got.logits[seen]) < tolerance(model.dtype)


# Labels: a warning is raised once if the first label of a document has one, or if labels are predicted from padding

IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 4]])
BOUNDS = torch.tensor([0, 3, 5, 8])
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
    "offsets": ({"labels": IDS, "cu_seq_lens_q": BOUNDS}, FIRST),
    "numbers": ({"labels": IDS, "seq_idx": NUMBERS}, FIRST),
    "a numbered mask": ({"labels": IDS, "attention_mask": NUMBERS + 1}, FIRST),
    "no label of a first token": ({"labels": MASKED, "position_ids": PLACES}, ""),
    "no labels": ({"position_ids": PLACES}, ""),
    "labels that are shifted": ({"labels": IDS, "shift_labels": IDS, "position_ids": PLACES}, ""),
    "collated and padded": (PackingCollator(8, 0)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]), ""),
    "padding on the right": ({"labels": MASKED, "attention_mask": RIGHT}, on_padding(5, 4)),
    "padding on the left": ({"labels": IDS, "attention_mask": LEFT}, on_padding(0, 6)),
    "padding of packed rows": ({"labels": MASKED, "attention_mask": RIGHT, "position_ids": PLACES}, on_padding(5, 4)),
    "padding of offsets": ({"labels": MASKED, "attention_mask": RIGHT, "cu_seq_lens_q": BOUNDS}, on_padding(5, 4)),
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
        model = zoo.tiny_model("llama")
        with warnings.catch_warnings(record=True) as found, tritonpack.patch(model, attention=attention):
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
    with tritonpack.patch(model):
        require_exact(model, expected, "offsets_alone", *tried)


def test_one_document_with_padding_gets_one_score() -> None:
    model, (ids,) = zoo.tiny_model("llama", kind="LlamaForSequenceClassification"), documents((5,))
    expected, zeros = model(ids).logits, torch.zeros(1, 3, dtype=torch.long)
    row, places = torch.cat([ids, zeros], 1), torch.cat([torch.arange(5)[None], zeros], 1)
    with tritonpack.patch(model):
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
    with tritonpack.patch(model):
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
