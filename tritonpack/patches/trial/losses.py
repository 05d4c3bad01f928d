"""The loss of packed documents, held against the losses of each alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritonpack.patches.forwards import is_own
from tritonpack.patches.labels import IGNORED
from tritonpack.patches.trial.packed_forms import Batch, Subject, whole


@dataclass(frozen=True)
class LossTrial:
    """The documents of a trial, and what their loss may be.

    Attributes:
        documents: token ids `[1, n]`, each with at least one label.
        may_be: the mean of the losses alone over labels, their mean over documents, their sum, and the loss of the same
            documents in a padded batch without a patch: a router's is a mean over all tokens of a call.
    """

    documents: list[Tensor]
    may_be: tuple[float, ...]


def has_known_loss(model: Any) -> bool:
    """Whether a model computes its loss by transformers' code alone, or takes no labels."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return True
    function = getattr(model, "loss_function", None)
    home = "transformers" if function is None else getattr(inspect.unwrap(function), "__module__", "")
    return is_own(model) and home.partition(".")[0] == "transformers"


@torch.no_grad()
def losses_alone(subject: Subject, documents: list[Tensor]) -> LossTrial | None:
    """The losses of documents, each in a call of its own.

    None for a model that gives no loss for the trial's labels: of tokens, or of documents for a head of documents.
    """
    documents = [document for document in documents if document.numel() > 1]
    losses, counts = [], []
    for document in documents:
        batch = whole(document)
        try:
            labels = _labels(subject, batch, [batch])
            loss = _loss_of(subject, batch, labels)
        except Exception:  # labels of another kind
            return None
        if loss is None:
            return None
        losses.append(loss)
        counts.append(int((labels != IGNORED).sum()))
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    may_be = [mean, sum(losses) / len(losses), sum(losses)]
    try:
        padded = subject.forms["padded_right"](documents)
        padded = replace(
            padded, arguments={name: x for name, x in padded.arguments.items() if not name.endswith("position_ids")}
        )
        loss = _loss_of(subject, padded, _labels(subject, padded, [whole(document) for document in documents]))
    except Exception:  # without a mask, say
        loss = None
    return LossTrial(documents, tuple(may_be if loss is None else [*may_be, loss]))


@torch.no_grad()
def why_loss_mixes(subject: Subject, form: str, trial: LossTrial, limit: float) -> str:
    """Why the loss of packed documents is wrong. The text is empty if the loss is right, or if the call fails."""
    batch = subject.forms[form](trial.documents)
    try:
        loss = _loss_of(subject, batch, _labels(subject, batch, [whole(document) for document in trial.documents]))
    except Exception:  # the call is refused, or fails without a word of ours
        return ""
    if loss is None:
        return "it gives no loss"
    if any(abs(loss - one) <= limit * max(abs(one), limit) for one in trial.may_be):
        return ""
    return f"it was {loss:.4g}, and by each document alone {trial.may_be[0]:.4g}"


def _labels(subject: Subject, batch: Batch, alone: Sequence[Batch]) -> Tensor:
    """Labels (B, T) of all tokens but the first of each document, or (documents,)."""
    width = int(subject.call_model(alone[0]).shape[-1])
    if subject.per_document:
        return torch.stack([one.ids[0, 0] % width for one in alone])
    labels = torch.full_like(batch.ids, IGNORED)
    for row, span in batch.spans:
        labels[row, span] = batch.ids[row, span] % width
        labels[row, span.start or 0] = IGNORED
    return labels


def _loss_of(subject: Subject, batch: Batch, labels: Tensor) -> float | None:
    """The loss that a call gives, if it is one number."""
    output = subject.output(batch, labels=labels)
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        return None
    return float(loss)
