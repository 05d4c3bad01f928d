"""Gradients of a head that runs apart from the model: hooks of users don't see parts, and there is no second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class Aliases:
    """Parameters in whose place torch's functions get aliases, because they have hooks on their gradients.

    `torch.autograd.grad` would run these hooks on a part of the gradient. They run later, on the sum of all parts.

    Attributes:
        inputs: for each parameter the tensor whose gradient is its part: an alias, or the parameter itself.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.inputs, self._of = [], {}
        for parameter in parameters:
            if parameter._backward_hooks:
                self._of[id(parameter)] = parameter.detach().requires_grad_(parameter.requires_grad)
            self.inputs.append(self._of.get(id(parameter), parameter))

    def in_place(self) -> AbstractContextManager[Any]:
        """Replace the parameters for the time of a `with` block, in this thread."""
        return _Replaced(self._of) if self._of else nullcontext()


class _Replaced(TorchFunctionMode):
    def __init__(self, of: dict[int, Tensor]) -> None:
        super().__init__()
        self.of = of

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda x: self.of.get(id(x), x), (args, kwargs or {}))
        return function(*args, **kwargs)


def once_differentiable(backward: Callable[..., tuple[Tensor | None, ...]]) -> Any:
    """A backward pass whose gradients can't be differentiated again.

    torch's decorator of this name lets gradients pass as constants if the gradient that comes in needs none, as that of
    a loss.
    """

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():  # without create_graph
            return found
        flag = torch.zeros((), requires_grad=True, device="cpu")
        return tuple(None if x is None else _Last.apply(flag, x) for x in found)

    return run


class _Last(torch.autograd.Function):
    """A tensor whose gradient is an error."""

    @staticmethod
    def forward(ctx: Any, flag: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(
            "can't differentiate twice: through logits that are computed when they are read, gradients have no "
            "derivatives. Patch the model without unpad and share_prefixes."
        )
