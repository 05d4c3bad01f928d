"""Losses, auxiliary ones among them: of a packed batch, against the same documents padded without a patch.

A loss is a mean over what has a label: tokens for token heads, documents for sequence heads. Padded with its mask, a
batch has the same tokens and documents as packed, so that both means are equal, and the gradients with them. Losses of
routers average over all tokens that aren't padding, which are the same, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.patches.sweep.subject import Layout, ShapeError, Subject
from tritonpack.testing.packed_forms import FORMS

# The forms that are tried with labels, and what each is called then.
LOSS_FORMS = {
    f"loss_{form}": form
    for form in ("position_ids", "collator", "segments_alone", "segments_padded", "padded_end_mask", "two_rows_padded")
}
REFERENCE = "padded_right"
IGNORED = -100


class NoLossError(Exception):
    """A class without a loss, or whose loss has nothing to be equal to; the message says why."""


class Losses:
    """What a model without a patch gives with labels.

    Attributes:
        forms: those that can be tried: none where the class takes no labels, or where padding alone moves its loss.
        why_not: the reason for none.
    """

    def __init__(self, subject: Subject, documents: list[Tensor], limit: float) -> None:
        self.documents, self.limit = documents, limit
        self.switches = _switches(subject)
        self.forms: tuple[str, ...] = ()
        self.why_not = ""
        try:
            self.expected = self._run(subject, REFERENCE)
            if self._apart(self.expected, self._run(subject, "padded_left")) > limit:
                raise NoLossError("padding moves its loss")
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            self.forms = tuple(LOSS_FORMS)

    def compare(self, subject: Subject, form: str) -> float:
        """How far losses and their gradients are from those of the padded batch, relative to the largest."""
        return self._apart(self.expected, self._run(subject, LOSS_FORMS[form]))

    @property
    def auxiliary(self) -> bool:
        return bool(self.forms) and any(name != "loss" for name in self.expected[0])

    def _run(self, subject: Subject, form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses by name, and the gradients of the first, which holds the others."""
        layout = subject.lay_out(FORMS[form], self.documents)
        given = {**self.switches, **labels(subject, layout)}
        with torch.enable_grad():
            output = subject.model(**{**subject.arguments(layout), **given})
            found = {
                name: value for name, value in output.items()
                if name.endswith("loss") and isinstance(value, Tensor) and value.is_floating_point()
            }  # fmt: skip
            if "loss" not in found:
                raise NoLossError("gives no loss")
            for name, value in found.items():
                if value.numel() != 1:
                    raise ShapeError(f"{name} has shape {tuple(value.shape)}")
            named = [(name, p) for name, p in subject.model.named_parameters() if p.requires_grad]
            gradients = torch.autograd.grad(found["loss"].sum(), [p for _, p in named], allow_unused=True)
        return (
            {name: value.detach().flatten() for name, value in found.items()},
            {name: g for (name, _), g in zip(named, gradients, strict=True) if g is not None},
        )

    def _apart(self, expected: Any, got: Any) -> float:
        from tests.patches.sweep.judging import difference, gradient_difference

        return max(difference(expected[0], got[0]), gradient_difference(expected[1], got[1]))


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
            given["labels"] = torch.randint(limit, (count,), generator=generator)
        else:
            limit = classes if "TokenClassification" in subject.class_name else subject.size
            if "ElectraForPreTraining" in subject.class_name:
                limit = 2
            given["labels"] = _token_labels(subject, batch, limit)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in names:
            given[name] = torch.randint(2, (count,), generator=generator)
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
