"""Rotary embeddings whose frequencies depend on the longest document of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.configurations import follows_longest
from tritonpack.patches.packed_batch import PackedBatch


class LongestPosition:
    """Hooks on a model's rotary embeddings: they append the largest position of the batch to a rank's positions.

    Attributes:
        last: 0-dim int64, the largest position of the running batch; None between batches.
    """

    def __init__(self, model: nn.Module) -> None:
        self.last: Tensor | None = None
        self._handles = []
        for module in model.modules():
            types = getattr(module, "rope_type", None)
            if any(map(follows_longest, types.values() if isinstance(types, dict) else [types or ""])):
                self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after))

    @contextmanager
    def following(self, packed_batch: PackedBatch) -> Iterator[None]:
        """A context in which rotary embeddings use the largest position of this batch."""
        if self._handles:
            positions = packed_batch.position_ids
            self.last = (packed_batch.positions() if positions is None else positions).max()
        try:
            yield
        finally:
            self.last = None

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append the largest position to position_ids of `rotary(x, position_ids, ...)`."""
        if self.last is None:
            return None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self._append(kwargs["position_ids"])}
        return (args[0], self._append(args[1]), *args[2:]), kwargs

    def _append(self, position_ids: Tensor) -> Tensor:
        assert self.last is not None
        return torch.cat([position_ids, self.last.expand_as(position_ids[..., :1])], -1)

    def _after(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
        """Drop the row of the appended position from cos and sin, (..., rows + 1, head_dim) each."""
        return None if self.last is None else tuple(x[..., :-1, :] for x in output)
