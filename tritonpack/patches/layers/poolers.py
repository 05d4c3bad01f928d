"""Poolers: one vector for each document instead of one for each row."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tritonpack.patches.document_places import Documents
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward


class DocumentPooler(InstanceForward):
    """The pooler of a text model: makes a vector of the first token of each document instead of each row.

    Rows that hold one document each, padded on any side, are pooled as in the model. Waits for the device.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        states, packed_batch = arguments[self.names[0]], self.context.current.packed_batch
        if packed_batch is not None and isinstance(states, Tensor) and states.shape[:2] == packed_batch.tokens:
            documents = Documents.of(packed_batch)
            if documents is not None:
                arguments[self.names[0]] = documents.cut(states)
        return self.inner(**arguments)


class PooledModel(InstanceForward):
    """A model that passes only the first token of each row to its pooler: passes the first token of each document."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output, packed_batch = self.inner(*args, **kwargs), self.context.current.packed_batch
        if isinstance(output, dict) and output.get("pooler_output") is not None and packed_batch is not None:
            documents = Documents.of(packed_batch)
            if documents is not None:
                first = documents.cut(output["last_hidden_state"])[:, 0]
                activation = getattr(self.module, ACTIVATIONS[type(self.module).__name__])
                output["pooler_output"] = activation(self.module.pooler(first))
        return output


# Models that pass only the first token of each row to their pooler, and the activation of its result.
ACTIVATIONS = {"AlbertModel": "pooler_activation", "BigBirdModel": "activation"}


def pooler_forward(module: nn.Module, context: PackingContext) -> InstanceForward | None:
    """The forward that pools each document of a patched module; None for a module without a pooler."""
    if type(module).__name__ in ACTIVATIONS:
        return PooledModel(module, context)
    pooler = getattr(module, "pooler", None)
    # By transformers' convention it takes the hidden states (B, T, n) and reads the first of each row.
    if isinstance(pooler, nn.Module) and type(pooler).__name__.endswith("Pooler"):
        return DocumentPooler(pooler, context)
    return None
