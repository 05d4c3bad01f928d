"""Attributes of one object that are replaced for a while."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def replaced(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of this instance. The stack restores it when it ends, unless other code has set it since."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    setattr(owner, name, value)

    def restore() -> None:
        if attributes.get(name) is not value:
            return
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    stack.callback(restore)
