"""Rotary embeddings whose frequencies follow a call's longest document: they must see it on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.rope import follows_longest


class LongestPosition:
    """Hooks on the rotary embeddings of a model that add the batch's last position to those of a rank's rows.

    Attributes:
        last: 0-dim int64, the largest position of the batch that is running.
    """

    def __init__(self, model: nn.Module) -> None:
        self.last: Tensor | None = None
        self._handles = []
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            if any(map(follows_longest, kinds.values() if isinstance(kinds, dict) else [kinds or ""])):
                self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._after))

    @contextmanager
    def of(self, packed_batch: PackedBatch) -> Iterator[None]:
        """The batch is running."""
        if self._handles:
            self.last = (
                packed_batch.positions() if packed_batch.position_ids is None else packed_batch.position_ids
            ).max()
        try:
            yield
        finally:
            self.last = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """rotary(x, position_ids, ...), however it is spelled."""
        if self.last is None:
            return None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self._with_last(kwargs["position_ids"])}
        return (args[0], self._with_last(args[1]), *args[2:]), kwargs

    def _with_last(self, position_ids: Tensor) -> Tensor:
        assert self.last is not None
        return torch.cat([position_ids, self.last.expand_as(position_ids[..., :1])], -1)

    def _after(self, module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> Any:
        """cos and sin, (..., rows + 1, head_dim) each, without the last row."""
        return None if self.last is None else tuple(x[..., :-1, :] for x in output)
