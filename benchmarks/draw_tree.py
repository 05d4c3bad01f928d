"""Draw a tree of tokens, its packed row, and its mask with and without a window.

python -m benchmarks.draw_tree [--out docs/images/tree.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from examples.demo.drawing import DOCUMENT_COLORS, INK, PADDING_COLOR, document_color, letters, make_panels
from tritonpack import BlockDiagonalMask
from tritonpack.testing.cases import Nodes, parents_of

# A prompt A; its first turn B with the branches C, D and E; another answer F.
NODES = [(-1, 6), (0, 4), (1, 5), (1, 3), (1, 2), (0, 4)]
WINDOW = 4  # tokens that a token sees, itself among them


def draw(nodes: Nodes = NODES, window: int = WINDOW) -> Figure:
    """Draw a tree of nodes, which are (parent node, tokens)."""
    node_of = np.repeat(np.arange(len(nodes)), [tokens for _, tokens in nodes])
    parents = parents_of(nodes)
    mask, near = (BlockDiagonalMask.from_tree(parents, window=(left, 0)) for left in (-1, window - 1))
    figure, ((tree, whole), (row, windowed)) = make_panels(
        "Sequences that begin alike: each common token once", 2, 2, height=10
    )
    _draw_tree(tree, nodes, node_of, mask)
    _draw_row(row, node_of, parents, mask)
    _draw_mask(whole, node_of, mask, "a token sees itself and its ancestors")
    _draw_mask(windowed, node_of, near, f"with a window of {window}, counted along the path")
    return figure


def _draw_tree(axes: Axes, nodes: Nodes, node_of: np.ndarray, mask: BlockDiagonalMask) -> None:
    """Draw each node over its depths, the leaves below each other, and beside each leaf its sequence."""
    assert mask.diagonal is not None
    depth = mask.diagonal.numpy()
    first = [int(place) for place in np.searchsorted(node_of, range(len(nodes)))]
    inner = {parent for parent, _ in nodes}
    leaves = [number for number in range(len(nodes)) if number not in inner]
    below = mask.to_dense()[:, first].numpy()  # whether each token is the node's or below it
    heights = [float(np.mean([y for y, leaf in enumerate(leaves) if below[first[leaf], n]])) for n in range(len(nodes))]
    for number, (parent, tokens) in enumerate(nodes):
        left = int(depth[first[number]])
        if parent >= 0:
            axes.plot([left - 0.5] * 2, [heights[parent], heights[number]], color=INK, linewidth=2, zorder=3)
        _draw_tokens(axes, number, left, tokens, heights[number])
        if number in leaves:
            path = "".join(map(letters, np.flatnonzero(below[first[number]]).tolist()))
            axes.text(left + tokens, heights[number], f"sequence {path}", va="center", fontsize=11, color=INK)
    axes.set(xlim=(-0.6, depth.max() + 4), ylim=(len(leaves) - 0.4, -0.6), xlabel="depth, which is the position id")
    axes.set_xticks(range(int(depth.max()) + 1))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    alone = sum(int(depth[node_of == leaf].max()) + 1 for leaf in leaves)
    axes.set_title(f"{len(leaves)} sequences, {alone} tokens together, as a tree of {len(node_of)} tokens")


def _draw_row(axes: Axes, node_of: np.ndarray, parents: Sequence[int], mask: BlockDiagonalMask) -> None:
    """Draw the row of all tokens, and below it the integers of each token."""
    assert mask.diagonal is not None
    assert mask.query_stop is not None
    for number in range(int(node_of.max()) + 1):
        places = np.flatnonzero(node_of == number)
        _draw_tokens(axes, number, int(places[0]), len(places), 0)
    lines = {
        "place in the row": range(len(parents)),
        "parents": parents,
        "position ids": mask.diagonal.tolist(),
        "subtree ends": mask.query_stop.tolist(),
    }
    for y, values in enumerate(lines.values(), 1):
        for place, value in enumerate(values):
            weight = "bold" if parents[place] != place - 1 and values is parents else None  # a branch begins
            axes.text(place, y, str(value), ha="center", va="center", fontsize=9, color=INK, fontweight=weight)
    axes.set(ylim=(len(lines) + 0.6, -0.6), xlim=(-0.6, len(parents) - 0.4), title="the same tokens in a packed row")
    axes.set_yticks(range(1, len(lines) + 1), lines)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_mask(axes: Axes, node_of: np.ndarray, mask: BlockDiagonalMask, title: str) -> None:
    """Draw which keys each query sees, in the color of the key's node."""
    total = mask.num_queries
    colors = ListedColormap(["white", *DOCUMENT_COLORS])
    seen = np.where(mask.to_dense().numpy(), 1 + node_of % len(DOCUMENT_COLORS), 0)
    axes.imshow(seen, cmap=colors, vmin=0, vmax=colors.N - 1, interpolation="nearest")
    axes.set_xticks(np.arange(total + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(total + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    for begin in np.flatnonzero(np.diff(node_of)) + 0.5:
        axes.axhline(begin, color=PADDING_COLOR, linewidth=0.6)
        axes.axvline(begin, color=PADDING_COLOR, linewidth=0.6)
    axes.set(title=title, xlabel="key (place in the row)", ylabel="query (place in the row)")


def _draw_tokens(axes: Axes, number: int, first: int, tokens: int, y: float) -> None:
    """Draw a node: a box for each token, and its letter."""
    boxes = [(place - 0.5, 1) for place in range(first, first + tokens)]
    axes.broken_barh(boxes, (y - 0.3, 0.6), facecolor=document_color(number), edgecolor="white", linewidth=1.2)
    axes.text(first + (tokens - 1) // 2, y, letters(number), ha="center", va="center", fontsize=12)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/tree.png"))
    out = parser.parse_args(arguments).out
    draw().savefig(out, format="png")
    print(out)


if __name__ == "__main__":
    main()
