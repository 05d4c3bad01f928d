"""Losses with labels, auxiliary ones too: of a packed batch, compared with the same documents without a patch.

A loss is a mean over labels. A token head has a label for each token, so the loss of a packed batch is the mean of the
losses alone, weighted by the number of labels of each document. For a sequence head, or one that finds a span in each
document, it is the plain mean. A router's loss averages over all tokens of a call that aren't padding, and two losses
of both kinds have no common weight. For those the reference is a padded batch of the same documents with its mask.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.patches.sweep.forms import Form, alone
from tests.patches.sweep.subject import Subject
from tritonpack.patches.trial.comparison import apart, gradients_of
from tritonpack.patches.trial.outputs import UnlikeError
from tritonpack.patches.trial.packed_forms import Batch, lay_out

IGNORED = -100
SCORES = ("ViltForQuestionAnswering",)  # the label of a document has a score for each answer, (documents, answers)
EVERY_TOKEN = ("ElectraForPreTraining",)  # labels of two kinds, for all tokens but padding
OF_DOCUMENTS = ("next_sentence_label", "sentence_order_label")
NO_LABELS = "takes no labels"


class NoLossError(Exception):
    """A class has no loss, or no reference for it; the message says why."""


Found = tuple[dict[str, Tensor], list[Tensor | None]]  # losses by name; gradients of all parameters


class Losses:
    """The losses of a model without a patch.

    Attributes:
        why_not: why there is no reference; empty if there is one.
    """

    def __init__(self, subject: Subject, documents: list[Tensor], limit: float) -> None:
        self.documents, self.limit = documents, limit
        self.switches = _switches(subject)
        self.why_not = "" if {"labels", "start_positions"} & subject.names else NO_LABELS
        if self.why_not:
            return
        try:
            mixed = subject.names & {*OF_DOCUMENTS}  # beside labels of tokens
            self.expected = self._padded(subject) if self.switches or mixed else self._alone(subject)
            if self._is_plain(self.expected):  # a head without the routers' loss
                self.switches = {}
                self.expected = self._alone(subject)
        except Exception as error:  # whatever a model's own code raises
            self.why_not = f"{type(error).__name__}: {error}".split("\n")[0]

    def compare(self, subject: Subject, form: Form) -> float:
        """Return how far losses and their gradients are from the expected ones, relative to the largest."""
        batch = subject.lay_out(form, self.documents)
        with torch.enable_grad():
            losses = self._losses(subject, batch)
            return _apart(self.expected, _differentiated(subject, losses))

    def difference(self, other: Losses) -> float:
        """Return how far the losses of another model are, such as one in another dtype."""
        return _apart(self.expected, other.expected)

    def _is_plain(self, found: Found) -> bool:
        return bool(self.switches) and len(found[0]) == 1

    def _padded(self, subject: Subject) -> Found:
        found = []
        for more in (0, 3):
            batch = subject.lay_out(lambda d, more=more: _pad(d, more), self.documents)  # type: ignore[misc]
            with torch.enable_grad():
                found.append(_differentiated(subject, self._losses(subject, batch)))
        if not self._is_plain(found[0]) and (apart := _apart(*found)) > self.limit:
            raise NoLossError(f"padding moves its loss without a patch, by {apart:.0e}")
        return found[0]

    def _alone(self, subject: Subject) -> Found:
        total: Any = 0.0
        weights = 0.0
        with torch.enable_grad():
            for document in self.documents:
                batch = subject.lay_out(alone, [document])
                weight = _weight(subject, batch)
                if weight:
                    total = total + weight * self._losses(subject, batch)["loss"]
                    weights += weight
            return _differentiated(subject, {"loss": total / weights})

    def _losses(self, subject: Subject, batch: Batch) -> dict[str, Tensor]:
        given = {**self.switches, **labels(subject, batch)}
        output = subject.run(**{**subject.arguments(batch), **given})
        found = {
            name: value
            for name, value in output.items()
            if name.endswith("loss") and isinstance(value, Tensor) and value.is_floating_point()
        }
        if "loss" not in found:
            raise NoLossError("gives no loss")
        for name, value in found.items():
            if value.numel() != 1:
                raise UnlikeError(f"{name} has shape {tuple(value.shape)}")
        return found


def _differentiated(subject: Subject, losses: dict[str, Tensor]) -> Found:
    """Return losses, and the gradients of the total loss."""
    return (
        {name: value.detach().flatten() for name, value in losses.items()},
        gradients_of(subject.model, losses["loss"].sum()[None]),
    )


def _apart(expected: Found, got: Found) -> float:
    losses = [apart([expected[0][name]], [got[0][name]]) for name in expected[0].keys() & got[0].keys()]
    return max(*losses, apart(expected[1], got[1]))


def _weight(subject: Subject, batch: Batch) -> float:
    """Return the number of labels of a document."""
    if subject.sentence or "start_positions" in subject.names or subject.class_name in SCORES:
        return 1.0
    return float((labels(subject, batch)["labels"] != IGNORED).sum())


def _pad(documents: list[Tensor], more: int) -> Batch:
    """One document in each row, padded on the right, with a mask; every model takes these."""
    batch = lay_out([[i] for i in range(len(documents))], documents, more=more)
    return dataclasses.replace(batch, arguments={"attention_mask": batch.arguments["attention_mask"]})


def _switches(subject: Subject) -> dict[str, Any]:
    """Return the arguments that turn auxiliary losses on, if a class has any."""
    text = subject.config.get_text_config(decoder=True)
    routed = any(hasattr(config, "router_aux_loss_coef") for config in (subject.config, text))
    if "output_router_logits" in subject.names or (routed and subject.takes_any):
        return {"output_router_logits": True}
    return {}


def labels(subject: Subject, batch: Batch) -> dict[str, Tensor]:
    """Return labels of every kind that a class takes: for each token but a document's first, and for each document."""
    first = torch.stack([batch.ids[row, span.start] for row, span in batch.spans])
    classes = int(getattr(subject.config, "num_labels", 2))
    given: dict[str, Tensor] = {}
    if "labels" in subject.names:
        if subject.sentence:
            two = subject.choices or "NextSentence" in subject.class_name
            given["labels"] = first % (2 if two else classes)
        elif subject.class_name in SCORES:
            scores = (first[:, None] + torch.arange(classes)) % 3 / 2
            given["labels"] = scores.to(next(subject.model.parameters()).dtype)
        else:
            given["labels"] = _token_labels(subject, batch, classes)
    for name in {*OF_DOCUMENTS} & subject.names:
        given[name] = first % 2
    if "start_positions" in subject.names:
        given["start_positions"] = torch.zeros_like(first)
        given["end_positions"] = torch.tensor([span.stop - span.start - 1 for _, span in batch.spans])
    return given


def _token_labels(subject: Subject, batch: Batch, classes: int) -> Tensor:
    """Return (B, T) tokens modulo the number of labels; padding and a document's first token have none."""
    every = subject.class_name in EVERY_TOKEN
    limit = 2 if every else classes if "TokenClassification" in subject.class_name else subject.size
    found = torch.full_like(batch.ids, 0 if every else IGNORED)
    for row, span in batch.spans:
        found[row, span] = batch.ids[row, span] % limit
        if not every:
            found[row, span.start] = IGNORED
    return found
