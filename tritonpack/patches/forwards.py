"""The forwards of a model through which documents may mix, and which of them are transformers' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tritonpack.patches.families import DENSE, MIXERS, OWN_MASKS, POSITION_TABLES

# Packages that may wrap transformers' forwards: the tests of `tests/ecosystem` train with each.
WRAPPERS = frozenset({"accelerate", "liger_kernel", "peft", "torch", "transformers", "tritonpack", "trl"})

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the registry from which layers take the attention function of a name

# Arguments that tell a layer about its row: a layer that takes one of them may mix the row's documents.
ROW_ARGUMENTS = frozenset(
    {
        "alibi", "attention_bias", "attention_mask", "cache", "cache_params", "causal_mask", "cu_seq_lens_q",
        "cu_seqlens", "layer_past", "mask", "past_key_value", "past_key_values", "position_bias", "position_embeddings",
        "position_ids", "seq_idx", "state",
    }
)  # fmt: skip


def mixing_forwards(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the forwards of a model through which documents may mix, without wrappers from `WRAPPERS`."""
    mixing = by_class(mixes)
    return (forward_of(module) for module in model.modules() if mixing(type(module)))


def by_class(question: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a cached predicate of classes. Use it in one call only, because a class may get another forward."""
    return cache(question)


def mixes(kind: Any) -> bool:
    """Whether documents may mix in layers of a class.

    They may if its forward takes an argument about the row, if `families` names the class, and, for a class that isn't
    from `WRAPPERS`, if its forward takes any keyword.
    """
    name, home = kind.__name__, kind.__module__.rpartition(".")[2]
    if issubclass(kind, PreTrainedModel) or name in MIXERS or name in POSITION_TABLES or (home, name) in OWN_MASKS:
        return True
    parameters = _parameters(kind.forward)
    if not ROW_ARGUMENTS.isdisjoint(parameters):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not _is_genuine(kind)


def takes_tokens_and_mask(module: nn.Module) -> bool:
    """Whether a module takes tokens, or their embeddings, and a mask for them: towers of images and sounds don't."""
    parameters = inspect.signature(module.forward).parameters
    tokens = "input_ids" in parameters or "inputs_embeds" in parameters
    return tokens and "attention_mask" in parameters and not holds_both_sides(module)


def inside(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it, by name, without towers: models that turn images or sounds into embeddings."""
    yield name, module
    for child_name, child in module.named_children():
        if not isinstance(child, PreTrainedModel) or takes_tokens_and_mask(child):
            yield from inside(child, f"{name}.{child_name}" if name else child_name)


def uses_interface(kind: Any) -> bool:
    """Whether layers of a class take their attention from transformers' interface: its name is in their code."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def takes_dense_mask(module: PreTrainedModel) -> bool:
    """Whether the attention of a module lies outside of transformers' interface, so that it gets a dense mask.

    Some of the types in `DENSE` use the interface in newer versions of transformers.
    """
    return module.config.model_type in DENSE and not any(uses_interface(type(layer)) for _, layer in inside(module))


def holds_both_sides(module: nn.Module) -> bool:
    """Whether a module takes tokens of an encoder and tokens of a decoder."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    parameters = inspect.signature(type(module).forward).parameters
    return "decoder_input_ids" in parameters and "attention_mask" in parameters


def foreign_forwards(model: nn.Module) -> list[str]:
    """Return the names of modules through which documents may mix and whose forward isn't transformers' own.

    A transformers class whose forward was replaced counts, whatever arguments the new forward takes.
    """
    mixing, genuine = by_class(mixes), by_class(_is_genuine)

    def is_foreign(module: nn.Module) -> bool:
        kind = type(module)
        if not genuine(kind):
            return mixing(kind) or kind.__module__.startswith("transformers.")
        instance = module.__dict__.get("forward")
        return instance is not None and not _is_wrapper(instance) and mixing(kind)

    return [name for name, module in model.named_modules() if is_foreign(module)]


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that runs when a module is called, without wrappers from `WRAPPERS`."""
    instance = module.__dict__.get("forward")
    if instance is not None and not _is_wrapper(instance):
        return getattr(instance, "__func__", instance)
    kind = type(module)
    return inspect.unwrap(kind.forward) if _is_genuine(kind) else kind.forward


def is_own(module: nn.Module, instance: Any = None) -> bool:
    """Whether a module runs the forward of its class, and the class is from `WRAPPERS`.

    `instance` is the forward that the module itself had before a patch; by default the one that it has.
    """
    instance = instance or module.__dict__.get("forward")
    return (instance is None or _is_wrapper(instance)) and _is_genuine(type(module))


def _is_genuine(kind: Any) -> bool:
    """Whether the forward of a class is the one in its definition, in one of `WRAPPERS`."""
    owner = next(base for base in kind.__mro__ if "forward" in base.__dict__)
    return _was_defined_in(owner, kind.forward)


@cache
def _was_defined_in(owner: type, forward: Callable[..., Any]) -> bool:
    innermost = inspect.unwrap(forward)
    if not _is_wrapper(forward) or package_of(innermost) != "transformers":
        return _is_wrapper(forward)
    home, _, _ = innermost.__qualname__.rpartition(".")  # another class if its forward was put here
    return "<locals>" in home or home in {base.__qualname__ for base in owner.__mro__}


def _is_wrapper(forward: Any) -> bool:
    """Whether a function, and all functions in its chain of `__wrapped__`, come from `WRAPPERS`."""
    while forward is not None:
        if package_of(forward) not in WRAPPERS:
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def package_of(function: Any) -> str:
    """The package whose code runs in a call. `__module__` may name another package, because decorators copy it."""
    while not isinstance(function, FunctionType):
        if isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, partial):
            function = function.func
        elif isinstance(call := inspect.getattr_static(type(function), "__call__", None), FunctionType):
            function = call
        else:
            return ""
    return function.__globals__.get("__name__", "").partition(".")[0]


@cache
def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters
