"""How far outputs and gradients are from those expected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.patches.sweep.subject import WHOLE, ShapeError

Results = dict[str, Tensor]  # outputs by name, or gradients by parameter


def difference(expected: Results, got: Results) -> float:
    """The largest over all outputs that both have, relative to the largest value of each."""
    return max((_apart(expected[name], got[name]) for name in expected if name in got), default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise ShapeError(f"{tuple(b.shape)} instead of {tuple(a.shape)}")
    if a.numel() == 0:
        return 0.0
    unlike = a.isfinite() != b.isfinite()
    if bool(unlike.any()):
        return math.inf
    a, b = (x.detach().double().masked_fill(~x.isfinite(), 0) for x in (a, b))
    largest = float(a.abs().max())
    apart = float((a - b).abs().max())
    return apart / largest if largest else (math.inf if apart else 0.0)


def gradients(model: nn.Module, values: Results) -> Results:
    """Of all parameters, under weights for the values that no two share."""
    total: Any = 0.0
    for name, value in values.items():
        if value.requires_grad and not name.endswith(WHOLE):
            weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
            finite = value.isfinite()
            total = total + (value.masked_fill(~finite, 0) * weights).sum() / (
                1 + float(value.detach()[finite].abs().max())
            )
    return gradients_of(model, total)


def gradients_of(model: nn.Module, total: Tensor) -> Results:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return {name: g for (name, _), g in zip(named, found, strict=True) if g is not None}


def gradient_difference(expected: Results, got: Results) -> float:
    """Relative to the largest gradient of all: those of key biases are mathematically zero."""
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0) or 1.0
    worst = 0.0
    for name in {*expected, *got}:
        a, b = expected.get(name), got.get(name)
        apart = (a - b) if a is not None and b is not None else (a if a is not None else b)
        assert apart is not None
        if apart.numel():
            found = float(apart.abs().max()) / largest
            worst = max(worst, math.inf if math.isnan(found) else found)
    return worst
