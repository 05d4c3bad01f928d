"""Rotary embeddings whose frequencies depend on the longest document of the whole batch (dynamic, longrope)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.parallel.replaced import replaced
from tritonpack.patches.configurations import follows_longest
from tritonpack.patches.packed_batch import PackedBatch


def rotary_of_longest(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model that follow the longest document."""
    kinds = ((module, getattr(module, "rope_type", None) or "") for module in model.modules())
    return [
        module
        for module, kind in kinds
        if any(map(follows_longest, kind.values() if isinstance(kind, dict) else [kind]))
    ]


def follow_longest(modules: Sequence[nn.Module], whole: PackedBatch, stack: ExitStack) -> None:
    """Until the stack ends, rotary embeddings use the largest position of the whole batch."""
    last = (whole.positions() if whole.position_ids is None else whole.position_ids).max()
    for module in modules:
        replaced(stack, module, "forward", _follow(module.forward, last))


def _follow(own: Callable[..., tuple[Tensor, Tensor]], last: Tensor) -> Callable[..., Any]:
    """A forward that appends a position, and drops its row from the cos and sin that `own` returns."""

    def forward(x: Tensor, position_ids: Tensor, *others: Any, **named: Any) -> tuple[Tensor, ...]:
        longer = torch.cat([position_ids, last.expand_as(position_ids[..., :1])], -1)
        return tuple(one[..., :-1, :] for one in own(x, longer, *others, **named))

    return forward
