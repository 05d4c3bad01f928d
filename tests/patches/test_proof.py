"""A model that isn't known to be exact is proven in its first call, on itself: leaking ones are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralForCausalLM,
    SiglipTextConfig,
    SiglipTextModel,
    T5ForConditionalGeneration,
)
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralAttention

import tritonpack
from tests.patches import zoo
from tests.patches.calls import LENGTHS, call_of, documents
from tests.patches.foreign import (
    DTYPES,
    AnyArguments,
    Centred,
    Change,
    Convolution,
    Int8Linear,
    Mixing,
    Noisy,
    OwnPooler,
    Scaled,
    Stranger,
    StrangerConfig,
    Summed,
    TwoOutputs,
    Unshown,
    WindowIgnored,
    attends_by_itself,
    attends_by_the_interface,
    attention,
    both,
    bypass_all,
    bypass_layers,
    config,
    llama,
    longrope,
    mask_of_its_own,
    mixes_states,
    nothing,
    replaced,
    sums,
    with_loss,
    with_value,
    wrap,
    wrap_linears,
)
from tests.patches.zoo import spread, tiny_pair_model
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import choose_modules, families, proof
from tritonpack.patches.layers import positions


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what another library does to it, and the words of the refusal; none for a model that is accepted."""

    make: Callable[[], Any]
    words: str = ""
    change: Change = nothing
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def spread_out(model: Any) -> Any:
    """With transformers' small weights a window has little effect in 16 bits."""
    spread(model, torch.Generator().manual_seed(0))
    return model


MIXED: dict[str, Callable[[Any, Tensor], Any]] = {
    "the mean": lambda _, x: x.mean(1),
    "the last token's": lambda _, x: x[:, -1],
    "a mean with a dimension": lambda _, x: x.mean(1, keepdim=True),  # it doesn't look like a result of a row
    "the token's before": lambda model, x: model.lm_head(x + x.roll(1, dims=1)),
    "a sum in a list": lambda _, x: [x, x.cumsum(1)],  # padding that follows doesn't change it
    "centred in the batch": lambda _, x: x - x.mean((0, 1)),
}


def siglip() -> Any:
    """No auto class leads to it, so the table of known classes doesn't list it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return spread_out(SiglipTextModel(SiglipTextConfig(vocab_size=64, max_position_embeddings=64, **ends, **sizes)))


def encoder_states(given: Callable[[Tensor], Tensor]) -> Any:
    """An encoder with a decoder that also returns a function of its encoder's states."""

    class Encoded(T5ForConditionalGeneration):
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, decoder_input_ids: Any = None,
            decoder_attention_mask: Any = None, encoder_outputs: Any = None, **more: Any,
        ) -> Any:  # fmt: skip
            output = super().forward(
                input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask, encoder_outputs=encoder_outputs, **more,
            )  # fmt: skip
            output.encoder_last_hidden_state = given(output.encoder_last_hidden_state)
            return output

    return spread_out(Encoded(zoo.tiny_config("t5")))


