"""The plan's picture: rows filled with documents, padded and packed, and how evenly each step loads its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from tritonpack.cli.plan.strategies import Result
from tritonpack.packing.plan import Plan
from tritonpack.packing.statistics import Cost

# Okabe and Ito's palette, which people with any common colour vision can tell apart, but for its darkest two: letters
# have to be read on it.
_DOCUMENT_COLORS = ("#56B4E9", "#E69F00", "#66C2A5", "#CC79A7", "#F0E442", "#E0885A")
_PADDING_COLOR = "#BDBDBD"
_ROOM_COLOR = "#F2F2F2"
_INK = "#333333"
_BAND_COLOR = "#D6E6F2"
_LOAD_STYLES: dict[str, dict[str, Any]] = {
    "most loaded rank": {"color": "#D55E00", "linewidth": 1.5},
    "mean rank": {"color": _INK, "linewidth": 1.2, "linestyle": (0, (3, 1.5))},
    "least loaded rank": {"color": "#0072B2", "linewidth": 1.2},
}
_PACKED_LINES, _PADDED_LINES = 10, 16  # drawn at most
_NARROWEST = 0.9  # the lowest load drawn, over the highest, is at most this
_STEPS = 200  # whose loads are drawn at most
_PIXELS = 800  # about what a row is wide


@dataclass(frozen=True)
class Segment:
    """A document in a line, or (without a number) padding: from its first token on."""

    document: int | None
    start: int
    length: int


def draw(
    path: Path,
    ours: Result,
    other: Result,
    lengths: NDArray[np.integer],
    cost: Cost,
    title: str,
    seed: int,
) -> None:
    """Draw the picture.

    Args:
        path: the PNG to write.
        ours: tritonpack's plan.
        other: the packed plan that its loads are shown beside.
        lengths: (documents,) tokens, which the plans' items count.
        cost: what a row costs, for the loads.
        title: over everything.
        seed: of the order in which the padded rows read the first documents.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.14, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(15, 9.5), dpi=120, layout=layout)
    figure.suptitle(title, fontsize=16, color=_INK)
    (padded, packed), (left, right) = figure.subplots(2, 2)
    _draw_rows(padded, packed, ours, lengths, seed)
    right.sharey(left)
    loads = [_work(result.plan, lengths, cost) for result in (other, ours)]
    for axes, result, work in zip((left, right), (other, ours), loads, strict=True):
        _draw_loads(axes, result, work)
    # A last step may be nearly empty, and is no reason to draw the others small. Ours has a step at least.
    shown = np.concatenate([work[: min(_STEPS, max(len(work) - 1, 1))].ravel() for work in loads])
    top = 1.01 * shown.max()
    left.set_ylim(min(0.99 * shown.min(), _NARROWEST * top), top)  # even loads look even
    left.set_ylabel("work of a rank, in tokens\n(attention counted in; the axis doesn't begin at 0)")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=6, frameon=False)
    for axes in figure.axes:
        axes.title.set_color(_INK)
        axes.tick_params(colors=_INK)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_rows(padded: Axes, packed: Axes, ours: Result, lengths: NDArray[np.integer], seed: int) -> None:
    """The first rows of our plan, and the same documents padded, lettered in the order in which they are read there."""
    plan = ours.plan
    ranks = plan.num_ranks
    count = min(plan.num_steps * ranks, max(_PACKED_LINES // ranks * ranks, min(ranks, _PACKED_LINES)))
    rows = [plan.row(*divmod(index, ranks)).tolist() for index in range(count)]
    documents = [document for row in rows for document in row]
    order = [documents[i] for i in np.random.default_rng(seed).permutation(len(documents))]
    number_of = {document: number for number, document in enumerate(order)}

    per_line = plan.capacity // int(lengths.max())
    padded_lines = [_padded_line(order[i : i + per_line], lengths) for i in range(0, len(order), per_line)]
    packed_lines = [_packed_line(row, lengths) for row in rows]
    height = max(min(len(padded_lines), _PADDED_LINES), len(packed_lines))
    for axes, lines in ((padded, padded_lines[:_PADDED_LINES]), (packed, packed_lines)):
        _draw_lines(axes, lines, plan.capacity, number_of, height)
        axes.set_xlabel("position in the row (tokens)")
    what = _rows_named(count, ranks)
    slots = sum(segment.length for line in padded_lines for segment in line)
    tokens = int(lengths[documents].sum())
    hidden = len(padded_lines) - _PADDED_LINES
    padded.set_title(
        f"{len(documents):,} documents padded: {len(padded_lines):,} rows, {1 - tokens / slots:.0%} padding"
        + (f" (the first {_PADDED_LINES} drawn)" if hidden > 0 else "")
    )
    packed.set_title(f"{ours.way.name}: the same in {what}, {tokens / count / plan.capacity:.1%} full")
    padded.set_ylabel("row")


def _rows_named(count: int, ranks: int) -> str:
    """Which rows of the plan the first so many are."""
    if count < ranks:
        return f"{count} rows (step 1, ranks 1 to {count} of {ranks:,})"
    steps = count // ranks
    return f"{count} {'row' if count == 1 else 'rows'} ({'step 1' if steps == 1 else f'steps 1 to {steps}'})"


def _packed_line(items: Sequence[int], lengths: NDArray[np.integer]) -> list[Segment]:
    ends = np.cumsum(lengths[items], dtype=np.int64).tolist()
    return [Segment(item, end - int(lengths[item]), int(lengths[item])) for item, end in zip(items, ends, strict=True)]


def _padded_line(items: Sequence[int], lengths: NDArray[np.integer]) -> list[Segment]:
    longest = int(lengths[items].max())
    line = []
    for place, item in enumerate(items):
        length = int(lengths[item])
        line.append(Segment(item, place * longest, length))
        line.append(Segment(None, place * longest + length, longest - length))
    return line


def _draw_lines(
    axes: Axes, lines: Sequence[Sequence[Segment]], capacity: int, number_of: dict[int, int], height: int
) -> None:
    """One bar per line, filled from the left; documents with their letters where there is room for one."""
    axes.set_xlim(0, capacity)
    axes.set_ylim(height - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value + 1:.0f}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _draw_boxes(
        axes, [(0, row, capacity) for row in range(len(lines))], [_ROOM_COLOR] * len(lines), edge=_PADDING_COLOR
    )
    documents, colors, padding = [], [], []
    for row, line in enumerate(lines):
        for segment in line:
            if segment.document is None:
                padding.append((segment.start, row, segment.length))
                continue
            number = number_of[segment.document]
            documents.append((segment.start, row, segment.length))
            colors.append(_DOCUMENT_COLORS[number % len(_DOCUMENT_COLORS)])
            name = _letters(number)
            if segment.length / capacity * _PIXELS > 9 * len(name) + 3:
                middle = segment.start + segment.length / 2
                axes.text(middle, row, name, ha="center", va="center", fontsize=7, color="black", clip_on=True)
    _draw_boxes(axes, documents, colors)
    _draw_boxes(axes, padding, [_PADDING_COLOR] * len(padding), hatch="////")


def _draw_boxes(
    axes: Axes,
    boxes: Sequence[tuple[int, int, int]],
    colors: Sequence[str],
    edge: str = "white",
    hatch: str | None = None,
) -> None:
    """Boxes (start, line, length). White edges tell neighbours apart, but would paint over boxes of a few pixels."""
    if not boxes:
        return
    start, line, length = np.array(boxes, dtype=float).T
    left, right, top, bottom = start, start + length, line - 0.4, line + 0.4
    corners = np.stack([np.stack([left, left, right, right], 1), np.stack([top, bottom, bottom, top], 1)], 2)
    pixels = length / axes.get_xlim()[1] * _PIXELS
    axes.add_collection(
        PolyCollection(
            list(corners),
            facecolors=list(colors),
            edgecolors=edge,
            linewidths=np.clip(pixels / 10, 0, 0.8),
            hatch=hatch,
        ),
        autolim=False,
    )


def _letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def _work(plan: Plan, lengths: NDArray[np.integer], cost: Cost) -> NDArray[np.float64]:
    """(steps, ranks): what each row costs, over what a token does."""
    wide = lengths.astype(np.int64)
    work = plan.sums(wide) + cost.per_square / cost.per_token * plan.sums(wide**2)
    return work.astype(np.float64)


def _draw_loads(axes: Axes, result: Result, work: NDArray[np.float64]) -> None:
    """The costliest, the mean and the cheapest rank of every step."""
    if not len(work):
        axes.set_title(f"{result.way.name}: no whole step")
        return
    shown = work[:_STEPS]
    most, mean, least = shown.max(1), shown.mean(1), shown.min(1)
    edges = np.arange(len(shown) + 1) + 0.5
    axes.stairs(most, edges, baseline=least, fill=True, color=_BAND_COLOR)
    for values, style in zip((most, mean, least), _LOAD_STYLES.values(), strict=True):
        axes.stairs(values, edges, baseline=None, **style)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step" + (f" (the first {_STEPS} of {len(work):,})" if len(work) > _STEPS else ""))
    axes.set_xlim(edges[0], edges[-1])
    waiting = 1 - work.sum() / (work.shape[1] * work.max(1).sum())
    waits = (
        f"ranks wait {waiting:.1%} of the time for the most loaded one"
        if work.shape[1] > 1
        else "the work of each step"
    )
    axes.set_title(f"{result.way.name}: {waits}")


def _legend() -> list[Line2D | Patch]:
    return [
        Patch(facecolor=_DOCUMENT_COLORS[0], label="A, B, ...: documents"),
        Patch(facecolor=_PADDING_COLOR, hatch="////", edgecolor="white", label="padding, computed for nothing"),
        Patch(facecolor=_ROOM_COLOR, edgecolor=_PADDING_COLOR, label="room left in the row"),
        *(Line2D([], [], label=label, **style) for label, style in _LOAD_STYLES.items()),
    ]
