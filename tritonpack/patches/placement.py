"""Places of tokens in other rows: the documents of packed rows in their own rows, and a padded batch in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.families import DOCUMENT_OUTPUTS
from tritonpack.patches.packed_batch import PackedBatch


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of packed rows, in order: row after row, in each row from its first to its last token.

    Attributes:
        tokens: (B, T), the shape of the packed rows.
        places: (documents, longest) int64, the places of tokens in the flattened rows; 0 for padding.
        inside: (documents, longest) bool, True for tokens and False for padding.
        packed: whether a row holds several documents.
    """

    tokens: torch.Size
    places: Tensor
    inside: Tensor
    packed: bool = True

    @classmethod
    def of(cls, packed_batch: PackedBatch, *, always: bool = False) -> Documents | None:
        """Find the documents of rows that continue no cache. Waits for the device.

        None if no row holds several documents, unless `always`.
        """
        if not packed_batch.marks_documents and not always:
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
        """(documents,) int64, the row of each document."""
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
    joined = torch.cat([value[batch.inside] for batch, value in zip(batches, values, strict=True)])
    flat = joined.new_zeros((batches[0].tokens.numel(), *joined.shape[1:]))
    flat[torch.cat([batch.places[batch.inside] for batch in batches])] = joined
    return flat.unflatten(0, batches[0].tokens)


def batches_of(packed_batch: PackedBatch) -> list[Documents]:
    """Put the documents into batches of similar lengths: the longest is below twice the shortest.

    This is done once for all layers. Waits for the device.
    """
    if not packed_batch.document_batches and (every := Documents.of(packed_batch, always=True)) is not None:
        lengths = every.inside.sum(1)
        digits = lengths.log2().floor()
        for chosen in (digits == digit for digit in digits.unique()):
            places, inside = (x[chosen, : int(lengths[chosen].max())] for x in (every.places, every.inside))
            packed_batch.document_batches.append(replace(every, places=places, inside=inside))
    return packed_batch.document_batches


def require_one_document_a_row(packed_batch: PackedBatch, message: str, *, in_graphs: bool = False) -> None:
    """Refuse packed rows. On an accelerator the check is an assertion there, so the host doesn't wait.

    Graphs of torch.compile get an assertion only with `in_graphs`.
    """
    if not packed_batch.marks_documents:
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
    """The places of a batch's tokens (B, T) in one row (1, N). A token of the row may stand for several of the batch.

    Attributes:
        tokens: (B, T).
        source: (N,) int64, the place of each token of the row in the flattened batch.
        real: (M,) int64, the places in the flattened batch of all tokens that are in the row.
        copied: (M,) int64, the place of each of these in the row; None if no token stands for several.
    """

    tokens: torch.Size
    source: Tensor
    real: Tensor
    copied: Tensor | None = None

    def take(self, values: Tensor) -> Tensor:
        """Take the row's values (1, N, ...) from (B, T, ...) or (1, T, ...); from n kinds (n, B, T) take (n, 1, N)."""
        if values.shape[:2] not in (self.tokens, (1, self.tokens[1])):
            return torch.stack([self.take(kind) for kind in values])
        values = values.expand(*self.tokens, *values.shape[2:])
        return values.flatten(0, 1)[self.source.to(values.device)][None]

    def lay_back(self, values: Tensor) -> Tensor:
        """Lay values (1, N, ...) of the row back: (B, T, ...), zeros elsewhere. The gradients of copies are summed."""
        flat = values[0]
        if self.copied is not None:
            # `embedding` copies rows, and its backward sums their gradients in a fixed order, unlike index_select.
            table = flat.flatten(1) if flat.ndim > 1 else flat[:, None]
            floating = table.is_floating_point()
            rows = embedding(self.copied, table) if floating else table.index_select(0, self.copied)
            flat = rows.view(-1, *flat.shape[1:])
        out = flat.new_zeros((self.tokens.numel(), *flat.shape[1:]))
        return out.index_copy(0, self.real.to(flat.device), flat).unflatten(0, self.tokens)

    def lay_back_all(self, output: Any, name: str = "") -> Any:
        """Lay back each value of the row's tokens in the outputs of a model."""
        if isinstance(output, Mapping):
            for key, value in list(output.items()):
                output[key] = self.lay_back_all(value, key)  # type: ignore[index]
            return output
        if isinstance(output, (tuple, list)):
            return type(output)(self.lay_back_all(value, name) for value in output)
        if not isinstance(output, Tensor) or (DOCUMENT_OUTPUTS.fullmatch(name) and output.ndim < 3):
            return output
        count = self.source.shape[0]
        if output.shape[:2] == (1, count):
            return self.lay_back(output)
        if name == "hidden_states" and output.ndim == 4 and output.shape[1:3] == (1, count):  # several streams
            return torch.stack([self.lay_back(stream) for stream in output])
        if "router" in name and output.ndim == 2 and output.shape[0] == count:
            return self.lay_back(output[None]).flatten(0, 1)
        return output


@dataclass(frozen=True, eq=False)
class Row:
    """The placements of a batch (B, T) that became one row; an attribute of the row's `PackedBatch`.

    Attributes:
        placement: the batch in the row.
        shared: the row in a shorter row, where documents share the tokens that they begin with; None if they don't.
        ends: (1, N), the ends of subtrees in the shorter row.
        logits: the batch's last K tokens, (B, K), in the logits of a causal head; None if the head gets the batch.
    """

    placement: Placement
    shared: Placement | None = None
    ends: Tensor | None = None
    logits: Placement | None = None
