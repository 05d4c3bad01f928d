"""Attributes of instances and classes that are replaced for a time."""

from contextlib import ExitStack
from typing import Any


def replaced(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute. The stack restores it when it ends, unless other code has set it since."""
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    setattr(owner, name, value)

    def restore() -> None:
        if attributes.get(name) is value:
            setattr(owner, name, before) if had else delattr(owner, name)

    stack.callback(restore)
