"""Recurrences of layers: what a piece of a document does to a state, and what the state before it adds to its outputs.

The state after a piece is `transition` applied to the state before it, plus `addition`. docs/sequence-parallelism.md
has the sizes of both. The functions that layers call compute the outputs, so their kernels are used where they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus
from torch.utils.checkpoint import checkpoint

from tritonpack.parallel.comm import wide

Call = Callable[..., Any]  # a layer's function on a piece, with changed or further arguments
Arguments = dict[str, Any]  # by name; tensors (1, rows, ...) of a piece, or (1, ..., rows)
BLOCK = 128  # rows of a selective scan whose states are in memory at a time


@dataclass
class Effect:
    """A piece of a document.

    Attributes:
        transition: what becomes of the state before the piece. Of a piece that begins its document it is never used.
        addition: the state after the piece if the state before it is zero.
        outputs: the piece's outputs for the state before it; None for a piece that begins its document.
    """

    transition: Tensor
    addition: Tensor
    outputs: Callable[[Tensor | None], Tensor]


@dataclass(frozen=True)
class Recurrence:
    """A function that computes a recurrence.

    Attributes:
        rows: its arguments with a row per token.
        effect: the effect of a piece, from a call on the piece, all arguments and whether the piece begins its
            document.
        beside: what else of such a layer's forward mixes along the row: a function or a part of the layer.
        dim: the dimension of tokens in arguments and outputs.
        pair: whether it returns (outputs, state).
        join: (transition, addition) of two pieces in a row, from theirs: tensors (n, ...) for n such pairs.
    """

    rows: tuple[str, ...]
    effect: Callable[[Call, Arguments, bool], Effect]
    beside: str = "causal_conv1d_fn"
    dim: int = 1
    pair: bool = True
    join: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda t, a, t2, a2: (t2 * t, t2 * a + a2)


def _join_matrices(t: Tensor, a: Tensor, t2: Tensor, a2: Tensor) -> tuple[Tensor, Tensor]:
    return t2 @ t, t2 @ a + a2


def _delta_rule(call: Call, given: Arguments, begins: bool) -> Effect:
    """A state is (1, H, K, V), a transition (1, H, K, K).

    The function is linear in values and state together. So values (v, 0) and the state (0, 1) give the outputs and the
    addition in the first V columns, and in the other K the queries that read the state before the piece, and the
    transition.
    """
    value, key = given["value"], given["key"]
    heads, width, keys = value.shape[2], value.shape[3], key.shape[3]
    if begins:
        out, addition = call(output_final_state=True)
        return Effect(addition.new_zeros(1, heads, keys, keys), addition, lambda _: out)
    identity = torch.eye(keys, dtype=wide(value.dtype), device=value.device)
    states = pad(identity, [width, 0]).expand(1, heads, -1, -1).contiguous()
    out, after = call(value=pad(value, [0, keys]), initial_state=states, output_final_state=True)
    (out, queries), (addition, transition) = (x.split([width, keys], -1) for x in (out, after))

    def outputs(state: Any) -> Tensor:
        return out + torch.einsum("bthk,bhkv->bthv", queries.to(state.dtype), state).to(out.dtype)

    return Effect(transition, addition, outputs)


def _steps(dt: Tensor, bias: Tensor | None, applies_softplus: bool) -> Tensor:
    """The steps of a state space model in float32, from their projections (1, rows, channels)."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (softplus(dt) if applies_softplus else dt).to(wide(dt.dtype))


def _mamba2(call: Call, given: Arguments, begins: bool) -> Effect:
    """A state is (1, H, P, N), a transition (1, H, 1, 1)."""
    out, addition = call(return_final_states=True)
    dt = _steps(given["dt"], given.get("dt_bias"), given.get("dt_softplus", False))
    least, most = given.get("dt_limit", (0.0, float("inf")))
    decay = (given["A"].to(dt.dtype) * dt.clamp(least, most)).cumsum(1)  # (1, rows, H), logarithms

    def outputs(state: Any) -> Tensor:
        if begins:
            return out
        c = given["C"].to(state.dtype)  # (1, rows, groups, N)
        read = torch.einsum("btgn,bghpn->btghp", c, state.unflatten(1, (c.shape[2], -1)))
        return out + (read.flatten(2, 3) * decay.exp()[..., None]).to(out.dtype)

    return Effect(decay[:, -1].exp()[..., None, None], addition, outputs)


