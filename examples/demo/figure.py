"""The demo's picture: one step's documents as they are batched, and the speed and the losses of each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from examples.demo.drawing import (
    DOCUMENT_COLORS,
    INK,
    document_color,
    draw_rows,
    letters,
    make_panels,
)
from examples.demo.training import WAYS, Run, Way
from tritonpack.packing.lengths import count

_COLORS: dict[Way, str] = {"padded": "#0072B2", "unpadded": "#CC79A7", "naive": "#D55E00", "packed": "#009E73"}
_LEAK_COLOR = "#F7D9C8"
_MASK_PIXELS = 480


def draw(path: Path, runs: Mapping[Way, Run], lengths: Sequence[int]) -> None:
    """Draw the picture.

    Args:
        path: the PNG to write.
        runs: the measurements of each way.
        lengths: tokens of each document of one step, which the upper panels show.
    """
    figure, ((rows, seen), (speed, gaps)) = make_panels(
        "One small Llama, the same documents, four ways to batch them", 2, 2, height=7.3, width=9.5
    )
    _draw_rows(rows, lengths)
    _draw_attention(seen, lengths)
    _draw_speed(speed, runs)
    _draw_gaps(gaps, runs)
    figure.savefig(path, format="png")


def _draw_rows(axes: Axes, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    rows = [[(number, length), (None, longest - length)] for number, length in enumerate(lengths)]
    draw_rows(axes, rows, longest, len(rows), pixels=700)
    padding = 1 - sum(lengths) / (len(lengths) * longest)
    axes.set(title=f"padded: {count(len(lengths), 'row')}, {padding:.0%} padding (hatched)", ylabel="row")


def _draw_attention(axes: Axes, lengths: Sequence[int]) -> None:
    """Draw which keys each query of the step's row sees, sampled; documents in their colors."""
    total = sum(lengths)
    sampled = np.linspace(0, total - 1, min(total, _MASK_PIXELS)).astype(int)
    document = np.repeat(np.arange(len(lengths)), lengths)[sampled]
    causal = sampled <= sampled[:, None]
    own = causal & (document == document[:, None])
    colors = ListedColormap(["white", _LEAK_COLOR, *DOCUMENT_COLORS])
    axes.imshow(
        np.where(own, 2 + document[:, None] % len(DOCUMENT_COLORS), causal),
        cmap=colors,
        vmin=0,
        vmax=colors.N - 1,
        extent=(0, total, total, 0),
        interpolation="nearest",
        aspect="auto",
    )
    for number, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        if length > 0.03 * total:
            axes.text(end - 0.68 * length, end - 0.3 * length, letters(number), ha="center", va="center", fontsize=11)
    handles = [
        Patch(color=document_color(0), label="seen if packed"),
        Patch(color=_LEAK_COLOR, label="seen too if naive"),
    ]
    axes.legend(handles=handles, loc="upper right", framealpha=0.9)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(title="packed: 1 row; naive: without boundaries", xlabel="key (token)", ylabel="query (token)")


def _draw_speed(axes: Axes, runs: Mapping[Way, Run]) -> None:
    speeds = [runs[way].tokens_per_second for way in WAYS]
    bars = axes.bar(WAYS, speeds, color=[_COLORS[way] for way in WAYS], width=0.6)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, color=INK)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(title="speed, padding not counted", ylabel="tokens per second")


def _draw_gaps(axes: Axes, runs: Mapping[Way, Run]) -> None:
    """Draw how far the training loss of each way is from padded's."""
    for way in WAYS[1:]:
        gap = np.abs(np.subtract(runs[way].losses, runs["padded"].losses))
        apart = np.flatnonzero(gap)  # a logarithmic axis has no zero
        label = f"{way} (largest: {gap.max():.1e})" if len(apart) else f"{way} (0 at every step)"
        axes.plot(apart + 1, gap[apart], color=_COLORS[way], marker=".", label=label)
    axes.set(title="distance of the loss from padded's", xlabel="step", ylabel="nats per token", yscale="log")
    axes.legend(loc="center", framealpha=0.9)  # between naive's line and the exact ways'
