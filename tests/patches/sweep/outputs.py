"""All outputs of a model, cut into each document's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tests.patches.comparison import Parts, apart
from tritonpack.patches.measuring import Batch, tensors_in

# The shape of an output: (B, T, ...), (k, B, T, ...), (B * T, ...) or (documents, ...).
Kind = Literal["token", "layered", "flat", "document"]


class UnlikeError(ValueError):
    """An output of packed documents has no part for each document; the message says why."""


@dataclass(frozen=True)
class Output:
    """An output that has values for each token or for each document.

    Attributes:
        kind: its shape.
        of_source: whether its tokens are the encoder's, where the batch is the decoder's.
        parts: the values of each document alone, without the dimension of rows.
        more: how many values follow those of a document's tokens, such as an image's.
    """

    kind: Kind
    of_source: bool
    parts: Parts
    more: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether all documents have the same values, as a scale does."""
        return all(part.shape == self.parts[0].shape and torch.equal(part, self.parts[0]) for part in self.parts)

    def difference(self, got: Parts) -> float:
        """Return how far parts are from these; packed rows have no values beside those of tokens."""
        return apart([a[: len(b)] if self.more else a for a, b in zip(self.parts, got, strict=True)], got)


def outputs_alone(calls: Sequence[Any], batch: Batch) -> dict[str, Output]:
    """Return all outputs of documents alone that have values for tokens or for documents, by name.

    `calls` are the outputs of the model for each document in a call of its own; `batch` lays out these documents.
    Tensors in tuples and lists count only if they have values for tokens, because caches and attention weights come in
    tuples as well.
    """
    tensors = [dict(tensors_in(call)) for call in calls]
    names = [name for name in tensors[0] if all(name in one for one in tensors)]
    found = {name: _output([one[name] for one in tensors], "." in name, batch) for name in names}
    return {name: output for name, output in found.items() if output is not None}


def parts_of(name: str, expected: Output, value: Tensor | None, batch: Batch, *, strict: bool = True) -> list[Tensor]:
    """Cut an output of packed documents into each document's part, as large as the expected one of the document alone.

    `strict` requires all values of each document, and zeros after them where sizes differ between documents.

    Raises:
        UnlikeError: it has no such parts.
    """
    if value is None:
        raise UnlikeError(f"{name} is missing for packed documents")
    side = batch.source if expected.of_source and batch.source is not None else batch
    (rows, width), spans, shape = side.ids.shape, side.spans, tuple(value.shape)
    if expected.kind == "token" and shape[:2] == (rows, width + expected.more):
        return [value[row, span] for row, span in spans]
    if expected.kind == "layered" and shape[1:3] == (rows, width):
        return [value[:, row, span] for row, span in spans]
    if expected.kind == "flat" and shape[:1] == (rows * width,):
        value = value.unflatten(0, (rows, width))
        return [value[row, span] for row, span in spans]
    by_document = (expected.kind == "document" or expected.more) and value.ndim == expected.parts[0].ndim + 1
    if not by_document or shape[:1] != (len(spans),):
        raise UnlikeError(f"{name} has shape {shape} for {len(spans)} documents in {rows} x {width} tokens")
    corners = [tuple(slice(size) for size in part.shape) for part in expected.parts]
    if strict and any(m < n for part in expected.parts for m, n in zip(shape[1:], part.shape, strict=True)):
        raise UnlikeError(f"{name} has shape {shape}, which is less than documents alone have")
    if strict and len({part.shape for part in expected.parts}) > 1:
        rest = value.detach().clone()
        for i, corner in enumerate(corners):
            rest[i][corner] = 0
        if bool(rest.any()):
            raise UnlikeError(f"{name} has values other than zeros after those of a document")
    return [value[i][corner] for i, corner in enumerate(corners)]


def _output(values: Sequence[Tensor], in_list: bool, batch: Batch) -> Output | None:
    for side in (batch, batch.source):
        if side is None:
            continue
        lengths = [span.stop - span.start for _, span in side.spans]
        of_source = side is batch.source
        if all(x.ndim >= 2 and x.shape[0] == 1 for x in values):
            more = {x.shape[1] - n for x, n in zip(values, lengths, strict=True)}
            if more == {0} or (len(more) == 1 and min(more) > 0 and len(set(lengths)) > 1):
                return Output("token", of_source, [x[0] for x in values], more.pop())
        if all(x.shape[1:3] == (1, n) for x, n in zip(values, lengths, strict=True)):
            return Output("layered", of_source, [x[:, 0] for x in values])
        if all(x.shape[:1] == (n,) for x, n in zip(values, lengths, strict=True)):
            return Output("flat", of_source, list(values))
    if in_list or any(x.shape[:1] != (1,) or x.ndim != values[0].ndim for x in values):
        return None
    return Output("document", False, [x[0] for x in values])
