"""Current: the packing of the forward pass that is running, for layers that transformers tells nothing; and their
instances' forwards, which unpatching takes away again while classes stay as they are."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tritonpack.patches.packing import Packing

OUTSIDE = (
    "{} was called outside of its model's forward pass, where nothing says where documents begin. Call the model, or "
    "unpatch it first."
)


@dataclass
class Current:
    """The packing of the forward pass that is running, for modules that transformers passes nothing to.

    Attributes:
        packing: None outside of a forward pass, and where rows are left to the model (a cache is in use).
        depth: how many patched modules are running inside each other.
        told: what the head around them was told about documents, where heads keep it to themselves.
    """

    packing: Packing | None = None
    depth: int = 0
    told: dict[str, Any] = field(default_factory=dict)

    def enter(self, packing: Packing | None) -> None:
        """A patched module begins; the outermost one says what the packing is."""
        self.depth += 1
        if self.depth == 1:
            self.packing = packing

    def leave(self) -> None:
        """A patched module is done, perhaps by an exception."""
        self.depth = max(self.depth - 1, 0)
        if self.depth == 0:
            self.packing = None


class Checkpoint:
    """Stands for a layer's checkpointing function: what is recomputed in backward finds the packing of its forward."""

    def __init__(self, own: Any, current: Current) -> None:
        self.own, self.current = own, current

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        current, packing = self.current, self.current.packing

        def run(*inputs: Any) -> Any:
            current.enter(packing)
            try:
                return function(*inputs)
            finally:
                current.leave()

        return self.own(run, *args, **kwargs)


CHECKPOINT = "_gradient_checkpointing_func"  # transformers' name for it, an attribute of every layer that has one


def hold_checkpoints(layers: list[nn.Module], current: Current) -> None:
    """Put ourselves before the checkpointing function of layers that have got one since."""
    for layer in layers:
        own = layer.__dict__.get(CHECKPOINT)
        if own is not None and not isinstance(own, Checkpoint):
            layer.__dict__[CHECKPOINT] = Checkpoint(own, current)


def release_checkpoint(layer: nn.Module) -> None:
    """Give a layer its own checkpointing function back."""
    held = layer.__dict__.get(CHECKPOINT)
    if isinstance(held, Checkpoint):
        layer.__dict__[CHECKPOINT] = held.own


class InstanceForward:
    """Stands for one module's forward; `remove()` takes it away."""

    def __init__(self, module: nn.Module, current: Current) -> None:
        self.module, self.current = module, current
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        self.own = module.__dict__.get("forward")  # somebody else's, such as accelerate's
        module.forward = self  # type: ignore[assignment]

    @property
    def inner(self) -> Any:
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.own is not None:
                self.module.__dict__["forward"] = self.own


# The arguments by which a head is told about documents.
TOLD = ("attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


class HeadForward(InstanceForward):
    """A head that keeps to itself where documents begin. PEFT calls its forward, past any hook, so that is replaced."""

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward it stands for: trainers ask which columns of a dataset a model takes."""
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        outer = self.current.told
        self.current.told = {name: arguments[name] for name in TOLD if arguments.get(name) is not None}
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.current.told = outer
