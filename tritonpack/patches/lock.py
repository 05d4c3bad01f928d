"""A lock that is released after an interrupt, too."""

from __future__ import annotations

from typing import Any


class Freed:
    """Releases a lock at the end of a block that holds it: `with Freed(lock), lock: ...`.

    An interrupt may come at the end of the inner block, before the lock is released. Then other threads would wait for
    ever.

    Args:
        lock: a `threading.RLock`.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._held_before = lock._is_owned()  # by an outer block in the same thread

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        while not self._held_before and self._lock._is_owned():
            self._lock.release()
