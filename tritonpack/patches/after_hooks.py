"""The output of a module after its forward hooks, which may change it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.later_logits import STATES
from tritonpack.patches.placement import Placement


class AfterHooks:
    """Forward hooks that run once in one call of a head, after those of users on modules inside of it.

    Attributes:
        pending: the modules whose hook hasn't run, each with the handle of that hook.
    """

    def __init__(self) -> None:
        self.pending: dict[nn.Module, Any] = {}

    def call(self, module: nn.Module, action: Callable[[Any], Any]) -> None:
        """Call `action` with the output of the running call of a module. What it returns is the output then."""

        thread = _thread()

        def last(_: nn.Module, __: Any, output: Any) -> Any:
            if thread not in (None, _thread()) or module not in self.pending:
                return None
            self.pending.pop(module).remove()
            return action(output)

        self.pending[module] = module.register_forward_hook(last)

    def end(self) -> None:
        """Remove hooks that haven't run, because a hook of a user raised an exception."""
        while self.pending:
            self.pending.popitem()[1].remove()

    def require_run(self) -> None:
        """Refuse a call in which a hook of a user hasn't run."""
        for module in self.pending:
            raise UnsupportedModelError(
                f"{type(module).__name__} has a forward hook, and its forward was called without its hooks, so its "
                "states weren't found. Remove the hook, or patch the model without unpad and share_prefixes."
            )


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a forward hook of users runs after the forward of a module: one of its own, or one of all modules."""
    return bool(module._forward_hooks or all_modules._global_forward_hooks)


def back_in_row(output: Any, placement: Placement | None) -> Any:
    """An output that was laid back for hooks, with the states of the row's tokens alone."""
    if placement is not None and isinstance(output, Mapping) and STATES in output:
        output[STATES] = placement.take(output[STATES])  # type: ignore[index]
    return output


def _thread() -> int | None:
    """The number of this thread; None in code that torch compiles, which can't read it."""
    return None if torch.compiler.is_compiling() else threading.get_ident()
