"""What is refused, as tables: what is given, and the words that the message must hold."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import tritonpack
from tests.patches import zoo
from tests.patches.calls import FORMS, call_of, documents, relative, told
from tests.patches.foreign import OwnPooler, own
from tests.patches.models import VOCAB, tiny_model
from tests.patches.sweep.subject import Subject
from tritonpack import UnsupportedModelError
from tritonpack.patches.parse_inputs import DOCUMENT_ARGUMENTS, intended_argument

SEGMENTS = told("segments_alone")["attention_mask"]
OFFSETS = told("offsets_alone")["cu_seq_lens_q"]
PLACES = told()["position_ids"]
IDS = call_of()["input_ids"]


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


MARKING = ("attention_mask", "cu_seq_lens_q", "seq_idx", "position_ids")
# {argument: value} beside the ids of 22 tokens; words
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.tensor([[1] * 5 + [0] + [1] * 16])}, "padding inside a document"),
    ({"attention_mask": ones(1, 9)}, "attention_mask has shape"),
    ({"attention_mask": torch.full((1, 22), 0.5)}, "must hold whole numbers"),
    ({"attention_mask": torch.full((1, 22), -torch.inf)}, "must hold whole numbers"),
    ({"attention_mask": torch.tensor([[1] * 20 + [-1] * 2])},
     r"must hold whole numbers, 0 for padding and 1, or the number of the document, for tokens; got -1\."),
    ({"attention_mask": ones(22)}, r"attention_mask must be a two-dimensional tensor.*; got \(22,\) int64 on cpu"),
    ({"attention_mask": ones(1, 22, 22)},
     r"attention_mask has shape \(1, 22, 22\); a patched model makes masks of pairs of tokens itself"),
    ({"attention_mask": ones(1, 1, 22, 22).bool()}, "isn't block-diagonal and causal"),
    ({"attention_mask": SEGMENTS.numpy()}, "attention_mask must be .*; got ndarray"),
    ({"attention_mask": {"full_attention": None}, "position_ids": PLACES},
     r"attention_mask is a dict.*position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask"),
    ({"attention_mask": {"full_attention": np.ones(3)}}, "attention_mask is a dict"),
    ({"cu_seq_lens_q": torch.tensor([0, 5, 20])}, "end with the number of tokens, 22"),
    ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 22])}, "never decrease"),
    ({"cu_seq_lens_q": torch.tensor([0, 22]), "cu_seq_lens_k": torch.tensor([0, 2, 22])}, "differ"),
    ({"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS.tolist()},
     "cu_seq_lens_k must be a one-dimensional int32 or int64 tensor"),
    ({"cu_seq_lens_q": OFFSETS[None]}, r"cu_seq_lens_q must be .*; got \(1, 5\) int32 on cpu"),
    ({"cu_seq_lens_q": OFFSETS[:0]}, r"cu_seq_lens_q must be .*; got \(0,\) int32 on cpu"),
    ({"input_ids": IDS.view(2, 11), "cu_seq_lens_q": torch.tensor([0, 5, 22])}, "the end of a row of 11 tokens"),
    ({"seq_idx": torch.zeros(1, 9, dtype=torch.int32)}, "seq_idx has shape"),
    ({"output_attentions": True}, "output_attentions"),
    ({"position_ids": PLACES, "attention_mask": torch.tensor([[1] * 13 + [0] * 2 + [1] * 7])},
     r"padding inside a document \(row 0, token 15: \[1, 0, 0, 1, 1, 1, 1\] around it"),
    # names that resemble ours
    ({"cu_seqlens_q": OFFSETS}, "was called with 'cu_seqlens_q'.* Pass cu_seq_lens_q"),
    ({"segment_ids": SEGMENTS}, "was called with 'segment_ids'.* Pass seq_idx"),
    ({"positions_ids": PLACES}, "was called with 'positions_ids'.* Pass position_ids"),
    ({"cu_seq_lens_k": OFFSETS}, "was called with 'cu_seq_lens_k'.* Pass "),
    ({"parents": torch.zeros(1, 22)}, "'parents', which no code reads.*Pass tree_ends"),
]  # fmt: skip


def numbered(table: list[Any]) -> Any:
    """The rows of a table, each with its number and the names of its arguments as its id."""
    return [pytest.param(*row, id=f"{i}-{'-'.join(row[0]) or 'nothing'}") for i, row in enumerate(table)]


@pytest.mark.parametrize(("arguments", "words"), numbered(CALLS))
def test_calls(arguments: dict[str, Any], words: str) -> None:
    """Of a head, of the model in it, and of a recurrent model. The next call is right."""
    for model in (tiny_model("llama"), zoo.tiny_model("mamba")):
        with tritonpack.patch(model):
            for called in (model, model.base_model, model.forward):
                if "output_attentions" in arguments and not hasattr(model, "model"):
                    continue
                with pytest.raises(ValueError, match=words):
                    called(**{"input_ids": IDS, "use_cache": False} | arguments)
            assert model(IDS, position_ids=PLACES)[0].isfinite().all()


def marks(name: str, starts: tuple[int, ...]) -> Tensor:
    """The value of an argument that marks documents which begin at these of the 22 tokens."""
    lengths = torch.tensor([*starts, 22]).diff()
    if name == "cu_seq_lens_q":
        return torch.tensor([*starts, 22])
    if name == "position_ids":
        return torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    return torch.arange(len(starts)).repeat_interleave(lengths)[None] + (name == "attention_mask")


STARTS = ((0, 7, 8, 11), (0, 8), (0,), (0, 3, 8, 16), (0, 1))


@pytest.mark.parametrize("pair", [*itertools.combinations(MARKING, 2)], ids="-".join)
def test_contradictions(pair: tuple[str, str]) -> None:
    """The message names both arguments, where they begin documents, and the first token where they differ."""
    with tritonpack.patch(model := tiny_model("llama")):
        for starts in itertools.permutations(STARTS, 2):
            given = {name: marks(name, one) for name, one in zip(pair, starts, strict=True)}
            if "attention_mask" in given and starts[0] == (0,):  # ones mark no documents
                continue
            at, shown = min({*starts[0]} ^ {*starts[1]}), [", ".join(map(str, one)) for one in starts]
            where = rf"by {pair[0]} documents begin at {shown[0]}, by {pair[1]} at {shown[1]}\."
            words = rf"{pair[0]} and {pair[1]} contradict each other \(row 0, token {at}: .*{where}"
            with pytest.raises(ValueError, match=words):
                model(IDS, **given)


@pytest.mark.parametrize("name", MARKING)
def test_types(name: str) -> None:
    value = marks(name, STARTS[0])
    with tritonpack.patch(model := tiny_model("llama")):
        for given, words in ((value.tolist(), "list"), (value.numpy(), "ndarray"), (value / 2, "float|0.5")):
            with pytest.raises(ValueError, match=rf"{name} must .*; got .*({words})"):
                model(IDS, **{name: given})


SIMILAR_NAMES = {
    "cu_seq_lens_q": "cu_seqlens cu_seqlens_k max_seqlen seq_lens cumulative_seqlens document_lengths doc_offsets "
    "lengths Cu_Seqlens packed_seq_params doc_boundaries num_docs",
    "seq_idx": "segments sequence_id seqidx seq_indices doc_ids documents sample_ids token_doc_ids",
    "position_ids": "position_id positions pos_ids postion_ids positionids segment_positions",
    "attention_mask": "attn_mask attention_masks atention_mask padding_mask document_mask block_mask eod_mask",
}
# Arguments that trainers and collators of transformers, TRL and accelerate put into a batch or a call.
TRAINERS = """
    input_ids labels shift_labels num_items_in_batch return_loss output_hidden_states use_cache logits_to_keep length
    token_type_ids completion_mask assistant_masks max_length_q max_length_k special_tokens_mask cache_position
    past_key_values return_dict inputs_embeds mm_token_type_ids image_grid_thw pixel_values decoder_input_ids max_length
    decoder_attention_mask encoder_attention_mask global_attention_mask pixel_attention_mask decoder_position_ids
    position_bias attention_bias chosen_input_ids advantages is_causal
    """.split()  # noqa: SIM905


def test_names_that_resemble_ours() -> None:
    for meant, names in SIMILAR_NAMES.items():
        assert [intended_argument(name) for name in names.split()] == [meant] * len(names.split())
    assert not any(intended_argument(name) for name in (*TRAINERS, *DOCUMENT_ARGUMENTS))


class Numbered(transformers.LlamaForCausalLM):
    """A model whose own argument resembles one of ours."""

    def forward(self, input_ids: Any, segment_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = attention_mask if segment_ids is None else segment_ids
        return super().forward(input_ids, attention_mask=mask, **kwargs)


@pytest.mark.usefixtures("untried")
def test_arguments_in_a_models_signature_are_accepted() -> None:
    model = Numbered(zoo.tiny_config("llama")).double().eval()
    expected = torch.cat([model(piece).logits for piece in documents()], dim=1)
    with tritonpack.patch(model):
        assert relative(expected, model(IDS, segment_ids=SEGMENTS).logits) < 1e-6
        assert model(IDS, cu_seqlens=None).logits.isfinite().all()


# Heads of users: one adds a token, one rates a row if it has labels, so its proof accepts it, one has its own loss


class Lengthening(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        return self.lm_head(self.model(torch.cat([input_ids[:, :1], input_ids], dim=1)).last_hidden_state)


class Rater(transformers.LlamaPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model, self.score = transformers.LlamaModel(config), nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(self, *args: Any, labels: Any = None, **told: Any) -> CausalLMOutput:
        states = self.model(*args, **told).last_hidden_state
        loss = None if labels is None else nn.functional.cross_entropy(self.score(states[:, 0]), labels)
        return CausalLMOutput(loss=loss, logits=states)


QUESTIONS = transformers.BertForQuestionAnswering
Smoothing = own(QUESTIONS, "Smoothing", loss=lambda loss, output, _: loss and loss + output.start_logits.var())

# Arguments of patch()

MODELS: list[tuple[Any, str]] = [
    ("gpt2", r"the name 'gpt2'; load it first, with AutoModelForCausalLM.from_pretrained\('gpt2'\)"),
    (None, "got None of type NoneType; pass the model that you train"),
    (transformers.AutoModelForCausalLM, "the class AutoModelForCausalLM; make a model of it first"),
    (transformers.LlamaConfig(), r"a LlamaConfig; make a model of it first, with .*from_config\(config\)"),
    ([1], "got a list of 1; pass one model in each call"),
    ([nn.Sequential(nn.Linear(2, 2))] * 2, "got a list of 2; pass one model in each call"),
    (object(), "of type object; pass the model that you train"),
]


@pytest.mark.parametrize(("given", "words"), MODELS, ids=[words[:20] for _, words in MODELS])
@pytest.mark.parametrize("function", [tritonpack.patch, tritonpack.unpatch])
def test_what_is_no_model(given: Any, words: str, function: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        function(given)
    assert "\n" not in str(caught.value)


Make = str | Callable[[], Any]


def made(make: Make) -> Any:
    return zoo.build(make) if isinstance(make, str) else make()


def lazily(spec: str, **more: Any) -> Callable[[], Any]:
    return lambda: zoo.build(spec, **more)


# BigBird switches to full attention for short rows, but only after the first short row.
SPARSE = lazily("big_bird", is_decoder=False, attention_type="block_sparse", block_size=2, num_random_blocks=1)


UNPAD, SHARE = {"unpad": True}, {"share_prefixes": True}
# what makes a model, options of patch(), words; of prove(), if patch() accepts the model
PATCHES: list[tuple[Make, dict[str, Any], str]] = [
    (lambda: nn.Linear(2, 2), {}, "expected a transformers model; got Linear"),
    ("prophetnet", {}, r"'prophetnet'.* masks and position buckets of its own"),
    ("T5GemmaForSequenceClassification/t5gemma", {}, "scores a row by the decoder's state behind its"),
    ("nllb-moe+", {}, r"'nllb-moe'.* documents of a row compete"),
    ("switch_transformers+", {}, r"'switch_transformers'.* take the first tokens of a row"),
    ("llama", {"backend": "cuda"}, "got 'cuda'"),
    ("llama", {"attention": "flash"}, "got 'flash'"),
    ("llama", {"unpad": "no"}, "unpad must be True or False; got str 'no'"),
    ("llama", {"attention": "sdpa"} | UNPAD, "attention='sdpa' would compute all pairs"),
    ("llama", {"attention": "eager"} | SHARE, "attention='eager' would compute all pairs"),
    ("gemma2", {"attention": "sdpa"}, r"'gemma2'.* doesn't support sdpa"),
    (SPARSE, {}, r"set_attention_type\('original_full'\)"),
    (lazily("gemma", use_bidirectional_attention=True), {}, r"packed rows aren't defined\. Set it to False"),
    (lazily("gemma2", use_bidirectional_attention=True), {}, r"packed rows aren't defined\. Set it to False"),
    ("bloom", UNPAD, "takes a dense mask"),
    ("t5+", UNPAD, "an encoder with a decoder"),
    ("mamba2", SHARE, "on each document by itself"),
    ("opt", SHARE, "doesn't go through the OPTModel around it"),
    # Whether a proof finds it depends on the machine: on some, the best keys of its few tokens are the same.
    ("doge", SHARE, r"\(DogeAttention\) isn't exact where documents share .* best of"),
]


@pytest.mark.parametrize(("make", "options", "words"), PATCHES)
def test_patches(make: Make, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tritonpack.patch(made(make), **options).prove()


def test_remedies_of_patches() -> None:
    model = SPARSE()
    model.base_model.set_attention_type("original_full")
    tritonpack.patch(model)
    tritonpack.patch(zoo.tiny_model("doge"), unpad=True)
    with pytest.raises(ValueError, match="isn't patched"):
        tritonpack.unpatch(tiny_model("llama"))


# Calls of single classes


def padded(**more: Any) -> dict[str, Any]:
    return call_of("padded_right_mask_alone", **more)


def answering(spec: str) -> Callable[[], Any]:
    kind, _, name = spec.rpartition("/")
    return lazily(f"{kind}ForQuestionAnswering/{name}", num_labels=2, start_n_top=2, end_n_top=2)


def user(kind: Any, family: str = "llama") -> Callable[[], Any]:
    return lambda: kind(zoo.tiny_config(family, is_decoder=False, num_labels=2)).double().eval()


def beside(form: str = "segments_alone", **changes: Any) -> Callable[[Any], dict[str, Any]]:
    """A call of documents of 7, 1, 3 and 11 tokens with targets of 5, 2, 6 and 4, and changes of its arguments."""

    def call(model: Any) -> dict[str, Any]:
        subject = Subject(model)
        return {**subject.arguments(subject.lay_out(FORMS[form], documents())), **changes}

    return call


CACHE = transformers.DynamicCache()
CROSS = lazily("bert", add_cross_attention=True)
TREE = tritonpack.pack_tree([[3, 4, 5, 6], [3, 4, 7], [8, 9]]).inputs()
TREE = {name: TREE[name] for name in ("input_ids", "position_ids", "tree_ends")}
SHAPE = TREE["input_ids"].shape
ENTITIES = {"entity_ids": torch.tensor([[3, 4]]), "entity_position_ids": torch.tensor([[[0, 1, -1], [5, 6, -1]]])}
PIXELS = {"pixel_values": torch.ones(1, 3, 8, 8, dtype=torch.float64)}
NAMES = "entity_ids and entity_position_ids"
START, END = torch.tensor([2, 0, 1, 4]), torch.tensor([5, 0, 2, 10])
ANSWERS = {"start_positions": START, "end_positions": END}
# The mask numbers documents from 1, and is 0 for padding with labels.
NUMBERED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9, 3, 4, 4]]),
    "attention_mask": torch.tensor([[1] * 3 + [2] * 2 + [0] * 3]),
}
LABELS = torch.tensor([[-100, 6, 7, -100, 9, -100, 4, 4]])
ON_PADDING = "label 4 in row 0 is predicted at token 6"
OF_TARGETS = {"decoder_attention_mask": NUMBERED["attention_mask"], "labels": LABELS}
BOTH = "documents in the decoder and 4 in the encoder. Mark documents on both sides"

# what makes a model, options of patch(), a call or what makes it, words
OF_CLASSES: list[tuple[Make, dict[str, Any], Any, str]] = [
    ("gpt2", UNPAD, padded(output_attentions=True), "no weights"),
    ("opt", UNPAD, padded(), "OPTDecoder doesn't go through the OPTModel around it"),
    ("electra-encoder", SHARE, {"input_ids": IDS[:, :9].expand(4, -1)}, "also sees the tokens after it"),
    ("llama", UNPAD, padded(labels=padded()["input_ids"]),
     r"the label 0 in row 0 would be predicted at token 7, .* to -100"),
    ("LlamaForTokenClassification/llama", UNPAD, padded(labels=padded()["input_ids"] % 2),
     r"the label 0 in row 0 is predicted at token 7, .* and padding isn't computed. Set labels of padding to -100"),
    ("git", {}, call_of(pixel_values=torch.randn(1, 3, 8, 8)),
     "GitForCausalLM.* pixel_values.*or pass padded rows to the unpatched model"),
    ("LukeModel/luke", {}, call_of(**ENTITIES), f"{NAMES} to its tokens.*Leave {NAMES} out"),
    ("LayoutLMv3Model/layoutlmv3", {}, call_of(**PIXELS), "Leave pixel_values out"),
    # recurrent layers and caches
    ("bamba", {}, call_of(past_key_values=CACHE), r"can't use a cache\. Leave the cache out"),
    ("rwkv", {}, {"input_ids": IDS[:, :8], "attention_mask": torch.tensor([[0] * 3 + [1] * 5]),
                          "use_cache": True}, r"would read the padding on the left.*use_cache=False"),
    # trees
    ("llama", {}, TREE | {"tree_ends": torch.zeros(SHAPE)}, "tree_ends must be an integer tensor.*got"),
    ("llama", {}, TREE | {"tree_ends": ones(1, 3)}, r"tree_ends has shape \(1, 3\)"),
    ("llama", {}, TREE | {"tree_ends": 99 * ones(*SHAPE)}, r"ends\[0\] is 99"),
    ("llama", {}, TREE | {"attention_mask": ones(*SHAPE)}, "tree_ends and attention_mask both describe"),
    ("llama", {}, TREE | {"seq_idx": ones(*SHAPE)}, "tree_ends and seq_idx both describe"),
    ("llama", {}, TREE | {"labels": TREE["input_ids"]}, r"other branches.*shift_labels"),
    ("llama", {}, TREE | {"use_cache": True}, "Leave use_cache out"),
    ("llama", {}, lambda model: TREE | {"past_key_values": model(IDS[:, :4], use_cache=True).past_key_values},
     "tree_ends describe a batch of whole documents"),
    ("llama", {}, TREE | {"position_ids": torch.arange(SHAPE[1])[None]},
     "tree_ends and position_ids contradict each other at token 4 of the flattened rows, 4 for a depth of 2.*diagonal"),
    ("llama", {}, TREE | {"position_ids": TREE["position_ids"] * 0},
     "contradict each other at token 1 of the flattened rows, 0 for a depth of 1"),
    ("mamba2", {}, TREE, "Leave tree_ends and share_prefixes out"),
    ("electra-encoder", {}, TREE, "Leave tree_ends and share_prefixes out"),
    ("LlamaForSequenceClassification/llama", {}, TREE, "several documents"),
    # encoders with decoders
    ("bart+", {}, beside(decoder_attention_mask=None), f"row 0 has 1 {BOTH}"),
    ("bart+", {}, beside(attention_mask=None), "row 0 has 4 documents in the decoder and 1 in the enc"),
    ("bart+", {}, beside(decoder_attention_mask=torch.tensor([[1] * 5 + [2] * 2 + [4] * 6 + [5] * 4])),
     "document 4 of the decoder's mask would see document 3 of the encoder's"),
    ("bart+", {}, beside(decoder_attention_mask=torch.tensor([[1] * 7 + [2] * 6 + [3] * 4])), "row 0 has 3 docu"),
    ("bart+", {}, beside(attention_mask=None, decoder_attention_mask=None, seq_idx=torch.tensor([[0] * 11 + [1] * 11])),
     "row 0 has 1 documents in the decoder and 2 in the encoder"),
    ("bart+", {}, beside(cu_seq_lens_q=torch.tensor([0, 5, 7, 13, 17]), cu_seq_lens_k=torch.tensor([0, 11, 22])),
     "lists 4 documents of the decoder and cu_seq_lens_k 2 of the encoder"),
    ("bart+", {}, beside(cu_seq_lens_q=torch.tensor([0, 5, 5, 17]), cu_seq_lens_k=torch.tensor([0, 8, 22, 22])),
     "a document is empty in only one of cu_seq_lens_q and cu_seq_lens_k"),
    ("bart+", {}, beside(cu_seq_lens_q=torch.tensor([0, 17]), decoder_input_ids=None),
     "decoder_attention_mask was passed without decoder_input_ids"),
    ("bart+", {}, beside(cu_seq_lens_q=torch.tensor([0, 5, 7, 13, 15]), cu_seq_lens_k=OFFSETS),
     "documents of the decoder: .* end with the number of tokens, 17"),
    ("bart+", {}, beside(cu_seq_lens_q=torch.tensor([0, 5, 7, 13, 17]), cu_seq_lens_k=torch.tensor([0, 8, 10, 15, 20])),
     "documents of the encoder: cu_seq_lens_k must .* end with the number of tokens, 22"),
    ("bart+", {}, beside(attention_mask=torch.ones(1, 9)), "attention_mask has shape"),
    ("bart+", {}, beside(decoder_attention_mask=None, decoder_input_ids=None, labels=ones(1, 17)), "row 0 has 1 doc"),
    ("t5+", {}, lambda model: {
        "past_key_values": model(**beside()(model)).past_key_values, "attention_mask": SEGMENTS,
        "encoder_outputs": (torch.zeros(1, 22, 32, dtype=torch.float64),), "decoder_input_ids": IDS[:, :1],
    }, "continues a cache must have one document on the encoder's side"),
    # Its encoder takes padding tokens for padding, and its decoder for tokens.
    ("t5gemma+", {}, beside("padded_right", **dict.fromkeys(
        ("attention_mask", "position_ids", "decoder_attention_mask", "decoder_position_ids"))), "Pass attention_mask"),
    (CROSS, {}, call_of("segments_alone", encoder_hidden_states=torch.randn(1, 22, 32, dtype=torch.float64)),
     "row 0 has 4 documents in the decoder and 1 in the"),
    # labels on padding of numbered documents, for each kind of loss
    ("BertForMaskedLM/bert", {}, NUMBERED | {"labels": LABELS}, ON_PADDING),
    ("llama", {}, NUMBERED | {"labels": LABELS, "shift_labels": LABELS}, ON_PADDING),
    ("t5+", {}, NUMBERED | OF_TARGETS, ON_PADDING),
    ("t5+", {}, NUMBERED | OF_TARGETS | {"decoder_input_ids": NUMBERED["input_ids"]}, ON_PADDING),
    # a mask that numbers documents from 0
    ("llama", {}, NUMBERED | {"labels": LABELS, "attention_mask": torch.tensor([[0] * 3 + [1, 1, 2, 2, 2]])},
     r"label 6 in row 0 is predicted at token 0.* pass attention_mask \+ 1"),
    # answers and other results of rows
    (answering("Llama/llama"), {}, call_of(start_positions=torch.tensor([2]), end_positions=torch.tensor([5])),
     r"start_positions has shape \(1,\), but the packed rows hold 4 documents. Pass start_positions of shape \(4,\)"),
    (answering("Llama/llama"), {}, call_of(start_positions=START, end_positions=torch.zeros(5, dtype=torch.long)),
     r"end_positions has shape \(5,\), but the packed rows hold 4 documents"),
    (answering("Llama/llama"), {}, call_of(**ANSWERS, past_key_values=CACHE),
     r"packed rows can't use a cache.*Leave the cache out, or.* Documents in each row: \[4\]"),
    (answering("Bert/bert"), {}, call_of(start_positions=START), "start_positions without end_positions; pass both"),
    (answering("XLNet/xlnet"), {}, call_of(), "one value for each row.*Pass padded rows"),
    (answering("XLM/xlm"), {}, call_of(**ANSWERS), "XLMForQuestionAnswering has a loss of its own.*Pass padded rows"),
    (answering("BigBird/big_bird"), {}, call_of(), "BigBirdForQuestionAnswering gives one result for"),
    (user(Lengthening), {}, call_of(), r"runs on \(1, 23\) tokens, but the model around it was given \(1, 22\)"),
    (user(OwnPooler, "bert"), {}, call_of(), r"returns pooler_output with one value for each row.*in each row: \[4\]"),
    (user(Smoothing, "bert"), {}, call_of(**ANSWERS), "has a loss of its own.*Pass padded rows"),
    (user(Rater), {}, call_of(labels=torch.tensor([0, 1, 2, 0])),
     r"failed with labels .* for each of 4 documents.*Pass padded rows"),
]  # fmt: skip


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("make", "options", "call", "words"), OF_CLASSES)
def test_calls_of_single_classes(make: Make, options: dict[str, Any], call: Any, words: str) -> None:
    """Padded rows of heads of users aren't refused."""
    model = made(make)
    with tritonpack.patch(model, **options):
        if type(model).__module__.startswith("tests."):
            assert model(**padded(**(ANSWERS if "start_positions" in call else {}))) is not None
        given = call(model) if callable(call) else call
        with pytest.raises(ValueError, match=words):
            model(**given)


