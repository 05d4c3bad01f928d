"""The decorator that compiles loops, or an error that says how to install the compiler.

Modules with compiled loops import this one, and they are imported only when something is packed or planned. So the
rest of tritonpack works without numba.
"""

from __future__ import annotations

from typing import Any

try:
    import numba
except ImportError as error:
    raise ImportError(
        "tritonpack packs and plans with loops that numba compiles, and numba can't be imported here "
        f"({error}). Install it: pip install numba. PackingCollator, CostModel and everything outside of "
        "tritonpack.packing work without it."
    ) from error

# No compiled loop may call one of another file: numba's cache on disk would keep the machine code of a function that
# has changed while the file of its caller hasn't.
compiled: Any = numba.njit(cache=True, nogil=True)
