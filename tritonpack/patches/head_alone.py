"""A model's head without its base model: what it computes of given states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

STATES = "last_hidden_state"
# What stands between a call of a module and its forward.
WAY_IN: dict[str, Any] = {
    "_forward_hooks": {}, "_forward_pre_hooks": {}, "_backward_hooks": {}, "_backward_pre_hooks": {},
    "_compiled_call_impl": None,
}  # fmt: skip


def run_head(head: nn.Module, path: str, output: Any, states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """The logits that a head's own forward computes of states, with a stand-in that gives them as the base model.

    Args:
        head: the model that the user called.
        path: the name of the base model in it.
        output: what the base model gave the head; the states take the place of its own.
        states: (B, T, ...).
        arguments: of the head's forward, without labels.
    """
    output = type(output)(**{**output, STATES: states})
    base = twin(getattr(head, path), forward=lambda *_, **__: output, **WAY_IN)
    head = twin(head, _modules={**head._modules, path: base})
    return type(head).forward(head, **arguments)["logits"]


def own_parameters(head: nn.Module, base: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model's head, around its base model, each once; tied weights are of both."""
    found = (x for _, module in head.named_modules(memo={base}) for x in module.parameters(recurse=False))
    return iter({id(x): x for x in found}.values())


def twin(module: nn.Module, **changes: Any) -> nn.Module:
    """A module with the parts and the class of another, some attributes changed. The class's `__init__` doesn't run."""
    twin = object.__new__(type(module))
    twin.__dict__ = {**module.__dict__, **changes}
    return twin
