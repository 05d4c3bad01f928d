"""What the samplers' states share: digests of arrays, and what has changed since a state was saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def digest(*arrays: NDArray[Any]) -> str:
    """32 hexadecimal digits that tell arrays apart by their values, the same on every machine."""
    summary = hashlib.blake2b(digest_size=16)
    for array in arrays:
        summary.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
    return summary.hexdigest()


def refuse_changes(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """ValueError for settings that aren't those that a state was saved with, naming each."""
    changes = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted({*settings, *saved})
        if saved.get(name) != settings.get(name)
    ]
    if changes:
        raise ValueError(
            f"the state can't be resumed, because what it was saved with has changed: {'; '.join(changes)}. Restore "
            "that, or start an epoch anew with set_epoch."
        )