OWN = r"runs code that isn't transformers' own in .*don't stay apart"
UNKNOWN = r"isn't a model that tritonpack knows .*don't stay apart"
CASES = {
    # classes
    "a subclass": Case(lambda: Unshown(config())),
    "logits mixed by a head": Case(lambda: Mixing(config()), rf"Mixing {UNKNOWN}.*first in the model itself \(Mixing"),
    "logits centred over the row": Case(lambda: Centred(config()), rf"Centred {UNKNOWN}.*\(Centred\)"),
    "logits with noise": Case(lambda: Noisy(config()), "Noisy isn't a model.*beside rows of others"),
    "remote code that uses its mask": Case(lambda: Stranger(StrangerConfig())),
    "remote code that ignores its mask": Case(
        lambda: Stranger(StrangerConfig(uses_mask=False)), rf"Stranger {UNKNOWN}.*the model itself \(Stranger\)"
    ),
    "a window that is ignored": Case(
        lambda: spread_out(WindowIgnored(zoo.tiny_config("mistral", sliding_window=40))), f"WindowIgnored {UNKNOWN}"
    ),
    "a pooler of rows": Case(
        lambda: OwnPooler(zoo.tiny_config("bert", is_decoder=False)), r"OwnPooler .*(pooler_output|one for each row)"
    ),
    "a model that doesn't run on tokens alone": Case(
        lambda: Unshown(config()),
        r"can't be tried on a few tokens .*RuntimeError: mat1 and mat2.*Train it on padded rows, unpatched",
        lambda model, _: setattr(model, "lm_head", nn.Linear(3, 3)),
    ),
    "long rotary embeddings": Case(lambda: Unshown(config(rope_parameters=longrope()))),
    "dynamic rotary embeddings": Case(
        lambda: Unshown(config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}))
    ),
    # outputs beside the logits
    "a constant": Case(lambda: TwoOutputs(config())),
    "outputs of each token": Case(
        lambda: with_value(lambda _, x: {"scores": [x.square(), x[None].repeat(3, 1, 1, 1)]})(config())
    ),
    "an encoder's states": Case(lambda: encoder_states(lambda x: 2 * x)),
    "an encoder's states, mixed": Case(
        lambda: encoder_states(lambda x: x + x.roll(1, dims=1)), "encoder_last_hidden_state"
    ),
    "a pooled last token": Case(siglip, r"don't stay apart.*Train it on padded rows, unpatched"),
    **{
        f"an output that is {name}": Case(lambda of=of: with_value(of)(config()), "don't stay apart: .*value")
        for name, of in MIXED.items()
    },
    # attention that another library has replaced
    "attention of a class": Case(
        llama,
        rf"LlamaForCausalLM {OWN}.*layers\.0\.self_attn \(LlamaAttention\)",
        replaced(LlamaAttention, attends_by_itself),
    ),
    "attention of a class, by the interface": Case(llama, "", replaced(LlamaAttention, attends_by_the_interface)),
    "attention of another class": Case(llama, "", replaced(LlamaAttention, MistralAttention.forward)),
    "attention of an instance": Case(
        llama,
        rf"{OWN}.*first in model\.layers\.1\.self_attn \(LlamaAttention\)",
        lambda model, _: setattr(attention(model), "forward", attends_by_itself.__get__(attention(model))),
    ),
    "attention of any arguments": Case(
        llama, rf"{OWN}.*first in model\.layers\.1\.self_attn \(Any", wrap("model.layers.1.self_attn", AnyArguments)
    ),
    "a fused layer": Case(llama, rf"{OWN}.*\(LlamaDecoderLayer\)", replaced(LlamaDecoderLayer, bypass_layers)),
    "a fused model": Case(llama, OWN, replaced(LlamaModel, bypass_all)),
    "a mask of a file": Case(
        llama, "(needs the packed one|don't stay apart)",
        lambda model, patch: patch.setattr(modeling_llama, "create_causal_mask", mask_of_its_own),
    ),
    "a mask of a file, for sdpa": Case(
        llama, OWN, lambda model, patch: patch.setattr(modeling_llama, "create_causal_mask", mask_of_its_own),
        {"attention": "sdpa"},
    ),
    "a mask of a file, dense": Case(
        lambda: zoo.tiny_model("gpt_neo"), OWN,
        lambda model, patch: patch.setattr(modeling_gpt_neo, "create_causal_mask", mask_of_its_own),
    ),
    "a head of an instance": Case(
        llama, r"transformers' own in model \(LlamaModel\), and (it can't be tried|.*first in model \(LlamaModel)",
        lambda model, _: setattr(model.model, "forward", mixes_states.__get__(model.model)),
    ),
    # adapters
    "an adapter": Case(
        llama, rf"{OWN}.*layers\.1\.mlp \(Convolution\)", wrap("model.layers.1.mlp", Convolution)
    ),
    "an adapter of an instance": Case(
        llama, rf"{OWN}.*layers\.0\.mlp \(LlamaMLP\)",
        lambda model, _: setattr(model.model.layers[0].mlp, "forward", sums.__get__(model.model.layers[0].mlp)),
    ),
    "an adapter of a norm": Case(
        llama, rf"{OWN}.*norm\.1 \(Conv", wrap("model.norm", lambda own: nn.Sequential(own, Convolution(nn.Identity())))
    ),
    "an adapter of the head": Case(llama, rf"{OWN}.*lm_head \(Convolution\)", wrap("lm_head", Convolution)),
    "an adapter of an encoder": Case(
        lambda: tiny_pair_model("bart"), rf"{OWN}.*encoder.*fc1 \(Conv", wrap("model.encoder.layers.0.fc1", Convolution)
    ),
    "an adapter of a decoder": Case(
        lambda: tiny_pair_model("bart"), rf"{OWN}.*decoder.*fc1 \(Conv", wrap("model.decoder.layers.0.fc1", Convolution)
    ),
    "an adapter of a classifier": Case(
        lambda: LlamaForSequenceClassification(config(pad_token_id=0)), "", wrap("model.layers.1.mlp", Scaled)
    ),
    "an adapter of each token": Case(llama, "", wrap("model.layers.1.mlp", Scaled)),
    "layers that share attention": Case(
        llama, "", lambda model, _: setattr(model.model.layers[1], "self_attn", model.model.layers[0].self_attn)
    ),
    # quantized layers
    "int8 layers": Case(llama, "", wrap_linears(Int8Linear)),
    "int8 layers and an adapter": Case(
        llama, rf"{OWN}.*layers\.1\.mlp \(Conv", both(wrap_linears(Int8Linear), wrap("model.layers.1.mlp", Convolution))
    ),
    "int8 layers and replaced attention": Case(
        llama, rf"{OWN}.*self_attn", both(wrap_linears(Int8Linear), replaced(LlamaAttention, attends_by_itself))
    ),
}  # fmt: skip


