"""The columns of images and videos of examples: read, checked, and joined to those of one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.packing.columns import Columns, as_tensor
from tritonpack.packing.vision.families import IMAGES, VIDEOS, Column, Family


def read_media(family: Family, example: Mapping[str, Any]) -> Columns:
    """The columns of images and videos of an example, those that hold nothing left out.

    Raises:
        ValueError: a column of another form, or one without another that belongs to it.
    """
    media = {}
    for name, column in family.columns.items():
        if name in example and (tensor := _read(example[name], name, column)).numel():
            media[name] = tensor
    for kind in (IMAGES, VIDEOS):
        present = [name for name in media if family.columns[name].kind == kind]
        absent = [
            name
            for name, column in family.columns.items()
            if column.kind == kind and not column.optional and name not in media
        ]
        if present and absent:
            raise ValueError(
                f"has {present[0]!r} but no {', '.join(map(repr, absent))}; pass all columns that the processor "
                "returns."
            )
        counts = {name: len(media[name]) for name in present if family.columns[name].axes[0] == kind}
        if len(set(counts.values())) > 1:
            raise ValueError(f"has columns of different numbers of {kind}: {counts}; pass those of one call.")
    return media


def _read(values: Any, name: str, column: Column) -> Tensor:
    """A column as a tensor with the axes of one example, or without elements."""
    if isinstance(values, (list, tuple)) and any(isinstance(one, Tensor) or hasattr(one, "dtype") for one in values):
        parts = [as_tensor(one, name, "arrays") for one in values]
        if len({part.shape for part in parts}) > 1:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(f"has {name} of shapes {shapes!r:.100}; let the processor pad them: return_tensors='pt'.")
        values = torch.stack(parts)
    tensor = as_tensor(values, name, f"an array with the axes ({', '.join(column.axes)})")
    if tensor.ndim == len(column.axes) + 1 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.ndim != len(column.axes) and tensor.numel():
        raise ValueError(
            f"has {name} of shape {tuple(tensor.shape)}; it takes ({', '.join(column.axes)}), as the processor returns "
            "it for one example. Its first axis isn't that of a batch, so don't take [0] of it or squeeze it."
        )
    return tensor


def join_media(family: Family, media: Sequence[Columns], numbers: Sequence[int | str]) -> Columns:
    """The columns of images and videos of all examples, as the model takes them for one row.

    Raises:
        ValueError: examples whose columns can't be joined; the message names two of them.
    """
    joined = {}
    for name, column in family.columns.items():
        with_kind = [i for i, own in enumerate(media) if any(family.columns[x].kind == column.kind for x in own)]
        own = [i for i in with_kind if name in media[i]]
        if not own:
            continue
        if lacking := [i for i in with_kind if i not in own]:
            raise ValueError(
                f"document {numbers[own[0]]} has {name!r} and document {numbers[lacking[0]]} hasn't; give every "
                f"example with {column.kind} the same columns."
            )
        joined[name] = _join([media[i][name] for i in own], name, column, [numbers[i] for i in own])
    return joined


def _join(values: Sequence[Tensor], name: str, column: Column, numbers: Sequence[int | str]) -> Tensor:
    fixed = [axis for axis in range(1, values[0].ndim) if axis not in column.padded]
    if column.promoted:
        dtype = reduce(torch.promote_types, [one.dtype for one in values])
        values = [one.to(dtype) for one in values]
    sizes = f" and one size of {' and '.join(column.axes[axis] for axis in fixed)}" if fixed else ""
    for number, one in zip(numbers, values, strict=True):
        if one.dtype != values[0].dtype or any(one.shape[axis] != values[0].shape[axis] for axis in fixed):
            raise ValueError(
                f"{name} is {one.dtype} of shape {tuple(one.shape)} in document {number} and {values[0].dtype} of "
                f"shape {tuple(values[0].shape)} in document {numbers[0]}; the model takes one dtype{sizes} in a call. "
                "Process all examples alike, or pack them in different rows."
            )
    most = {axis: max(one.shape[axis] for one in values) for axis in column.padded}
    filled = [_fill(one, most, column.filling) for one in values]
    row = torch.cat(filled)
    return row[None] if column.of_rows else row


def _fill(values: Tensor, most: Mapping[int, int], filling: int) -> Tensor:
    """Values with padding at the end of some axes."""
    sides = [0] * (2 * values.ndim)
    for axis, size in most.items():
        sides[2 * (values.ndim - 1 - axis) + 1] = size - values.shape[axis]
    return pad(values, sides, value=filling) if any(sides) else values
