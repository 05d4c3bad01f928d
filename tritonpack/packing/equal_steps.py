"""divide_steps: makes more steps of a plan, so that several epochs have the same number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tritonpack.packing.plan import Plan


def divide_steps(plan: Plan, least_steps: int) -> Plan:
    """The plan with at least `least_steps` steps: those with the most documents per row become several steps.

    Raises:
        ValueError: too few documents.
    """
    if not 0 < plan.num_steps < least_steps:
        return plan
    held = np.diff(plan.offsets).reshape(plan.num_steps, plan.num_ranks).min(axis=1)  # (steps,)
    parts = np.ones_like(held)  # (steps,) the steps that each step becomes
    for _ in range(least_steps - plan.num_steps):
        most = int(np.argmax(held / parts))
        if held[most] == parts[most]:
            raise ValueError(
                f"{len(plan.items)} documents can't make least_steps={least_steps} steps in which each of "
                f"{plan.num_ranks} ranks has one. Ask for fewer steps, use fewer ranks or more documents."
            )
        parts[most] += 1
    rows = []
    for step, count in enumerate(parts):
        whole = [plan.row(step, rank) for rank in range(plan.num_ranks)]
        rows += [row[part::count] for part in range(count) for row in whole]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return replace(plan, items=np.concatenate(rows), offsets=offsets)
