"""attn_implementation="tritonpack": a model that is built with this name is patched at the end of its construction.

transformers passes the name to attention layers that look it up in its interface. Other models ignore the name, or look
it up in a table of their own classes and raise a KeyError. So three methods of the base class are wrapped, for the
whole process:

- `_check_and_adjust_attn_implementation` gives these other models their default attention.
- `post_init` patches the model. It runs at the end of the construction of a model and of each model inside it.
- `set_attn_implementation` patches or unpatches the model.

Any other name works as before.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from functools import cache, wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.applied_patch import LOCK, applied_to, apply_patch, release
from tritonpack.patches.choose_modules import Options, takes_text
from tritonpack.patches.interface import FUNCTIONS, NAMES, make_mask
from tritonpack.patches.modules import models_in, modules_in
from tritonpack.patches.parts import PackingContext, Refusal

NAME = NAMES["tritonpack"]
REQUESTED = "_tritonpack_asked"  # attribute of a model between the choice of its attention and the end of __init__


def register() -> None:
    """Register `attn_implementation="tritonpack"` with transformers in this process.

    Afterwards a model is patched as by `patch` when it is built or loaded with this name, or when
    `set_attn_implementation` sets it. A model that can't be packed exactly is refused in its first call. `patch` calls
    this function, too. A second call does nothing.
    """
    for name, function in FUNCTIONS.items():  # models use them only after they are patched or ask for the name
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    with LOCK:
        if not hasattr(PreTrainedModel.post_init, "tritonpack_wraps"):
            _wrap_methods()


def _wrap_methods() -> None:
    post_init, set_name = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @wraps(check)
    def check_and_note(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation == NAME and _has_its_own_attention(type(self)):  # type: ignore[arg-type]
            self.__dict__[REQUESTED] = True
            attn_implementation = None
        return check(self, attn_implementation, *args, **kwargs)

    @wraps(post_init)
    def post_init_and_patch(self: PreTrainedModel) -> None:
        post_init(self)
        _patch_if_named(self)

    @wraps(set_name)
    def set_and_patch(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        named = [applied for applied in applied_to(self) if applied.by_name]
        for applied in named:
            release(applied)
        for refusal in _refusals(self):
            refusal.remove()
        result = set_name(self, attn_implementation, *args, **kwargs)
        one_name = isinstance(attn_implementation, str)
        requested = attn_implementation == NAME if one_name else _is_named(self.config)
        if one_name and not requested:  # transformers keeps our name in models whose attention looks up no name
            for module in models_in(self):
                if module.config._attn_implementation_internal == NAME:
                    module.config._attn_implementation_internal = attn_implementation
        for model in [applied.model for applied in named] or [self]:
            _patch_if_named(model, requested)
        return result

    post_init_and_patch.tritonpack_wraps = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check_and_note
    PreTrainedModel.post_init = post_init_and_patch
    PreTrainedModel.set_attn_implementation = set_and_patch


def _patch_if_named(model: PreTrainedModel, requested: bool = False) -> None:
    """Patch a model if it, or a part of it, has our name or requested it.

    The patch of a whole model replaces the patches of its parts.
    """
    requested = model.__dict__.pop(REQUESTED, False) or requested
    of_parts = [applied for applied in applied_to(model) if applied.by_name]
    refused = _refusals(model)
    if not (requested or of_parts or refused or _is_named(model.config)) or not takes_text(model):
        return
    for refusal in refused:
        refusal.remove()
    try:
        handle_id = object()
        whole = apply_patch(model, Options(), handle_id, by_name=True)
    except UnsupportedModelError as error:
        # Its calls are refused, not its construction, because it may become a part of a model that can be packed.
        for module in models_in(model):
            if takes_text(module):
                Refusal(module, PackingContext(), f"{error} It has attn_implementation={NAME!r}.").install()
    else:
        for applied in of_parts:  # `whole` is among them if a subclass calls `post_init` a second time
            applied.handle_ids = [handle_id] if applied is whole else []


@cache
def _has_its_own_attention(kind: type[PreTrainedModel]) -> bool:
    """Return whether a class has attention that isn't looked up by name, or is looked up in a table of classes."""
    with suppress(OSError, TypeError, KeyError):  # the class has no file
        if "_ATTENTION_CLASSES[" in inspect.getsource(sys.modules[kind.__module__]):
            return True
    return not kind._can_set_attn_implementation()


def _refusals(model: PreTrainedModel) -> list[Refusal]:
    forwards = (module.__dict__.get("forward") for module in modules_in(model))
    return [forward for forward in forwards if isinstance(forward, Refusal)]


def _is_named(config: Any) -> bool:
    """Return whether a configuration, or a part of it, has our name."""
    parts = (getattr(config, part, None) for part in getattr(config, "sub_configs", None) or {})
    return getattr(config, "_attn_implementation_internal", None) == NAME or any(map(_is_named, parts))