def judged(case: Case, model: Any, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    if not after:
        case.change(model, monkeypatch)
    handle = tritonpack.patch(model, **case.options)
    if after:
        case.change(model, monkeypatch)
    if not case.words:
        return handle.prove()
    for _ in range(2):  # it isn't forgotten
        with pytest.raises(UnsupportedModelError, match=f"(?s){case.words}"):
            handle.prove()
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(
    "a subclass-torch.float32",
    "logits centred over the row-torch.bfloat16",
    "a pooler of rows-torch.float16",
    "a model that doesn't run on tokens alone-torch.bfloat16",
    "dynamic rotary embeddings-torch.float32",
)
def test_leaks_are_refused_and_nothing_else(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = CASES[name].make().to(dtype)
    judged(CASES[name], model, monkeypatch, after=False)


@pytest.mark.fast("logits centred over the row", "a pooler of rows")
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].change is not nothing])
def test_what_is_replaced_after_the_patch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first call it is found, also in a model that was called in another dtype, and until it is undone."""
    torch.manual_seed(0)
    model = CASES[name].make().float()
    judged(CASES[name], model, monkeypatch, after=True)


# Without its tables tritonpack would leak in these families; the proof finds each.

LEAKING = (
    "bailing_hybrid", "bamba", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "blt", "camembert",
    "cpmant", "data2vec-text", "deepseek_v4", "doge-experts", "falcon_h1", "falcon_mamba",
    "granitemoehybrid", "inkling2_loop_text", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lara_mini",
    "lfm2", "lfm2_moe", "lfm3", "llama4", "llama4_text", "mamba", "mamba2", "marian", "mbart", "minimax",
    "minimax_m3_vl_text", "musicgen", "musicgen_melody", "mvp", "nemotron_h", "olmo_hybrid", "openai-gpt",
    "pegasus", "plbart", "prophetnet", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer", "roberta", "roberta-prelayernorm",
    "roformer", "rwkv", "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "zamba", "zamba2", "zaya",
)  # fmt: skip
SAMPLED = ("bart", "falcon_h1", "llama4_text", "lfm2", "openai-gpt", "recurrent_gemma", "roberta", "rwkv")


@pytest.fixture
def without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the table of shown classes and the tables of layers."""
    monkeypatch.setattr(proof, "is_shown", lambda kind, **_: False)
    for name in ("MIXERS", "POSITION_TABLES", "OWN_MASKS"):
        monkeypatch.setattr(families, name, frozenset())
    for owner, name in (
        (choose_modules, "REWRITTEN"), (families, "REFUSED"), (families, "REFUSED_LAYERS"),
        (families, "PLACES_FROM_MASK"), (families, "COUNT_FROM_PADDING"), (positions, "TEMPERATURES"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, {})


@pytest.mark.usefixtures("without_tables")
@pytest.mark.parametrize(
    "name", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.slow) for name in LEAKING]
)
@pytest.mark.fast("lfm2", "roberta")
def test_leaking_families_are_refused(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        handle = tritonpack.patch(zoo.tiny_model(name, dtype=dtype))
        with pytest.raises(UnsupportedModelError, match=r"don't stay apart|can't be tried"):
            handle.prove()


@pytest.mark.slow
@pytest.mark.usefixtures("without_tables")
def test_no_other_family_leaks() -> None:
    """Families without an entry in the tables are accepted, so the refusals above come from leaks."""
    refused = []
    for name in zoo.MODEL_TYPES:
        if name not in zoo.UNBUILT and name not in LEAKING:
            try:
                tritonpack.patch(zoo.tiny_model(name)).prove()
            except UnsupportedModelError as error:
                refused.append((name, str(error)))
    assert [name for name, _ in refused] == ["gemma4_unified_assistant", "xlstm"], refused


# Losses of other classes, compared with the losses of documents alone in the first call with labels.


def labelled(pieces: list[Tensor]) -> dict[str, Any]:
    labels = torch.cat([piece.index_fill(1, torch.tensor([0]), -100) for piece in pieces], dim=1)
    return call_of(pieces=pieces, labels=labels)


def shifted_twice(self: Any, *args: Any, labels: Any = None, **more: Any) -> Any:
    """Moshi's decoder up to transformers 5.16."""
    output = LlamaForCausalLM.forward(self, *args, **more)
    if labels is not None:
        logits = output.logits[:, :-1].contiguous()
        output.loss = self.loss_function(logits, labels[:, 1:].contiguous(), vocab_size=self.config.vocab_size)
    return output


def entropy(logits: Tensor, labels: Tensor, shift: int = 1, reduction: str = "mean") -> Tensor:
    flat = logits[:, :-shift].flatten(0, 1), labels[:, shift:].flatten()
    return nn.functional.cross_entropy(*flat, reduction=reduction)


def mean_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] >= 0).sum(1)).mean()


