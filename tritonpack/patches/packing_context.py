"""The packing of the current forward pass, for layers whose arguments don't hold it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from tritonpack.patches.packed_batch import PackedBatch


@dataclass(frozen=True)
class Call:
    """A call of a patched model. It is no tuple: torch.compile ties a graph to the items of tuples that it reads.

    Attributes:
        told: the packing that was read from the arguments of the model that the user called, while that model runs. Its
            head may not pass all of these arguments to the patched modules inside.
        running: whether a patched module runs its layers.
        packed_batch: the packing for these layers; None where rows are left to the model (a cache is in use).
    """

    told: PackedBatch | None = None
    running: bool = False
    packed_batch: PackedBatch | None = None


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.call = Call()


class PackingContext:
    """The call that runs now.

    Each thread has its own. torch.compile does not guard what it reads of a thread's state, so traced code reads the
    attribute here. Within one graph it is a value of the graph, whatever other threads do.

    Attributes:
        call: of traced code.
        in_force: whether the patch is on the model.
    """

    def __init__(self) -> None:
        self.call = Call()
        self.in_force = True
        self._of_thread = _OfThread()

    def __reduce__(self) -> tuple[type[PackingContext], tuple[()]]:
        return PackingContext, ()  # copies of a model share no state

    @property
    def current(self) -> Call:
        """The call that runs; one without packing outside of all calls."""
        return self.call if torch.compiler.is_compiling() else self._of_thread.call

    def enter(self, call: Call) -> Call:
        """Make a call the current one, and return the one before. Enter that again in a `finally` block."""
        before = self.current
        self.call = self._of_thread.call = call
        return before

    def require_in_force(self) -> None:
        """Refuse the recomputation of a layer whose patch isn't on the model any more: documents would mix."""
        if not self.in_force:
            raise ValueError(
                "gradient checkpointing recomputes a layer that was patched in its forward pass and isn't now. Call "
                "backward() before unpatch(), or inside of `with tritonpack.patch(model)`."
            )
