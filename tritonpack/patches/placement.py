"""Where the tokens of a padded batch lie in the one row that the model runs in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tritonpack.patches.families import OF_DOCUMENTS


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the tokens of a batch (B, T) lie in one row (1, N), in which a token may stand for several.

    Attributes:
        tokens: (B, T).
        source: (N,) int64, where each token of the row comes from in the flattened batch.
        real: (M,) int64, the places in the flattened batch of the tokens that the row holds.
        copied: (M,) int64, where each of these lies in the row; None if no token stands for several.
    """

    tokens: torch.Size
    source: Tensor
    real: Tensor
    copied: Tensor | None = None

    def take(self, values: Tensor) -> Tensor:
        """Values (B, T, ...) or (1, T, ...) of the tokens in the row: (1, N, ...). Of n kinds (n, B, T): (n, 1, N)."""
        if values.shape[:2] not in (self.tokens, (1, self.tokens[1])):
            return torch.stack([self.take(one) for one in values])
        values = values.expand(*self.tokens, *values.shape[2:])
        return values.flatten(0, 1)[self.source.to(values.device)][None]

    def lay_back(self, values: Tensor) -> Tensor:
        """Values (1, N, ...) of the row in the batch: (B, T, ...), zeros elsewhere. The gradients of copies add up."""
        flat = values[0]
        if self.copied is not None:
            # Among torch's functions that copy rows, the backward pass of `embedding` adds them up in a fixed order.
            table = flat.flatten(1) if flat.ndim > 1 else flat[:, None]
            floating = table.is_floating_point()
            rows = embedding(self.copied, table) if floating else table.index_select(0, self.copied)
            flat = rows.view(-1, *flat.shape[1:])
        out = flat.new_zeros((self.tokens.numel(), *flat.shape[1:]))
        return out.index_copy(0, self.real.to(flat.device), flat).unflatten(0, self.tokens)

    def lay_back_all(self, output: Any, name: str = "") -> Any:
        """The outputs of the model, with each value of the row's tokens laid back."""
        if isinstance(output, Mapping):
            for key, value in list(output.items()):
                output[key] = self.lay_back_all(value, key)  # type: ignore[index]
            return output
        if isinstance(output, (tuple, list)):
            return type(output)(self.lay_back_all(value, name) for value in output)
        if not isinstance(output, Tensor) or (OF_DOCUMENTS.fullmatch(name) and output.ndim < 3):
            return output
        count = self.source.shape[0]
        if output.shape[:2] == (1, count):
            return self.lay_back(output)
        if name == "hidden_states" and output.ndim == 4 and output.shape[1:3] == (1, count):  # of several streams
            return torch.stack([self.lay_back(stream) for stream in output])
        if "router" in name and output.ndim == 2 and output.shape[0] == count:
            return self.lay_back(output[None]).flatten(0, 1)
        return output


@dataclass(frozen=True, eq=False)
class Row:
    """The row of a batch (B, T), which a `PackedBatch` of one row carries.

    Attributes:
        placement: of the batch in the row.
        shared: of the row in a shorter one, in which documents share the tokens that they begin with; None without.
        ends: (1, N), the ends of subtrees in that one.
        logits: of the batch's last tokens, (B, K), in the logits of a causal head; None if the head gets the batch.
    """

    placement: Placement
    shared: Placement | None = None
    ends: Tensor | None = None
    logits: Placement | None = None
