"""divide_steps: makes more steps of a plan, so that several epochs have the same number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def divide_steps(
    items: NDArray[np.int32], offsets: NDArray[np.int64], num_ranks: int, least_steps: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The items and offsets of a plan with at least `least_steps` steps; a plan without steps stays empty.

    The steps with the most documents per row become several steps.

    >>> items, offsets = divide_steps(np.array([7, 5, 6, 9]), np.array([0, 1, 4]), num_ranks=1, least_steps=3)
    >>> [row.tolist() for row in np.split(items, offsets[1:-1])]
    [[7], [5, 9], [6]]

    Raises:
        ValueError: too few documents.
    """
    num_steps = (len(offsets) - 1) // num_ranks
    if not 0 < num_steps < least_steps:
        return items, offsets
    rows = np.split(items, offsets[1:-1])
    held = np.diff(offsets).reshape(num_steps, num_ranks).min(axis=1)  # (steps,)
    parts = np.ones_like(held)  # (steps,) the steps that each step becomes
    for _ in range(least_steps - num_steps):
        most = int(np.argmax(held / parts))
        if held[most] == parts[most]:
            raise ValueError(
                f"{len(items)} documents can't make least_steps={least_steps} steps in which each of {num_ranks} ranks "
                "has one. Ask for fewer steps, use fewer ranks or more documents."
            )
        parts[most] += 1
    divided = []
    for step, count in enumerate(parts):
        whole = rows[step * num_ranks : (step + 1) * num_ranks]
        divided += [row[part::count] for part in range(count) for row in whole]
    return np.concatenate(divided), np.concatenate([[0], np.cumsum([len(row) for row in divided])])
