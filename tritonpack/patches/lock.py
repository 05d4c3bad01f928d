"""A lock that other threads get back after an interrupt."""

from __future__ import annotations

from typing import Any


class Freed:
    """Frees a lock when a block ends that also holds it: `with Freed(lock), lock: ...`.

    An interrupt may break in where the inner block ends, before it has released the lock. Other threads would wait for
    it for ever.

    Args:
        lock: a `threading.RLock`.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._held_before = lock._is_owned()  # by a block around this one, in the same thread

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        while not self._held_before and self._lock._is_owned():
            self._lock.release()
