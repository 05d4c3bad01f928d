"""A name with a slash makes transformers look for a kernel on the hub; for ours it finds what is here already."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from tritonpack import hub
from tritonpack.patches.interface import ALIAS, register


def answer_for_alias() -> None:
    """Let transformers' loader of kernels answer for `tritonpack/flash-attn`, and for nothing else, from this package.

    The loader wants the `kernels` library in one of the few versions that a version of transformers takes, and the hub.
    """
    from transformers.integrations import hub_kernels

    load = getattr(hub_kernels, "load_and_register_attn_kernel", None)
    if load is None or hasattr(load, "tritonpack_answers"):
        return

    @wraps(load)
    def load_or_answer(attn_implementation: str, *args: Any, **kwargs: Any) -> ModuleType | None:
        if attn_implementation != ALIAS:
            return load(attn_implementation, *args, **kwargs)
        register()
        return hub

    load_or_answer.tritonpack_answers = True  # type: ignore[attr-defined]
    hub_kernels.load_and_register_attn_kernel = load_or_answer
