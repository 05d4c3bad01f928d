"""Code that replaces parts of models, as in other projects, and models of users: some of them let documents meet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralForCausalLM,
    SiglipTextConfig,
    SiglipTextModel,
    T5ForConditionalGeneration,
)  # fmt: skip
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    apply_rotary_pos_emb,
)  # fmt: skip
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.utils import ModelOutput

from tests.patches import zoo
from tests.patches.models import VOCAB, tiny_model
from tests.patches.remote_code import composed
from tests.patches.zoo import spread, tiny_pair_model


def attends_by_itself(self: Any, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
    """Attention that calls sdpa instead of the interface: causal, and without the mask."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


OWN_FORWARD = LlamaAttention.forward


def attends_by_the_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
    return OWN_FORWARD(self, *args, **kwargs)


class AnyArguments(nn.Module):
    """A module whose signature names no argument."""

    def __init__(self, own: LlamaAttention) -> None:
        super().__init__()
        self.own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return attends_by_itself(self.own, *args, **kwargs)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Change = Callable[[Any, pytest.MonkeyPatch], None]


def config(**more: Any) -> LlamaConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaConfig(**{**sizes, "num_hidden_layers": 2, **more})


class Unshown(LlamaForCausalLM):
    """A subclass, which isn't in the table of shown classes."""


class Mixing(LlamaForCausalLM):
    """Each token's logits contain those of all tokens before it in the row."""

    def changed(self, logits: Tensor) -> Tensor:
        return logits + 0.1 * logits.cumsum(1)

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = self.changed(output.logits)
        return output


class Centred(Mixing):
    """A leak that is the same for documents in another order."""

    def changed(self, logits: Tensor) -> Tensor:
        return logits - logits.mean(1, keepdim=True)


class Noisy(Mixing):
    def changed(self, logits: Tensor) -> Tensor:
        return logits + torch.randn_like(logits)


class Branches(LlamaForCausalLM):
    """Its attention gets the right mask, and its head adds the token before in the row: another branch's."""

    def forward(self, input_ids: Tensor | None = None, position_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        if position_ids is not None:
            inner = (position_ids[..., None] > 0).to(output.logits.dtype)
            output.logits = output.logits + inner * output.logits.roll(1, dims=1)
        return output


class WindowIgnored(MistralForCausalLM):
    """A model that ignores its window unless it gets position ids."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        window = self.config.sliding_window
        if position_ids is None:
            self.config.sliding_window = 10**6
        try:
            return super().forward(input_ids, position_ids=position_ids, **kwargs)
        finally:
            self.config.sliding_window = window


class OwnPooler(BertModel):
    """A pooled vector that is the mean of a row."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask, **kwargs)
        output.pooler_output = output.last_hidden_state.mean(1)
        return output


class Convolution(nn.Module):
    """An adapter that adds each token's neighbour to it."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        y = self.own(x)
        return y + 0.1 * y.roll(1, dims=1)


class Scaled(nn.Module):
    """An adapter that computes each token by itself, with dropout. It counts its calls."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.drop, self.calls = own, nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(2 * self.own(x))


class Int8Linear(nn.Module):
    """A quantized layer; the scale of its inputs depends on all tokens of a call."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", own.weight.detach().abs().max() / 127)
        self.register_buffer("weight", (own.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return ((x / scale).round() @ self.weight.T.to(x.dtype)) * (scale * self.scale)


def bypass_layers(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A forward that fuses a whole layer, so that its attention is never called."""
    hidden_states = hidden_states + attends_by_itself(self.self_attn, self.input_layernorm(hidden_states), **kwargs)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def mask_of_its_own(*args: Any, **kwargs: Any) -> Tensor:
    length = kwargs["inputs_embeds"].shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def sums(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x).cumsum(1)


def attention(model: Any) -> Any:
    return model.model.layers[1].self_attn


def wrap(path: str, wrapper: Callable[[Any], nn.Module]) -> Change:
    return lambda model, _: model.set_submodule(path, wrapper(model.get_submodule(path)))


def wrap_linears(wrapper: Callable[[Any], nn.Module]) -> Change:
    def change(model: Any, _: Any) -> None:
        for path, part in list(model.named_modules()):
            if isinstance(part, nn.Linear) and "lm_head" not in path:
                model.set_submodule(path, wrapper(part))

    return change


def both(*changes: Change) -> Change:
    return lambda model, patch: [change(model, patch) for change in changes] and None


def nothing(model: Any, patch: Any) -> None:
    pass


def llama() -> Any:
    return tiny_model("llama")


def replaced(kind: Any, forward: Any) -> Change:
    return lambda model, patch: patch.setattr(kind, "forward", forward)


def mixes_states(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
    output = type(self).forward(self, input_ids, attention_mask, **more)
    output.last_hidden_state = output.last_hidden_state + 0.1 * output.last_hidden_state.cumsum(1)
    return output


def longrope() -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
    return {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096, **factors,
    }  # fmt: skip


@dataclasses.dataclass
class Output(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    value: Any = None


class TwoOutputs(LlamaForCausalLM):
    """A language model with another output, here a constant, and with a loss of its own, here transformers'."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, labels: Any = None,
        **more: Any,
    ) -> Output:  # fmt: skip
        told = {"attention_mask": attention_mask, "position_ids": position_ids, **more}
        states = self.model(input_ids, **told).last_hidden_state
        logits = self.lm_head(states)
        loss = None if labels is None else self.own_loss(logits, labels)
        return Output(loss=loss, logits=logits, value=self.value(states))

    def value(self, states: Tensor) -> Any:
        return states.new_ones(1, 5, 2)

    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def with_value(of: Callable[[Any, Tensor], Any]) -> type[TwoOutputs]:
    """A class with another value, a function of the model and its states."""
    return type("WithValue", (TwoOutputs,), {"value": of})


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
    "logits with noise": Case(lambda: Noisy(config()), "Noisy isn't a model.*beside other rows"),
    "remote code that uses its mask": Case(lambda: composed("causal", "add")),
    "remote code that ignores its mask": Case(
        lambda: composed("causal", "ignored"), rf"Composed {UNKNOWN}.*the model itself \(Composed\)"
    ),
    "a tree that mixes branches": Case(
        lambda: Branches(config()), "don't stay apart", options={"share_prefixes": True}
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
    "a mask of a file": Case(
        llama, "(instead of the mask of the documents|don't stay apart)",
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
