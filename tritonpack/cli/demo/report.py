"""The demo's table and its verdict, all of it computed from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.demo.checks import Checks
from tritonpack.cli.demo.model import WAYS, Way
from tritonpack.cli.demo.training import Run

LAST_STEPS = 5  # the final training loss is the mean over so many steps


def final_loss(run: Run) -> float:
    """The mean training loss of the last steps."""
    last = run.losses[-LAST_STEPS:]
    return sum(last) / len(last)


def loss_gap(run: Run, other: Run) -> float:
    """The largest difference between two runs' training losses at one step."""
    return max(abs(a - b) for a, b in zip(run.losses, other.losses, strict=True))


def count(number: int, noun: str) -> str:
    """The number with its noun: "1 row", "8 rows"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def table(runs: Mapping[Way, Run]) -> Table:
    """One row per way."""
    padded = runs["padded"]
    result = Table(
        title="The same documents in the same order, three ways",
        caption="Tokens per second don't count padding. Losses are in nats per token: training is the mean of the last "
        f"{LAST_STEPS} steps; held-out is judged alike for all, documents apart, with stock attention; the gap is the "
        "largest distance of a step's training loss from padded's.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # with the box: within the 80 columns of a plain terminal, and of a pipe
    )
    result.add_column("way", no_wrap=True, min_width=6)
    for header in (
        "tokens/s",
        "speed",
        "peak\nmemory",
        "padding",
        "training\nloss",
        "held-out\nloss",
        "gap to\npadded",
    ):
        result.add_column(header, justify="right", no_wrap=True)
    for way in WAYS:
        run = runs[way]
        result.add_row(
            way,
            f"{run.tokens_per_second:,.0f}",
            f"{run.tokens_per_second / padded.tokens_per_second:.2f}x",
            "unknown" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:,.0f} MiB",
            f"{run.padding_share:.1%}",
            f"{final_loss(run):.4f}",
            f"{run.validation_loss:.4f}",
            "" if way == "padded" else f"{loss_gap(run, padded):.1e}",
        )
    return result


@dataclass(frozen=True)
class Verdict:
    """What the demo found, in sentences.

    Attributes:
        sentences: one finding each.
        holds: whether packed training is exact and isolated.
    """

    sentences: tuple[str, ...]
    holds: bool


def verdict(runs: Mapping[Way, Run], checks: Checks) -> Verdict:
    """Judge packed and naive training against padded training."""
    padded, naive, packed = (runs[way] for way in WAYS)
    gap, naive_gap = loss_gap(packed, padded), loss_gap(naive, padded)
    isolated = checks.moved["packed"] == 0
    closer = gap < naive_gap or checks.exact("naive")
    moved = "no bit of the others' logits" if isolated else f"THE OTHERS' LOGITS by up to {checks.moved['packed']:.1e}"
    sentences = (
        _agreement("packed", checks),
        _agreement("naive", checks),
        f"Over the run, packed's training loss stays within {gap:.1e} of padded's and naive's within {naive_gap:.1e}."
        + ("" if closer else " PACKED IS NO CLOSER THAN NAIVE: the packed run went wrong after its first step."),
        f"Isolation: changing one token of one document moves {moved} under packed, and the others' logits by up to "
        f"{checks.moved['naive']:.1e} under naive.",
    )
    return Verdict(sentences, holds=checks.exact("packed") and isolated and closer)


def _agreement(way: Way, checks: Checks) -> str:
    verb = "agree" if checks.exact(way) else "DISAGREE" if way == "packed" else "don't agree"
    errors = " and ".join(
        f"{name} by {error.of[way]:.1e} (padded itself by {error.of['padded']:.1e}; allowed: {error.bound:.1e})"
        for name, error in (("logits", checks.logits), ("gradients", checks.gradients))
    )
    return f"padded and {way} {verb}: at the initial weights {way} is off float64's {errors}."
