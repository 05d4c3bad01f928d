"""Poolers: one vector for each document of a packed row, where a model has one for each row."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.unpacking.documents import Documents


class DocumentPooler(InstanceForward):
    """The pooler of a text model, which makes one vector of the first token of each row: of each document instead.

    Rows that hold one document each, padded on any side, are pooled as the model does. Waits for the device.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        states, packed_batch = arguments[self.names[0]], self.context.state.packed_batch
        if packed_batch is not None and isinstance(states, Tensor) and states.shape[:2] == packed_batch.tokens:
            documents = Documents.of(packed_batch)
            if documents is not None:
                arguments[self.names[0]] = documents.cut(states)
        return self.inner(**arguments)


class PooledModel(InstanceForward):
    """A model that takes the first token of each row itself, and gives its pooler that."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output, packed_batch = self.inner(*args, **kwargs), self.context.state.packed_batch
        if isinstance(output, dict) and output.get("pooler_output") is not None and packed_batch is not None:
            documents = Documents.of(packed_batch)
            if documents is not None:
                first = documents.cut(output["last_hidden_state"])[:, 0]
                activation = getattr(self.module, ACTIVATIONS[type(self.module).__name__])
                output["pooler_output"] = activation(self.module.pooler(first))
        return output


# Models that take the first token of each row themselves, and what they put its pooler's result through.
ACTIVATIONS = {"AlbertModel": "pooler_activation", "BigBirdModel": "activation"}


def pooler_forward(module: nn.Module, context: PackingContext) -> InstanceForward | None:
    """What pools each document of a model that takes tokens; None for a model without a pooler."""
    if type(module).__name__ in ACTIVATIONS:
        return PooledModel(module, context)
    pooler = pooler_of(module)
    return None if pooler is None else DocumentPooler(pooler, context)


def pooler_of(module: nn.Module) -> nn.Module | None:
    """The pooler of a model that takes tokens. By transformers' convention it takes the hidden states (B, T, n) and
    reads the first of each row."""
    pooler = getattr(module, "pooler", None)
    return pooler if isinstance(pooler, nn.Module) and type(pooler).__name__.endswith("Pooler") else None
