"""Resumes an epoch, also after the number of ranks or another setting has changed.

A segment is a part of an epoch that is planned with the same settings. It plans the units that earlier segments left
over, in the order of the epoch, so every unit is trained on once. A state holds the settings of its segment and of
earlier ones, with the rows that are done, so all of them are planned again when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pprint import pformat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritonpack.checks import check_flag
from tritonpack.packing.lengths import check_integer
from tritonpack.packing.planning.order import Order, epoch_order
from tritonpack.packing.planning.plan import (
    MOST_RANKS,
    MOST_TOKENS,
    Plan,
    check_options,
    choose_steps_together,
    plan_stream,
)
from tritonpack.packing.units import Units

VERSION = 4  # of states


@dataclass(frozen=True, eq=False)
class Segment:
    """What earlier segments of an epoch left over, planned; the first segment plans the whole epoch.

    Attributes:
        settings: what decides the plan: `tokens_per_row`, `num_ranks`, `seed`, `shuffle`, and the options `objective`,
            `tail` and `least_steps` of `plan_epoch`.
        plan: the rows, with the numbers of the dataset's units.
        num_left: the units that were left over and fit into a row.
        steps_before: the steps of earlier segments; one that wasn't whole counts.
    """

    settings: Mapping[str, Any]
    plan: Plan
    num_left: int
    steps_before: int

    @cached_property
    def digest(self) -> str:
        return digest(self.plan.items, self.plan.offsets)


class Place(NamedTuple):
    """The epoch of a state, the segment that goes on, the batches of the epoch that are done, the saved settings."""

    epoch: int
    before: str
    made: Segment
    done: int
    saved: Mapping[str, Any]


def plan_segment(
    units: Units, epoch: int, before: str, settings: Mapping[str, Any], order: Order | None = None
) -> Segment:
    """Plan what earlier segments of an epoch leave over.

    Args:
        units: those that are longer than a row are left out.
        before: the earlier segments, from `after`; an empty string for none.
        settings: as in `Segment`.
        order: see `MultipackDistributedBatchSampler`.

    Raises:
        ValueError: settings or a text that can't be.
    """
    done, steps = np.zeros(len(units), dtype=np.int64), 0
    try:
        earlier = [(dict(own), rows) for own, rows in json.loads(before or "[]")]
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"before, which holds the earlier settings, is damaged: {before!r:.60}.") from None
    for own, rows in earlier:
        plan, _ = _plan_left(units, epoch, done, own, order)
        rows = check_integer(rows, "the rows of earlier settings", 0, len(plan.offsets) - 1)
        trained = plan.items[: min(int(plan.offsets[rows]), plan.num_documents)]
        done += np.bincount(trained, minlength=len(units))
        steps += -(-rows // plan.num_ranks)
    plan, num_left = _plan_left(units, epoch, done, settings, order)
    return Segment(settings, plan, num_left, steps)


def after(before: str, settings: Mapping[str, Any], rows_done: int) -> str:
    """The earlier segments as JSON, for a state that is saved after `rows_done` rows of a segment.

    It is text, because torch.distributed.checkpoint loads a state into one of the same shape.
    """
    return json.dumps([*json.loads(before or "[]"), [dict(settings), rows_done]]) if rows_done else before


def _plan_left(
    units: Units, epoch: int, done: NDArray[np.int64], settings: Mapping[str, Any], order: Order | None
) -> tuple[Plan, int]:
    """Plan the units that aren't done; `done` says how often each was trained on. Return the number of them, too."""
    options = dict(settings)
    capacity = check_integer(options.pop("tokens_per_row", None), "tokens_per_row", 1, MOST_TOKENS)
    num_ranks = check_integer(options.pop("num_ranks", None), "num_ranks", 1, MOST_RANKS)
    seed, shuffle = options.pop("seed", None), check_flag(options.pop("shuffle", None), "shuffle")
    if options.keys() != {"objective", "tail", "least_steps"}:
        raise ValueError(f"they are {', '.join(map(repr, settings))}.")
    check_options(options["objective"], options["tail"])
    check_integer(options["least_steps"], "least_steps")
    fitting = units.tokens <= capacity
    if order is not None:
        numbers = epoch_order(len(units), seed, epoch, order=order)
        numbers = numbers[fitting[numbers]]
    else:
        numbers = np.flatnonzero(fitting).astype(np.int32)
        numbers = numbers[epoch_order(len(numbers), seed, epoch, shuffle)]
    options["steps_together"] = 1
    if shuffle and order is None and len(numbers):
        options["steps_together"] = choose_steps_together(units.tokens[fitting], capacity, num_ranks)
    if done.any():
        # What is left stays in the order of the whole epoch; of a unit that comes several times the first are done.
        by_unit = np.argsort(numbers, kind="stable")
        turn = np.arange(len(numbers)) - np.searchsorted(numbers[by_unit], numbers[by_unit])
        numbers = numbers[np.sort(by_unit[turn >= done[numbers[by_unit]]])]
        options["least_steps"] = 1  # an epoch that changes its ranks can't have the number of steps of other epochs
    squares = None if units.are_documents else units.squares[numbers]
    return plan_stream(numbers, units.tokens[numbers], squares, capacity, num_ranks, **options), len(numbers)


def check_state(state: Any, names: set[str], owner: str) -> None:
    """ValueError unless a state has the version of this package and these names."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a state of {owner} must be a mapping, as state_dict() returns it; got {type(state).__name__} "
            f"{state!r:.60}."
        )
    if "version" in state and not same(state["version"], VERSION):
        fault = f"it has version {state['version']!r}. Resume with the version of tritonpack that saved it, or begin"
        fault += " the epoch anew"
    else:
        wrong = {"it lacks": names - set(state), "it also has": set(state) - names}
        fault = "; ".join(f"{has} {', '.join(sorted(map(repr, those)))}" for has, those in wrong.items() if those)
    if fault:
        raise ValueError(f"this isn't a state of version {VERSION} of {owner}: {fault}.")


def digest(*arrays: NDArray[Any]) -> str:
    """32 hexadecimal digits of the values of arrays, the same on every machine."""
    summary = hashlib.blake2b(digest_size=16)
    for array in arrays:
        summary.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).data)
    return summary.hexdigest()


def describe_changes(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Which settings differ, such as "seed was 1 and is 0"; an empty string if none does."""
    changes, words = [], {"tokens_per_row": "the tokens of a row", "num_ranks": "the number of ranks"}
    for name in sorted({*settings, *saved}, key=str):
        was, now = (repr(values[name]) if name in values else "missing" for values in (saved, settings))
        if not (name in saved and name in settings and same(saved[name], settings[name])):
            changes.append(f"{words.get(name, name)} was {was} and is {now}")
    return "; ".join(changes)


def same(one: Any, other: Any) -> bool:
    """Whether plain values are equal and of the same types: True isn't 1."""
    return pformat(one) == pformat(other)
