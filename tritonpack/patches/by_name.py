"""attn_implementation="tritonpack": a model that is built with this name is patched at the end of its construction.

transformers passes a name on to attention layers that look it up in its interface. Other models ignore the name, or
look it up in a table of their own classes and raise a KeyError.

So three methods of the base class are wrapped, for the whole process:

- `_check_and_adjust_attn_implementation` gives such other models their default attention instead.
- `post_init` patches the model. It runs at the end of the construction of a model and of each model inside it.
- `set_attn_implementation` patches or unpatches the model.

For any other name they do what they did before.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from functools import cache, wraps
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.applied_patch import LOCK, applied_to, leave, put_on
from tritonpack.patches.choose_modules import Options, tokens_enter
from tritonpack.patches.interface import FUNCTIONS, NAMES, make_mask
from tritonpack.patches.modules import models_in, modules_in
from tritonpack.patches.parts import PackingContext, Refusal

OURS = NAMES["tritonpack"]
ASKED = "_tritonpack_asked"  # set on a model between the choice of its attention and the end of its construction


def register() -> None:
    """Make `attn_implementation="tritonpack"` known to transformers, for this process.

    Afterwards a model is patched as by `patch` when it is built or loaded with this name, or gets it later. `patch`
    calls this function too. A model that can't be packed exactly is refused in its first call. A second call does
    nothing.
    """
    for name, function in FUNCTIONS.items():  # no model uses them before it is patched or asks for them
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    with LOCK:
        if not hasattr(PreTrainedModel.post_init, "tritonpack_follows"):
            _wrap_methods()


def _wrap_methods() -> None:
    post_init, set_name = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @wraps(check)
    def check_and_note(self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation == OURS and _has_its_own_attention(type(self)):  # type: ignore[arg-type]
            self.__dict__[ASKED] = True
            attn_implementation = None
        return check(self, attn_implementation, *args, **kwargs)

    @wraps(post_init)
    def post_init_and_follow(self: PreTrainedModel) -> None:
        post_init(self)
        _follow(self)

    @wraps(set_name)
    def set_and_follow(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        named = [applied for applied in applied_to(self) if applied.by_name]
        for applied in named:
            leave(applied)
        for refused in _refused(self):
            refused.remove()
        result = set_name(self, attn_implementation, *args, **kwargs)
        one_name = isinstance(attn_implementation, str)
        asked = attn_implementation == OURS if one_name else _is_named(self.config)
        if one_name and not asked:  # transformers leaves our name where attention looks up no name
            for module in models_in(self):
                if module.config._attn_implementation_internal == OURS:
                    module.config._attn_implementation_internal = attn_implementation
        for model in [applied.model for applied in named] or [self]:
            _follow(model, asked)
        return result

    post_init_and_follow.tritonpack_follows = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check_and_note
    PreTrainedModel.post_init = post_init_and_follow
    PreTrainedModel.set_attn_implementation = set_and_follow


def _follow(model: PreTrainedModel, asked: bool = False) -> None:
    """Patch a model if it, or a part of it, has our name or was asked to take it.

    The patch of a whole model replaces those of its parts.
    """
    asked = model.__dict__.pop(ASKED, False) or asked
    parts = [applied for applied in applied_to(model) if applied.by_name]
    refused = _refused(model)
    if not (asked or parts or refused or _is_named(model.config)) or not tokens_enter(model):
        return
    for forward in refused:
        forward.remove()
    try:
        lease = object()
        whole = put_on(model, Options(), lease, by_name=True)
    except UnsupportedModelError as error:
        # Calls are refused, and not the construction, because the model may be a part of one that can be packed.
        for module in models_in(model):
            if tokens_enter(module):
                Refusal(module, PackingContext(), f"{error} It was given attn_implementation={OURS!r}.").install()
    else:
        for part in parts:  # a subclass that calls `post_init` once more has its patch already
            part.leases = [lease] if part is whole else []


@cache
def _has_its_own_attention(kind: type[PreTrainedModel]) -> bool:
    """Whether a model's file has attention that isn't looked up by name, or is looked up in a table of classes."""
    with suppress(OSError, TypeError, KeyError):  # a class without a file
        if "_ATTENTION_CLASSES[" in inspect.getsource(sys.modules[kind.__module__]):
            return True
    return not kind._can_set_attn_implementation()


def _refused(model: PreTrainedModel) -> list[Refusal]:
    forwards = (module.__dict__.get("forward") for module in modules_in(model))
    return [forward for forward in forwards if isinstance(forward, Refusal)]


def _is_named(config: Any) -> bool:
    """Whether a configuration, or a part of it, has our name."""
    parts = (getattr(config, part, None) for part in getattr(config, "sub_configs", None) or {})
    return getattr(config, "_attn_implementation_internal", None) == OURS or any(map(_is_named, parts))
