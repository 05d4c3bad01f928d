"""Warnings and messages that appear once per process, and the models that are patched in this process.

A `PackingWarning` reports a likely mistake that may be intended: a packed batch while no model is patched, a second
epoch in the order of the first. A message on standard error explains a wait.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any
from weakref import WeakSet

from tritonpack import _imported_by
from tritonpack.errors import PackingWarning

# The patched modules of this process: `patch()` adds them, `unpatch()` discards them.
patched_models: WeakSet[Any] = WeakSet()

said: dict[str, object] = {}  # the keys of the warnings and messages that have appeared
_silenced = threading.local()  # marks threads without warnings


def say_once(key: str, message: str) -> None:
    """Warn with `PackingWarning` at the first call with this key in the process, at the line of the user's code.

    Args:
        key: the subject of the warning, in lower case with hyphens. The text begins with it, so filters can name it.
        message: the facts and the remedy, in full sentences.
    """
    if hasattr(_silenced, "now"):
        return
    mine = object()
    if said.setdefault(key, mine) is not mine:  # one step, so that only one of several threads warns
        return
    end = f"warnings.filterwarnings('ignore', '{key}', tritonpack.PackingWarning)"
    warnings.warn(f"{key}: {message} To silence this warning: {end}", PackingWarning, stacklevel=_users_level())


def tell_once(key: str, message: str) -> None:
    """Print a message to standard error at the first call with this key in the process, if it `may_print`."""
    mine = object()
    if said.setdefault(key, mine) is mine and may_print():
        print(f"tritonpack: {message}", file=sys.stderr, flush=True)


def may_print() -> bool:
    """Return whether this process may print: only the first rank of a machine and its first DataLoader worker may."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    return sys.stderr is not None and os.environ.get("LOCAL_RANK", "0") == "0" and (worker is None or worker.id == 0)


@contextmanager
def silenced() -> Iterator[None]:
    """Silence warnings in this thread. A later call still warns, because calls of a proof aren't the user's calls."""
    outer = hasattr(_silenced, "now")
    _silenced.now = True
    try:
        yield
    finally:
        if not outer:
            del _silenced.now


def knows_patched_models() -> bool:
    """Return whether `patched_models` holds every model that may get a batch made in this process.

    A DataLoader's worker makes batches for the process that started it. A forked worker knows the models that were
    patched before the fork; a spawned worker knows none. Only the first of several workers returns True.
    """
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    if worker is None:
        return True
    parent = parent_process()
    return worker.id == 0 and parent is not None and parent.pid == _imported_by


def _users_level() -> int:
    """Return the caller's `stacklevel` of the innermost frame that is neither in this package nor in torch."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in (__name__.split(".")[0], "torch"):
        level, frame = level + 1, frame.f_back
    return level
