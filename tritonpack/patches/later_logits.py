"""An output whose logits are computed when they are read: its head ran on a part of the tokens.

The head runs once more, on the states of all tokens. Reading attaches the logits to the graph of the call, so their
gradients are those of logits that the call itself would have made.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.tensor_like import TensorLike, as_tensor

STATES = "last_hidden_state"
# A module's hooks and compiled call, emptied, so that a call runs its forward alone.
WAY_IN: dict[str, Any] = {
    "_forward_hooks": {}, "_forward_pre_hooks": {}, "_backward_hooks": {}, "_backward_pre_hooks": {},
    "_compiled_call_impl": None,
}  # fmt: skip


class Reading(TensorLike):
    """The logits (B, K, vocabulary) of a call, which `to_tensor` computes. An output holds it until they are read.

    Attributes:
        targets: the HeadTargets of the call.
        path: the name of the base model in the head.
        call: the arguments of the head's forward, without labels.
        data: the logits, after they were read.
    """

    def __init__(self, targets: Any, logits: Tensor, head: nn.Module, path: str, call: Mapping[str, Any]) -> None:
        self.shape = torch.Size((targets.wanted.shape[0], targets.keep, *logits.shape[2:]))
        self.dtype, self.device = logits.dtype, logits.device
        self.targets, self.head, self.path, self.call = targets, head, path, call
        self.parameters = list(own_parameters(head, getattr(head, path)))
        self.fingerprints = [_fingerprint(parameter) for parameter in self.parameters]
        kind = self.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.data: Tensor | None = None

    def float(self) -> Reading:
        """In float32, also computed when it is read: accelerate asks for it in mixed precision, whoever reads it."""
        other = copy.copy(self)
        other.dtype, other.data = torch.float32, None
        return other

    def to_tensor(self) -> Tensor:
        if self.data is None:
            self._require_same_head()
            targets, (kind, dtype, enabled) = self.targets, self.autocast
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                states = targets.states
                states = states if targets.placement is None else targets.placement.lay_back(states)
                self.data = _run_head(self.head, self.path, targets.output, states, self.call).to(self.dtype)
        return self.data

    def _require_same_head(self) -> None:
        now = list(own_parameters(self.head, getattr(self.head, self.path)))
        same = len(now) == len(self.parameters) and all(map(operator.is_, now, self.parameters))
        if not same or any(bool(_fingerprint(x) != before) for x, before in zip(now, self.fingerprints, strict=True)):
            raise ValueError(
                "logits of a call with labels are computed when they are read, and the weights of the model's head "
                "have changed since the call. Read them before the optimizer's step."
            )


class _LogitsWhenRead:
    """Methods added to the class of an output. `items()` and `values()` compute no logits, because accelerate and DDP
    go through them in each call."""

    @property
    def logits(self) -> Tensor:
        return as_tensor(self.__dict__["logits"])

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__["logits"] = value

    def __getitem__(self, key: Any) -> Any:
        key = list(self.keys())[key] if isinstance(key, int) else key  # type: ignore[attr-defined]
        return as_tensor(super().__getitem__(key))  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        return as_tensor(super().get(key, default))  # type: ignore[misc]

    def __reduce__(self) -> Any:
        plain: Any = type(self).__mro__[2]  # a copy, or a pickle, is of an output with its logits
        return plain(**{name: self[name] for name in self.keys()}).__reduce__()  # type: ignore[attr-defined]


@cache
def _class_of(kind: Any) -> Any:
    return type(kind)(kind.__name__, (_LogitsWhenRead, kind), {"__module__": kind.__module__})


def with_logits(output: Any, reading: Reading) -> Any:
    """An output with these logits in place of its own."""
    kind: Any = type(output)
    return _class_of(kind)(**{**output, "logits": reading})


def own_parameters(head: nn.Module, base: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model's head, around its base model, each once; tied weights are of both."""
    found = (x for _, module in head.named_modules(memo={base}) for x in module.parameters(recurse=False))
    return iter({id(x): x for x in found}.values())


def _run_head(head: nn.Module, path: str, output: Any, states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The logits that a head's own forward computes of states, with a stand-in that gives them as the base model."""
    output = type(output)(**{**output, STATES: states})
    base = _twin(getattr(head, path), forward=lambda *_, **__: output, **WAY_IN)
    head = _twin(head, _modules={**head._modules, path: base})
    return type(head).forward(head, **arguments)["logits"]


def _twin(module: nn.Module, **changes: Any) -> nn.Module:
    """A module with the parts and the class of another, some attributes changed. The class's `__init__` doesn't run."""
    twin = object.__new__(type(module))
    twin.__dict__ = {**module.__dict__, **changes}
    return twin


def _fingerprint(parameter: Tensor) -> Tensor:
    """The sum of the bits of a parameter, as integers. A change in place needn't change its `_version`."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return parameter.detach().view(integers).sum()
