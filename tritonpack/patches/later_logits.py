"""The logits of a causal head that are computed when they are read."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritonpack.patches.head_alone import own_parameters, run_head
from tritonpack.patches.head_gradients import Aliases, once_differentiable

# Methods of a tensor that read its memory, not by an operator.
IN_MEMORY = {
    "__array__", "__deepcopy__", "__dlpack__", "__dlpack_device__", "_typed_storage", "data_ptr", "is_shared", "numpy",
    "share_memory_", "storage", "tolist", "untyped_storage",
}  # fmt: skip


class Reading:
    """How the logits of a call are computed when they are read: the head runs once more, on the states of all tokens.

    Attributes:
        targets: the HeadTargets of the call.
        states: (1, N, ...) or (B, T, ...), of all tokens that the model ran on.
        dtype: of the logits.
        data: the logits, after they were read.
    """

    def __init__(self, targets: Any, logits: Tensor, head: nn.Module, path: str, arguments: Mapping[str, Any]) -> None:
        self.shape = torch.Size((*targets.kept, *logits.shape[2:]))
        self.dtype, self.device = logits.dtype, logits.device
        self.targets, self.head, self.path, self.call = targets, head, path, arguments
        self.parameters = list(own_parameters(head, getattr(head, path)))
        self.fingerprints = [_fingerprint(parameter) for parameter in self.parameters]
        kind = self.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self.data: Tensor | None = None

    @property
    def states(self) -> Tensor:
        return self.targets.states

    def logits(self) -> LaterLogits:
        return _Read.apply(self, self.states, *self.parameters)

    def cast(self, dtype: torch.dtype) -> Reading:
        """The same logits in another dtype, read by themselves."""
        other = copy.copy(self)
        other.dtype, other.data = dtype, None
        return other

    def read(self) -> Tensor:
        if self.data is None:
            with torch.no_grad():
                self.data = self.run(self.states).detach()
        return self.data

    def run(self, states: Tensor) -> Tensor:
        """Run the head's own forward on a stand-in that gives the states in place of the base model."""
        self._require_same_head()
        placement = self.targets.placement
        states = states if placement is None else placement.lay_back(states)
        kind, dtype, enabled = self.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return run_head(self.head, self.path, self.targets.output, states, self.call).to(self.dtype)

    def _require_same_head(self) -> None:
        now = list(own_parameters(self.head, getattr(self.head, self.path)))
        same = len(now) == len(self.parameters) and all(map(operator.is_, now, self.parameters))
        if not same or any(bool(_fingerprint(x) != before) for x, before in zip(now, self.fingerprints, strict=True)):
            raise ValueError(
                "logits of a call with labels are computed when they are read, and the weights of the model's head "
                "have changed since the call. Read them before the optimizer's step."
            )


class LaterLogits(Tensor):
    """The logits (B, K, vocabulary) of a call whose head ran on a part of the tokens: computed when they are read.

    It is a tensor without memory of its own, with a node in the graph of gradients. Each operator on it gets the
    logits themselves.
    """

    reading: Reading

    @staticmethod
    def __new__(cls, reading: Reading) -> LaterLogits:
        made = Tensor._make_wrapper_subclass(cls, reading.shape, dtype=reading.dtype, device=reading.device)
        made.reading = reading
        return made

    def float(self) -> Tensor:
        """In float32, also computed when it is read: accelerate asks for it in mixed precision, whoever reads it."""
        if self.dtype == torch.float32:
            return self
        with torch.set_grad_enabled(self.requires_grad and torch.is_grad_enabled()):
            return self.reading.cast(torch.float32).logits()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(function, "__name__", "") in IN_MEMORY and isinstance(args[0], LaterLogits):
                args = (args[0].plain(), *args[1:])
            return function(*args, **(kwargs or {}))

    def plain(self) -> Tensor:
        """The logits as a plain tensor, which requires a gradient if these do."""
        return self.view(self.shape) if self.requires_grad else self.reading.read()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        out = function(*tree_map(_read, args), **tree_map(_read, kwargs or {}))
        return args[0] if function._schema.is_mutable and isinstance(args[0], LaterLogits) else out

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.detach())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # a pickle is that of the logits


def _read(value: Any) -> Any:
    return value.reading.read() if isinstance(value, LaterLogits) else value


class _Read(torch.autograd.Function):
    """The node of logits that are read later, between them and the states and the weights of the head."""

    @staticmethod
    def forward(ctx: Any, reading: Reading, states: Tensor, *parameters: Tensor) -> LaterLogits:
        ctx.reading = reading
        ctx.save_for_backward(states, *parameters)
        return LaterLogits(reading)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        states, *parameters = ctx.saved_tensors
        aliases = Aliases(parameters)
        with torch.enable_grad(), aliases.in_place():
            states = states.detach().requires_grad_(ctx.needs_input_grad[1])
            logits = ctx.reading.run(states)
        inputs = (states, *aliases.inputs)
        wanted = [x if needed else None for x, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True)]
        found = torch.autograd.grad(logits, [x for x in wanted if x is not None], gradient, allow_unused=True)
        gradients = iter(found)
        return None, *(None if x is None else next(gradients) for x in wanted)


def _fingerprint(parameter: Tensor) -> Tensor:
    """The sum of the bits of a parameter, as integers. A change in place needn't change its `_version`."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return parameter.detach().view(integers).sum()
