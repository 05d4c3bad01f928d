"""Activation checkpointing: a recomputation in backward gets the packing of its forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import ModuleRef

# The attributes that hold a module's checkpointing function: of transformers' layers, and of torch's CheckpointWrapper,
# which FSDP and accelerate put around layers.
ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


class Checkpoint:
    """A module's checkpointing function, which sets the packing of the forward pass again in the recomputation.

    The recomputation may run in another thread, and after other batches.
    """

    def __init__(self, own: Any, context: PackingContext) -> None:
        self.own, self.context = own, context

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        context, state = self.context, self.context.state
        values = {"running": state.running, "packed_batch": state.packed_batch, "told": state.told}

        def run(*args: Any, **kwargs: Any) -> Any:
            with context.holding(**values):
                return function(*args, **kwargs)

        return self.own(run, *args, **kwargs)


class Checkpoints:
    """The checkpointing functions inside a patched module.

    Wrappers may be put around layers after the model was patched. So every call compares the modules on the way to the
    layers that need the packing with those of the last call, and looks for wrappers again if one differs.
    """

    def __init__(self, module: nn.Module, context: PackingContext, layers: Iterable[nn.Module]) -> None:
        self._module, self.context = ModuleRef(module), context
        self.layers = [layer for layer in layers if layer is not module]
        self._look()

    def hold(self) -> None:
        """Replace all checkpointing functions that the module has now."""
        if not torch.compiler.is_compiling() and any(
            parent.module._modules.get(name) is not child for parent, name, child in self.links
        ):
            self._look()
        for holder in self.holders:
            for attribute in ATTRIBUTES:
                own = holder.__dict__.get(attribute)
                if own is not None and not isinstance(own, Checkpoint):
                    holder.__dict__[attribute] = Checkpoint(own, self.context)

    def _look(self) -> None:
        layers = set(map(id, self.layers))
        modules = list(self._module.module.modules())
        self.holders = [m for m in modules if hasattr(m, "gradient_checkpointing") or "checkpoint_fn" in m.__dict__]
        self.links: list[tuple[ModuleRef, str, nn.Module]] = [
            (ModuleRef(parent), name, child)
            for parent in modules
            for name, child in parent._modules.items()
            if child is not None and any(id(inner) in layers for inner in child.modules())
        ]


def release_checkpoint(module: nn.Module) -> None:
    """Give a module its own checkpointing function back."""
    for attribute in ATTRIBUTES:
        held = module.__dict__.get(attribute)
        if isinstance(held, Checkpoint):
            module.__dict__[attribute] = held.own
