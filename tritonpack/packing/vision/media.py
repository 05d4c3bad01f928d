"""The columns of images and videos of examples, read, checked and joined; and the positions of their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tritonpack.packing.collator import Columns, as_tensor, quote
from tritonpack.packing.vision.families import Column, Family

MediaOf = dict[str, Columns]  # of an example: the columns of its images, and of its videos
_ROPE = "get_rope_index"  # transformers' name for the method that makes positions of three axes


def read_media(family: Family, example: Mapping[str, Any]) -> MediaOf:
    """The columns of the images and of the videos of an example, without those that hold nothing, checked."""
    media: MediaOf = {}
    for kind, part in family.parts.items():
        found = {name: _read(example[name], name, part.columns[name]) for name in part.columns if name in example}
        found = {name: tensor for name, tensor in found.items() if tensor.numel()}
        if not found:
            continue
        if absent := [name for name, column in part.columns.items() if not column.optional and name not in found]:
            raise ValueError(
                f"has {next(iter(found))!r} but no {quote(absent)}; pass all columns that the processor returns."
            )
        sizes: dict[str, dict[str, int]] = {}
        for name, tensor in found.items():
            for axis, size in zip(part.columns[name].axes, tensor.shape, strict=True):
                sizes.setdefault(axis, {})[name] = size
        for axis, of_columns in sizes.items():
            if len(set(of_columns.values())) > 1:
                raise ValueError(f"has columns of different numbers of {axis}: {of_columns}; pass those of one call.")
        media[kind] = found
    return media


def _read(values: Any, name: str, column: Column) -> Tensor:
    """A column as a tensor with the axes of one example, or without elements."""
    axes = ", ".join(column.axes)
    tensor = as_tensor(values, name, f"an array with the axes ({axes}), as return_tensors='pt' makes it,")
    if tensor.ndim == len(column.axes) + 1 and len(tensor) == 1:
        tensor = tensor[0]
    wanted = [
        int(axis[0]) if axis[0].isdigit() else size for axis, size in zip(column.axes, tensor.shape, strict=False)
    ]
    if tensor.numel() and (tensor.ndim != len(column.axes) or [*tensor.shape] != wanted):
        raise ValueError(
            f"has {name} of shape {tuple(tensor.shape)}; it takes ({axes}), as the processor returns it for one "
            "example. Its first axis isn't that of a batch, so don't take [0] of it or squeeze it."
        )
    return tensor


def join_media(family: Family, media: Sequence[tuple[str, MediaOf]]) -> Columns:
    """The columns of images and videos of all examples, each after its name, as the model takes them for one row."""
    joined: Columns = {}
    for kind, part in family.parts.items():
        of_kind = [(document, own[kind]) for document, own in media if kind in own]
        for name, column in part.columns.items():
            having = [(document, own[name]) for document, own in of_kind if name in own]
            if not having:
                continue
            if len(having) < len(of_kind):
                raise ValueError(
                    f"{having[0][0]} has {name!r} and another hasn't; give all with {kind} the same columns."
                )
            values = [value for _, value in having]
            if len(column.axes) == 1:  # numbers, such as the integer 1 beside 0.5
                dtype = reduce(torch.promote_types, [one.dtype for one in values])
                values = [one.to(dtype) for one in values]
            first = values[0]
            fixed = [axis for axis in range(1, first.ndim) if axis not in column.padded]
            for (document, _), one in zip(having, values, strict=True):
                if one.dtype != first.dtype or any(one.shape[axis] != first.shape[axis] for axis in fixed):
                    size = f" and one size of {' and '.join(column.axes[axis] for axis in fixed)}" if fixed else ""
                    raise ValueError(
                        f"{name} is {one.dtype} of shape {tuple(one.shape)} in {document} and {first.dtype} of shape "
                        f"{tuple(first.shape)} in {having[0][0]}; the model takes one dtype{size} in a call. Process "
                        "all examples alike, or pack them in different rows."
                    )
            for axis in column.padded:
                most = max(one.shape[axis] for one in values)
                values = [pad(one, [0, 0] * (one.ndim - 1 - axis) + [0, most - one.shape[axis]]) for one in values]
            row = torch.cat(values)
            joined[name] = row[None] if column.of_rows else row
    return joined


class ModelPositions:
    """Positions of three axes (time, height, width) of one example, by the model's own `get_rope_index`.

    The method reads the configuration and a few settings of its module. So a second module of its class gets these,
    and no weights, no submodules, and nothing that a patch puts on the model.
    """

    def __init__(self, model: nn.Module) -> None:
        module = next((each for each in model.modules() if hasattr(type(each), _ROPE)), None)
        if module is None:
            raise ValueError(
                f"{type(model).__name__} has no {_ROPE}, by which its family makes positions; pass the whole model."
            )
        self._module = object.__new__(type(module))
        nn.Module.__init__(self._module)
        for name, value in vars(module).items():
            if not name.startswith("_") and not callable(value) and not isinstance(value, Tensor):
                object.__setattr__(self._module, name, value)
        self._names = tuple(inspect.signature(getattr(self._module, _ROPE)).parameters)

    def __call__(self, name: str, text: Columns, media: MediaOf) -> Tensor:
        """(3, n) int64 of an example's (n,) tokens and its columns of images and videos; its name is for messages."""
        given = {column: values[None] for column, values in text.items()}
        for columns in media.values():
            given |= columns
        try:
            with torch.device("cpu"):  # where the columns lie, whatever the default device is
                taken = {column: given[column] for column in self._names if column in given}
                positions: Tensor = getattr(self._module, _ROPE)(**taken)[0]
            if positions.shape != (3, *given["input_ids"].shape):
                raise ValueError(f"it returned positions of shape {tuple(positions.shape)}")
        except Exception as error:
            raise ValueError(
                f"{name} has images or videos for which {type(self._module).__name__}.{_ROPE} makes no positions "
                f"({type(error).__name__}: {error}). Pass all columns of one call of the processor."
            ) from error
        return positions[:, 0]
