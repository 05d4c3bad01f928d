"""attn_implementation="tritonpack": a model that is built with our name is patched when it has been built.

transformers gives a name to attention layers alone. A model whose layers don't ask for one takes it without a word, and
one that looks it up in a table of its own classes ends in a KeyError. So the methods of the base class through which
every name comes are wrapped, for the whole process: `_check_and_adjust_attn_implementation`, which gives models of
these two kinds their default instead; `post_init`, which ends the construction of a model and of each model inside it;
and `set_attn_implementation`. For other names they do what they did before.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, wraps
from typing import Any

from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.applied import Applied, applied_to
from tritonpack.patches.interface import NAMES, register_functions
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward

OURS = NAMES["tritonpack"]
ASKED = "_tritonpack_asked"  # set on a model between the choice of its attention and the end of its construction


class Refused(InstanceForward):
    """The forward of a model that has our name and can't be packed exactly: raises the reason.

    Building it isn't refused, because it may be a part of a model that can be packed.
    """

    def __init__(self, module: PreTrainedModel, reason: str) -> None:
        super().__init__(module, PackingContext())
        self.reason = reason

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(f"{self.reason} It was given attn_implementation={NAMES['tritonpack']!r}.")


def register() -> None:
    """Make `attn_implementation="tritonpack"` known to transformers, for this process.

    A model that is built, loaded or renamed with it from now on is patched like one given to `patch`, which calls this.
    A model that can't be packed exactly is refused in its first call. A second call changes nothing.
    """
    register_functions()
    if hasattr(PreTrainedModel.post_init, "tritonpack_follows"):
        return
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
        from tritonpack.patches.patching import restore

        named = [applied for applied in applied_to(self) if applied.by_name]
        for applied in named:
            restore(applied)
        for refused in _refused(self):
            refused.remove()
        result = set_name(self, attn_implementation, *args, **kwargs)
        asked = attn_implementation == OURS if isinstance(attn_implementation, str) else _is_named(self.config)
        if isinstance(attn_implementation, str) and not asked:
            _rename(self, attn_implementation)
        for model in [applied.model for applied in named] or [self]:
            _follow(model, asked)
        return result

    post_init_and_follow.tritonpack_follows = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check_and_note
    PreTrainedModel.post_init = post_init_and_follow
    PreTrainedModel.set_attn_implementation = set_and_follow


def _rename(model: PreTrainedModel, name: str) -> None:
    """Take our name from configurations of models whose attention asks for no name: transformers leaves it there."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation_internal == OURS:
            module.config._attn_implementation_internal = name


def _follow(model: PreTrainedModel, asked: bool = False) -> None:
    """Patch a model if it or a part of it has our name, or was asked to take it.

    The patch of a whole takes the place of those of its parts.
    """
    from tritonpack.patches.patching import patch_by_name, tokens_enter  # it may be what imports transformers just now

    asked = model.__dict__.pop(ASKED, False) or asked
    parts = [applied for applied in applied_to(model) if applied.by_name]
    refused = _refused(model)
    if not (asked or parts or refused or _is_named(model.config)) or not tokens_enter(model):
        return
    for forward in refused:
        forward.remove()
    try:
        whole = patch_by_name(model)
    except UnsupportedModelError as error:
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and tokens_enter(module):
                Refused(module, str(error)).install()
    else:
        _forget(whole, parts)


@cache
def _has_its_own_attention(kind: type[PreTrainedModel]) -> bool:
    """Whether a model's file has attention that asks for no function by name, or a table of classes by name."""
    home = sys.modules.get(kind.__module__)
    try:
        tables = "_ATTENTION_CLASSES[" in inspect.getsource(home) if home is not None else False
    except (OSError, TypeError):
        tables = False
    return tables or not kind._can_set_attn_implementation()


def _forget(whole: Applied, parts: list[Applied]) -> None:
    whole.below = [applied for applied in whole.below if applied not in parts]
    for part in parts:
        part.leases.clear()


def _refused(model: PreTrainedModel) -> list[Refused]:
    forwards = (module.__dict__.get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, Refused)]


def _is_named(config: Any) -> bool:
    """Whether a configuration, or a part of it, has our name."""
    if getattr(config, "_attn_implementation_internal", None) == OURS:
        return True
    return any(
        _is_named(getattr(config, part)) for part in getattr(config, "sub_configs", None) or {} if hasattr(config, part)
    )
