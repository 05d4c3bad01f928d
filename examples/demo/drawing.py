"""Pictures: a grid of panels, colors, rows of documents drawn as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

INK = "#333333"
# Okabe and Ito's palette, which people with common forms of color blindness can tell apart. Its two darkest colors are
# lighter here, because letters are drawn on them.
DOCUMENT_COLORS = ("#56B4E9", "#E69F00", "#66C2A5", "#CC79A7", "#F0E442", "#E0885A")
PADDING_COLOR, ROOM_COLOR = "#BDBDBD", "#F2F2F2"


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
