"""Models of users, and what other libraries do to models: some of them let documents meet."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralAttention

from tests.patches import zoo
from tests.patches.models import VOCAB, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Change = Callable[[Any, pytest.MonkeyPatch], None]

# Models of users


def config(**more: Any) -> transformers.LlamaConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.LlamaConfig(**{**sizes, "num_hidden_layers": 2, **more})


def own(kind: Any = transformers.LlamaForCausalLM, name: str = "Own", **changes: Callable[..., Any]) -> Any:
    """A subclass whose outputs are changed: each change gets the value, the whole output, and the call's arguments."""

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        output = kind.forward(self, *args, **given)
        for field, change in changes.items():
            if (value := change(output.get(field), output, given)) is not None:
                output[field] = value
        return output

    return type(name, (kind,), {"forward": forward})


class Unshown(transformers.LlamaForCausalLM):
    """A subclass, which isn't in the table of shown classes."""


# Each token's logits contain those of all tokens before it in the row.
Mixing = own(name="Mixing", logits=lambda x, *_: x + 0.1 * x.cumsum(1))
# A leak that is the same for documents in another order.
Centred = own(name="Centred", logits=lambda x, *_: x - x.mean(1, keepdim=True))
Noisy = own(name="Noisy", logits=lambda x, *_: x + torch.randn_like(x))
# Documents stay apart, but a document alone has other logits.
OfRows = own(name="OfRows", logits=lambda x, *_: x * x.shape[1])
OwnPooler = own(
    transformers.BertModel, "OwnPooler", pooler_output=lambda _, output, __: output.last_hidden_state.mean(1)
)


def add_token_before(logits: Tensor, output: Any, given: dict[str, Any]) -> Tensor:
    """Attention gets the right mask, and the head adds the token before in the row: in a tree another branch's."""
    inner = (given["position_ids"][..., None] > 0).to(logits.dtype) if "position_ids" in given else 0
    return logits + inner * logits.roll(1, dims=1)


def with_value(of: Callable[[Tensor], Any]) -> Any:
    """A class with another output, a function of the logits."""
    return own(value=lambda _, output, __: of(output.logits))


def with_loss(of: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A class with a loss of its own, a function of logits and labels."""
    return own(loss=lambda loss, output, given: None if loss is None else of(output.logits, given["labels"]))


def siglip() -> Any:
    """No auto class leads to it, so the table of known classes doesn't list it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"vocab_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    return spread_out(transformers.SiglipTextModel(transformers.SiglipTextConfig(**sizes, **more)))


def encoder_states(of: Callable[[Tensor], Tensor]) -> Any:
    """An encoder with a decoder that also returns a function of its encoder's states."""
    kind = own(transformers.T5ForConditionalGeneration, encoder_last_hidden_state=lambda x, *_: of(x))
    return spread_out(kind(zoo.tiny_config("t5")))


def spread_out(model: Any) -> Any:
    """With transformers' small weights a window has little effect in 16 bits."""
    zoo.spread(model, torch.Generator().manual_seed(0))
    return model


def rope(kind: str) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
    more = {"original_max_position_embeddings": 4096, **factors} if kind == "longrope" else {}
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, **more}


# Remote code: it asks transformers for a mask, and computes with it by itself

FIRST_IMAGE = 40  # tokens from here on are images, alike ones belong to one image


def blocks(ids: Tensor) -> Tensor:
    return torch.where(ids >= FIRST_IMAGE, ids, -1)


def made_by(name: str) -> Callable[..., Any]:
    """One of transformers' functions that make masks, called as models call it."""
    make = getattr(masking_utils, f"create_{name}_mask")

    def mask(config: Any, hidden: Tensor, told: dict[str, Any], **more: Any) -> Any:
        given = () if name == "bidirectional" else (None, told["position_ids"])
        return make(config, hidden, told["attention_mask"], *given, **more)

    return mask


causal, window, both_ways = made_by("causal"), made_by("sliding_window_causal"), made_by("bidirectional")

