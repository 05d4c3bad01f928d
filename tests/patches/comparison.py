"""How far results of packed documents are from expected ones, and what counts as rounding in small models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonpack.patches.measuring import apart

Parts = Sequence[Tensor]  # one output's values, document by document

# Runs packed documents and returns each output's parts, by the output's name.
PackedCall = Callable[[list[Tensor]], Mapping[str, Parts]]


class Influence(NamedTuple):
    """The largest change of an output for documents that stayed the same, when one other document was changed.

    It is relative to the output's largest value.
    """

    size: float
    output: str
    document: int  # the one that was changed


def tolerance(dtype: torch.dtype) -> float:
    """The limit for small models in float32 or float64.

    transformers computes norms and rotary angles in float32 in both.
    """
    return (8 if dtype == torch.float64 else 64) * torch.finfo(torch.float32).eps


@torch.no_grad()
def influence(run: PackedCall, documents: list[Tensor], others: Mapping[int, Tensor]) -> Influence:
    """Measure how far outputs of documents move when another document of the call changes.

    `others` holds replacements by the number of the document that each replaces. Each is tried by itself.
    """
    before, worst = run(documents), Influence(0.0, "", 0)
    for number, other in others.items():
        after = run([other if i == number else document for i, document in enumerate(documents)])
        kept = [i for i in range(len(documents)) if i != number]
        for name in before.keys() & after.keys():
            size = apart([before[name][i] for i in kept], [after[name][i] for i in kept])
            worst = max(worst, Influence(size, name, number))
    return worst


def gradients_of(model: nn.Module, values: Tensor) -> list[Tensor | None]:
    """Return the gradients of all parameters, with a different weight for each of the values."""
    weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype, device=values.device).view_as(values)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True))
