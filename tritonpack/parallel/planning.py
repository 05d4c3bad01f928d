"""plan: which exchange and layout take a batch's attention the least time, as far as a model can tell.

No choice is best for all batches: long documents want their work divided evenly, short ones as little exchange as
possible, and what that costs depends on the network. docs/decisions/exchange-and-layout.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

import torch

from tritonpack.checks import describe, is_int
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.exchange import Exchange, key_heads_per_step, refusal
from tritonpack.parallel.layouts import Layout, LayoutName, check_self_attention, divide
from tritonpack.parallel.prediction import Kind, Model, Prediction, Shards
from tritonpack.parallel.shape import AttentionShape

Name = TypeVar("Name", bound=str)

LATENCY = 10e-6
_DIGITS = 3  # of predicted seconds that count: finer differences are beyond the model


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """The predictions for a batch. `str()` is a table of them.

    Attributes:
        predictions: the fastest first.
        refused: the exchanges that can't compute this model's attention on so many ranks, and why.
        layout: the best layout itself, on the mask's device.
    """

    predictions: tuple[Prediction, ...]
    refused: Mapping[Exchange, str]
    layout: Layout = field(repr=False)

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def __str__(self) -> str:
        ranks = self.layout.ranks
        lines = [
            f"{self.layout.num_rows:,} tokens on {ranks:,} rank{'s' if ranks > 1 else ''}: attention and its exchange, "
            "forward and backward, all layers; predicted, not measured",
            f"{'exchange':10}  {'layout':10}  {'ms':>9}  {'attention':>9}  {'exposed':>9}  {'max/mean':>8}  "
            f"{'MB received':>11}  {'MB held':>8}",
        ]
        for one in self.predictions:
            times = "  ".join(f"{1e3 * value:9,.2f}" for value in (one.seconds, one.attention, one.exposed))
            lines.append(
                f"{one.exchange:10}  {one.layout:10}  {times}  {one.imbalance:8.3f}  "
                f"{one.received / 1e6:11,.1f}  {one.memory / 1e6:8,.1f}"
            )
        lines += [f"{exchange:10}  can't: {reason}" for exchange, reason in self.refused.items()]
        return "\n".join(lines)


def plan(
    mask: BlockDiagonalMask | Mapping[BlockDiagonalMask, int],
    model_config: Any,
    group_size: int,
    bandwidth: float,
    flops: float,
    *,
    exchanges: Iterable[Exchange] = get_args(Exchange),
    layouts: Iterable[LayoutName] = get_args(LayoutName),
    latency: float = LATENCY,
    heads_k_stride: int | None = None,
    bytes_per_number: int | None = None,
    checkpointing: bool = False,
) -> ExchangePlan:
    """Predict every pair of an exchange and a layout for one batch, and rank them.

    The same arguments give the same ranking on every rank: what is counted are whole numbers, and times that agree to
    three digits count as equal; of equal ones the exchange, and then the layout, that `attend` and `make_layout` list
    first comes first. Takes milliseconds on the host, and waits for the mask's device once.

    The model: a rank computes the blocks of 128 x 128 pairs that the kernels would visit (backward 2.5 times as long
    as forward), sends with the given bandwidth and latency, and overlaps the two as the exchanges do. Copies, merging
    of partial results, launches and everything but attention cost nothing in it.

    Args:
        mask: of the whole batch, for all layers alike. For a model whose layers see different masks, a mapping from
            each mask to how many layers have it; layouts are then made for the first mask.
        model_config: of transformers, or anything with its fields: see `AttentionShape.from_config`.
        group_size: how many ranks share the batch.
        bandwidth: bytes per second that a rank receives.
        flops: floating-point operations per second that attention attains on a rank, such as 400e12 on an H100.
        exchanges, layouts: those to choose from; name one where it is settled.
        latency: seconds that a message takes however short: a step of the ring, or a collective of any number of ranks.
        heads_k_stride: of "all_gather", as in `attend`.
        bytes_per_number: of queries, keys and values; None means those of the configuration's dtype, or 2.
        checkpointing: whether backward runs each layer's forward again.

    Raises:
        ValueError: a mask that isn't one, or of cross-attention; a configuration without the sizes; a number that isn't
            above 0; an unknown exchange or layout, or none; exchanges none of which can compute this model's attention
            on so many ranks.

    One long document, whose last rows have nearly all the work:

    >>> from types import SimpleNamespace
    >>> llama = SimpleNamespace(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    >>> mask = BlockDiagonalMask.from_seqlens([32768])
    >>> found = plan(mask, llama, 8, bandwidth=350e9, flops=400e12, exchanges=["ring"])
    >>> [(one.layout, round(one.imbalance, 2)) for one in found.predictions]
    [('zigzag', 1.0), ('balanced', 1.0), ('stripe', 1.0), ('contiguous', 1.87)]
    """
    masks = _check_masks(mask)
    check_self_attention(next(iter(masks)))
    exchanges, layouts = _check_names(exchanges, "exchanges", Exchange), _check_names(layouts, "layouts", LayoutName)
    for value, what in ((bandwidth, "bandwidth"), (flops, "flops")):
        if not _is_finite(value) or value <= 0:
            raise ValueError(f"{what} must be a number above 0, of one rank in a second; got {value!r}.")
    if not _is_finite(latency) or latency < 0:
        raise ValueError(f"latency must be a number of seconds, 0 or more; got {latency!r}.")
    if bytes_per_number is not None and (not is_int(bytes_per_number) or bytes_per_number < 1):
        raise ValueError(f"bytes_per_number must be an integer of at least 1, or None; got {bytes_per_number!r}.")
    if not is_int(group_size) or group_size < 1:
        raise ValueError(f"group_size must be an integer of at least 1; got {group_size!r}.")
    shape = AttentionShape.from_config(model_config, bytes_per_number)
    stride = key_heads_per_step(heads_k_stride, shape.kv_heads)
    reasons = {name: refusal(name, shape.heads, group_size, alibi=shape.alibi) for name in exchanges}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(refused) == len(exchanges):
        raise ValueError("none of the exchanges can compute this: " + " ".join(refused.values()))

    kinds = _on_host(masks, shape.layers)
    shards = [Shards.of(name, divide(name, kinds[0].mask, group_size), kinds) for name in layouts]
    model = Model(shape, float(bandwidth), float(flops), float(latency), stride, checkpointing)
    found = [model.predict(exchange, one, kinds) for exchange in exchanges if exchange not in refused for one in shards]
    found.sort(key=lambda one: float(f"{one.seconds:.{_DIGITS - 1}e}"))  # equal ones stay in their order
    rows = next(one.rows for one in shards if one.layout == found[0].layout)
    device = next(iter(masks)).device
    return ExchangePlan(tuple(found), refused, Layout(tuple(own.to(device) for own in rows)))


def _on_host(masks: Mapping[BlockDiagonalMask, int | None], layers: int) -> list[Kind]:
    """The masks in host memory, waiting for the device once for all of them."""
    bounds = torch.stack([bound for mask in masks for bound in (mask.key_start, mask.key_stop)]).cpu()
    return [
        Kind.of(BlockDiagonalMask(start, stop, mask.num_keys, trusted=True), layers if count is None else count)
        for (mask, count), start, stop in zip(masks.items(), bounds[::2], bounds[1::2], strict=True)
    ]


def _check_masks(mask: BlockDiagonalMask | Mapping[BlockDiagonalMask, int]) -> Mapping[BlockDiagonalMask, int | None]:
    """Each mask with its layers; None means those of the configuration."""
    if isinstance(mask, BlockDiagonalMask):
        return {mask: None}
    if not isinstance(mask, Mapping) or not mask or not all(isinstance(one, BlockDiagonalMask) for one in mask):
        raise ValueError(
            "mask must be a tritonpack.BlockDiagonalMask of the whole batch, or a mapping from such masks to how many "
            f"layers have them; got {describe(mask)}."
        )
    for count in mask.values():
        if not is_int(count) or count < 1:
            raise ValueError(f"a mask must be that of one layer or more; got {count!r} layers.")
    sizes = {(one.num_queries, one.num_keys, one.device) for one in mask}
    if len(sizes) > 1:
        raise ValueError(f"all masks must be of the same batch, on the same device; got {list(mask)!r:.300}.")
    return mask


def _check_names(given: Iterable[Name], what: str, kind: Any) -> list[Name]:
    """The names, once each, in their order of old: that of ties."""
    allowed, names = get_args(kind), [given] if isinstance(given, str) else list(given)
    if not names or not set(names) <= set(allowed):
        raise ValueError(f"{what} must be some of {', '.join(map(repr, allowed))}; got {names!r}.")
    return [name for name in allowed if name in names]


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
