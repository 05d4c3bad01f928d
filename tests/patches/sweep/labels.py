"""Losses in outputs, and labels of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.small_copies.outputs import UnlikeError
from tests.small_copies.packed_forms import Batch
from tritonpack.patches.targets import IGNORED


def losses_in(output: Any) -> dict[str, Tensor]:
    """Return the losses (1,) in the output of a call with labels: `loss`, and others whose names end so.

    Raises:
        UnlikeError: it has no loss, or one that isn't a single number.
    """
    named = {"loss": output[0]} if isinstance(output, tuple) else output if isinstance(output, Mapping) else {}
    found = {
        name: value for name, value in named.items()
        if name.endswith("loss") and isinstance(value, Tensor) and value.is_floating_point()
    }  # fmt: skip
    if "loss" not in found:
        raise UnlikeError("it gives no loss")
    for name, value in found.items():
        if value.numel() != 1:
            raise UnlikeError(f"{name} has shape {tuple(value.shape)}")
    return {name: value.flatten() for name, value in found.items()}


def mean_over_labels(losses: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The mean over labels of the losses (1,) of documents with these numbers of labels."""
    return torch.stack([count * loss for loss, count in zip(losses, counts, strict=True)]).sum(0) / sum(counts)


def first_tokens(batch: Batch) -> Tensor:
    """(documents,) the first token id of each document."""
    return torch.stack([batch.ids[row, span.start] for row, span in batch.spans])


def token_labels(batch: Batch, classes: int) -> Tensor:
    """(B, T) tokens modulo the number of classes; `IGNORED` for padding and the first token of each document."""
    labels = torch.full_like(batch.ids, IGNORED)
    for row, span in batch.spans:
        labels[row, span] = batch.ids[row, span] % classes
        labels[row, span.start] = IGNORED
    return labels
