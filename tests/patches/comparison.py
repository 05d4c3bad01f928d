"""How far results of packed documents are from expected ones, and what counts as rounding in small models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tritonpack.patches.measuring import apart

__all__ = ["apart", "gradients_of", "tolerance"]


def tolerance(dtype: torch.dtype) -> float:
    """The limit for small models; transformers computes norms and rotary angles in float32 also in float64."""
    return (8 if dtype == torch.float64 else 64) * torch.finfo(torch.float32).eps


def gradients_of(model: nn.Module, values: Tensor) -> list[Tensor | None]:
    """Return the gradients of all parameters, with a different weight for each of the values."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype, device=values.device).view_as(values)
    (values * weights).sum().backward()  # torch.autograd.grad doesn't go through reentrant checkpoints
    found = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return found
