"""The name of the attention in the configurations of patched modules: transformers looks it up there."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from tritonpack.patches.parts import Part


class AttentionName(Part):
    """Another name of the attention in the configuration of a module.

    Models may share a configuration. It gets its own name back when the last of these models is unpatched.

    Args:
        name: the new name.

    Attributes:
        before: the name that the configuration had before any patch.
        installed: whether the configuration has the other name because of this object.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self._name = name
        self.before: str | None = None
        self.installed = False

    def install(self) -> None:
        config = self.module.config
        key = id(config)
        reference, holders, before = _names.get(key, (None, [], config._attn_implementation_internal))
        if reference is None:
            reference = weakref.ref(config, lambda _: _names.pop(key, None))
        self.before, self.installed = before, True
        _names[key] = reference, [*self._others(holders), weakref.ref(self)], before
        config._attn_implementation_internal = self._name

    def remove(self) -> None:
        if not self.installed:
            return
        config: Any = self._config()
        reference, holders, before = _names.get(id(config), (None, [], self.before))  # a copy's configuration has none
        others = self._others(holders)
        if reference is not None and others:
            _names[id(config)] = reference, others, before
        elif config is not None:
            config._attn_implementation_internal = before
            _names.pop(id(config), None)
        self.installed = False

    def _config(self) -> Any:
        """The configuration, also if the module is gone; None if the configuration is gone too."""
        if not self.gone:
            return self.module.config
        for reference, holders, _ in list(_names.values()):
            if any(holder() is self for holder in holders):
                return reference()
        return None

    def _others(self, holders: list[weakref.ref[AttentionName]]) -> list[weakref.ref[AttentionName]]:
        living = [(holder, holder()) for holder in holders]
        return [holder for holder, name in living if name is not None and name is not self and not name.gone]


# {id of a configuration: the configuration, the patched modules that need the other name, and the name from before}.
# By identity, because configurations compare by value. An entry ends with its configuration, because another one may
# get the same address. Models are patched one after the other (`patch_stack.py`), so this needs no lock.
_names: dict[int, tuple[weakref.ref[Any], list[weakref.ref[AttentionName]], str | None]] = {}
