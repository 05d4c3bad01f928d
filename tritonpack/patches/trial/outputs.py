"""All outputs of a model, and each document's part of them. Some heads give more than logits or hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tritonpack.patches.call_arguments import CACHES

if TYPE_CHECKING:
    from tritonpack.patches.trial.packed_forms import Batch

# Where an output has its tokens, or that it has one value for each document.
Kind = Literal["(B, T)", "(k, B, T)", "(B * T)", "documents"]

# Ends of the names of outputs that have no value for each token or document.
ENDINGS_LEFT_OUT = ("loss", "attentions")

# Numbers smaller than this count as rounding.
LEAST = torch.finfo(torch.float32).eps

Parts = list[Tensor]  # of each document


class UnlikeError(ValueError):
    """An output of a call that has no part for each document; the message says why."""


@dataclass(frozen=True)
class Output:
    """An output of documents alone that has values for each token, or for each document.

    Attributes:
        kind: its shape.
        of_source: whether its tokens are those of an encoder, and not of the decoder.
        parts: of each document, without the dimension of rows.
    """

    kind: Kind
    of_source: bool
    parts: Parts


def outputs_alone(calls: Sequence[Any], batch: Batch) -> dict[str, Output]:
    """The outputs that packed documents can be held against.

    Left out are outputs that no document changes, such as a scale, and shapes that are neither of tokens nor of
    documents. Of tensors in tuples and lists only those of tokens count, because caches and attention weights come in
    them as well.

    Args:
        calls: what a model gave for each document in a call of its own.
        batch: the same documents, laid out.
    """
    tensors = [dict(_tensors(call)) for call in calls]
    names = [name for name in tensors[0] if all(name in one for one in tensors)]
    found = ((name, _output([one[name] for one in tensors], "." in name, batch)) for name in names)
    return {name: output for name, output in found if output is not None and not _is_constant(output.parts)}


def parts_of(name: str, expected: Output, output: Any, batch: Batch) -> Parts:
    """Each document's part of an output of a call, as large as it is of the document alone.

    Raises:
        UnlikeError: it has none.
    """
    value = dict(_tensors(output)).get(name)
    if value is None:
        raise UnlikeError(f"{name}: packed documents have none")
    side = batch.source if expected.of_source and batch.source is not None else batch
    shape, spans, rows = tuple(side.ids.shape), side.spans, len(side.spans)
    if expected.kind == "(B, T)" and value.shape[:2] == shape:
        return [value[row, span] for row, span in spans]
    if expected.kind == "(k, B, T)" and value.shape[1:3] == shape:
        return [value[:, row, span] for row, span in spans]
    if expected.kind == "(B * T)" and value.shape[:1] == (side.ids.numel(),):
        value = value.unflatten(0, shape)
        return [value[row, span] for row, span in spans]
    if value.shape[:1] == (rows,) and value.ndim == expected.parts[0].ndim + 1:
        corners = [tuple(slice(size) for size in part.shape) for part in expected.parts]
        return [value[i][corner] for i, corner in enumerate(corners)]
    raise UnlikeError(f"{name}: it has shape {tuple(value.shape)} for {rows} documents in rows of shape {shape}")


def apart(expected: Parts, got: Parts) -> float:
    """How far parts of an output are from those expected, relative to the largest value of all."""
    largest, worst = LEAST, 0.0
    for a, b in zip(expected, got, strict=True):
        if a.shape != b.shape:
            return math.inf
        finite = a.isfinite()
        if bool((finite != b.isfinite()).any()):
            return math.inf
        if finite.any():
            largest = max(largest, float(a[finite].abs().max()))
            worst = max(worst, float((a - b)[finite].abs().max()))
    return worst / largest


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in an output, with names; "." is in the names of those in tuples and lists."""
    if isinstance(output, Mapping):
        for key, value in output.items():
            if not str(key).endswith(ENDINGS_LEFT_OUT) and key not in CACHES:
                yield from _tensors(value, f"{name}[{key}]" if name else str(key))
    elif isinstance(output, (tuple, list)):
        for i, value in enumerate(output):
            yield from _tensors(value, f"{name}.{i}" if name else f"output {i}")
    elif isinstance(output, Tensor) and output.is_floating_point():
        yield name or "its output", output.detach()


def _output(values: Sequence[Tensor], in_list: bool, batch: Batch) -> Output | None:
    """An output with these values for documents alone; None for one that packed documents can't be held against."""
    if any(bool(x.isnan().any()) for x in values):
        return None
    for side in (batch, batch.source):
        kind = None if side is None else _kind(values, [span.stop - span.start for _, span in side.spans])
        if kind is not None:
            return Output(kind, side is batch.source, [_only(kind, x) for x in values])
    of_documents = not in_list and all(x.shape[:1] == (1,) for x in values)
    return Output("documents", False, [x[0] for x in values]) if of_documents else None


def _kind(values: Sequence[Tensor], lengths: Sequence[int]) -> Kind | None:
    """Where values of documents alone have tokens; None for those that have none."""
    if all(x.shape[:2] == (1, n) for x, n in zip(values, lengths, strict=True)):
        return "(B, T)"
    if all(x.shape[1:3] == (1, n) for x, n in zip(values, lengths, strict=True)):
        return "(k, B, T)"
    if all(x.shape[:1] == (n,) for x, n in zip(values, lengths, strict=True)):
        return "(B * T)"
    return None


def _only(kind: Kind, value: Tensor) -> Tensor:
    return value[:, 0] if kind == "(k, B, T)" else value if kind == "(B * T)" else value[0]


def _is_constant(parts: Parts) -> bool:
    return all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts)
