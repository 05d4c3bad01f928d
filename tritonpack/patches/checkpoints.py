"""Activation checkpointing: what is recomputed in backward finds the packing of its forward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tritonpack.patches.packing_context import ModuleRef, PackingContext

# Where modules keep the function that checkpoints what they call: transformers' layers, and torch's CheckpointWrapper,
# which FSDP and accelerate put around layers.
ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")


class Checkpoint:
    """Stands for a module's checkpointing function: sets the packing of the forward pass again in the recomputation,
    which may run in another thread and when other batches have been seen."""

    def __init__(self, own: Any, context: PackingContext) -> None:
        self.own, self.context = own, context

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        context, state = self.context, self.context.state
        packed_batch, running, told = state.packed_batch, state.running, state.told

        def run(*args: Any, **kwargs: Any) -> Any:
            state = context.state
            outer, outer_told = (state.running, state.packed_batch), state.told
            context.set(running, packed_batch)
            context.tell(told)
            try:
                return function(*args, **kwargs)
            finally:
                context.set(*outer)
                context.tell(outer_told)

        return self.own(run, *args, **kwargs)


class Checkpoints:
    """The checkpointing functions inside a patched module.

    Wrappers may be put around layers after the model was patched. So every call compares the modules on the way to the
    layers that need the packing with those of the last call, and looks for wrappers where one differs.
    """

    def __init__(self, module: nn.Module, context: PackingContext, layers: Iterable[nn.Module]) -> None:
        self._module, self.context = ModuleRef(module), context
        self.layers = [layer for layer in layers if layer is not module]
        self._look()

    def hold(self) -> None:
        """Stand for all checkpointing functions that there are now."""
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
        self.holders = [
            module
            for module in self._module.module.modules()
            if hasattr(module, "gradient_checkpointing") or "checkpoint_fn" in module.__dict__
        ]
        self.links: list[tuple[ModuleRef, str, nn.Module]] = [
            (ModuleRef(parent), name, child)
            for parent in self._module.module.modules()
            for name, child in parent._modules.items()
            if child is not None and any(id(inner) in layers for inner in child.modules())
        ]


def release_checkpoint(module: nn.Module) -> None:
    """Give a module its own checkpointing function back."""
    for attribute in ATTRIBUTES:
        held = module.__dict__.get(attribute)
        if isinstance(held, Checkpoint):
            module.__dict__[attribute] = held.own
