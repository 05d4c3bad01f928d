"""Losses with labels, auxiliary ones too: of a packed batch, compared with the same documents without a patch.

A loss is a mean over labels. A token head has a label for each token, so the loss of a packed batch is the mean of the
losses alone, weighted by the number of labels of each document. For a sequence head, or one that finds a span in each
document, it is the plain mean. A router's loss averages over all tokens of a call that aren't padding, and two losses
of both kinds have no common weight. For those the reference is a padded batch of the same documents with its mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.patches.comparison import apart, gradients_of
from tests.patches.sweep.forms import Form, alone
from tests.patches.sweep.outputs import UnlikeError
from tests.patches.sweep.subject import Subject
from tritonpack.patches.measuring import Batch, lay_out
from tritonpack.patches.targets import IGNORED

SCORES = ("ViltForQuestionAnswering",)  # the label of a document has a score for each answer, (documents, answers)
EVERY_TOKEN = ("ElectraForPreTraining",)  # labels of two kinds, for all tokens but padding
OF_DOCUMENTS = ("next_sentence_label", "sentence_order_label")
NO_LABELS = "takes no labels"


class NoLossError(Exception):
    """A class has no loss, or no reference for it; the message says why."""


class Found(NamedTuple):
    """Losses by name, and the gradients of all parameters."""

    losses: Mapping[str, Tensor]
    gradients: Sequence[Tensor | None]

    def difference(self, got: Found) -> float:
        """Return how far other losses and gradients are from these, relative to the largest of these."""
        losses = [apart([self.losses[name]], [got.losses[name]]) for name in self.losses.keys() & got.losses.keys()]
        return max(*losses, apart(self.gradients, got.gradients))


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
            with torch.enable_grad():
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
            return self.expected.difference(self._found(subject, self._losses(subject, batch)))

    def difference(self, other: Losses) -> float:
        """Return how far the losses of another model are, such as one in another dtype."""
        return self.expected.difference(other.expected)

    def _is_plain(self, found: Found) -> bool:
        return bool(self.switches) and len(found.losses) == 1

    def _padded(self, subject: Subject) -> Found:
        batches = [subject.lay_out(partial(_pad, more=more), self.documents) for more in (0, 3)]
        found, longer = (self._found(subject, self._losses(subject, batch)) for batch in batches)
        if not self._is_plain(found) and (apart := found.difference(longer)) > self.limit:
            raise NoLossError(f"padding moves its loss without a patch, by {apart:.0e}")
        return found

    def _alone(self, subject: Subject) -> Found:
        batches = [subject.lay_out(alone, [document]) for document in self.documents]
        counts = {i: count for i, batch in enumerate(batches) if (count := _count(labels(subject, batch)))}
        losses = [count * self._losses(subject, batches[i])["loss"] for i, count in counts.items()]
        return self._found(subject, {"loss": torch.stack(losses).sum(0) / sum(counts.values())})

    def _losses(self, subject: Subject, batch: Batch) -> dict[str, Tensor]:
        given = {**self.switches, **labels(subject, batch)}
        return losses_in(subject.model(**{**subject.arguments(batch), **given}))

    def _found(self, subject: Subject, losses: dict[str, Tensor]) -> Found:
        detached = {name: value.detach() for name, value in losses.items()}
        return Found(detached, gradients_of(subject.model, losses["loss"]))


def _count(labels: dict[str, Tensor]) -> int:
    """The number of labels of a document: one for each token, or one in all."""
    return int((labels.get("start_positions", labels.get("labels")) != IGNORED).sum())


def _pad(documents: list[Tensor], *, more: int) -> Batch:
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
    first = torch.stack([batch.ids[row, span.start] for row, span in batch.spans])  # the first token of each document
    classes = int(getattr(subject.config, "num_labels", 2))
    given: dict[str, Tensor] = {}
    if "labels" in subject.names:
        if subject.sentence:
            two = subject.choices or "NextSentence" in subject.class_name
            given["labels"] = first % (2 if two else classes)
        elif subject.class_name in SCORES:
            scores = (first[:, None] + torch.arange(classes)) % 3 / 2
            given["labels"] = scores.to(next(subject.model.parameters()).dtype)
        elif subject.class_name in EVERY_TOKEN:
            given["labels"] = batch.ids % 2
        else:
            limit = classes if "TokenClassification" in subject.class_name else subject.size
            given["labels"] = token_labels(batch, limit)
    for name in {*OF_DOCUMENTS} & subject.names:
        given[name] = first % 2
    if "start_positions" in subject.names:
        given["start_positions"] = torch.zeros_like(first)
        given["end_positions"] = torch.tensor([span.stop - span.start - 1 for _, span in batch.spans])
    return given


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


def token_labels(batch: Batch, classes: int) -> Tensor:
    """(B, T) tokens modulo the number of classes; `IGNORED` for padding and the first token of each document."""
    labels = torch.full_like(batch.ids, IGNORED)
    for row, span in batch.spans:
        labels[row, span] = batch.ids[row, span] % classes
        labels[row, span.start] = IGNORED
    return labels
