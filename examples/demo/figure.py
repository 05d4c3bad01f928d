"""The demo's picture: one step's documents as they are batched, and the speed and the losses of each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from examples.demo.training import WAYS, Run, Way
from tritonpack.cli.figures import (
    DOCUMENT_COLORS,
    INK,
    document_color,
    draw_rows,
    letters,
    make_panels,
)
from tritonpack.cli.files import write_figure
from tritonpack.packing.lengths import count

_STYLES: dict[Way, dict[str, Any]] = {
    "padded": {"color": "#0072B2", "linewidth": 5, "alpha": 0.4, "zorder": 1},
    "unpadded": {"color": "#CC79A7", "linewidth": 1.6, "linestyle": (4, (4, 2))},  # fills the gaps of packed's line
    "naive": {"color": "#D55E00", "linewidth": 1.6, "zorder": 1.5},
    "packed": {"color": "#009E73", "linewidth": 1.6, "linestyle": (0, (4, 2))},
}
_LEAK_COLOR = "#F7D9C8"
_MASK_PIXELS = 480


def draw(path: Path, runs: Mapping[Way, Run], lengths: Sequence[int]) -> None:
    """Draw the picture.

    Args:
        path: the PNG to write.
        runs: the measurements of each way.
        lengths: tokens of each document of one step, which the upper panels show.
    """
    figure, ((padded, naive, packed), (speed, losses, gaps)) = make_panels(
        "One small Llama, the same documents, four ways to batch them", 2, 3, height=9
    )
    _draw_padded(padded, lengths)
    _draw_attention(naive, lengths, naive=True)
    _draw_attention(packed, lengths, naive=False)
    _draw_speed(speed, runs)
    _draw_losses(losses, gaps, runs)
    write_figure(path, figure)


def _draw_padded(axes: Axes, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    rows = [[(number, length), (None, longest - length)] for number, length in enumerate(lengths)]
    draw_rows(axes, rows, longest, len(rows), pixels=450)
    padding = 1 - sum(lengths) / (len(lengths) * longest)
    rows_and_padding = f"{count(len(lengths), 'row')}, {padding:.0%} padding (hatched)"
    axes.set(title=f"padded, unpadded: {rows_and_padding}", ylabel="row")


def _draw_attention(axes: Axes, lengths: Sequence[int], naive: bool) -> None:
    """Draw which keys each query of the step's row sees, sampled; documents in their colors."""
    total = sum(lengths)
    sampled = np.linspace(0, total - 1, min(total, _MASK_PIXELS)).astype(int)
    document = np.repeat(np.arange(len(lengths)), lengths)[sampled]
    causal = sampled <= sampled[:, None]
    own = causal & (document == document[:, None])
    colors = ListedColormap(["white", _LEAK_COLOR, *DOCUMENT_COLORS])
    axes.imshow(
        np.where(own, 2 + document[:, None] % len(DOCUMENT_COLORS), causal & naive),
        cmap=colors,
        vmin=0,
        vmax=colors.N - 1,
        extent=(0, total, total, 0),
        interpolation="nearest",
    )
    for number, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        if length > 0.03 * total:
            axes.text(end - 0.68 * length, end - 0.3 * length, letters(number), ha="center", va="center", fontsize=7)
    handles = [Patch(color=document_color(0), label="seen: the own document")]
    if naive:
        handles.append(Patch(color=_LEAK_COLOR, label="seen: other documents"))
    axes.legend(handles=handles, loc="upper right", framealpha=0.9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    title = "naive: 1 row, documents see each other" if naive else "packed, unpadded: 1 row, documents kept apart"
    axes.set(title=title, xlabel="key (token)", ylabel="query (token)")


def _draw_speed(axes: Axes, runs: Mapping[Way, Run]) -> None:
    speeds = [runs[way].tokens_per_second for way in WAYS]
    bars = axes.bar(WAYS, speeds, color=[_STYLES[way]["color"] for way in WAYS], width=0.6)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, color=INK)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(title="speed, padding not counted", ylabel="document tokens per second")


def _draw_losses(losses: Axes, gaps: Axes, runs: Mapping[Way, Run]) -> None:
    """Draw the training loss of each way, and its distance from padded's."""
    for way, run in runs.items():
        label = f"{way} (held out: {run.validation_loss:.3f})"
        losses.plot(range(1, len(run.losses) + 1), run.losses, label=label, **_STYLES[way])
    losses.set(title="training loss", xlabel="step", ylabel="nats per token")
    losses.legend(loc="upper right", framealpha=0.9)
    for way in WAYS[1:]:
        gap = np.abs(np.subtract(runs[way].losses, runs["padded"].losses))
        apart = np.flatnonzero(gap)  # a logarithmic axis has no zero
        equal = f"; 0 at {count(len(gap) - len(apart), 'step')}" if len(apart) < len(gap) else ""
        label = f"{way} (largest: {gap.max():.1e}{equal})" if len(apart) else f"{way} (0 at every step)"
        gaps.plot(apart + 1, gap[apart], color=_STYLES[way]["color"], marker=".", label=label)
    gaps.set(title="distance of the training loss from padded's", xlabel="step", ylabel="nats per token", yscale="log")
    gaps.legend(loc="center", framealpha=0.9)  # between naive's line and those of exact ways
