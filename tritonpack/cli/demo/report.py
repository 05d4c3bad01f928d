"""The demo's table, and the comparison of training losses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tritonpack.cli.demo.model import WAYS, Way
from tritonpack.cli.demo.training import Run

LAST_STEPS = 5  # the final training loss is their mean


def final_loss(run: Run) -> float:
    """The mean training loss of the last steps."""
    last = run.losses[-LAST_STEPS:]
    return sum(last) / len(last)


def loss_gap(run: Run, other: Run) -> float:
    """The largest difference between the training losses of two runs at one step."""
    return float(np.abs(np.subtract(run.losses, other.losses)).max())  # nan if a loss is


def table(runs: Mapping[Way, Run]) -> Table:
    """One row per way."""
    padded = runs["padded"]
    result = Table(
        title="The same documents in the same order, three ways",
        caption="Tokens per second don't count padding. Losses are in nats per token: training is the mean of the last "
        f"{min(LAST_STEPS, len(padded.losses))} steps; held-out is computed alike for all, each document alone, with "
        "stock attention; the gap is the largest distance of a step's training loss from padded's.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # with the box: within the 80 columns of a plain terminal, and of a pipe
    )
    result.add_column("way", no_wrap=True, min_width=6)
    for header in (
        *("tokens/s", "speed", "peak\nmemory", "padding"),
        *("training\nloss", "held-out\nloss", "gap to\npadded"),
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


def compare_losses(runs: Mapping[Way, Run], nothing_leaks: bool) -> tuple[bool, str]:
    """Compare the gaps of packed and naive training to padded training.

    Args:
        nothing_leaks: whether every step has one document, so that naive training is exact too.

    Returns:
        Whether packed's gap is the smaller one (or nothing leaks), and a sentence with both.
    """
    naive, packed = (loss_gap(runs[way], runs["padded"]) for way in ("naive", "packed"))
    closer = nothing_leaks or packed < naive  # false for nan
    return closer, (
        f"Over the run, packed's training loss stays within {packed:.1e} of padded's and naive's within {naive:.1e}."
        + ("" if closer else " PACKED IS NO CLOSER THAN NAIVE: packed training went wrong.")
    )
