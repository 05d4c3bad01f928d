"""Attention over parts of the keys: merging partial results, and the gradients of sinks (docs/math.md, sections 5, 6).

The kernels compute each part without sinks. A sink is one more part, a key without a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """out (T, H, D_v) and lse (H, T), in float32 or float64, merged with a partial result of other keys."""
    merged = torch.logaddexp(lse, part_lse)
    return (out * _weight(lse, merged)).add_(part * _weight(part_lse, merged)), merged


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (T, H, D_v) and lse (H, T), as in `merge`, with sinks (H,); a row that sees no key has no sink either."""
    merged = torch.where(lse == float("-inf"), lse, torch.logaddexp(lse, sinks[:, None]))
    return out * _weight(lse, merged), merged


def sink_gradients(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """(H,): the part of the gradient that comes from this rank's rows."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1).T
    share = torch.exp(sinks[:, None] - lse)
    return -torch.where(lse == float("-inf"), 0.0, share * delta).sum(1).to(sinks.dtype)


def _weight(lse: Tensor, merged: Tensor) -> Tensor:
    """(T, H, 1): the weight of a partial result in the merged one; 0 where a row has seen no key."""
    return torch.where(lse == float("-inf"), 0.0, torch.exp(lse - merged)).T[..., None]
