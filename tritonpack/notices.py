"""Warnings that are said once per process, and the models that are patched in it.

What a single call can't tell from a mistake (a packed batch where no model is patched, a second epoch in the order of
the first) is a `PackingWarning`, not an error.
"""

from __future__ import annotations

import inspect
import os
import warnings
from multiprocessing import parent_process
from typing import Any
from weakref import WeakSet

from tritonpack.errors import PackingWarning

# The patched modules of this process: `patch()` adds them, `unpatch()` discards them.
patched_models: WeakSet[Any] = WeakSet()

_said: dict[str, object] = {}
_process = os.getpid()  # the process that imported this module; a fork of it keeps the number


def say_once(key: str, message: str) -> None:
    """Warn with `PackingWarning` at the first call for a key in this process; the warning names the user's line.

    Args:
        key: what the warning is about, in lower case with hyphens. The text begins with it, so filters can name it.
        message: the facts and the remedy, in whole sentences.
    """
    mine = object()
    if _said.setdefault(key, mine) is not mine:  # one step, so that of several threads one warns
        return
    end = f"warnings.filterwarnings('ignore', '{key}', tritonpack.PackingWarning)"
    warnings.warn(f"{key}: {message} To silence this warning: {end}", PackingWarning, stacklevel=_users_level())


def is_said(key: str) -> bool:
    """Whether a warning was said in this process, so that nobody need look for its cause again."""
    return key in _said


def knows_patched_models() -> bool:
    """Whether `patched_models` holds every model that could get a batch made in this process.

    A DataLoader's worker makes batches for the process that started it. A forked worker has the models that were
    patched when it was forked, a spawned worker has none. Of several workers the first speaks for all.
    """
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    if worker is None:
        return True
    parent = parent_process()
    return worker.id == 0 and parent is not None and parent.pid == _process


def _users_level() -> int:
    """The `stacklevel`, for the caller, of the innermost frame that is neither of this package nor of torch."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("tritonpack", "torch"):
        level, frame = level + 1, frame.f_back
    return level
