"""EqualEpochs: a sampler whose epochs have the same number of steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from tritonpack.packing.distributed import MultipackDistributedBatchSampler
from tritonpack.packing.plan import Plan


class EqualEpochs(MultipackDistributedBatchSampler):
    """A MultipackDistributedBatchSampler of which several epochs have the same number of steps.

    How well rows fill depends on the order of the documents, so one epoch may have a step more than another. A trainer
    that plans its training by the length of the first epoch would leave that step out.

    >>> sampler = EqualEpochs(8, [5, 3, 4, 4, 2, 6, 8, 8], num_replicas=1, rank=0, tail="spread", steps_together=64)
    >>> len(sampler)
    5
    >>> sampler.equalize(2)
    >>> len(sampler), [sampler.set_epoch(1), len(sampler)][1]
    (6, 6)
    """

    _steps = 0

    def equalize(self, epochs: int) -> None:
        """Give the epochs 0 to `epochs` - 1 as many steps as the one of them with the most."""
        self._steps, self._made = 0, None
        if epochs > 1:
            self._steps = max(self._make(epoch).num_steps for epoch in range(epochs))

    def _make(self, epoch: int) -> Plan:
        return with_steps(super()._make(epoch), self._steps)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "least_steps": self._steps}


def with_steps(plan: Plan, num_steps: int) -> Plan:
    """The plan with at least `num_steps` steps: steps that hold many documents become several steps.

    >>> plan = Plan(np.arange(5, dtype=np.int32), np.array([0, 1, 2, 4, 5]), num_ranks=1, capacity=8)
    >>> [row.tolist() for row in with_steps(plan, 5).rows_of_rank(0)]
    [[0], [1], [2], [3], [4]]

    Raises:
        ValueError: too few documents.
    """
    if plan.num_steps >= num_steps:
        return plan
    held = np.diff(plan.offsets).reshape(plan.num_steps, plan.num_ranks).min(axis=1)  # (steps,)
    parts = np.ones_like(held)
    for _ in range(num_steps - plan.num_steps):
        most = int(np.argmax(held / parts))
        if held[most] == parts[most]:
            raise ValueError(
                f"{len(plan.items)} documents can't make {num_steps} steps in which each of {plan.num_ranks} ranks has "
                "one. Use fewer ranks or more documents."
            )
        parts[most] += 1
    rows = []
    for step, count in enumerate(parts):
        whole = [plan.row(step, rank) for rank in range(plan.num_ranks)]
        rows += [row[part::count] for part in range(count) for row in whole] if count > 1 else whole
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Plan(np.concatenate(rows), offsets, plan.num_ranks, plan.capacity)