# Losses that mix documents. One predicts the token after the next one, too; one hardly moves the loss of new weights.
WRONG = {
    "means": with_loss(lambda logits, labels: logits.mean(1).square().sum()),
    "second token": with_loss(lambda x, y: entropy(x, y, 1, "sum") + entropy(x, y, 2, "sum")),
    "smooth": with_loss(lambda x, y: entropy(x, y) + 0.1 * (x[:, 1:] - x[:, :-1]).square().mean()),
    "mean of rows": with_loss(mean_of_rows),
    "shifted twice": type("ShiftedTwice", (LlamaForCausalLM,), {"forward": shifted_twice}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_mixes_documents_is_refused(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "has_known_loss", lambda model: name == "shifted twice")  # as of transformers' classes
    model, pieces = spread_out(WRONG[name](config())).to(dtype).eval(), documents()
    with torch.no_grad():
        one = labelled(pieces[:1])
        expected = model(**one).loss
        with tritonpack.patch(model):
            assert model(**call_of()).logits.shape[:2] == (1, sum(LENGTHS))
            for _ in range(2):
                with pytest.raises(ValueError, match=r" has a loss of its own.*Leave labels out"):
                    model(**labelled(pieces))
            with tritonpack.patch(model), pytest.raises(ValueError, match="has a loss of its own"):  # a second handle
                model(**labelled(pieces))
            assert model(**one).loss.item() == pytest.approx(expected.item(), rel=0.02)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", [TwoOutputs, Summed, Unshown])
def test_a_right_loss_is_accepted_and_leaves_no_trace(kind: Any, context: Any) -> None:
    """Means and sums over labels."""
    with torch.inference_mode(context is torch.inference_mode):
        model = spread_out(kind(config())).double().eval()
    with torch.no_grad():
        pieces = [piece for piece in documents() if piece.numel() > 1]
        alone = torch.stack([model(**labelled([piece])).loss for piece in pieces])
    counts = torch.tensor([piece.numel() - 1 for piece in pieces])
    hooks = len(model.lm_head._forward_hooks), len(model._forward_hooks)
    with context(), tritonpack.patch(model):
        loss = model(**labelled(documents())).loss
        assert torch.is_grad_enabled() == loss.requires_grad == (context is torch.enable_grad)
    expected = alone.sum() if kind is Summed else (alone * counts).sum() / counts.sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    assert hooks == (len(model.lm_head._forward_hooks), len(model._forward_hooks))
    assert all(parameter.grad is None for parameter in model.parameters())


class Routed(MixtralForCausalLM):
    """The loss of its routers is a mean over all tokens of a call, so documents alone have another loss."""

    def forward(self, *args: Any, labels: Any = None, **more: Any) -> Any:
        return super().forward(*args, labels=labels, output_router_logits=labels is not None, **more)


def test_router_loss_equals_that_of_a_padded_batch() -> None:
    model, rows = spread_out(Routed(zoo.tiny_config("mixtral"))).double().eval(), call_of("padded_right")
    labels = torch.where(rows["attention_mask"] > 0, rows["input_ids"], -100)
    labels[:, 0] = -100
    with torch.no_grad():
        expected = model(rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss
        with tritonpack.patch(model):
            torch.testing.assert_close(model(**labelled(documents())).loss, expected, rtol=1e-6, atol=0)
