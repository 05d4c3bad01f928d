"""Resumes an epoch, also after the number of ranks or an option has changed.

A segment is a part of an epoch that is planned with the same settings. It plans the units that earlier segments left
over, in the order of the epoch, so every unit is trained on once. A state holds the settings of its segment, which are
planned again to tell what was trained on, and how often earlier segments trained on each unit.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_flag
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.planning.cost import CostModel
from tritonpack.packing.planning.order import Order, given_order, shuffled
from tritonpack.packing.planning.plan import MOST_RANKS, MOST_TOKENS, Plan, plan_epoch
from tritonpack.packing.samplers.state import digest
from tritonpack.packing.units import Units, check_budgets


@dataclass(frozen=True, eq=False)
class Segment:
    """What earlier segments of an epoch left over, planned; the first segment plans the whole epoch.

    Attributes:
        settings: what decides the plan: `batch_max_length`, `num_replicas`, `seed`, `shuffle`, and the options of
            `plan_epoch`, as plain numbers and strings: `budgets` and `cost_model` are JSON.
        plan: the rows, with the numbers of the dataset's units.
        num_left: the units that were left over and fit into a row.
        done: (units,) how often earlier segments trained on each unit.
        tokens_before: (steps,) int64, the tokens of each step of earlier segments.
    """

    settings: Mapping[str, Any]
    plan: Plan
    num_left: int
    done: NDArray[np.integer]
    tokens_before: NDArray[np.int64]

    @property
    def steps_before(self) -> int:
        return len(self.tokens_before)

    @cached_property
    def digest(self) -> str:
        return digest(self.plan.items, self.plan.offsets)

    @property
    def dropped_documents(self) -> int:
        """The units that are in no row of the plan."""
        return self.num_left - self.plan.num_documents

    def after(self, rows_done: int, tokens: NDArray[np.int64]) -> str:
        """The text for a state of the next segment, after the first rows of the plan; a step that isn't whole counts.

        Text, because torch.distributed.checkpoint loads a state into one of the same shape.

        Args:
            tokens: (units,) the tokens of each unit.
        """
        plan = self.plan
        items = plan.items[: plan.offsets[rows_done]]
        done = self.done + np.bincount(items[: plan.num_documents], minlength=len(tokens))
        ends = np.append(plan.offsets[: rows_done : plan.num_ranks], plan.offsets[rows_done])
        steps = np.diff(np.append(0, np.cumsum(tokens[items]))[ends])
        done = done.astype(np.min_scalar_type(int(done.max(initial=0))))
        header = json.dumps([done.dtype.str, [*self.tokens_before.tolist(), *steps.tolist()]])
        return base64.b64encode(zlib.compress(f"{header}\n".encode() + done.tobytes())).decode()


def _read(before: str, count: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """What `Segment.after` wrote: how often each unit is done, and the tokens of steps; ValueError if it is damaged."""
    if not before:
        return np.zeros(count, dtype=np.uint8), np.zeros(0, dtype=np.int64)
    try:
        header, done = zlib.decompress(base64.b64decode(before, validate=True)).split(b"\n", 1)
        kind, tokens = json.loads(header)
        found = np.frombuffer(done, dtype=np.dtype(kind)), np.array(tokens, dtype=np.int64)
    except (ValueError, TypeError, OverflowError, RecursionError, zlib.error):
        found = None
    if found is None or found[0].shape != (count,) or found[0].dtype.kind != "u" or found[1].ndim != 1:
        raise ValueError(f"before, what earlier settings trained on, is damaged: {before!r:.60}.")
    return found


def plan_segment(
    units: Units, epoch: int, before: str, settings: Mapping[str, Any], order: Order | None = None
) -> Segment:
    """Plan what earlier segments of an epoch leave over.

    Args:
        units: those that don't fit into a row, by `batch_max_length` or by a budget, are left out.
        before: what `Segment.after` of the segment before returned; an empty string for the first segment.
        settings: as in `Segment`.
        order: see `MultipackDistributedBatchSampler`.

    Raises:
        ValueError: settings or a text that can't be.
    """
    done, tokens_before = _read(before, len(units))
    options = dict(settings)
    capacity = check_integer(options.pop("batch_max_length"), "batch_max_length", 1, MOST_TOKENS)
    num_ranks = check_integer(options.pop("num_replicas"), "num_replicas", 1, MOST_RANKS)
    options["budgets"] = budgets = check_budgets(units, json.loads(options["budgets"]))
    cost_model = json.loads(options["cost_model"])
    if cost_model is not None:
        if not isinstance(cost_model, Mapping) or set(cost_model) != {"per_token", "per_square", "per_step"}:
            raise ValueError(f"cost_model has per_token, per_square and per_step; got {cost_model!r:.100}.")
        cost_model = CostModel(**cost_model)
    options["cost_model"] = cost_model
    seed, shuffle = options.pop("seed"), check_flag(options.pop("shuffle"), "shuffle")
    fitting = units.tokens <= capacity
    for name, budget in budgets.items():
        fitting &= units.resources[name] <= budget
    if order is not None:
        numbers = given_order(order, len(units), seed, epoch)
        numbers = numbers[fitting[numbers]]
    else:
        numbers = np.flatnonzero(fitting).astype(np.int32)
        numbers = numbers[shuffled(len(numbers), seed, epoch)] if shuffle else numbers
    if done.any():
        # What is left stays in the order of the whole epoch; of a unit that comes several times the first are done.
        by_unit = np.argsort(numbers, kind="stable")
        turn = np.arange(len(numbers)) - np.searchsorted(numbers[by_unit], numbers[by_unit])
        numbers = numbers[np.sort(by_unit[turn >= done[numbers[by_unit]]])]
        options["least_steps"] = 1  # an epoch that changes its ranks can't have the number of steps of other epochs
    plan = Plan(numbers[:0], np.zeros(1, dtype=np.int64), num_ranks, capacity)
    if len(numbers):
        plan = plan_epoch(units.select(numbers), capacity, num_ranks, order=np.arange(len(numbers)), **options)
        plan = replace(plan, items=numbers[plan.items])
    return Segment(settings, plan, len(numbers), done, tokens_before)