def _mamba(call: Call, given: Arguments, begins: bool) -> Effect:
    """A state and a transition are (1, C, N). A row's states are as large, so few rows have theirs at a time.

    The kernel returns a last state without a gradient. So it isn't used.
    """
    out = call()  # (1, C, rows)
    bias = given.get("delta_bias")
    dt = _steps(given["dt"].mT, bias, given.get("delta_softplus", False))[0]  # (rows, C)
    a = given["A"].to(dt.dtype)
    x, b, c = (given[name][0].mT.to(dt.dtype) for name in ("hidden_states", "B", "C"))
    passed = dt.cumsum(0)
    left = dt.flip(0).cumsum(0).flip(0) - dt  # not a difference of long sums: those lose the digits of short ones

    def in_blocks(compute: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        blocks = zip(*(some.split(BLOCK) for some in tensors), strict=True)
        return [checkpoint(compute, a, *block, use_reentrant=False, preserve_rng_state=False) for block in blocks]

    def adds(a: Tensor, left: Tensor, dx: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("tcn,tc,tn->cn", (left[..., None] * a).exp(), dx, b)

    def reads(a: Tensor, passed: Tensor, c: Tensor, state: Tensor) -> Tensor:
        return torch.einsum("tcn,cn,tn->tc", (passed[..., None] * a).exp(), state, c)

    def outputs(state: Any) -> Tensor:
        if begins:
            return out
        found = torch.cat(in_blocks(lambda a, passed, c: reads(a, passed, c, state[0]), passed, c)).mT[None]
        z = given.get("z")
        return out + (found if z is None else found * silu(z.to(found.dtype))).to(out.dtype)

    addition = torch.stack(in_blocks(adds, left, dt * x, b)).sum(0)
    return Effect((passed[-1, :, None] * a).exp()[None], addition[None], outputs)


def _rg_lru(call: Call, given: Arguments, begins: bool) -> Effect:
    """A state and a transition are (1, C).

    The function is linear in inputs and state together. So a second row of the batch, with inputs of zero and a state
    of ones, gives the factors of the state before the piece.
    """
    if begins:
        out, addition = call()
        return Effect(torch.zeros_like(addition), addition, lambda _: out)
    x = given["hidden_states"]
    states = x.new_zeros(2, x.shape[2], dtype=wide(x.dtype))
    states[1] = 1
    both = {name: given[name].expand(2, -1, -1) for name in ("recurrent_gate", "reset")}
    outs, after = call(hidden_states=torch.cat([x, torch.zeros_like(x)]), recurrent_states=states, **both)
    return Effect(after[1:], after[:1], lambda state: outs[:1] + (outs[1:] * state).to(outs.dtype))


def _rwkv(call: Call, given: Arguments, begins: bool) -> Effect:
    """A state is (1, 2, C): the logarithm of the sum of weights, and the weighted mean of values.

    Such a state is one token with this key and this value. So it is put before the piece. A transition, (1, C), is the
    logarithm of a decay.
    """
    key, value = (given[name].to(wide(given[name].dtype)) for name in ("key", "value"))
    rows = key.shape[1]
    decay = -given["time_decay"].to(key.dtype).exp()
    weights = key + decay * torch.arange(rows - 1, -1, -1, device=key.device, dtype=key.dtype)[:, None]
    total = weights.logsumexp(1, keepdim=True)
    addition = torch.cat([total, ((weights - total).exp() * value).sum(1, keepdim=True)], 1)

    def outputs(state: Any) -> Tensor:
        if begins:
            return call()[0]
        before = (torch.cat([some[:, None], x], 1) for some, x in zip(state.unbind(1), (key, value), strict=True))
        return call(**dict(zip(("key", "value"), before, strict=True)))[0][:, 1:].to(given["key"].dtype)

    return Effect(decay[None] * rows, addition, outputs)


def _join_weighted(t: Tensor, a: Tensor, t2: Tensor, a2: Tensor) -> tuple[Tensor, Tensor]:
    (log, mean), (log2, mean2) = (x.unbind(-2) for x in (a, a2))
    log = log + t2
    total = torch.logaddexp(log, log2)
    mean = mean * (log - total).exp() + mean2 * (log2 - total).exp()
    return t + t2, torch.stack([total, mean], -2)


def lightning_attention(query: Tensor, key: Tensor, value: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    """MiniMax's linear attention: (B, rows, H, D) -> outputs, and the state (B, H, D, D) after the rows.

    With the decays that the module keeps for a block of rows.
    """
    layer: Any = module
    blocks = [x.transpose(1, 2).split(layer.block_size, 2) for x in (query, key, value)]
    state = value.new_zeros(value.shape[0], *value.shape[2:], value.shape[3])
    outs = []
    for q, k, v in zip(*blocks, strict=True):
        rows = q.shape[2]
        inside = (q @ k.mT * layer.diagonal_decay[:, :, :rows, :rows]) @ v
        outs.append(inside + (q * layer.query_decay[:, :rows]) @ state)
        state = state * (-layer.slope_rate * rows).exp() + (k * layer.key_decay[:, -rows:]).mT @ v
    return torch.cat(outs, 2).transpose(1, 2), state


def _lightning(call: Call, given: Arguments, begins: bool) -> Effect:
    """A state is (1, H, D, D), a transition (1, H, 1, 1)."""
    out, addition = call()
    slope = given["module"].slope_rate.to(wide(out.dtype))  # (H, 1, 1)
    rows = out.shape[1]

    def outputs(state: Any) -> Tensor:
        if begins:
            return out
        passed = torch.arange(1, rows + 1, device=out.device, dtype=slope.dtype)[:, None]
        query = given["query"].transpose(1, 2) * (-slope * passed).exp()
        return out + (query @ state).transpose(1, 2).to(out.dtype)

    return Effect((-slope * rows).exp()[None], addition.to(slope.dtype), outputs)


LIGHTNING = Recurrence(("query", "key", "value"), _lightning)
# By the function that a layer's forward calls, or the method of a part.
RECURRENCES = {
    "torch_chunk_gated_delta_rule": Recurrence(
        ("query", "key", "value", "g", "beta"), _delta_rule, join=_join_matrices
    ),
    "chunk_kimi_delta_attention": Recurrence(("query", "key", "value", "g", "beta"), _delta_rule, join=_join_matrices),
    "mamba2_chunk_scan": Recurrence(("hidden_states", "dt", "B", "C"), _mamba2, pair=False),
    "mamba_selective_scan": Recurrence(("hidden_states", "dt", "B", "C", "z"), _mamba, dim=-1, pair=False),
    "rwkv_linear_attention": Recurrence(("key", "value"), _rwkv, beside="time_shift", join=_join_weighted),
    "rg_lru._rnn_scan": Recurrence(("hidden_states", "recurrent_gate", "reset"), _rg_lru, beside="conv_1d"),
}