# Names, implementations and layers that don't belong to a patched model


@pytest.mark.parametrize("kind", ["xlstm", "cpmant", "blt", "deepseek_v4", "prophetnet"])
def test_models_by_name(kind: str) -> None:
    """In the call, because the model may be a part of one that can be packed; also in a direct call of its forward."""
    model = zoo.tiny_model(kind, attention="tritonpack")
    for call in (model, model.forward, model.base_model):
        with pytest.raises(UnsupportedModelError, match=r"on padded rows, unpatched.*It has attn_implementation"):
            call(torch.arange(6, 10)[None])


def test_an_implementation_that_is_set_before_or_after_the_patch() -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = "tritonpack"
    with pytest.raises(ValueError, match=r"isn't patched.*tritonpack\.patch\(model\) for this model, too"):
        model(**call_of())
    model = tiny_model("llama")
    with tritonpack.patch(model):
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="'eager' after this model was patched"):
            model(**call_of())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="transformers has no Dory")
def test_layers_that_write_twice_to_a_cache(attention: str) -> None:
    """Dory counts its layers twice if it has fewer than its input and output sections: stock transformers fails, too,
    or gives other logits with a cache than without."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.DoryConfig(vocab_size=VOCAB, layer_types=["full_attention"] * 2, num_hidden_layers=2, **sizes)
    model = transformers.DoryForCausalLM(config).eval()
    with tritonpack.patch(model, attention=attention):
        with pytest.raises(ValueError, match=r"DoryAttention changes the number of keys .* pass use_cache=False"):
            model(**call_of())
        assert model(**call_of(use_cache=False)).logits.isfinite().all()


def test_a_layer_called_outside_of_its_model() -> None:
    model = zoo.tiny_model("lfm2")
    layer = next(m for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")
    with tritonpack.patch(model), pytest.raises(ValueError, match="Lfm2ShortConv was called outside"):
        layer(torch.zeros(1, 3, 32))
    assert layer(torch.zeros(1, 3, 32)).shape == (1, 3, 32)
