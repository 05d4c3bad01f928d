"""Do the ways compute the same function? The first step's documents, at the initial weights, against float64.

The reference is each document alone, in float64, with stock attention. A way is exact if its error is at most twice
that of the padded way, which differs from the reference by rounding alone, plus a rounding of the largest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tritonpack.cli.demo.corpus import Document
from tritonpack.cli.demo.model import WAYS, Settings, Way, attention_of, build_model, collate, to_device


@dataclass(frozen=True)
class Errors:
    """The largest error of each way against float64, and the error up to which a way counts as exact."""

    of: dict[Way, float]
    bound: float

    def exact(self, way: Way) -> bool:
        return self.of[way] <= self.bound  # false for nan


@dataclass(frozen=True)
class Checks:
    """The ways compared at the initial weights.

    Attributes:
        logits: errors of the logits of all tokens.
        gradients: errors of the loss's gradient, over all parameters.
        moved: for `naive` and `packed`, the largest change of other documents' logits when one token of the first
            document is changed.
    """

    logits: Errors
    gradients: Errors
    moved: dict[Way, float]

    def exact(self, way: Way) -> bool:
        """Whether logits and gradients are as good as the padded way's."""
        return self.logits.exact(way) and self.gradients.exact(way)


def check_ways(documents: Sequence[Document], settings: Settings) -> Checks:
    """Compare the ways on one step's documents."""
    reference_logits, reference_gradients = _documents_alone(documents, settings)
    logits: dict[Way, Tensor] = {}
    gradients: dict[Way, Tensor] = {}
    for way in WAYS:
        model = build_model(settings)
        with attention_of(way, model):
            batch = to_device(collate(way, documents), settings.device)
            output = model(**batch)
            output.loss.backward()
            real = batch["attention_mask"].bool() if way == "padded" else slice(None)
            logits[way] = output.logits.detach()[real].reshape(-1, output.logits.shape[-1])
            gradients[way] = _gradient_of(model)
    return Checks(
        logits=_errors(logits, reference_logits),
        gradients=_errors(gradients, reference_gradients),
        moved={way: _moved_logits(way, documents, settings) for way in WAYS if way != "padded"},
    )


def _documents_alone(documents: Sequence[Document], settings: Settings) -> tuple[Tensor, Tensor]:
    """Logits of all tokens, and the gradient of the mean loss over all predicted ones, in float64."""
    model = build_model(settings, torch.float64)
    predicted = sum(len(document) - 1 for document in documents)
    logits = []
    for document in documents:
        ids = torch.as_tensor(document, device=settings.device)
        rows = model(input_ids=ids[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(rows[:-1], ids[1:], reduction="sum") / predicted
        loss.backward()
        logits.append(rows.detach())
    return torch.cat(logits), _gradient_of(model)


def _gradient_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def _errors(values: dict[Way, Tensor], reference: Tensor) -> Errors:
    errors: dict[Way, float] = {way: (value.double() - reference).abs().max().item() for way, value in values.items()}
    rounding = torch.finfo(values["padded"].dtype).eps * reference.abs().max().item()
    return Errors(errors, bound=2 * errors["padded"] + rounding)


@torch.no_grad()
def _moved_logits(way: Way, documents: Sequence[Document], settings: Settings) -> float:
    """How far the other documents' logits move when the first document's first byte is changed."""
    changed = np.copy(documents[0])
    changed[0] = (changed[0] + 1) % 256
    model = build_model(settings)
    with attention_of(way, model):
        before, after = (
            model(**to_device(collate(way, batch), settings.device)).logits[0, len(changed) :]
            for batch in (documents, [changed, *documents[1:]])
        )
    return (after.float() - before.float()).abs().max().item()
