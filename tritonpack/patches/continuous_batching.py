"""Continuous batching of a patched model: `generate_batch`, and the managers that transformers makes for it.

In continuous batching, requests share a row and a paged cache tells them apart, so nothing is packed. A manager reads
the name of the attention when it is made, and accepts only some names. So the model has the name from before the patch
as long as the manager runs. The forwards stay installed: they pass the manager's calls on and refuse any other call.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from tritonpack.patches.base_forward import BaseForward
from tritonpack.patches.interface import NAMES, stock_name
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward

ENTRY = "init_continuous_batching"  # transformers makes or reuses every manager in this method


class ContinuousBatching(InstanceForward):
    """`init_continuous_batching` of one patched model.

    Attributes:
        bases: the forwards of the patched modules.
        running: whether a manager runs, so that the model has its attention's name from before the patch.
    """

    attribute = ENTRY

    def __init__(self, model: PreTrainedModel, context: PackingContext, bases: list[BaseForward]) -> None:
        super().__init__(model, context)
        self.bases, self.running = bases, False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The manager that transformers makes for the model before it was patched."""
        try:
            self._suspend()
            manager = self.inner(*args, **kwargs)
            stop = type(manager).stop.__get__(manager)

            @wraps(stop)
            def stop_and_resume(*args: Any, **kwargs: Any) -> Any:
                try:
                    return stop(*args, **kwargs)
                finally:
                    self._resume()

            manager.stop = stop_and_resume
        except BaseException:
            self._resume()
            raise
        return manager

    def _suspend(self) -> None:
        self.running = True
        for base in self.bases:
            if base.attention_name.installed:
                config, before = base.module.config, base.attention_name.before
                config._attn_implementation_internal = stock_name(base.module, before)

    def _resume(self) -> None:
        self.running = False
        for base in self.bases:
            if base.attention_name.installed:  # else the patch was left while the manager was running
                base.module.config._attn_implementation_internal = NAMES[base.serving.attention]
