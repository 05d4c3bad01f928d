"""`TensorLike`: an object in place of a tensor, such as a mask. It becomes a tensor when code computes with it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from typing_extensions import Self

ADDITIONS = ("add", "add_", "__add__", "__iadd__", "__radd__")


class TensorLike:
    """Looks like a tensor of `shape`. Operators, torch's functions and unknown attributes work on `to_tensor()`.

    So a mask costs nothing if the model only passes it on. Subclasses must not be dataclasses, because FSDP copies
    dataclasses among a layer's arguments in mixed precision.

    Attributes:
        arguments: names of the constructor's arguments; each is also an attribute.
    """

    arguments: tuple[str, ...]
    shape: torch.Size
    ndim: int
    dtype: torch.dtype
    device: torch.device
    __hash__ = object.__hash__

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some arguments changed. Other attributes are not copied."""
        return type(self)(**{**{name: getattr(self, name) for name in self.arguments}, **changes})

    def to_tensor(self) -> Tensor:
        raise NotImplementedError

    def to_addend(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor to be added to a tensor of this dtype."""
        return self.to_tensor()

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> TensorLike:
        return self

    def view(self, *shape: Any) -> Any:
        """Return this object if the shape stays the same; else a tensor."""
        tensor = self.to_tensor().view(*shape)
        return self if tensor.shape == self.shape and tensor.dtype == self.dtype else tensor

    reshape = view

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return this object for slices that keep everything; else a tensor."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) <= len(self.shape) and all(map(_keeps_all, parts, self.shape)):
            return self
        return self.to_tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.to_tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ADDITIONS and len(args) == 2:
            return _add(*args)
        return function(*tree_map(as_tensor, args), **tree_map(as_tensor, kwargs or {}))

    def __add__(self, other: Any) -> Any:
        return _add(self, other)

    def __radd__(self, other: Any) -> Any:
        return _add(other, self)


def as_tensor(value: Any) -> Any:
    """Convert a `TensorLike` to a tensor; return any other value unchanged."""
    return value.to_tensor() if isinstance(value, TensorLike) else value


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, TensorLike) and isinstance(right, Tensor):
        return left.to_addend(right.dtype) + right
    if isinstance(right, TensorLike) and isinstance(left, Tensor):
        return left + right.to_addend(left.dtype)
    return as_tensor(left) + as_tensor(right)


def _keeps_all(part: Any, size: int) -> bool:
    if not isinstance(part, slice) or part.step not in (None, 1):
        return False
    return part.start in (None, 0, -size) and (part.stop is None or part.stop >= size)


def _forward(name: str, *, reflected: bool = False) -> Any:
    function, step = getattr(operator, name), -1 if reflected else 1
    return lambda *values: function(*map(as_tensor, values[::step]))


for _name in ("and_", "or_", "xor", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(TensorLike, f"__{_name.rstrip('_')}__", _forward(_name))
    setattr(TensorLike, f"__r{_name.rstrip('_')}__", _forward(_name, reflected=True))
for _name in ("abs", "invert", "neg", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TensorLike, f"__{_name}__", _forward(_name))
