"""Code that replaces Llama's attention, as in other projects."""

from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb


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


class Replacement(nn.Module):
    def __init__(self, own: LlamaAttention) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        return attends_by_itself(self.own, hidden_states, **kwargs)


class AnyArguments(nn.Module):
    """A module whose signature names no argument."""

    def __init__(self, own: LlamaAttention) -> None:
        super().__init__()
        self.own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return attends_by_itself(self.own, *args, **kwargs)


def mixes_rows(self: Any, **kwargs: Any) -> Any:
    """A forward of a head: each token's logits depend on all tokens before it in the row."""
    output = type(self).forward(self, **kwargs)
    output.logits = output.logits + 0.1 * output.logits.cumsum(1)
    return output
