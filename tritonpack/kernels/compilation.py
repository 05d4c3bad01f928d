"""announce_compilation: a process that compiles kernels, because Triton's cache lacks them, says so once."""

from __future__ import annotations

from typing import Any

from triton import knobs

from tritonpack.notices import tell_once


def announce_compilation() -> None:
    """Let Triton tell of kernels that it has compiled, until the first one of this package is among them.

    Triton has no call before it compiles, so the line appears after the first kernel, a small one. A listener that was
    there before is called, too.
    """
    before: Any = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **facts: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **facts)
        if cache_hit or not _is_ours(src):
            return
        if knobs.compilation.listener is listen:
            knobs.compilation.listener = before
        tell_once(
            "triton kernels",
            "compiling Triton kernels, once per machine for each dtype and head dimension (30 to 80 s in a first step)",
        )

    knobs.compilation.listener = listen


def _is_ours(src: Any) -> bool:
    function = getattr(getattr(src, "fn", None), "fn", None)
    return getattr(function, "__module__", "").startswith("tritonpack.kernels.")
