"""Losses that a model's own code computes from labels: of each document alone, and of packed documents."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonpack.patches.forwards import is_own
from tritonpack.patches.labels import IGNORED
from tritonpack.patches.trial.comparison import apart
from tritonpack.patches.trial.judge import Results
from tritonpack.patches.trial.outputs import UnlikeError
from tritonpack.patches.trial.packed_forms import Batch, whole
from tritonpack.patches.trial.subject import Subject


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


def has_known_loss(model: Any) -> bool:
    """Whether a model computes its loss by transformers' code alone, or takes no labels."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return True
    function = getattr(model, "loss_function", None)
    home = "transformers" if function is None else getattr(inspect.unwrap(function), "__module__", "")
    return is_own(model) and home.partition(".")[0] == "transformers"


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
    may_be: list[Tensor]

    def loss(self, subject: Subject, batch: Batch) -> Tensor:
        """The loss (1,) of a batch of some of the documents."""
        labels = first_tokens(batch) % self.classes if self.per_document else token_labels(batch, self.classes)
        return losses_in(subject.output(batch, labels=labels))["loss"]


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
    counts = [1 if trial.per_document else document.numel() - 1 for document in documents]
    summed = torch.stack(losses).sum(0)
    right = [mean_over_labels(losses, counts), summed / len(losses), summed]
    padded = subject.forms["padded_right"](documents)
    told = {name: x for name, x in padded.arguments.items() if not name.endswith("position_ids")}
    with suppress(Exception):  # it takes no mask, say
        right.append(trial.loss(subject, replace(padded, arguments=told)))
    return trial._replace(may_be=right)


@torch.no_grad()
def why_loss_mixes(subject: Subject, form: str, trial: LossTrial, limit: float) -> str:
    """Say why the loss of packed documents is wrong; empty if it is right, or if the call fails."""
    try:
        loss = trial.loss(subject, subject.forms[form](trial.documents))
    except UnlikeError as error:
        return str(error)
    except Exception:  # the call is refused, or fails with an error that isn't tritonpack's
        return ""
    if any(apart([one], [loss]) <= limit for one in trial.may_be):
        return ""
    return f"it was {float(loss):.4g}, and by each document alone {float(trial.may_be[0]):.4g}"
