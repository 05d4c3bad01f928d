"""Random numbers of a model in evaluation mode, made the same in every call, so that calls can be compared.

A few models draw random numbers in evaluation mode too: dropout before a decoder of sound, noise of a flow. Two calls
with the same tokens differ then, and so do a document alone and the same document in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HALF = 0.5  # noise is half a standard deviation, because noise of 0 would hide what it is scaled by


class ConstantDraws(TorchDispatchMode):
    """A mode in which each draw gives one number, wherever it lies in a batch.

    Noise is half a standard deviation above its mean, and a uniform number lies in the middle. Dropout keeps all if it
    keeps each with a probability of at least one half. A random choice takes the most probable value, and the first of
    equally probable ones.

    Attributes:
        drawn: whether anything was drawn.
    """

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        number = NUMBERS.get(func.overloadpacket.__name__)
        if number is None:
            return result
        self.drawn = True
        value = number(*args)
        return result.copy_(value) if isinstance(value, Tensor) else result.fill_(value)


def _normal(mean: Any, std: Any = 1.0, *size: Any) -> Any:
    return mean + HALF * std


def _kept(probability: Any) -> Any:
    return probability >= HALF


def _chosen(weights: Tensor, number: int, replacement: bool = False) -> Tensor:
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return order[..., :1].expand(*order.shape[:-1], number) if replacement else order[..., :number]


# The number that an operator of torch gives, as a function of its arguments.
NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), lambda *_: HALF),
    "bernoulli": lambda drawn, p=None: _kept(drawn if p is None else p),
    "bernoulli_": lambda drawn, p=HALF: _kept(p),
    "multinomial": _chosen,
    "normal": _normal,
    "normal_": lambda drawn, mean=0.0, std=1.0: _normal(mean, std),
    "uniform_": lambda drawn, low=0.0, high=1.0: low + HALF * (high - low),
}


def constant_draws_if_any(call: Callable[[], Any]) -> AbstractContextManager[Any]:
    """Return a context in which a model draws the same in every call; an empty one if `call` draws nothing."""
    with torch.no_grad(), ConstantDraws() as mode:
        call()
    return mode if mode.drawn else nullcontext()
