"""Functions that numba compiles. Their machine code is cached on disk, and a process that compiles prints a message.

numba compiles a function once for each combination of argument types. A literal number and None have their own types.
So loops get numbers as `np.int64(1)`, and None for an unused argument: numba leaves out code behind `if x is not None`.

The cache holds a function together with the functions that it calls, until the function's own file changes. So after a
change of a function that another file calls, delete the .nbi and .nbc files in __pycache__.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numba
from numba.core import event
from numba.core.dispatcher import Dispatcher

from tritonpack.notices import may_print, tell_once

# Options that leave out unused code and save time. They aren't public: a numba without them only takes longer.
_KNOWN = numba.core.options.DefaultOptions
# For functions that allocate no array: without reference counting of array arguments.
COUNTS_NOTHING: Any = {"_nrt": False} if hasattr(_KNOWN, "_nrt") else {}
# Without an entry for calls from C.
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"} | (
    {"no_cfunc_wrapper": True} if hasattr(_KNOWN, "no_cfunc_wrapper") else {}
)
_not_cached: set[Any] = set()  # functions whose machine code can't be cached


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator like `numba.njit` that caches machine code on disk if numba finds a writable folder."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **_OPTIONS, **options)(function)
        except (RuntimeError, OSError):  # no such folder
            made = numba.njit(**_OPTIONS, **options)(function)
            _not_cached.add(made)
            return made

    return decorate


class _Compilations(event.Listener):
    """Prints a message when functions of this package are compiled, with a progress bar on a terminal.

    numba reports each function that it compiles, but not functions that it loads from disk. It compiles one function at
    a time, and the functions that it calls within it.
    """

    def __init__(self) -> None:
        self._outer: list[Any] = []  # functions that are being compiled, each for the one before it
        self._bar: Any = None
        self._collects = False

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"]
        if not self._outer and _is_ours(function):
            how = "once per machine, at their first use (about 10 s)"
            if function in _not_cached:
                how = "in each process (about 10 s): numba found no writable cache folder, set NUMBA_CACHE_DIR"
            tell_once("numba", f"compiling functions for packing {how}")
            if may_print() and sys.stderr.isatty():
                from tqdm import tqdm

                shape = "compiling: {n_fmt} of {total_fmt} functions |{bar}| {elapsed}"
                self._bar = tqdm(total=len(_called_by(function)), bar_format=shape, leave=False)
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


def _called_by(function: Any) -> set[Any]:
    """Return a function and all functions of this package that it calls, directly or indirectly."""
    functions, new = set[Any](), [function]
    while new:
        caller = new.pop()
        if caller not in functions:
            functions.add(caller)
            names = caller.py_func.__code__.co_names
            called = [caller.py_func.__globals__.get(name) for name in names]
            new += [each for each in called if isinstance(each, Dispatcher) and _is_ours(each)]
    return functions


event.register("numba:compile", _Compilations())
