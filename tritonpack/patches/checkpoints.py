"""Activation checkpointing: a recomputation in backward gets the packing of its forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import Part

# The attributes that hold a module's checkpointing function: of transformers' layers, and of torch's CheckpointWrapper,
# which FSDP and accelerate put around layers.
ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
HOLDERS = {"gradient_checkpointing", "checkpoint_fn"}  # attributes of modules that have, or may get, such a function


class Checkpoint:
    """A module's checkpointing function, which sets the packing of the forward pass again in the recomputation.

    The recomputation may run in another thread, and after other batches.
    """

    def __init__(self, own: Any, context: PackingContext) -> None:
        self.own, self.context = own, context

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        context, call = self.context, self.context.current

        def run(*args: Any, **kwargs: Any) -> Any:
            context.require_in_force()
            before = context.enter(call)
            try:
                return function(*args, **kwargs)
            finally:
                context.enter(before)

        return self.own(run, *args, **kwargs)


class Checkpoints(Part):
    """The checkpointing functions inside a patched module.

    Wrappers may be put around layers after the model was patched, so every call looks for these functions again.
    """

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        super().__init__(module)
        self.context = context
        self.holders = self._find()

    def hold(self) -> None:
        """Replace all checkpointing functions that the module has now."""
        if not torch.compiler.is_compiling():
            self.holders = self._find()
        for holder in self.holders:
            for attribute in ATTRIBUTES:
                own = holder.__dict__.get(attribute)
                if own is not None and not isinstance(own, Checkpoint):
                    holder.__dict__[attribute] = Checkpoint(own, self.context)

    def _find(self) -> list[nn.Module]:
        modules = self.module.modules()
        return [m for m in modules if hasattr(type(m), "gradient_checkpointing") or not HOLDERS.isdisjoint(m.__dict__)]


def release_checkpoint(module: nn.Module) -> None:
    """Give a module its own checkpointing function back."""
    for attribute in ATTRIBUTES:
        held = module.__dict__.get(attribute)
        if isinstance(held, Checkpoint):
            module.__dict__[attribute] = held.own