# What makes a mask of ids, and whether transformers is allowed to skip it.
MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda ids, *given: causal(*given, allow_is_causal_skip=False),
    "both ways": lambda ids, *given: both_ways(*given, allow_is_bidirectional_skip=False),
    "both ways or none": lambda ids, *given: both_ways(*given),
    "window": lambda ids, *given: window(*given, allow_is_causal_skip=False),
    "window or none": lambda ids, *given: window(*given),
    "chunks": lambda ids, *given: made_by("chunked_causal")(*given),
    "images": lambda ids, *given: causal(*given, block_sequence_ids=blocks(ids)),
    "images in a window": lambda ids, *given: window(*given, block_sequence_ids=blocks(ids)),
    "all": lambda ids, *given: causal(*given, or_mask_function=lambda *_: torch.tensor(True)),
}


def least(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


# What models compute with a mask and scores.
USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "where": lambda x, mask: torch.where(mask, x, least(x)),
    "not": lambda x, mask: x.masked_fill(~mask, least(x)),
    "and": lambda x, mask: x.masked_fill((mask & torch.ones_like(x, dtype=torch.bool)) == 0, least(x)),
    "index": lambda x, mask: x.masked_fill(~mask[:, 0][:, None], least(x)),
    "squeeze": lambda x, mask: x.masked_fill(~torch.squeeze(mask, 1)[:, None], least(x)),
    "float": lambda x, mask: x + (1 - mask.to(x.dtype)) * least(x),
    "passed on": lambda x, mask: torch.where(mask.to(x.device).contiguous()[:, :, :, : x.shape[-1]], x, least(x)),
    "ignored": lambda x, _: x + torch.full_like(x[0, 0], least(x)).triu(1),
    # A mask of transformers is bool here, and can't be added.
    "add": lambda x, mask: x.masked_fill(~mask, least(x)) if isinstance(mask, Tensor) else x + mask,
    "added": lambda x, mask: x.masked_fill(~mask, least(x)) if isinstance(mask, Tensor) else mask + x,
    "added in place": lambda x, mask: x.masked_fill_(~mask, least(x)) if isinstance(mask, Tensor) else x.__iadd__(mask),
}


class ComposedConfig(transformers.PreTrainedConfig):
    model_type = "composed"
    hidden_size: int = 16
    num_hidden_layers: int = 1
    vocab_size: int = VOCAB
    sliding_window: int = 3
    attention_chunk_size: int = 4
    mask: str = "causal"
    use: str = "where"


class Composed(transformers.PreTrainedModel):
    config_class = ComposedConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.qkv = nn.Embedding(config.vocab_size, 16), nn.Linear(16, 48)
        self.post_init()
        nn.init.normal_(self.embed.weight)
        nn.init.normal_(self.qkv.weight, std=0.5)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        hidden = self.embed(input_ids)
        told = {"attention_mask": attention_mask, "position_ids": position_ids}
        mask = MASKS[self.config.mask](input_ids, self.config, hidden, told)
        query, key, value = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        if mask is None:
            mask = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)[None, None]
            mask = mask if "both" in self.config.mask else mask.tril()
        scores = USES[self.config.use](query @ key.mT, mask)
        return ((scores.softmax(-1) @ value)[:, 0],)


def composed(mask: str, use: str = "where") -> Any:
    torch.manual_seed(0)
    return Composed(ComposedConfig(mask=mask, use=use)).double().eval()


# What other libraries do


