"""The bounds of a mask: their checks, the mask transposed, the mask of some rows and some keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonpack.checks import check_indices, describe, is_length

if TYPE_CHECKING:
    from tritonpack.masks.block_diagonal import BlockDiagonalMask


def check_fields(mask: BlockDiagonalMask) -> None:
    """Raise ValueError unless all fields have the types, shapes and devices that `BlockDiagonalMask` names."""
    source = mask.document_source
    rows = {"key_start": mask.key_start, "key_stop": mask.key_stop, "diagonal": mask.diagonal}
    rows["document_source"] = None if callable(source) else source
    for name, bound in rows.items():
        if bound is not None or name in ("key_start", "key_stop"):
            _check_bound(name, bound, "key_start", mask.key_start)
    if not is_length(mask.num_keys):
        raise ValueError(f"num_keys must be an integer from 0 to 2**31 - 1; got {describe(mask.num_keys)}.")
    if mask.max_documents is not None and not is_length(mask.max_documents):
        raise ValueError(f"max_documents must be an integer of at least 0, or None; got {mask.max_documents!r}.")
    start, stop = mask.query_start, mask.query_stop
    if start is None and stop is None:
        return
    for name, bound in (("query_start", start), ("query_stop", stop)):
        _check_bound(name, bound, "query_start", start)
        if bound.shape[0] != mask.num_keys or bound.device != mask.device:  # type: ignore[union-attr]
            raise ValueError(
                f"{name} must hold a bound for each of the {mask.num_keys} keys, on {mask.device}; got "
                f"{describe(bound)}."
            )


def _check_bound(name: str, bound: Tensor | None, like_name: str, like: Tensor | None) -> None:
    if not isinstance(bound, Tensor) or bound.ndim != 1 or bound.dtype != torch.int32:
        raise ValueError(f"{name} must be a one-dimensional int32 tensor; got {describe(bound)}.")
    assert like is not None
    if bound.shape != like.shape or bound.device != like.device:
        raise ValueError(
            f"{like_name} and {name} must have the same length and device; got {describe(like)} and {describe(bound)}."
        )


def check_values(mask: BlockDiagonalMask) -> None:
    """`BlockDiagonalMask.validate`; waits for the device."""
    _check_side(mask.key_start, mask.key_stop, mask.num_keys, ("row", "keys"), ascending=not mask.is_tree)
    if mask.query_start is not None and mask.query_stop is not None:
        _check_side(mask.query_start, mask.query_stop, mask.num_queries, ("key", "queries"), ascending=False)


def _check_side(start: Tensor, stop: Tensor, size: int, names: tuple[str, str], *, ascending: bool) -> None:
    start, stop = start.cpu().long(), stop.cpu().long()
    own, other = names
    faults = [
        ((start < 0) | (stop > size), f"reaches outside the {size} {other}"),
        (stop < start, "ends before it begins"),
    ]
    if ascending:
        faults += [(_falls(start) | _falls(stop), f"begins or ends before the interval of the {own} above")]
    for wrong, what in faults:
        if wrong.any():
            number = int(wrong.nonzero()[0, 0])
            verb, rule = ("sees", " and never decrease") if ascending else ("has", "")
            raise ValueError(
                f"{own} {number} of the mask {verb} {other} [{int(start[number])}, {int(stop[number])}), which {what}; "
                f"intervals must lie within the {other}{rule}. Check the offsets, ids or indices that the mask was "
                "built from."
            )


def transpose(mask: BlockDiagonalMask, document: Tensor | Callable[[], Tensor] | None) -> BlockDiagonalMask:
    """The queries that see each key, from the mask and its document or the document's source."""
    if mask.query_start is not None and mask.query_stop is not None:
        return replace(
            mask,
            key_start=mask.query_start,
            key_stop=mask.query_stop,
            num_keys=mask.num_queries,
            diagonal=None,
            document_source=None,
            query_start=mask.key_start,
            query_stop=mask.key_stop,
            trusted=True,
        )
    keys = torch.arange(mask.num_keys, device=mask.device, dtype=torch.int32)
    query_start = torch.searchsorted(mask.key_stop, keys, right=True, out_int32=True)
    query_stop = torch.searchsorted(mask.key_start, keys, right=True, out_int32=True)
    if document is not None:  # the function must not hold `mask`, which would be a reference cycle
        document = partial(_document_of_keys, document, query_start) if mask.num_queries else None
    return replace(
        mask,
        key_start=query_start,
        key_stop=query_stop,
        num_keys=mask.num_queries,
        diagonal=None,
        document_source=document,
        trusted=True,
    )


def restrict(
    mask: BlockDiagonalMask, query_rows: Tensor | None = None, key_positions: Tensor | None = None
) -> BlockDiagonalMask:
    """`BlockDiagonalMask.restrict`."""
    start, stop, num_keys = mask.key_start, mask.key_stop, mask.num_keys
    query_start, query_stop = mask.query_start, mask.query_stop
    diagonal, document, max_documents = mask.diagonal, mask.document, mask.max_documents
    if query_rows is not None:
        rows = check_indices(query_rows, "query_rows", mask.num_queries, mask.device)
        start, stop = start[rows], stop[rows]
        query_start, query_stop = (_count_below(rows, x) for x in (query_start, query_stop))
        diagonal, document = (None if x is None or mask.is_tree else x[rows] for x in (diagonal, document))
    if key_positions is not None:
        keys = check_indices(key_positions, "key_positions", num_keys, mask.device)
        start, stop = (_count_below(keys, x) for x in (start, stop))
        query_start, query_stop = (None if x is None else x[keys] for x in (query_start, query_stop))
        num_keys, diagonal = keys.shape[0], None  # without all keys, distances can't be counted
        max_documents = None  # and a document may have many runs of rows that see nothing
    return replace(
        mask,
        key_start=start,
        key_stop=stop,
        num_keys=num_keys,
        diagonal=diagonal,
        document_source=document,
        max_documents=max_documents,
        query_start=query_start,
        query_stop=query_stop,
        trusted=True,
    )


def _count_below(indices: Tensor, bound: Tensor | None) -> Tensor | None:
    """How many ascending indices lie below each bound: the bound among them."""
    return None if bound is None else torch.searchsorted(indices.to(torch.int32), bound, out_int32=True)


def _document_of_keys(source: Tensor | Callable[[], Tensor], query_start: Tensor) -> Tensor:
    """The document of each key: the document of the first query that sees it."""
    document = source() if callable(source) else source
    return document[query_start.clamp(max=document.shape[0] - 1)]


def _falls(values: Tensor) -> Tensor:
    falls = torch.zeros_like(values, dtype=torch.bool)
    falls[1:] = values[1:] < values[:-1]
    return falls
