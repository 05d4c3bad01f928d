"""The picture of `make demo-grpo`: one step's tokens as they are batched, and what each way costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from examples.demo.drawing import DOCUMENT_COLORS, INK, draw_rows, make_panels
from examples.demo.grpo.rollouts import Group
from examples.demo.grpo.training import WAYS, Way
from examples.demo.measuring import Measurements
from tritonpack import pack_tree

_COLORS: dict[Way, str] = {"padded": "#0072B2", "packed": "#009E73", "shared": "#CC79A7", "tree": "#E69F00"}
_MASK_PIXELS = 480


def draw(path: Path, runs: Mapping[Way, Measurements], groups: Sequence[Group]) -> None:
    """Draw the picture.

    Args:
        path: the PNG to write.
        runs: the measurements of each way.
        groups: the groups of one step, which the upper panels show.
    """
    figure, ((padded, packed, tree), (speed, memory, gaps)) = make_panels(
        "One small Llama, the same steps of GRPO, four ways to compute them", 2, 3, height=9
    )
    numbers = _numbers(groups)
    _draw_padded(padded, groups, numbers)
    _draw_masks(packed, tree, groups, numbers)
    _draw_bars(
        speed,
        "seconds per optimizer step",
        {way: runs[way].seconds_per_step for way in WAYS},
        lambda seconds: f"{seconds:.2f} s",
    )
    sizes = {way: runs[way].peak_bytes for way in WAYS}
    if None in sizes.values():
        memory.set_axis_off()  # it can't be measured on this system
    else:
        mib = {way: (size or 0) / 2**20 for way, size in sizes.items()}
        _draw_bars(memory, "peak memory beyond the parameters", mib, lambda size: f"{size:,.0f} MiB")
    _draw_losses(gaps, runs)
    figure.savefig(path, format="png")


def _numbers(groups: Sequence[Group]) -> list[tuple[int, list[int]]]:
    """The number of each prompt, which decides its letter and its color, with those of its completions."""
    numbers, begin = [], 0
    for group in groups:
        stop = begin + 1 + len(group.completions)
        numbers.append((begin, list(range(begin + 1, stop))))
        begin = stop
    return numbers


def _draw_padded(axes: Axes, groups: Sequence[Group], numbers: Sequence[tuple[int, list[int]]]) -> None:
    left = max(len(group.prompt) for group in groups)
    right = max(len(completion) for group in groups for completion in group.completions)
    rows: list[list[tuple[int | None, int]]] = [
        [
            (None, left - len(group.prompt)),
            (prompt, len(group.prompt)),
            (number, len(completion)),
            (None, right - len(completion)),
        ]
        for group, (prompt, own) in zip(groups, numbers, strict=True)
        for number, completion in zip(own, group.completions, strict=True)
    ]
    draw_rows(axes, rows, left + right, len(rows), pixels=450)
    axes.set(title=f"padded, shared: {len(rows)} rows, padding hatched", ylabel="row")


def _draw_masks(packed: Axes, tree: Axes, groups: Sequence[Group], numbers: Sequence[tuple[int, list[int]]]) -> None:
    """Draw which keys each query sees, both panels at one scale, and the tree enlarged."""
    sequences = [sequence for group in groups for sequence in group.sequences()]
    labels = [
        np.repeat([prompt, number], [len(group.prompt), len(completion)])
        for group, (prompt, own) in zip(groups, numbers, strict=True)
        for number, completion in zip(own, group.completions, strict=True)
    ]
    number_of = np.concatenate(labels)
    lengths = [len(sequence) for sequence in sequences]
    ends = np.repeat(np.cumsum(lengths), lengths)
    total = len(ends)
    _draw_mask(packed, ends, number_of, total)
    packed.set(title=f"packed: 1 row, {total:,} tokens", xlabel="key (token)", ylabel="query (token)")
    row = pack_tree(sequences)
    first = np.empty(row.num_tokens, dtype=np.int64)
    first[row.places.numpy()[::-1]] = number_of[::-1]  # a shared token has the color of its first sequence
    _draw_mask(tree, row.ends.numpy(), first, total)
    tree.set(title=f"shared, tree: 1 row, {row.num_tokens:,} tokens", xlabel="key (token)", ylabel="query (token)")
    enlarged = tree.inset_axes((0.3, 0.03, 0.67, 0.67))
    _draw_mask(enlarged, row.ends.numpy(), first, row.num_tokens)
    enlarged.set_title("enlarged", fontsize=9)
    enlarged.set(xticks=[], yticks=[])


def _draw_mask(axes: Axes, ends: NDArray[np.int64], number_of: NDArray[np.int64], room: int) -> None:
    """Draw which keys each query of a tree sees, sampled, in the color of the key's prompt or completion.

    Args:
        ends: one past the last token of each token's subtree.
        number_of: the number of each token's prompt or completion.
        room: the tokens that each axis has room for.
    """
    total = len(ends)
    keys = np.linspace(0, total - 1, min(total, _MASK_PIXELS)).astype(int)
    seen = (keys <= keys[:, None]) & (keys[:, None] < ends[keys])
    colors = ListedColormap(["white", *DOCUMENT_COLORS])
    axes.imshow(
        np.where(seen, 1 + number_of[keys] % len(DOCUMENT_COLORS), 0),
        cmap=colors,
        vmin=0,
        vmax=colors.N - 1,
        extent=(0, total, total, 0),
        interpolation="nearest",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlim=(0, room), ylim=(room, 0))


def _draw_bars(axes: Axes, title: str, values: Mapping[Way, float], name: Callable[[float], str]) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[_COLORS[way] for way in values], width=0.6)
    shares = [value / values["padded"] for value in values.values()]
    labels = [f"{name(value)}\n{share:.0%}" for value, share in zip(values.values(), shares, strict=True)]
    axes.bar_label(bars, labels, padding=3, color=INK)
    axes.margins(y=0.18)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.set(title=title)


def _draw_losses(axes: Axes, runs: Mapping[Way, Measurements]) -> None:
    """Draw the loss of each step, in lines of falling width, because they lie on each other."""
    for (way, run), width in zip(runs.items(), (9, 6, 3.5, 1.5), strict=True):
        label = way if way == "padded" else f"{way} (largest gap to padded: {run.gap(runs['padded']):.1e})"
        axes.plot(range(1, len(run.losses) + 1), run.losses, color=_COLORS[way], linewidth=width, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = axes.get_ylim()
    axes.set(title="loss", xlabel="step", ylim=(low, high + 0.5 * (high - low)))  # room for the legend
    axes.legend(loc="upper left", framealpha=0.9)
