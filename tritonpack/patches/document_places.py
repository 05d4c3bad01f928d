"""Where the documents of packed rows lie, and how they become the rows of a padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
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

    def in_batches(self) -> list[Documents]:
        """These documents in batches of similar lengths: the longest is below twice the shortest."""
        digits = self.inside.sum(1).log2().floor()
        return [self.subset((digits == some).nonzero().flatten()) for some in digits.unique()]

    def subset(self, numbers: Tensor) -> Documents:
        """The documents of these numbers, (n,) int64, padded to the longest of them."""
        longest = int(self.inside[numbers].sum(1).max())
        return replace(self, places=self.places[numbers, :longest], inside=self.inside[numbers, :longest])

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

    def lay_back(self, values: Tensor) -> Tensor:
        """Lay values (documents, longest, ...) back into rows (B, T, ...), with zeros where no document lies."""
        return lay_back([self], [values])


def lay_back(batches: Sequence[Documents], values: Sequence[Tensor]) -> Tensor:
    """Lay values (documents, longest, ...) of several batches back into rows (B, T, ...), with zeros elsewhere."""
    found = torch.cat([value[batch.inside] for batch, value in zip(batches, values, strict=True)])
    flat = found.new_zeros((batches[0].tokens.numel(), *found.shape[1:]))
    flat[torch.cat([batch.places[batch.inside] for batch in batches])] = found
    return flat.unflatten(0, batches[0].tokens)


def batches_of(packed_batch: PackedBatch) -> list[Documents]:
    """The documents of a packing `in_batches`, found once for all layers. Waits for the device."""
    if not packed_batch.kept_batches:
        documents = Documents.of(packed_batch, always=True)
        if documents is not None:
            packed_batch.kept_batches += documents.in_batches()
    return packed_batch.kept_batches


def require_one_document_a_row(packed_batch: PackedBatch, message: str, *, in_graphs: bool = False) -> None:
    """Refuse packed rows. On a device the check becomes an assertion there, so nothing waits for the device.

    In graphs of torch.compile nothing is checked, unless `in_graphs` asks for an assertion there, too.

    Raises:
        UnsupportedModelError: with the message and the number of documents in each row.
    """
    if not packed_batch.tells_documents:
        return
    documents = (packed_batch.runs()[0] & packed_batch.not_padding()).sum(1)
    alone = (documents <= 1).all()
    if in_graphs and torch.compiler.is_compiling():
        torch._assert_async(alone, message)
        return
    try:
        require(
            alone, lambda: message + (f" Documents in each row: {documents.tolist()[:8]}." if documents.is_cpu else "")
        )
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from None
