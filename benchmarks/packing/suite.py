"""The data sets of `compare --suite`, and the verdict on our planner beside the other samplers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.peers import Lengths, Sampler
from tests.lengths import log_normal
from tritonpack.packing.planning.plan import Plan, plan_epoch
from tritonpack.packing.planning.statistics import plan_statistics

SEEDS = 5
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
    covered: float
    full: float
    busy: float
    lag: float
    spread: float
    milliseconds: float


def measure(plans: Sequence[Plan], lengths: Sequence[Lengths], milliseconds: float) -> Row:
    """The measures of plans, without the last step of each.

    Samplers treat the documents that don't fill a last step differently: some leave them out, some make a short step.
    Without that step the tokens per step are comparable: the fewer steps, the fuller they are.
    """
    found = []
    for plan, own in zip(plans, lengths, strict=True):
        shown = plan_statistics(plan, own)
        rows = (plan.num_steps - 1) * plan.num_ranks
        whole = Plan(plan.items[: plan.offsets[rows]], plan.offsets[: rows + 1], plan.num_ranks, plan.capacity)
        inner = plan_statistics(whole, own)
        found.append(
            (plan.num_steps, shown.tokens_covered, inner.efficiency, inner.utilization, inner.l2_lag, shown.spread or 0)
        )
    steps, covered, full, busy, lag, spread = np.mean(found, axis=0).tolist()
    return Row(steps, covered, full, busy, lag, spread, milliseconds)


def print_suite(others: Sequence[Sampler], openchat: Lengths, options: argparse.Namespace) -> None:
    """Print the measures of every sampler on every data set, and which of our rows lose to which."""
    shown = ("steps", "full", "busy", "L2 lag", "spread", "covered", "ms")
    print(f"\n{options.ranks} ranks, means over {SEEDS} seeds; full, busy and lag without the last step\n")
    print("| lengths | sampler | " + " | ".join(shown) + " |\n" + "|---" * (2 + len(shown)) + "|")
    losses: list[str] = []
    for name, (capacity, draw) in data_sets(openchat).items():
        sets = [draw(seed) for seed in range(SEEDS)]
        samplers = [_ours(), *others]
        best = _times(samplers, sets, capacity, options)
        rows: dict[str, Row] = {}
        for sampler in samplers:
            plans = [checked(sampler.plan(own, capacity, options.ranks, 0, seed), own) for seed, own in enumerate(sets)]
            rows[sampler.name] = row = measure(plans, sets, best[sampler.name])
            cells = (
                f"{row.steps:.4g}", f"{row.full:.2%}", f"{row.busy:.2%}", f"{row.lag:,.0f}", f"{row.spread:.2f}x",
                f"{row.covered:.2%}", f"{row.milliseconds:.2g}",
            )  # fmt: skip
            print(f"| {name} | {sampler.name} | " + " | ".join(cells) + " |", flush=True)
        losses += _losses(name, rows)
    print(f"\nShares within {CLOSE:.1%} count as equal. Our rows that lose: " + ("; ".join(losses) or "none") + ".")


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


def _ours() -> Sampler:
    """Our planner as the sampler runs it."""

    def own_work(prepared: Any, capacity: int, ranks: int, seed: int, epoch: int) -> Plan:
        return plan_epoch(prepared, capacity, ranks, seed=seed, epoch=epoch)

    def prepare(lengths: Lengths) -> NDArray[np.int32]:
        return lengths.astype(np.int32)

    return Sampler(OURS, lambda lengths, *how: own_work(prepare(lengths), *how), own_work, prepare)


def _times(
    samplers: Sequence[Sampler], sets: Sequence[Lengths], capacity: int, options: argparse.Namespace
) -> dict[str, float]:
    """The least milliseconds that one rank takes to plan an epoch; the samplers take turns."""
    prepared = {sampler.name: [sampler.prepare(own) for own in sets] for sampler in samplers}
    best = dict.fromkeys(prepared, float("inf"))
    for turn in range(options.repeats + 1):
        for sampler in samplers:
            for seed, own in enumerate(prepared[sampler.name]):
                took = 1e3 * seconds(sampler.own_work, own, capacity, options.ranks, 0, seed)
                if turn:  # the first call compiles
                    best[sampler.name] = min(best[sampler.name], took)
    return best


def _losses(name: str, rows: dict[str, Row]) -> list[str]:
    """In words: where other samplers' steps are fuller, their ranks busier, or their times shorter than ours."""
    own, words = rows[OURS], []
    for rival, row in rows.items():
        if not rival.startswith(_RIVALS):
            continue
        for measure_name in ("full", "busy"):
            if getattr(row, measure_name) > getattr(own, measure_name) + CLOSE:
                words.append(
                    f"{name}: {measure_name} {getattr(own, measure_name):.2%}, {rival} {getattr(row, measure_name):.2%}"
                )
        if rival.startswith(_TIMED) and row.milliseconds < own.milliseconds:
            words.append(f"{name}: {own.milliseconds:.2g} ms, {rival} {row.milliseconds:.2g} ms")
    return words
