"""Functions that numba compiles: their machine code is kept on disk, and a process that compiles them says so.

numba compiles a function once for each combination of the types of its arguments. A literal number and None are types
of their own. So loops get numbers as `np.int64(1)`, and None for what isn't in use: numba leaves out code behind
`if x is not None`.

numba's cache on disk keeps the machine code of a function as long as its file doesn't change, with the code of the
functions that it calls. So after a change of a function that another file calls, delete the .nbi and .nbc files in
__pycache__.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numba
from numba.core import event
from numba.core.dispatcher import Dispatcher

from tritonpack.notices import speaks, tell_once

# What these options leave out takes time and isn't used. They aren't public, so a numba without them only takes longer.
_KNOWN = numba.core.options.DefaultOptions
# For functions that allocate no array: otherwise numba counts the references to each array that they are passed.
COUNTS_NOTHING: Any = {"_nrt": False} if hasattr(_KNOWN, "_nrt") else {}
# An entry for calls from C.
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"} | (
    {"no_cfunc_wrapper": True} if hasattr(_KNOWN, "no_cfunc_wrapper") else {}
)
_not_kept: set[Any] = set()  # functions whose machine code can't be kept


def compiled(**options: Any) -> Callable[[Any], Any]:
    """A decorator like `numba.njit`, with the machine code on disk if numba finds a folder that it can write."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **_OPTIONS, **options)(function)
        except (RuntimeError, OSError):  # no such folder
            made = numba.njit(**_OPTIONS, **options)(function)
            _not_kept.add(made)
            return made

    return decorate


class _Compilations(event.Listener):
    """Says that functions of this package are compiled, with a bar on a terminal.

    numba tells of each function that it compiles, and of none whose machine code it finds on disk. It compiles one at a
    time, and those that a function calls within it.
    """

    def __init__(self) -> None:
        self._outer: list[Any] = []  # functions that are being compiled, each one for that before it
        self._bar: Any = None
        self._collects = False

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"]
        if not self._outer and _is_ours(function):
            how = "once per machine, at their first use (about 10 s)"
            if function in _not_kept:
                how = "in each process (about 10 s): numba found no folder to keep them, set NUMBA_CACHE_DIR"
            tell_once("numba", f"compiling functions for packing {how}")
            if speaks() and sys.stderr.isatty():
                from tqdm import tqdm

                shape = "compiling: {n_fmt} of {total_fmt} functions |{bar}| {elapsed}"
                self._bar = tqdm(total=len(_reached(function)), bar_format=shape, leave=False)
            self._collects = gc.isenabled()  # a tenth of the time; the compiler's objects live until its end
            gc.disable()
        if self._outer or _is_ours(function):
            self._outer.append(function)

    def on_end(self, event: Any) -> None:
        if not self._outer:
            return
        function = self._outer.pop()
        if self._bar is not None and _is_ours(function):
            self._bar.update()
        if not self._outer:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
            if self._collects:
                gc.enable()


def _is_ours(function: Any) -> bool:
    return function.py_func.__module__.startswith("tritonpack.")


def _reached(function: Any) -> set[Any]:
    """A function of this package and those of this package that it calls, directly or not."""
    found, new = set[Any](), [function]
    while new:
        caller = new.pop()
        if caller not in found:
            found.add(caller)
            names = caller.py_func.__code__.co_names
            called = [caller.py_func.__globals__.get(name) for name in names]
            new += [each for each in called if isinstance(each, Dispatcher) and _is_ours(each)]
    return found


event.register("numba:compile", _Compilations())
