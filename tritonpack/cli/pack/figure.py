"""The picture of `tritonpack pack`: documents in the first rows, the same documents padded, lengths, and fill."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from tritonpack.cli.figures import DOCUMENT_COLORS, PADDING_COLOR, ROOM_COLOR, draw_rows, make_panels
from tritonpack.cli.files import write_figure
from tritonpack.cli.words import count, percent
from tritonpack.packing.columns import SEQ_LENGTHS

_PACKED_ROWS, _PADDED_ROWS = 10, 16  # drawn
_PIXELS = 800  # about the width of a row


def draw(path: Path, packed: dict[str, Any]) -> None:
    """Draw the picture from the rows on disk, of which only the lengths are read."""
    rows = datasets.load_from_disk(str(packed["path"])).select_columns(SEQ_LENGTHS).with_format("arrow")
    lists = [chunk for table in rows.iter(10_000) for chunk in table.column(SEQ_LENGTHS).chunks]
    lengths = np.concatenate([chunk.flatten().to_numpy() for chunk in lists])
    sizes = np.concatenate([chunk.value_lengths().to_numpy() for chunk in lists])
    ends = np.cumsum(sizes)
    tokens = np.diff(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)[ends - 1]]))  # (rows,)

    title = f"{packed['path'].name}: {count(packed['rows'], 'row')} of {count(packed['capacity'], 'token')}"
    figure, ((padded, first), (left, right)) = make_panels(title, 2, 2, height=9.5)
    _draw_first_rows(padded, first, lengths, ends, packed["capacity"])
    _draw_counts(
        left, lengths, packed["capacity"], f"{count(len(lengths), 'document')} in the rows", "tokens of a document"
    )
    least = count(packed["lower_bound"], "row")
    title = f"rows are {percent(packed['efficiency'])} full; no packing needs fewer than {least}"
    _draw_counts(right, tokens, packed["capacity"], title, "tokens of a row")
    left.set_ylabel("documents")
    right.set_ylabel("rows")
    handles = [
        Patch(facecolor=DOCUMENT_COLORS[0], label="A, B, ...: documents"),
        Patch(facecolor=PADDING_COLOR, hatch="////", edgecolor="white", label="padding, computed for nothing"),
        Patch(facecolor=ROOM_COLOR, edgecolor=PADDING_COLOR, label="room left in the row"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    write_figure(path, figure)


def _draw_first_rows(
    padded: Axes, packed: Axes, lengths: NDArray[np.int32], ends: NDArray[np.int64], capacity: int
) -> None:
    """Draw the first rows, and their documents in rows of as many as fit when padded to the longest in the row."""
    edges = [0, *ends[:_PACKED_ROWS].tolist()]
    rows = [[(number, int(lengths[number])) for number in range(start, stop)] for start, stop in pairwise(edges)]
    shown = lengths[: edges[-1]]
    batches: list[list[int]] = [[]]
    for number in np.random.default_rng(0).permutation(len(shown)).tolist():
        if (len(batches[-1]) + 1) * int(shown[[*batches[-1], number]].max()) > capacity:
            batches.append([])
        batches[-1].append(number)
    padded_rows: list[list[tuple[int | None, int]]] = []
    for batch in batches:
        longest = int(shown[batch].max())
        segments = [[(number, int(shown[number])), (None, longest - int(shown[number]))] for number in batch]
        padded_rows.append(list(chain.from_iterable(segments)))
    height = max(min(len(padded_rows), _PADDED_ROWS), len(rows))
    draw_rows(padded, padded_rows[:_PADDED_ROWS], capacity, height, _PIXELS)
    draw_rows(packed, rows, capacity, height, _PIXELS)
    total = int(shown.sum())
    padded.set_title(
        f"{count(len(shown), 'document')} padded: {count(len(padded_rows), 'row')}, "
        f"{percent(total / len(padded_rows) / capacity)} full"
        + (f" (the first {_PADDED_ROWS} drawn)" if len(padded_rows) > _PADDED_ROWS else "")
    )
    packed.set_title(f"the same in {count(len(rows), 'row')}, {percent(total / len(rows) / capacity)} full")
    padded.set_ylabel("row")


def _draw_counts(axes: Axes, values: NDArray[np.integer], capacity: int, title: str, label: str) -> None:
    edges = np.linspace(0, capacity, min(capacity, 60) + 1)
    axes.hist(values, bins=edges.tolist(), color=DOCUMENT_COLORS[0])
    axes.set_yscale("log")
    axes.set_xlim(0, capacity)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(title)
    axes.set_xlabel(label)
