"""Exchange by group cast where few keys are needed, and else by all-gather: chosen by counts, once per mask.

A group cast brings a rank no more bytes than an all-gather. But it brings a key into a node once for each rank there
that sees it, and an all-gather may bring it once. If no rank sees more keys of others than the longest shard has rows,
it is never worse, into a rank or into a node, whichever ranks are a node. For R ranks, nodes of G ranks and a longest
shard of N rows:

- forward: a node receives at most G N keys by group cast, and (R - G) N or more by all-gather.
- backward: the R - G other ranks send a node at most N gradients each by group cast. By a reduce-scatter, which sums
  within nodes first, each of R / G - 1 other nodes sends G N.
"""

from __future__ import annotations

from collections.abc import Sequence

from tritonpack.parallel.exchanges import all_gather, group_cast
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.parts import Part


def divide(call: Call, count: int) -> Sequence[Part]:
    """The keys of other ranks in at most `count` parts, as one of the two exchanges divides them."""
    chosen = group_cast if few_keys(call) else all_gather
    return chosen.divide(call, count)


def few_keys(call: Call) -> bool:
    """Whether no rank sees more keys of others than the longest shard has rows; waits for the mask's device.

    All ranks find the same, because the mask and the layout are.
    """
    mask, layout = call.mask, call.layout
    return mask.cached(("few keys", layout), lambda: max(layout.remote_keys(mask)) <= max(layout.lengths))