def attends_by_itself(self: Any, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
    """Attention that calls sdpa instead of the interface: causal, and without the mask."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def attends_by_the_interface(self: Any, *args: Any, own: Any = LlamaAttention.forward, **kwargs: Any) -> Any:
    return own(self, *args, **kwargs)


def bypass_layers(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A forward that fuses a whole layer, so that its attention is never called."""
    hidden_states = hidden_states + attends_by_itself(self.self_attn, self.input_layernorm(hidden_states), **kwargs)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def mask_of_its_own(*args: Any, **kwargs: Any) -> Tensor:
    length = kwargs["inputs_embeds"].shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def mixes_states(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
    output = type(self).forward(self, input_ids, attention_mask, **more)
    output.last_hidden_state = output.last_hidden_state + 0.1 * output.last_hidden_state.cumsum(1)
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


def wrap(path: str, wrapper: Callable[[Any], nn.Module]) -> Change:
    return lambda model, _: model.set_submodule(path, wrapper(model.get_submodule(path)))


def quantize(model: Any, _: Any) -> None:
    for path, part in list(model.named_modules()):
        if isinstance(part, nn.Linear) and "lm_head" not in path:
            model.set_submodule(path, Int8Linear(part))


def both(*changes: Change) -> Change:
    return lambda model, patch: [change(model, patch) for change in changes] and None


def replaced(home: Any, name: str, value: Any) -> Change:
    return lambda _, patch: patch.setattr(home, name, value)


def of_instance(path: str, forward: Callable[..., Any]) -> Change:
    """Replace the forward of one module."""
    return lambda model, _: setattr(part := model.get_submodule(path), "forward", forward.__get__(part))


# The table


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what another library does to it, and the words of the refusal; none for a model that is accepted."""

    make: Callable[[], Any]
    words: str = ""
    change: Change = lambda model, patch: None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def llama() -> Any:
    return tiny_model("llama")


def bart() -> Any:
    return zoo.build("bart+")


def of(kind: Any, **more: Any) -> Callable[[], Any]:
    return lambda: kind(config(**more))


# Another output, and the words of its refusal.
VALUE = "don't stay apart: .*value"
VALUES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a constant": ("", lambda x: x.new_ones(1, 5, 2)),
    "of each token": ("", lambda x: {"scores": [x.square(), x[None].repeat(3, 1, 1, 1)]}),
    "the mean": (VALUE, lambda x: x.mean(1)),
    "the last token's": (VALUE, lambda x: x[:, -1]),
    "a mean with a dimension": (VALUE, lambda x: x.mean(1, keepdim=True)),  # it doesn't look like a result of a row
    "the token's before": (VALUE, lambda x: x + x.roll(1, dims=1)),
    "a sum in a list": (VALUE, lambda x: [x, x.cumsum(1)]),  # padding that follows doesn't change it
    "centred in the batch": (VALUE, lambda x: x - x.mean((0, 1))),
}

OWN = r"runs code that isn't transformers' own in .*don't stay apart"
UNKNOWN = r"isn't a model that tritonpack knows .*don't stay apart"
MLP = "model.layers.1.mlp"
OWN_MASK = ("create_causal_mask", mask_of_its_own)
CASES = {
    # classes
    "a subclass": Case(of(Unshown)),
    "logits mixed by a head": Case(of(Mixing), rf"Mixing {UNKNOWN}.*first in the model itself \(Mixing"),
    "logits centred over the row": Case(of(Centred), rf"Centred {UNKNOWN}.*\(Centred\)"),
    "logits with noise": Case(of(Noisy), "Noisy isn't a model.*beside other rows"),
    "logits that depend on the length of the row": Case(of(OfRows), f"OfRows {UNKNOWN}.*from the document alone"),
    "remote code that uses its mask": Case(lambda: composed("causal", "add")),
    "remote code that ignores its mask": Case(
        lambda: composed("causal", "ignored"), rf"Composed {UNKNOWN}.*the model itself \(Composed\)"
    ),
    "a tree that mixes branches": Case(
        of(own(logits=add_token_before)), "don't stay apart", options={"share_prefixes": True}
    ),
    "a pooler of rows": Case(
        lambda: OwnPooler(zoo.tiny_config("bert", is_decoder=False)), r"OwnPooler .*(pooler_output|one for each row)"
    ),
    "a model that doesn't run on tokens alone": Case(
        of(Unshown), r"can't be tried on a few tokens .*RuntimeError: mat1 .*Train it on padded rows, unpatched",
        lambda model, _: setattr(model, "lm_head", nn.Linear(3, 3)),
    ),
    "long rotary embeddings": Case(of(Unshown, rope_parameters=rope("longrope"))),
    "dynamic rotary embeddings": Case(of(Unshown, rope_parameters=rope("dynamic"))),
    # outputs beside the logits
    **{f"an output: {name}": Case(of(with_value(value)), words) for name, (words, value) in VALUES.items()},
    "an encoder's states": Case(lambda: encoder_states(lambda x: 2 * x)),
    "an encoder's states, mixed": Case(
        lambda: encoder_states(lambda x: x + x.roll(1, dims=1)), "encoder_last_hidden_state"
    ),
    "a pooled last token": Case(siglip, r"don't stay apart.*Train it on padded rows, unpatched"),
    # attention that another library has replaced
    "attention of a class": Case(
        llama, rf"LlamaForCausalLM {OWN}.*layers\.0\.self_attn \(LlamaAttention\)",
        replaced(LlamaAttention, "forward", attends_by_itself),
    ),
    "attention of a class, by the interface": Case(
        llama, "", replaced(LlamaAttention, "forward", attends_by_the_interface)
    ),
    "attention of another class": Case(llama, "", replaced(LlamaAttention, "forward", MistralAttention.forward)),
    "attention of an instance": Case(
        llama, rf"{OWN}.*first in model\.layers\.1\.self_attn \(LlamaAttention\)",
        of_instance("model.layers.1.self_attn", attends_by_itself),
    ),
    "a fused layer": Case(
        llama, rf"{OWN}.*\(LlamaDecoderLayer\)", replaced(LlamaDecoderLayer, "forward", bypass_layers)
    ),
    "a mask of a file": Case(
        llama, "(instead of the mask of the documents|don't stay apart)", replaced(modeling_llama, *OWN_MASK)
    ),
    "a mask of a file, for sdpa": Case(llama, OWN, replaced(modeling_llama, *OWN_MASK), {"attention": "sdpa"}),
    "a mask of a file, dense": Case(lambda: zoo.tiny_model("gpt_neo"), OWN, replaced(modeling_gpt_neo, *OWN_MASK)),
    "a base model of an instance": Case(
        llama, r"transformers' own in model \(LlamaModel\), and (it can't be tried|.*first in model \(LlamaModel)",
        of_instance("model", mixes_states),
    ),
    # adapters
    "an adapter": Case(llama, rf"{OWN}.*layers\.1\.mlp \(Convolution\)", wrap(MLP, Convolution)),
    "an adapter of an instance": Case(
        llama, rf"{OWN}.*layers\.1\.mlp \(LlamaMLP\)",
        of_instance(MLP, lambda self, x: type(self).forward(self, x).cumsum(1)),
    ),
    "an adapter of the head": Case(llama, rf"{OWN}.*lm_head \(Convolution\)", wrap("lm_head", Convolution)),
    **{
        f"an adapter of the {side}": Case(
            bart, rf"{OWN}.*{side}.*fc1 \(Conv", wrap(f"model.{side}.layers.0.fc1", Convolution)
        )
        for side in ("encoder", "decoder")
    },
    "an adapter of a classifier": Case(
        of(transformers.LlamaForSequenceClassification, pad_token_id=0), "", wrap(MLP, Scaled)
    ),
    "an adapter of each token": Case(llama, "", wrap(MLP, Scaled)),
    "layers that share attention": Case(
        llama, "", lambda model, _: setattr(model.model.layers[1], "self_attn", model.model.layers[0].self_attn)
    ),
    # quantized layers
    "int8 layers": Case(llama, "", quantize),
    "int8 layers and an adapter": Case(
        llama, rf"{OWN}.*layers\.1\.mlp \(Conv", both(quantize, wrap(MLP, Convolution))
    ),
    "int8 layers and replaced attention": Case(
        llama, rf"{OWN}.*self_attn", both(quantize, replaced(LlamaAttention, "forward", attends_by_itself))
    ),
}  # fmt: skip
