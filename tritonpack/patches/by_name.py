"""Models whose attention has our name without having been patched: what they can't do.

Such a model gives its layers nothing of ours but the attention function. Where other layers mix tokens along the row
too, or count positions by themselves, attention alone can't keep documents apart.
"""

from __future__ import annotations

import sys
from functools import cache

from torch import nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.families import MIXERS, POSITION_TABLES, REFUSED, REFUSED_LAYERS

_NEED_A_PATCH = {*MIXERS, *POSITION_TABLES, *REFUSED_LAYERS}


def require_attention_alone(module: nn.Module) -> None:
    """Refuse the attention layer of a family of which attention is but one of the layers that mix documents.

    Raises:
        UnsupportedModelError: with the remedy, patch(), or why there is none.
    """
    home = type(module).__module__
    kind = (home.split(".")[-2:] or [""])[0]  # a part's config has a type of its own
    if why := REFUSED.get(kind):
        raise UnsupportedModelError(f"models of type {kind!r} can't be packed exactly: {why}.")
    if layers := _special_layers(home):
        raise UnsupportedModelError(
            f"{type(module).__name__} has tritonpack's attention by name, but models of its family have other layers "
            f"that must know where documents begin ({', '.join(layers)}). Call tritonpack.patch(model)."
        )


@cache
def _special_layers(home: str) -> tuple[str, ...]:
    """The layers among a modeling file's classes that patch() makes something of, by name."""
    return tuple(sorted(_NEED_A_PATCH & set(vars(sys.modules[home]))))
