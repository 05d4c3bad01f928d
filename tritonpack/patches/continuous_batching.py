"""Continuous batching of a patched model: `generate_batch` and the managers that transformers makes for it.

Requests share a row there and a paged cache tells them apart, so nothing is packed. Managers read the name of the
attention when they are made and take few names, so from then until it stops the model has the name from before the
patch. The hooks stay: they pass the manager's calls on as they are, and refuse any other call.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from tritonpack.patches.interface import NAMES, stock_name
from tritonpack.patches.packing_context import UNCLAIMED, ModuleRef

if TYPE_CHECKING:
    from tritonpack.patches.applied import Applied

ENTRY = "init_continuous_batching"  # transformers makes or reuses every manager there


class ContinuousBatching:
    """Stands for `init_continuous_batching` of one patched model, from `install` to `remove`."""

    def __init__(self, model: PreTrainedModel, patch: Applied) -> None:
        self._model, self.patch = ModuleRef(model), patch
        self.by_name = patch.by_name

    @property
    def gone(self) -> bool:
        return self._model.gone

    def install(self) -> None:
        """Take the method's place in the instance; a second call changes nothing."""
        self._model.module.__dict__[ENTRY] = self

    def remove(self) -> None:
        """Give the instance its class's method back; a second call changes nothing."""
        attributes = self._model.module.__dict__
        if attributes.get(ENTRY) is self:
            del attributes[ENTRY]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The manager, as transformers makes it for the model before it was patched."""
        model = self._model.module
        try:
            self._suspend()
            manager = getattr(type(model), ENTRY)(model, *args, **kwargs)
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
        self.patch.by_name = False  # a name that the manager sets doesn't end a patch that was made by name
        for hook in self.patch.hooks:
            if hook.replaced is not UNCLAIMED:
                hook.module.config._attn_implementation_internal = stock_name(hook.module, hook.replaced)

    def _resume(self) -> None:
        self.patch.by_name = self.by_name
        for hook in self.patch.hooks:
            if hook.replaced is not UNCLAIMED:  # else the patch was left while the manager was running
                hook.module.config._attn_implementation_internal = NAMES[hook.serving.attention]
