"""Losses with labels, auxiliary ones too: of a packed batch, compared with the same documents without a patch.

A loss is a mean over labels, so the loss of a packed batch is the mean of the losses of documents alone, weighted by
their numbers of labels. A router's loss averages over all tokens of a call that aren't padding, and two losses of both
kinds have no common weight. For those the reference is a padded batch of the same documents with its mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.patches.comparison import apart, gradients_of
from tests.patches.sweep.forms import MASK, Form, alone, form, in_rows
from tests.patches.sweep.subject import Subject
from tritonpack.patches.measuring import Batch
from tritonpack.patches.targets import IGNORED

SCORES = ("ViltForQuestionAnswering",)  # the label of a document has a score for each answer, (documents, answers)
EVERY_TOKEN = ("ElectraForPreTraining",)  # labels of two kinds, for all tokens but padding
OF_DOCUMENTS = ("next_sentence_label", "sentence_order_label")


class NoLossError(Exception):
    """A class has no loss, or no reference for it; the message says why."""


class Losses(NamedTuple):
    """Losses by name, and the gradients of all parameters."""

    losses: Mapping[str, Tensor]
    gradients: Sequence[Tensor | None]

    def difference(self, got: Losses) -> float:
        """Return how far other losses and gradients are from these, relative to the largest of these."""
        losses = [apart([self.losses[name]], [got.losses[name]]) for name in self.losses.keys() & got.losses.keys()]
        return max(*losses, apart(self.gradients, got.gradients))


@torch.enable_grad()
def losses_of(subject: Subject, documents: list[Tensor], form: Form) -> Losses:
    """Return the losses of documents in a form; raise NoLossError if one isn't a single number."""
    batch = subject.lay_out(form, documents)
    output = subject.model(**{**subject.arguments(batch), **_switches(subject), **labels(subject, batch)})
    named = {"loss": output[0]} if isinstance(output, tuple) else output if isinstance(output, Mapping) else {}
    found = {
        name: value.flatten() for name, value in named.items()
        if name.endswith("loss") and isinstance(value, Tensor) and value.is_floating_point()
    }  # fmt: skip
    if "loss" not in found or any(value.numel() != 1 for value in found.values()):
        raise NoLossError(f"its losses have the shapes {[tuple(value.shape) for value in found.values()]}")
    return Losses({name: x.detach() for name, x in found.items()}, gradients_of(subject.model, found["loss"]))


def expected_losses(subject: Subject, documents: list[Tensor], limit: float) -> Losses:
    """Return the losses of a model without a patch; raise NoLossError if it has none, or padding changes it."""
    if not {"labels", "start_positions"} & subject.names:
        raise NoLossError
    if _switches(subject) or subject.names & {*OF_DOCUMENTS}:  # two losses have no common weight
        found, longer = (losses_of(subject, documents, form(MASK, rows=in_rows, more=more)) for more in (0, 3))
        if len(found.losses) > 1 or not _switches(subject):
            if (apart := found.difference(longer)) > limit:
                raise NoLossError(f"padding moves its loss without a patch, by {apart:.0e}")
            return found
    return _mean_of(subject, documents)


def _mean_of(subject: Subject, documents: list[Tensor]) -> Losses:
    """Return the mean of the losses of documents alone, weighted by their numbers of labels."""
    given = [labels(subject, subject.lay_out(alone, [document])) for document in documents]
    counts = [int((one.get("start_positions", one.get("labels")) != IGNORED).sum()) for one in given]
    found = [(n, losses_of(subject, [d], alone)) for n, d in zip(counts, documents, strict=True) if n]

    def mean(values: Sequence[Tensor | None]) -> Any:
        weighted = [n * x for (n, _), x in zip(found, values, strict=True) if x is not None]
        return sum(weighted) / sum(counts) if weighted else None

    loss = mean([one.losses["loss"] for _, one in found])
    return Losses({"loss": loss}, [mean(one) for one in zip(*(x.gradients for _, x in found), strict=True)])


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
    lengths = torch.tensor([span.stop - span.start for _, span in batch.spans])
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
        given |= {"start_positions": (lengths - 1) // 2, "end_positions": lengths - 1}
    return given


def token_labels(batch: Batch, classes: int) -> Tensor:
    """(B, T) tokens modulo the number of classes; `IGNORED` for padding and the first token of each document."""
    labels = torch.full_like(batch.ids, IGNORED)
    for row, span in batch.spans:
        labels[row, span] = batch.ids[row, span] % classes
        labels[row, span.start] = IGNORED
    return labels
