"""Pictures: a grid of panels, colors, rows of documents drawn as bars; and the picture of `tritonpack plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tritonpack.cli.strategies import Result
from tritonpack.packing.lengths import count
from tritonpack.packing.planning.statistics import EVEN_LENGTH

INK = "#333333"
# Okabe and Ito's palette, which people with common forms of color blindness can tell apart. Its two darkest colors are
# lighter here, because letters are drawn on them.
DOCUMENT_COLORS = ("#56B4E9", "#E69F00", "#66C2A5", "#CC79A7", "#F0E442", "#E0885A")
PADDING_COLOR, ROOM_COLOR, _BAND_COLOR = "#BDBDBD", "#F2F2F2", "#D6E6F2"
_LOAD_STYLES: dict[str, dict[str, Any]] = {
    "most loaded rank": {"color": "#D55E00", "linewidth": 1.5},
    "mean rank": {"color": INK, "linewidth": 1.2, "linestyle": (0, (3, 1.5))},
    "least loaded rank": {"color": "#0072B2", "linewidth": 1.2},
}
_PACKED_ROWS, _PADDED_ROWS, _STEPS = 10, 16, 200  # the most that is drawn
_NARROWEST = 0.9  # the lowest load drawn, over the highest, is at most this: even loads look even
_PIXELS = 800  # about the width of a row


def make_panels(title: str, rows: int, columns: int, height: float, width: float = 15) -> tuple[Figure, Any]:
    """A figure of 1,800 pixels with a title, and its (rows, columns) axes; in a narrow one words are larger."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.14, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(width, height), dpi=1800 / width, layout=layout)
    figure.suptitle(title, fontsize=16, color=INK)
    panels = figure.subplots(rows, columns)
    for axes in figure.axes:
        axes.title.set_color(INK)
        axes.tick_params(colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def draw_rows(
    axes: Axes, rows: Sequence[Sequence[tuple[int | None, int]]], capacity: int, height: int, pixels: float
) -> None:
    """Draw one bar per row, with its documents from left to right, each with a letter where there is room for it.

    Args:
        rows: the segments of each row: the number of a document, or None for padding, and the tokens.
        capacity: tokens that fit into a row.
        height: rows that the panel has room for.
        pixels: about how wide a row is drawn.
    """
    scale, size = pixels / capacity, 7 * axes.figure.dpi / 120
    for y, row in enumerate(rows):
        place = (y - 0.4, 0.8)
        axes.broken_barh([(0, capacity)], place, facecolor=ROOM_COLOR, edgecolor=PADDING_COLOR, linewidth=0.8)
        ends = np.cumsum([length for _, length in row]).tolist()
        spans = [(number, end - length, length) for (number, length), end in zip(row, ends, strict=True) if length]
        padding = [(start, length) for number, start, length in spans if number is None]
        axes.broken_barh(padding, place, facecolor=PADDING_COLOR, edgecolor="white", hatch="////", linewidth=0)
        documents = [(number, start, length) for number, start, length in spans if number is not None]
        axes.broken_barh(
            [(start, length) for _, start, length in documents],
            place,
            facecolors=[document_color(number) for number, _, _ in documents],
            edgecolor="white",  # tells neighbors apart; it must not hide boxes of a few pixels
            linewidth=[min(length * scale / 10, 0.8) for _, _, length in documents],
        )
        for number, start, length in documents:
            name = letters(number)
            if length * scale > 9 * len(name) + 3:
                axes.text(start + length / 2, y, name, ha="center", va="center", fontsize=size, clip_on=True)
    axes.set_xlim(0, capacity)
    axes.set_ylim(height - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value + 1:.0f}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("position in the row (tokens)")


def document_color(number: int) -> str:
    """The color of a document, by its number from 0 on."""
    return DOCUMENT_COLORS[number % len(DOCUMENT_COLORS)]


def letters(number: int) -> str:
    """The name of a document, by its number from 0 on: A, B, ..., Z, AA, AB, ..."""
    before, last = divmod(number, 26)
    return (letters(before - 1) if before else "") + chr(ord("A") + last)


def draw_plan(path: Path, ours: Result, other: Result, lengths: NDArray[np.integer], title: str, seed: int) -> None:
    """Draw documents in padded and in packed rows, and the load of each rank in every step.

    Args:
        path: the PNG to write.
        ours, other: tritonpack's plan, and the packed plan whose loads are shown beside it.
        lengths: (documents,) the tokens of each document of both plans.
        seed: decides the order of the documents in the padded rows.
    """
    figure, ((padded, packed), (left, right)) = make_panels(title, 2, 2, height=9.5)
    _draw_documents(padded, packed, ours, lengths, seed)
    right.sharey(left)
    wide = lengths.astype(np.int64)
    # (steps, ranks): the cost of each row, over the cost of one token
    loads = [result.plan.sums(wide) + result.plan.sums(wide**2) / EVEN_LENGTH for result in (other, ours)]
    for axes, result, load in zip((left, right), (other, ours), loads, strict=True):
        _draw_loads(axes, result.name, load)
    # The last step doesn't set the scale, because it may be nearly empty. Our plan has at least one step.
    shown = np.concatenate([load[: min(_STEPS, max(len(load) - 1, 1))].ravel() for load in loads])
    top = 1.01 * shown.max()
    left.set_ylim(min(0.99 * shown.min(), _NARROWEST * top), top)
    left.set_ylabel("load of a rank, in tokens\n(attention counted in; the axis doesn't begin at 0)")
    handles = [
        Patch(facecolor=DOCUMENT_COLORS[0], label="A, B, ...: documents"),
        Patch(facecolor=PADDING_COLOR, hatch="////", edgecolor="white", label="padding, computed for nothing"),
        Patch(facecolor=ROOM_COLOR, edgecolor=PADDING_COLOR, label="room left in the row"),
        *(Line2D([], [], label=label, **style) for label, style in _LOAD_STYLES.items()),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, format="png")


def _draw_documents(padded: Axes, packed: Axes, ours: Result, lengths: NDArray[np.integer], seed: int) -> None:
    """Draw the first rows of our plan, and the same documents padded, in random order."""
    plan = ours.plan
    ranks = plan.num_ranks
    most = max(_PACKED_ROWS // ranks * ranks, min(ranks, _PACKED_ROWS))  # whole steps, if one has few enough rows
    rows = [plan.row(*divmod(index, ranks)).tolist() for index in range(min(plan.num_steps * ranks, most))]
    documents = np.concatenate(rows)
    order = np.random.default_rng(seed).permutation(documents)
    number_of = {document: number for number, document in enumerate(order.tolist())}
    packed_rows = [[(number_of[document], int(lengths[document])) for document in row] for row in rows]

    per_row = plan.capacity // int(lengths.max())
    padded_rows: list[list[tuple[int | None, int]]] = []
    slots = 0
    for start in range(0, len(order), per_row):
        row = lengths[order[start : start + per_row]].tolist()
        slots += len(row) * max(row)
        padded_rows.append([])
        for number, length in enumerate(row, start):
            padded_rows[-1] += [(number, length), (None, max(row) - length)]

    height = max(min(len(padded_rows), _PADDED_ROWS), len(rows))
    draw_rows(padded, padded_rows[:_PADDED_ROWS], plan.capacity, height, _PIXELS)
    draw_rows(packed, packed_rows, plan.capacity, height, _PIXELS)
    tokens = int(lengths[documents].sum())
    drawn = f" (the first {_PADDED_ROWS} drawn)" if len(padded_rows) > _PADDED_ROWS else ""
    many, full = count(len(padded_rows), "row"), tokens / len(rows) / plan.capacity
    padded.set_title(f"{count(len(order), 'document')} padded: {many}, {1 - tokens / slots:.0%} padding{drawn}")
    steps = f"steps 1 to {len(rows) // ranks}" if len(rows) > ranks else "step 1"
    which = steps if len(rows) >= ranks else f"step 1, ranks 1 to {len(rows)} of {ranks:,}"
    packed.set_title(f"{ours.name}: the same in {count(len(rows), 'row')} ({which}), {full:.1%} full")
    padded.set_ylabel("row")


def _draw_loads(axes: Axes, name: str, loads: NDArray[Any]) -> None:
    """Draw the largest, the mean and the smallest load of every step."""
    if not len(loads):
        axes.set_title(f"{name}: no whole step")
        return
    shown = loads[:_STEPS]
    edges = np.arange(len(shown) + 1) + 0.5
    axes.stairs(shown.max(1), edges, baseline=shown.min(1), fill=True, color=_BAND_COLOR)
    for values, style in zip((shown.max(1), shown.mean(1), shown.min(1)), _LOAD_STYLES.values(), strict=True):
        axes.stairs(values, edges, baseline=None, **style)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step" + (f" (the first {_STEPS} of {len(loads):,})" if len(loads) > _STEPS else ""))
    axes.set_xlim(edges[0], edges[-1])
    waiting = 1 - loads.mean() / loads.max(1).mean()
    waits = f"ranks wait {waiting:.1%} of the time for the most loaded one"
    axes.set_title(f"{name}: {waits if loads.shape[1] > 1 else 'load of each step'}")
