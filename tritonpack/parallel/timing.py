"""How long a layer's attention takes with each exchange: what overlaps with what, and who waits for whom.

All seconds, of one pass (forward or backward) through one layer. What is sent at a time goes one after the other, each
message taking its bytes over the bandwidth and a latency; computing and sending don't slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def all_gather(work: float, shares: Sequence[float], gathers: Sequence[float], scatters: Sequence[float]) -> float:
    """The first gather waits for nothing to compute, nor the last scatter; the others travel beside a step's work.

    Collectives keep ranks in step, so the slowest rank decides.

    Args:
        work: of the slowest rank, all steps together.
        shares: (steps,) of that work.
        gathers: (steps,) of keys and values.
        scatters: (steps,) of their gradients; zeros in forward.
    """
    seconds, before = gathers[0], 0.0
    for share, gather, scatter in zip(shares, [*gathers[1:], 0.0], scatters, strict=True):
        seconds += max(share * work, before + gather)
        before = scatter
    return seconds + before


def ring(work: NDArray[np.float64], keys: float, gradients: float) -> float:
    """Each rank begins a step when it's done with the step before and has its block, and waits for no other rank.

    Args:
        work: (ranks, ranks), of each rank on the keys of each.
        keys: that a block of keys and values takes to the next rank.
        gradients: that its gradients take; 0.0 in forward.
    """
    size = len(work)
    ranks = np.arange(size)
    neighbour, steps = ranks - 1, ranks[:, None]
    done = np.zeros(size)
    for step, seconds in enumerate(work[ranks, (ranks - steps) % size]):
        sent = (keys if step + 1 < size else 0.0) + (gradients if step else 0.0)
        computed = done + seconds
        # The neighbour sends when it begins the step. Where nothing is sent nobody waits for it.
        done = np.maximum(computed, np.maximum(done, done[neighbour]) + sent) if sent else computed
    if gradients:
        done = np.maximum(done, done[neighbour]) + gradients  # the own ones come home
    return float(done.max())
