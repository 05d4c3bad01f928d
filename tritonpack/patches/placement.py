"""Where tokens lie in other rows: documents of packed rows in rows of their own, a padded batch in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.families import OF_DOCUMENTS
from tritonpack.patches.packed_batch import PackedBatch


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of packed rows, in order: row after row, in each row from its first to its last token.

    Attributes:
        tokens: (B, T), the shape of the packed rows.
        places: (documents, longest) int64, where tokens lie in the flattened rows; 0 for padding.
        inside: (documents, longest) bool, which of these places are tokens; the others are padding.
        packed: whether a row holds several documents.
    """

    tokens: torch.Size
    places: Tensor
    inside: Tensor
    packed: bool = True

    @classmethod
    def of(cls, packed_batch: PackedBatch, *, always: bool = False) -> Documents | None:
        """The documents of rows without a cache, without padding. Waits for the device.

        None if no row holds several, unless `always`.
        """
        if not packed_batch.tells_documents and not always:
            return None
        begin, length = packed_batch.lengths()
        rows = begin // packed_batch.tokens[1]
        packed = bool((rows[1:] == rows[:-1]).any())
        if not length.numel() or not (packed or always):
            return None
        steps = torch.arange(int(length.max()), device="cpu").expand(len(length), -1)
        inside = steps < length[:, None]
        places = torch.where(inside, begin[:, None] + steps, 0)
        device = packed_batch.device
        return cls(packed_batch.tokens, places.to(device), inside.to(device), packed)

    @property
    def rows(self) -> Tensor:
        """(documents,) int64, the row that each document lies in."""
        return self.places.amax(1) // self.tokens[1]

    def __len__(self) -> int:
        return self.places.shape[0]

    def cut(self, values: Tensor, fill: float = 0) -> Tensor:
        """Cut values (B, T, ...) or (1, T, ...) into (documents, longest, ...), with `fill` for padding."""
        flat = values.expand(*self.tokens, *values.shape[2:]).flatten(0, 1)
        outside = ~self.inside.view(*self.inside.shape, *[1] * (values.ndim - 2)).to(values.device)
        return flat[self.places.to(values.device)].masked_fill(outside, fill)


def lay_back(batches: Sequence[Documents], values: Sequence[Tensor]) -> Tensor:
    """Lay values (documents, longest, ...) of several batches back into rows (B, T, ...), with zeros elsewhere."""
    found = torch.cat([value[batch.inside] for batch, value in zip(batches, values, strict=True)])
    flat = found.new_zeros((batches[0].tokens.numel(), *found.shape[1:]))
    flat[torch.cat([batch.places[batch.inside] for batch in batches])] = found
    return flat.unflatten(0, batches[0].tokens)


def batches_of(packed_batch: PackedBatch) -> list[Documents]:
    """The documents of a packing in batches of similar lengths: the longest is below twice the shortest.

    They are found once for all layers. Waits for the device.
    """
    if not packed_batch.kept_batches and (every := Documents.of(packed_batch, always=True)) is not None:
        lengths = every.inside.sum(1)
        digits = lengths.log2().floor()
        for some in (digits == one for one in digits.unique()):
            places, inside = (x[some, : int(lengths[some].max())] for x in (every.places, every.inside))
            packed_batch.kept_batches.append(replace(every, places=places, inside=inside))
    return packed_batch.kept_batches


def require_one_document_a_row(packed_batch: PackedBatch, message: str, *, in_graphs: bool = False) -> None:
    """Refuse packed rows. On a device the check becomes an assertion there, so nothing waits for the device.

    In graphs of torch.compile nothing is checked, unless `in_graphs` asks for an assertion there, too.
    """
    if not packed_batch.tells_documents:
        return
    documents = (packed_batch.runs()[0] & packed_batch.not_padding()).sum(1)
    alone = (documents <= 1).all()
    if torch.compiler.is_compiling():
        if in_graphs:
            torch._assert_async(alone, message)
    elif alone.is_cpu and not bool(alone):
        raise UnsupportedModelError(f"{message} Documents in each row: {documents.tolist()[:8]}.")
    else:
        require(alone, message)


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
