"""Poolers: one vector for each document of a packed row, where a model has one for each row."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tritonpack.patches.current import InstanceForward
from tritonpack.patches.documents import Documents


class DocumentPooler(InstanceForward):
    """The pooler of a text model, which makes one vector of the first token of each row: of each document instead.

    Rows that hold one document each, padded on any side, are pooled as the model does. Waits for the device.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        states, packing = arguments[self.names[0]], self.current.state.packing
        if packing is not None and isinstance(states, Tensor) and states.shape[:2] == packing.tokens:
            documents = Documents.of(packing)
            if documents is not None:
                arguments[self.names[0]] = documents.cut(states)
        return self.inner(**arguments)


def pooler_of(module: nn.Module) -> nn.Module | None:
    """The pooler of a model that takes tokens. By transformers' convention it takes the hidden states (B, T, n) and
    reads the first of each row."""
    pooler = getattr(module, "pooler", None)
    return pooler if isinstance(pooler, nn.Module) and type(pooler).__name__.endswith("Pooler") else None
