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
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.utils import ModelOutput

from tests.patches.models import VOCAB, tiny_model


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


class StrangerConfig(PreTrainedConfig):
    model_type = "stranger"
    hidden_size: int = 16
    num_hidden_layers: int = 1
    vocab_size: int = VOCAB
    uses_mask: bool = True


class Stranger(PreTrainedModel):
    """Remote code: its attention doesn't use transformers' interface and adds the mask to its scores."""

    config_class = StrangerConfig
    _supports_sdpa = True

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.post_init()
        nn.init.normal_(self.qkv.weight, std=0.5)
        nn.init.normal_(self.embed.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor]:
        hidden = self.embed(input_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids, allow_is_causal_skip=False)
        query, key, value = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        scores = query @ key.transpose(2, 3)
        if self.config.uses_mask and isinstance(mask, Tensor) and mask.dtype == torch.bool:  # stock sdpa's
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif self.config.uses_mask:
            scores = scores + mask
        else:
            scores = scores + torch.full_like(scores[0, 0], torch.finfo(scores.dtype).min).triu(1)
        return ((scores.softmax(-1) @ value)[:, 0],)


def config(**more: Any) -> LlamaConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaConfig(**sizes, num_hidden_layers=2, **more)


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


def bypass_all(self: Any, input_ids: Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
    """A forward that fuses a whole model."""
    hidden_states = self.embed_tokens(input_ids)
    places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    angles = self.rotary_emb(hidden_states, places)
    for layer in self.layers:
        hidden_states = bypass_layers(layer, hidden_states, position_embeddings=angles)
    return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


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


class Summed(TwoOutputs):
    def own_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def with_value(of: Callable[[Any, Tensor], Any]) -> type[TwoOutputs]:
    """A class with another value, a function of the model and its states."""
    return type("WithValue", (TwoOutputs,), {"value": of})


def with_loss(of: Callable[[Tensor, Tensor], Tensor]) -> type[TwoOutputs]:
    """A class with another loss, a function of logits and labels."""
    return type("WithLoss", (TwoOutputs,), {"own_loss": lambda self, logits, labels: of(logits, labels)})
