"""The check of a tree against its definition: each distinct begin of the sequences is one token of the tree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hypothesis import settings

REPEATABLE = settings(deadline=None, derandomize=True, database=None, max_examples=60)


def check_tree(sequences: Sequence[Sequence[Hashable]], sources: list[int], places: list[int], ends: list[int]) -> None:
    """Assert that a tree is that of the sequences; `sources` are places among the tokens of all sequences."""
    flat = [tuple(row[:stop]) for row in sequences for stop in range(1, len(row) + 1)]
    begins = [flat[source] for source in sources]
    assert sorted(map(repr, begins)) == sorted(map(repr, set(flat)))
    assert [begins[place] for place in places] == flat
    for place, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        below = [number for number, other in enumerate(begins) if other[: len(begin)] == begin]
        assert below == list(range(place, end))
