"""announce_compilation: prints one line when a process compiles kernels that Triton's cache lacks."""

from __future__ import annotations

from typing import Any

from triton import knobs

from tritonpack.notices import tell_once


def announce_compilation() -> None:
    """Print the line when Triton has compiled the first kernel of this package.

    Triton calls its listener after a compilation, so the line appears after the first kernel, a small one. A listener
    that was set before is called, too.
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
    return getattr(function, "__module__", "").startswith(f"{__package__}.")
