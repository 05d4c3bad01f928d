"""Rotary embeddings whose frequencies depend on the longest document of the whole batch (dynamic, longrope)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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


@contextmanager
def following_longest(modules: Sequence[nn.Module], whole: PackedBatch) -> Iterator[None]:
    """A context in which rotary embeddings use the largest position of the whole batch.

    It is appended to the positions that they get, and its row is dropped from the cos and sin that they return.
    """

    def append(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change `rotary(x, position_ids, ...)`."""
        given: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([given, last.expand_as(given[..., :1])], -1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def drop(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
        return tuple(x[..., :-1, :] for x in output)

    with ExitStack() as stack:
        if modules:
            last = (whole.positions() if whole.position_ids is None else whole.position_ids).max()
        for module in modules:
            for handle in (
                module.register_forward_pre_hook(append, with_kwargs=True),
                module.register_forward_hook(drop),
            ):
                stack.callback(handle.remove)
        yield
