"""Losses with labels, auxiliary ones among them: of a packed batch, against what the same documents give unpatched.

A loss is a mean over what has a label. Of a token head that is each token, so that the loss of a packed batch is the
mean of the losses alone, weighted by how many labels each document has; of a sequence head, or of one that finds a span
in each document, it is their plain mean. A router's loss isn't a sum over documents: it averages over all tokens of a
call that aren't padding. So with those the reference is a padded batch of the same documents with its mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.patches.sweep.comparing import difference, gradient_difference, gradients_of
from tests.patches.sweep.forms import FORMS, LOSSES, alone
from tests.patches.sweep.subject import Layout, ShapeError, Subject
from tritonpack.patches.trial.packed_forms import Batch, lay_out

IGNORED = -100
NO_LABELS = "takes no labels"


class NoLossError(Exception):
    """A class without a loss, or whose loss has nothing to be equal to; the message says why."""


Found = tuple[dict[str, Tensor], dict[str, Tensor]]  # losses by name; gradients by parameter


class Losses:
    """What a model without a patch gives with labels.

    Attributes:
        why_not: why there is no loss to be equal to; empty where there is one.
    """

    def __init__(self, subject: Subject, documents: list[Tensor], limit: float) -> None:
        self.documents, self.limit = documents, limit
        self.switches = _switches(subject)
        self.why_not = "" if {"labels", "start_positions"} & subject.names else NO_LABELS
        if self.why_not:
            return
        try:
            # A head for pretraining adds up a mean over tokens and one over documents.
            padded = self.switches or subject.class_name.endswith("ForPreTraining")
            self.expected = self._padded(subject) if padded else self._alone(subject)
            if self.switches and len(self.expected[0]) == 1:  # a head that leaves the routers' loss out
                self.switches = {}
                self.expected = self._alone(subject)
        except Exception as error:  # whatever a model's own code raises
            self.why_not = f"{type(error).__name__}: {error}".split("\n")[0]

    def compare(self, subject: Subject, form: str) -> float:
        """How far losses and their gradients are from those expected, relative to the largest."""
        layout = subject.lay_out(FORMS[LOSSES[form]], self.documents)
        with torch.enable_grad():
            losses = self._losses(subject, layout)
            return _apart(self.expected, _differentiated(subject, losses))

    def _padded(self, subject: Subject) -> Found:
        found = []
        for more in (0, 3):
            layout = subject.lay_out(lambda d, more=more: _pad(d, more), self.documents)  # type: ignore[misc]
            with torch.enable_grad():
                found.append(_differentiated(subject, self._losses(subject, layout)))
        if len(found[0][0]) > 1 and (apart := _apart(*found)) > self.limit:
            raise NoLossError(f"padding moves its loss without a patch, by {apart:.0e}")
        return found[0]

    def _alone(self, subject: Subject) -> Found:
        total: Any = 0.0
        weights = 0.0
        with torch.enable_grad():
            for document in self.documents:
                layout = subject.lay_out(alone, [document])
                weight = _weight(subject, layout)
                if weight:
                    total = total + weight * self._losses(subject, layout)["loss"]
                    weights += weight
            return _differentiated(subject, {"loss": total / weights})

    def _losses(self, subject: Subject, layout: Layout) -> dict[str, Tensor]:
        given = {**self.switches, **labels(subject, layout)}
        output = subject.model(**{**subject.arguments(layout), **given})
        found = {
            name: value
            for name, value in output.items()
            if name.endswith("loss") and isinstance(value, Tensor) and value.is_floating_point()
        }
        if "loss" not in found:
            raise NoLossError("gives no loss")
        for name, value in found.items():
            if value.numel() != 1:
                raise ShapeError(f"{name} has shape {tuple(value.shape)}")
        return found


def _differentiated(subject: Subject, losses: dict[str, Tensor]) -> Found:
    """Losses, and the gradients of the one that holds the others."""
    return (
        {name: value.detach().flatten() for name, value in losses.items()},
        gradients_of(subject.model, losses["loss"].sum()),
    )


def _apart(expected: Found, got: Found) -> float:
    return max(difference(expected[0], got[0]), gradient_difference(expected[1], got[1]))


def _weight(subject: Subject, layout: Layout) -> float:
    """How many labels a document has."""
    if subject.sentence or "start_positions" in subject.names:
        return 1.0
    return float((labels(subject, layout)["labels"] != IGNORED).sum())


def _pad(documents: list[Tensor], more: int) -> Batch:
    """A document to a row, padded on the right with its mask: what every model takes, and its own positions."""
    batch = lay_out([[i] for i in range(len(documents))], documents, more=more)
    return dataclasses.replace(batch, arguments={"attention_mask": batch.arguments["attention_mask"]})


def _switches(subject: Subject) -> dict[str, Any]:
    """What turns auxiliary losses on, where a class has any."""
    text = subject.config.get_text_config(decoder=True)
    routed = any(hasattr(config, "router_aux_loss_coef") for config in (subject.config, text))
    if "output_router_logits" in subject.names or (routed and subject.takes_any):
        return {"output_router_logits": True}
    return {}


def labels(subject: Subject, layout: Layout) -> dict[str, Tensor]:
    """Labels of every kind that a class takes: of each token but a document's first, and of each document."""
    names = subject.names
    batch = layout.decoder or layout.encoder
    count = len(batch.spans)
    classes = int(getattr(subject.config, "num_labels", 2))
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Tensor] = {}
    if "labels" in names:
        if subject.choices:
            given["labels"] = torch.zeros(count, dtype=torch.long)
        elif subject.sentence:
            limit = 2 if "NextSentence" in subject.class_name else classes
            given["labels"] = torch.tensor([int(batch.ids[row, span].sum()) % limit for row, span in batch.spans])
        else:
            limit = classes if "TokenClassification" in subject.class_name else subject.size
            if "ElectraForPreTraining" in subject.class_name:
                limit = 2
            given["labels"] = _token_labels(subject, batch, limit)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in names:
            given[name] = torch.tensor([int(batch.ids[row, span].sum()) % 2 for row, span in batch.spans])
    if "start_positions" in names:
        lengths = torch.tensor([d.stop - d.start for _, d in batch.spans])
        given["start_positions"] = torch.zeros(count, dtype=torch.long)
        given["end_positions"] = lengths - 1
    return given


def _token_labels(subject: Subject, batch: Any, limit: int) -> Tensor:
    """(B, T) the token itself, modulo `limit`; none for padding and a document's first token."""
    found = torch.full_like(batch.ids, IGNORED)
    for row, span in batch.spans:
        found[row, span] = batch.ids[row, span] % limit
        found[row, span.start] = IGNORED
    return found
