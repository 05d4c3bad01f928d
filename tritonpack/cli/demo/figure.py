"""The demo's picture: what padding wastes, what a packed batch may attend to, and what each way cost and learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tritonpack.cli.demo.model import WAYS, Way
from tritonpack.cli.demo.report import count
from tritonpack.cli.demo.training import Run
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.packing import pack

# Okabe and Ito's palette, which people with any common colour vision can tell apart.
_WAY_COLORS: dict[Way, str] = {"padded": "#0072B2", "naive": "#D55E00", "packed": "#009E73"}
_DOCUMENT_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#F0E442", "#D55E00")
_PADDING_COLOR = "#E4E4E4"
_LEAK_COLOR = "#F7D9C8"
_INK = "#333333"
_MASK_PIXELS = 480


def draw(path: Path, runs: Mapping[Way, Run], lengths: Sequence[int]) -> None:
    """Draw the picture.

    Args:
        path: the PNG to write.
        runs: each way's measurements.
        lengths: tokens of each document of one step.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.14, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(15, 9), dpi=120, layout=layout)
    figure.suptitle("One small Llama, the same documents, three ways to batch them", fontsize=17, color=_INK)
    (padded, packed, mask), (speed, losses, gaps) = figure.subplots(2, 3)
    _draw_rows(padded, packed, lengths)
    _draw_mask(mask, lengths)
    _draw_speed(speed, runs)
    _draw_losses(losses, runs)
    _draw_gaps(gaps, runs)
    for axes in figure.axes:
        axes.title.set_color(_INK)
        axes.tick_params(colors=_INK)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_rows(padded: Axes, packed: Axes, lengths: Sequence[int]) -> None:
    """One step's documents, a row each with padding, and packed into rows of the same length."""
    capacity = max(lengths)
    packing = pack(lengths, capacity)
    _draw_strips(padded, [[item] for item in range(len(lengths))], lengths, capacity)
    _draw_strips(packed, [items.tolist() for items in packing], lengths, capacity)
    waste = 1 - sum(lengths) / (len(lengths) * capacity)
    padded.set_title(f"Padded: {count(len(lengths), 'row')}, {waste:.0%} padding")
    packed.set_title(f"Packed: {count(packing.num_bins, 'row')}, {packing.efficiency:.0%} full")
    packed.sharey(padded)
    padded.set_ylabel("row")
    padded.legend(handles=[Patch(color=_PADDING_COLOR, label="padding")], loc="lower right", framealpha=0.9)


def _draw_strips(axes: Axes, rows: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> None:
    axes.barh(range(len(rows)), capacity, color=_PADDING_COLOR, height=0.8)
    for row, items in enumerate(rows):
        start = 0
        for item in items:
            color = _DOCUMENT_COLORS[item % len(_DOCUMENT_COLORS)]
            axes.barh(row, lengths[item], left=start, color=color, height=0.8, edgecolor="white", linewidth=0.8)
            start += lengths[item]
    axes.set_xlim(0, capacity)
    axes.set_ylim(len(lengths) - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position in the row (tokens)")


def _draw_mask(axes: Axes, lengths: Sequence[int]) -> None:
    """The mask of one step's packed row, sampled; documents in their colours, and what naive attention sees besides."""
    mask = BlockDiagonalMask.from_seqlens(lengths)
    total = mask.num_queries
    sampled = np.linspace(0, total - 1, min(total, _MASK_PIXELS)).astype(int)
    start, stop = mask.key_start.numpy()[sampled, None], mask.key_stop.numpy()[sampled, None]
    document = np.repeat(np.arange(len(lengths)), lengths)[sampled]
    kind = np.where(sampled <= sampled[:, None], 1, 0)  # a later key is never seen, an earlier one by naive attention
    seen = (start <= sampled) & (sampled < stop)
    kind = np.where(seen, 2 + document[:, None] % len(_DOCUMENT_COLORS), kind)
    colors = ListedColormap(["white", _LEAK_COLOR, *_DOCUMENT_COLORS])
    axes.imshow(kind, cmap=colors, vmin=0, vmax=colors.N - 1, extent=(0, total, total, 0), interpolation="nearest")
    axes.set_title("Attention in one packed step")
    axes.set_xlabel("key (token)")
    axes.set_ylabel("query (token)")
    handles = [
        Patch(color=_DOCUMENT_COLORS[0], label="seen: the own document"),
        Patch(color=_LEAK_COLOR, label="seen by naive attention only"),
    ]
    axes.legend(handles=handles, loc="upper right", framealpha=0.9)


def _draw_speed(axes: Axes, runs: Mapping[Way, Run]) -> None:
    speeds = [runs[way].tokens_per_second for way in WAYS]
    bars = axes.bar(WAYS, speeds, color=[_WAY_COLORS[way] for way in WAYS], width=0.6)
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3, color=_INK)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title("Speed, padding not counted")
    axes.set_ylabel("document tokens per second")


def _draw_losses(axes: Axes, runs: Mapping[Way, Run]) -> None:
    styles: dict[Way, dict[str, object]] = {
        "padded": {"linewidth": 5, "alpha": 0.4},
        "naive": {"linewidth": 1.6},
        "packed": {"linewidth": 1.6, "linestyle": (0, (4, 2))},
    }
    for way in WAYS:
        run = runs[way]
        label = f"{way} (held out: {run.validation_loss:.3f})"
        axes.plot(range(1, len(run.losses) + 1), run.losses, color=_WAY_COLORS[way], label=label, **styles[way])  # type: ignore[arg-type]
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend(loc="upper right", framealpha=0.9)


def _draw_gaps(axes: Axes, runs: Mapping[Way, Run]) -> None:
    padded = runs["padded"].losses
    for way in WAYS[1:]:
        gap = np.abs(np.subtract(runs[way].losses, padded))
        apart = np.flatnonzero(gap)  # a logarithm has no place for the steps at an exact zero
        same = f"; 0 at {count(len(gap) - len(apart), 'step')}" if len(apart) < len(gap) else ""
        label = f"{way} (largest: {gap.max():.1e}{same})"
        axes.plot(apart + 1, gap[apart], color=_WAY_COLORS[way], marker=".", label=label)
    axes.set_yscale("log")
    axes.margins(y=0.3)  # room for the legend
    axes.set_title("Distance of the training loss from padded's")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend(loc="upper left", framealpha=0.9)
