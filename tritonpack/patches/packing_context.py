"""The packing of the current forward pass, for layers whose arguments don't hold it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tritonpack.patches.packed_batch import PackedBatch


class _Fields:
    def __init__(self) -> None:  # no class attributes: a graph is tied to whether an instance has its own
        self.running = False
        self.packed_batch: PackedBatch | None = None
        self.told: PackedBatch | None = None


class _State(_Fields, threading.local):
    """The state of one thread."""


class PackingContext(_Fields):
    """The packing of the current forward pass.

    Each thread has its own state. torch.compile does not guard what it reads of a thread's state, so traced code reads
    the attributes here. Within one graph these are values of the graph, whatever other threads do.

    Attributes:
        running: whether a forward pass of the model is running.
        packed_batch: None outside of a forward pass, and where rows are left to the model (a cache is in use).
        told: the packing that was read from the arguments of the model that the user called, while that model runs. Its
            head may not pass all of these arguments to the patched modules inside.
        in_force: whether the patch is on the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_force = True
        self._of_thread = _State()

    def __reduce__(self) -> tuple[type[PackingContext], tuple[()]]:
        return PackingContext, ()  # copies of a model share no state

    @property
    def state(self) -> _Fields:
        """The state to read from."""
        return self if torch.compiler.is_compiling() else self._of_thread

    def require_in_force(self) -> None:
        """Refuse the recomputation of a layer whose patch isn't on the model any more: documents would mix."""
        if not self.in_force:
            raise ValueError(
                "gradient checkpointing recomputes a layer that was patched in its forward pass and isn't now. Call "
                "backward() before unpatch(), or inside of `with tritonpack.patch(model)`."
            )

    @contextmanager
    def holding(self, **values: Any) -> Iterator[None]:
        """Set attributes of the state for the time of a `with` block, also if an exception or an interrupt ends it."""
        state = self.state
        before = {name: getattr(state, name) for name in values}
        self._set(values)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, values: Mapping[str, Any]) -> None:
        for state in (self, self._of_thread):
            for name, value in values.items():
                setattr(state, name, value)
