"""The data sets of `compare --suite`, and the verdict on our planner beside the other samplers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.peers import Lengths, Sampler
from tests.lengths import log_normal
from tritonpack.packing.planning.plan import Plan
from tritonpack.packing.planning.statistics import plan_statistics

CLOSE = 0.001  # shares that differ by less count as equal
OURS = "tritonpack"
_RIVALS = ("multipack", "axolotl")
_TIMED = "multipack"  # axolotl's time is mostly the garbage collection at the end of its sampler


def _power_law(seed: int) -> NDArray[np.int64]:
    draws = np.random.default_rng(seed).pareto(1.1, 6000)
    return np.clip(100 * (draws + 1), 1, 8192).astype(np.int64)


def _bimodal(seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    long, short = rng.normal(0.6 * 8192, 0.05 * 8192, 4000), rng.normal(0.05 * 8192, 0.01 * 8192, 4000)
    return np.clip(np.where(rng.random(4000) < 0.3, long, short), 1, 8192).astype(np.int64)


def data_sets(openchat: Lengths) -> dict[str, tuple[int, Callable[[int], Lengths]]]:
    """Name to the capacity and a function of the seed that draws lengths."""

    def drawn(low: int, high: int, count: int, seed: int) -> Lengths:
        return np.random.default_rng(seed).integers(low, high, count)

    return {
        "OpenChat, 8,192": (8192, lambda seed: openchat),
        "OpenChat, 32,768": (32768, lambda seed: openchat),
        "power law": (8192, _power_law),
        "bimodal": (8192, _bimodal),
        "longer than half": (8192, partial(drawn, 4097, 8193, 2000)),
        "log-normal": (8192, lambda seed: log_normal(6000, high=8192, seed=seed)),
        "log-normal, 32,768": (32768, lambda seed: log_normal(20_000, seed=seed)),
        "tiny": (8192, partial(drawn, 1, 33, 20_000)),
        "uniform": (8192, partial(drawn, 100, 8193, 4000)),
        "thirds": (8192, partial(drawn, 2000, 3500, 4000)),
        "four lengths": (8192, lambda seed: np.random.default_rng(seed).choice([300, 1100, 2000, 3100], 6000)),
    }


class Row(NamedTuple):
    """Means over seeds of one sampler on one data set; `milliseconds` is the least of all runs."""

    steps: float
    full: float
    busy: float
    cost: float
    lag: float
    most: float
    spread: float
    covered: float
    milliseconds: float


_SHOWN = {
    "steps": "{:.4g}", "full": "{:.2%}", "busy": "{:.2%}", "busy by cost": "{:.2%}", "L2 lag": "{:,.0f}",
    "L2 max": "{:,.0f}", "spread": "{:.2f}x", "covered": "{:.2%}", "ms": "{:.2g}",
}  # fmt: skip


def measure(plans: Sequence[Plan], lengths: Sequence[Lengths], milliseconds: float, *, whole: bool) -> Row:
    """The measures of plans, if not `whole` without the last step of each.

    Samplers treat the documents that don't fill a last step differently: some leave them out, some make a short step.
    Without that step the tokens per step are comparable: the fewer steps, the fuller they are.
    """
    found = []
    for plan, own in zip(plans, lengths, strict=True):
        shown = plan_statistics(plan, own)
        rows = (plan.num_steps - (not whole)) * plan.num_ranks
        counted = Plan(plan.items[: plan.offsets[rows]], plan.offsets[: rows + 1], plan.num_ranks, plan.capacity)
        inner = shown if whole else plan_statistics(counted, own)
        shares = (inner.efficiency, inner.utilization, inner.cost_utilization)
        lags = (inner.l2_lag, inner.l2_lag_max)
        found.append((plan.num_steps, *shares, *lags, shown.spread or 0, shown.tokens_covered))
    return Row._make([*np.mean(found, axis=0).tolist(), milliseconds])


def print_table(
    sets: Mapping[str, tuple[int, Callable[[int], Lengths]]],
    samplers: Sequence[Sampler],
    options: argparse.Namespace,
    *,
    seeds: int,
    whole: bool,
) -> dict[str, dict[str, Row]]:
    """Print the measures of every sampler on every data set; returns them by data set and sampler."""
    left_out = "" if whole else "; full, busy and lag without the last step"
    print(f"\n{options.ranks} ranks, means over {seeds} seeds{left_out}\n")
    print("| lengths | sampler | " + " | ".join(_SHOWN) + " |\n" + "|---" * (2 + len(_SHOWN)) + "|")
    found: dict[str, dict[str, Row]] = {}
    for name, (capacity, draw) in sets.items():
        drawn = [draw(seed) for seed in range(seeds)]
        best, found[name] = _times(samplers, drawn, capacity, options), {}
        for sampler in samplers:
            how = (capacity, options.ranks, options.seed)
            plans = [checked(sampler.plan(own, *how, seed), own) for seed, own in enumerate(drawn)]
            found[name][sampler.name] = row = measure(plans, drawn, best[sampler.name], whole=whole)
            cells = (form.format(value) for form, value in zip(_SHOWN.values(), row, strict=True))
            print(f"| {name} | {sampler.name} | " + " | ".join(cells) + " |", flush=True)
    return found


def checked(plan: Plan, lengths: Lengths) -> Plan:
    """The plan; AssertionError if a document is in it twice or a row is above its capacity."""
    assert len(np.unique(plan.items)) == len(plan.items), "a document twice"
    assert not plan.num_steps or plan.sums(lengths).max() <= plan.capacity, "a row above its capacity"
    return plan


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    """The time of one call."""
    begin = perf_counter()
    work(*arguments)
    return perf_counter() - begin


def _times(
    samplers: Sequence[Sampler], sets: Sequence[Lengths], capacity: int, options: argparse.Namespace
) -> dict[str, float]:
    """The least milliseconds that one rank takes to plan an epoch; the samplers take turns."""
    prepared = {sampler.name: [sampler.prepare(own) for own in sets] for sampler in samplers}
    best = dict.fromkeys(prepared, float("inf"))
    for turn in range(options.repeats + 1):
        for sampler in samplers:
            for seed, own in enumerate(prepared[sampler.name]):
                took = 1e3 * seconds(sampler.own_work, own, capacity, options.ranks, options.seed, seed)
                if turn:  # the first call compiles
                    best[sampler.name] = min(best[sampler.name], took)
    return best


def losses(found: Mapping[str, Mapping[str, Row]]) -> str:
    """In words: where other samplers' steps are fuller, their ranks busier, or their times shorter than ours."""
    words = []
    for name, rows in found.items():
        own = rows[OURS]
        for rival, row in rows.items():
            if not rival.startswith(_RIVALS):
                continue
            for share in ("full", "busy"):
                if getattr(row, share) > getattr(own, share) + CLOSE:
                    words.append(f"{name}: {share} {getattr(own, share):.2%}, {rival} {getattr(row, share):.2%}")
            if rival.startswith(_TIMED) and row.milliseconds < own.milliseconds:
                words.append(f"{name}: {own.milliseconds:.2g} ms, {rival} {row.milliseconds:.2g} ms")
    return f"\nShares within {CLOSE:.1%} count as equal. Our rows that lose: {'; '.join(words) or 'none'}."
