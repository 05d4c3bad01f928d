"""Facts about classes and forwards: exact by tests, from which package, with which arguments."""

from __future__ import annotations

import csv
import inspect
import sys
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel, masking_utils

from tritonpack.patches.families import DENSE, DENSE_BEFORE
from tritonpack.patches.modules import modules_in


def is_listed(kind: type, *, in_trees: bool = False) -> bool:
    """Return whether `exact_classes.csv` lists a model class for the installed version of transformers.

    A subclass, or remote code of the same name, is another class. With `in_trees` the class must also be exact for
    documents that share the tokens that they begin with.
    """
    kind = without_wrappers(kind)
    known = versions()["in_trees" if in_trees else "versions"]
    return kind.__module__.startswith("transformers.") and installed() in known.get(kind.__name__, ())


def installed() -> str:
    """Return the installed version of transformers as `exact_classes.csv` writes it, such as "5.23"."""
    return ".".join(transformers.__version__.split(".")[:2])


def without_wrappers(kind: type) -> type:
    """Return the class from which a model was built. FSDP's `fully_shard` gives a model a subclass made by torch."""
    models = [base for base in kind.__mro__ if issubclass(base, PreTrainedModel)]
    return next((base for base in models if not base.__module__.startswith("torch.")), kind)


@cache
def versions() -> dict[str, dict[str, set[str]]]:
    """Read the table as {column: {class: versions of transformers}}; column "in_trees" is for documents in trees."""
    with Path(__file__).with_name("exact_classes.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {column: {row["class"]: set(row[column].split()) for row in rows} for column in ("versions", "in_trees")}


# Packages that may wrap transformers' forwards; `tests/ecosystem` trains with each.
TRUSTED_PACKAGES = frozenset({"accelerate", "liger_kernel", "peft", "torch", "transformers", "tritonpack", "trl"})

# Attributes by which a module gets a forward, or a model a loss, in place of its class's.
OF_INSTANCES = ("forward", "_loss_function")

MASK_MAKERS = [name for name in vars(masking_utils) if name.startswith("create_")]


def takes_tokens_and_mask(module: nn.Module) -> bool:
    """Return whether a module takes tokens, or their embeddings, and their mask. Towers of images and sounds don't."""
    parameters = inspect.signature(module.forward).parameters
    tokens = "input_ids" in parameters or "inputs_embeds" in parameters
    return tokens and "attention_mask" in parameters and not is_seq2seq(module)


def takes_dense_mask(module: PreTrainedModel) -> bool:
    """Return whether a module's attention is outside of transformers' interface, so that it gets a dense mask."""
    kind, version = module.config.model_type, tuple(map(int, installed().split(".")))
    return kind in DENSE or version < DENSE_BEFORE.get(kind, (0, 0))


def is_seq2seq(module: nn.Module) -> bool:
    """Return whether a module takes tokens of an encoder and tokens of a decoder."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    parameters = inspect.signature(type(module).forward).parameters
    return "decoder_input_ids" in parameters and "attention_mask" in parameters


def foreign_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with code that is neither from transformers nor from a wrapper in `TRUSTED_PACKAGES`."""
    modules = list(modules_in(model))
    kinds = {type(module) for module in modules}
    homes = {home for home in {kind.__module__ for kind in kinds} if _makes_own_masks(home)}
    genuine = {kind for kind in kinds if kind.__module__ in homes and _is_genuine(kind)}
    return [m for m in modules if type(m) not in genuine or not all(map(comes_from, map(m.__dict__.get, OF_INSTANCES)))]


def is_genuine(module: nn.Module, instance: Any = None) -> bool:
    """Return whether a module runs the forward of its class, and the class is from `TRUSTED_PACKAGES`.

    `instance` is the module's own forward from before a patch; by default the current one.
    """
    return comes_from(instance or module.__dict__.get("forward")) and _is_genuine(type(module))


def has_known_loss(model: Any) -> bool:
    """Return whether a model computes its loss by transformers' code alone, or takes no labels."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return True
    function = getattr(model, "loss_function", None)
    home = "transformers" if function is None else getattr(inspect.unwrap(function), "__module__", "")
    return is_genuine(model) and home.partition(".")[0] == "transformers"


def _makes_own_masks(home: str) -> bool:
    """Return whether the functions that make masks in a modeling file are from `TRUSTED_PACKAGES`."""
    functions = map(vars(sys.modules.get(home, masking_utils)).get, MASK_MAKERS)
    return all(package_of(function) in TRUSTED_PACKAGES for function in functions if isinstance(function, FunctionType))


def _is_genuine(kind: Any) -> bool:
    """Return whether the forward of a class is the one of its definition, from `TRUSTED_PACKAGES`."""
    innermost = inspect.unwrap(kind.forward)
    if not comes_from(kind.forward) or package_of(innermost) != "transformers":
        return comes_from(kind.forward)
    owner = next(base for base in kind.__mro__ if "forward" in base.__dict__)
    home, _, _ = innermost.__qualname__.rpartition(".")  # another class if its forward was put here
    return "<locals>" in home or home in {base.__qualname__ for base in owner.__mro__}


def comes_from(forward: Any, packages: Collection[str] = TRUSTED_PACKAGES) -> bool:
    """Return whether a function, and all functions that it wraps or replaces (`own`), are from these packages."""
    while forward is not None:
        if package_of(forward) not in packages:
            return False
        forward = getattr(forward, "__wrapped__", getattr(forward, "own", None))
    return True


def package_of(function: Any) -> str:
    """Return the package whose code runs in a call. `__module__` may name another one, because decorators copy it."""
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
