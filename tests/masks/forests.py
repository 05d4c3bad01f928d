"""Random trees of tokens, and what each token of them sees, found by walking from token to parent."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tritonpack.masks.tree import ROOT, SLACK
from tritonpack.testing.cases import parents_of

settings.register_profile("tritonpack", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("tritonpack")

_TOKENS = st.integers(1, 9)


@st.composite
def _any_tree(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Nodes in depth-first order: the parent of each is an ancestor of the node before, or that node."""
    nodes, path = [(ROOT, draw(_TOKENS))], [0]
    for number in range(1, draw(st.integers(1, 10))):
        path = path[: 1 + draw(st.integers(0, len(path) - 1))]
        nodes.append((path[-1], draw(_TOKENS)))
        path.append(number)
    return nodes


# A prompt with completions, and a chain, both with more tokens
_STAR = st.builds(lambda n, rest: [(ROOT, n), *((0, one) for one in rest)], _TOKENS, st.lists(_TOKENS, max_size=20))
_CHAIN = st.builds(lambda n: [(ROOT, n)], st.integers(1, 60))

TREES = st.one_of(_CHAIN, _STAR, _any_tree())


@st.composite
def forests(draw: st.DrawFn, *, slack: bool = True) -> tuple[int, ...]:
    """The parents of a few trees, with tokens outside of them at the end."""
    trees = draw(st.lists(TREES, min_size=1, max_size=4))
    return parents_of(*trees) + (SLACK,) * (draw(st.integers(0, 5)) if slack else 0)


def path_of(parents: tuple[int, ...], token: int) -> list[int]:
    """A token's ancestors from the root on, then the token."""
    path = []
    while token >= 0:
        path.append(token)
        token = parents[token]
    return path[::-1]


def leaves_of(parents: tuple[int, ...]) -> list[int]:
    """The tokens of trees that no token has as its parent."""
    return [token for token, parent in enumerate(parents) if parent != SLACK and token not in parents]


def visible(parents: tuple[int, ...], left: int | None = None, chunk: int | None = None) -> Tensor:
    """(T, T) bool: which tokens each token sees along its path, up to `left` tokens up and within its chunk."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        path = [] if parent == SLACK else path_of(parents, token)
        own = len(path) - 1
        for depth, ancestor in enumerate(path):
            near = left is None or own - depth <= left
            seen[token, ancestor] = near and (chunk is None or own // chunk == depth // chunk)
    return seen
