"""The legs of an epoch: parts that were trained on with different settings, such as different numbers of ranks.

Every leg plans the documents that the legs before it left over, in the order of the epoch. So an epoch that was broken
off goes on with any number of ranks, and every document is trained on once. A leg is a few numbers: planning it again
tells which documents it has trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from tritonpack.packing.samplers.state import are_documents, digest
from tritonpack.packing.units import Units, check_budgets

_OWN = ("rows_done", "plan")  # what a leg holds besides its settings


@dataclass(frozen=True)
class Leg:
    """A part of an epoch.

    Attributes:
        settings: what decides the plan: `batch_max_length`, `num_replicas`, `seed`, `shuffle`, and the options of
            `plan_epoch`, as plain numbers, strings and mappings.
        rows_done: the first rows of the plan, which were trained on; a step has a row for each rank.
        plan: the digest of the plan.
    """

    settings: Mapping[str, Any]
    rows_done: int
    plan: str

    @property
    def num_replicas(self) -> int:
        return self.settings["num_replicas"]

    @property
    def steps_done(self) -> int:
        """The number of steps; a step that isn't whole counts."""
        return -(-self.rows_done // self.num_replicas)


@dataclass(frozen=True, eq=False)
class Rest:
    """What the legs of an epoch left over, planned with other settings; without legs the whole epoch.

    Attributes:
        settings: as in a leg.
        plan: the rows, with the document numbers of the dataset.
        num_left: the documents that were left over and aren't too long.
        tokens_before: (steps,) int64, the tokens of each step of the legs.
    """

    settings: Mapping[str, Any]
    plan: Plan
    num_left: int
    tokens_before: NDArray[np.int64]

    @property
    def steps_before(self) -> int:
        return len(self.tokens_before)

    @cached_property
    def digest(self) -> str:
        return digest(self.plan.items, self.plan.offsets)

    @cached_property
    def dropped_documents(self) -> int:
        """The documents that are in no row of the plan."""
        return self.num_left - self.plan.num_documents


def plan_rest(
    units: Units, epoch: int, legs: Sequence[Leg], settings: Mapping[str, Any], order: Order | None = None
) -> Rest:
    """Plan what the legs of an epoch leave over.

    Args:
        units: those that don't fit into a row, by `batch_max_length` or by a budget, are left out.
        legs: in the order of training.
        settings: as in a leg.
        order: see `MultipackDistributedBatchSampler`.

    Raises:
        ValueError: settings or legs that can't be.
        OtherPlanError: the plan of a leg has another digest.
    """
    done = np.zeros(len(units), dtype=np.int32)  # how often each unit was trained on
    tokens_before = [np.zeros(0, dtype=np.int64)]
    for number, leg in enumerate(legs):
        try:
            plan, _ = _plan(units, epoch, done, leg.settings, order)
            check_leg(leg, plan)
        except ValueError as error:
            raise ValueError(f"leg {number} of the state can't be: {error}") from None
        ends = plan.offsets[: leg.rows_done + 1 : leg.num_replicas]
        tokens = np.append(0, np.cumsum(units.tokens[plan.items]))
        ends = np.append(ends, plan.offsets[leg.rows_done])[: leg.steps_done + 1]
        tokens_before.append(np.diff(tokens[ends]))
        done += np.bincount(plan.items[: plan.offsets[leg.rows_done]][: plan.num_documents], minlength=len(units))
    plan, num_left = _plan(units, epoch, done, settings, order)
    return Rest(settings, plan, num_left, np.concatenate(tokens_before))


def check_leg(leg: Leg, plan: Plan) -> None:
    """Check a leg against its plan, made again.

    Raises:
        ValueError: a number of rows that the plan doesn't have.
        OtherPlanError: the leg has the digest of another plan.
    """
    if leg.plan != digest(plan.items, plan.offsets):
        raise OtherPlanError
    check_integer(leg.rows_done, "rows_done", 0, len(plan.offsets) - 1, "the number of rows of its plan")


class OtherPlanError(Exception):
    """The settings of a leg make another plan now than when it was saved."""


def _plan(
    units: Units, epoch: int, done: NDArray[np.integer], settings: Mapping[str, Any], order: Order | None
) -> tuple[Plan, int]:
    """The plan of the units that aren't done, and their number."""
    options = dict(settings)
    capacity = check_integer(options.pop("batch_max_length"), "batch_max_length", 1, MOST_TOKENS)
    num_ranks = check_integer(options.pop("num_replicas"), "num_replicas", 1, MOST_RANKS)
    options["budgets"] = budgets = check_budgets(units, options["budgets"])
    if options["cost_model"] is not None:
        options["cost_model"] = _cost_model(options["cost_model"])
    seed, shuffle = options.pop("seed"), check_flag(options.pop("shuffle"), "shuffle")
    fitting = units.tokens <= capacity
    for name, budget in budgets.items():
        fitting &= units.resources[name] <= budget
    chosen = np.flatnonzero(fitting).astype(np.int32)
    if order is not None:
        numbers = given_order(order, len(units), seed, epoch)
        numbers = numbers[fitting[numbers]]
    else:
        numbers = chosen[shuffled(len(chosen), seed, epoch)] if shuffle else chosen
    # What is left stays in the order of the whole epoch, in which units that were deferred come first.
    left = _without(numbers, done)
    if done.any():  # an epoch that changes its ranks can't have the number of steps of other epochs
        options["least_steps"] = 1
    place = np.zeros(len(units), dtype=np.int32)
    place[chosen] = np.arange(len(chosen), dtype=np.int32)
    # Documents by their lengths, which are planned in less time.
    kept = units.tokens[chosen] if are_documents(units) else units.select(chosen)
    plan = plan_epoch(kept, capacity, num_ranks, order=place[left], **options)
    return replace(plan, items=chosen[plan.items]), len(left)


def _without(order: NDArray[np.int32], done: NDArray[np.integer]) -> NDArray[np.int32]:
    """An order of documents without the first `done` entries of each."""
    if not done.any():
        return order
    by_document = np.argsort(order, kind="stable")
    numbers = order[by_document]
    turn = np.arange(len(order)) - np.searchsorted(numbers, numbers)
    return order[np.sort(by_document[turn >= done[numbers]])]


def _cost_model(value: Any) -> CostModel:
    if not isinstance(value, Mapping) or set(value) != {"per_token", "per_square", "per_step"}:
        raise ValueError(f"cost_model must be None or have per_token, per_square and per_step; got {value!r:.100}.")
    return CostModel(**value)


def write_legs(legs: Sequence[Leg]) -> str:
    """Legs as JSON.

    A string, because torch.distributed.checkpoint loads a state into one of the same shape, and would lose the legs
    beyond those that a list has already. A leg without budgets has no such entry, as in states from before there were
    any.
    """
    written = [{**leg.settings, "rows_done": leg.rows_done, "plan": leg.plan} for leg in legs]
    return json.dumps([{name: leg[name] for name in leg if name != "budgets" or leg[name]} for leg in written])


def read_legs(text: Any, settings: Mapping[str, Any]) -> list[Leg]:
    """The legs that `write_legs` wrote, which have the same names as `settings`.

    Raises:
        ValueError: damaged text. The values of settings and the numbers of rows are checked by `plan_rest`.
    """
    if not isinstance(text, str):
        raise ValueError(f"legs of the state must be a str; got {type(text).__name__} {text!r:.60}.")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not all(isinstance(leg, dict) for leg in found):
        raise ValueError(f"legs of the state must be a list of legs in JSON, with at least one; got {text!r:.60}.")
    legs = []
    for number, leg in enumerate(found):
        leg.setdefault("budgets", {})
        for verb, names in (("lacks", {*settings, *_OWN} - set(leg)), ("also has", set(leg) - {*settings, *_OWN})):
            if names:
                raise ValueError(f"leg {number} of the state {verb} {', '.join(map(repr, sorted(names)))}.")
        if not isinstance(leg["plan"], str):
            raise ValueError(f"plan of leg {number} of the state must be a str; got {leg['plan']!r:.60}.")
        check_integer(leg["rows_done"], f"rows_done of leg {number} of the state", 0, None)
        legs.append(Leg({name: leg[name] for name in settings}, leg["rows_done"], leg["plan"]))
    return legs
