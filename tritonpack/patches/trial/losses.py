"""The comparison of a packed batch's loss with the losses of each document alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonpack.patches.forwards import is_own
from tritonpack.patches.labels import IGNORED
from tritonpack.patches.trial.judge import Results
from tritonpack.patches.trial.packed_forms import Batch, whole
from tritonpack.patches.trial.subject import Subject


class LossTrial(NamedTuple):
    """What the loss of packed documents is compared with.

    Attributes:
        documents: token ids `[1, n]`, each with at least one label.
        classes: labels are smaller than this.
        per_document: whether each document has one label, and not each token.
        may_be: the losses that are right. They are the mean of the losses alone over labels, their mean over documents,
            their sum, and the loss of the same documents in a padded batch without a patch (a router's loss is a mean
            over all tokens of a call).
    """

    documents: list[Tensor]
    classes: int
    per_document: bool
    may_be: list[float]

    def loss(self, subject: Subject, batch: Batch) -> float | None:
        """The loss of a batch of some of the documents; None if it isn't one number."""
        output = subject.output(batch, labels=self._labels(batch))
        loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
        if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
            return None
        return float(loss)

    def _labels(self, batch: Batch) -> Tensor:
        """Labels (B, T) of all tokens but the first of each document, or (documents,)."""
        first = torch.stack([batch.ids[row, span.start] for row, span in batch.spans])
        if self.per_document:
            return first % self.classes
        labels = torch.full_like(batch.ids, IGNORED)
        for row, span in batch.spans:
            labels[row, span] = batch.ids[row, span] % self.classes
            labels[row, span.start] = IGNORED
        return labels


def has_known_loss(model: Any) -> bool:
    """Whether a model computes its loss by transformers' code alone, or takes no labels."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return True
    function = getattr(model, "loss_function", None)
    home = "transformers" if function is None else getattr(inspect.unwrap(function), "__module__", "")
    return is_own(model) and home.partition(".")[0] == "transformers"


@torch.no_grad()
def losses_alone(subject: Subject, documents: list[Tensor], expected: Results) -> LossTrial | None:
    """Compute the losses of documents, each in a call of its own, before the model is patched.

    The main output of the expected results decides whether tokens or documents have labels. Returns None for a model
    that gives no loss for such labels.
    """
    documents = [document for document in documents if document.numel() > 1]
    main = expected.outputs[expected.main]
    trial = LossTrial(documents, int(main.parts[0].shape[-1]), main.kind == "document", [])
    try:
        losses = [trial.loss(subject, whole(document)) for document in documents]
    except Exception:  # labels of another kind
        return None
    found = [loss for loss in losses if loss is not None]
    if len(found) < len(losses):
        return None
    counts = [1 if trial.per_document else document.numel() - 1 for document in documents]
    may_be = [sum(x * n for x, n in zip(found, counts, strict=True)) / sum(counts), sum(found) / len(found), sum(found)]
    padded = subject.forms["padded_right"](documents)
    told = {name: x for name, x in padded.arguments.items() if not name.endswith("position_ids")}
    try:
        loss = trial.loss(subject, replace(padded, arguments=told))
    except Exception:  # it takes no mask, say
        loss = None
    return trial._replace(may_be=may_be if loss is None else [*may_be, loss])


@torch.no_grad()
def why_loss_mixes(subject: Subject, form: str, trial: LossTrial, limit: float) -> str:
    """Say why the loss of packed documents is wrong; empty if it is right, or if the call fails."""
    try:
        loss = trial.loss(subject, subject.forms[form](trial.documents))
    except Exception:  # the call is refused, or fails with an error that isn't tritonpack's
        return ""
    if loss is None:
        return "it gives no loss"
    if any(abs(loss - one) <= limit * max(abs(one), limit) for one in trial.may_be):
        return ""
    return f"it was {loss:.4g}, and by each document alone {trial.may_be[0]:.4g}"
