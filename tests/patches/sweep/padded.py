"""The verdict on padded batches in models that compute them as one row: with `unpad`, and with `share_prefixes`.

A class is judged in the layout that `tritonpack.patch` chooses for it. "exact" requires that no padding was computed,
and no shared token twice. If results are right and tokens weren't saved, the verdict is "as it is".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

import tritonpack
from tests.patches.sweep import build as building
from tests.patches.sweep import forms
from tests.patches.sweep.classes import Case
from tests.patches.sweep.judging import Patched, Trial
from tests.patches.sweep.results import OPTIONS, Row
from tests.patches.sweep.subject import Subject

# Documents of several groups, in no order.
LENGTHS = (9, 6, 11, 4, 8, 7, 5, 7)
# A document, the one that it begins like, and the number of common tokens. Two of a group may have more in common, one
# is the beginning of its group, and two are equal.
ALIKE = ((2, 0, 4), (3, 0, 4), (4, 0, 6), (5, 1, 3), (7, 5, 7))


def takes_options(case: Case) -> bool:
    """Whether a class is tried with the options: causal language models are."""
    return "CAUSAL_LM" in case.mappings


class PaddedTrial(Trial):
    """The trial of a class with an option of `tritonpack.patch`.

    Args:
        case: the class.
        option: one of `results.OPTIONS`. With "share_prefixes" the documents are groups that begin alike.
        chosen: names of forms, of which those in `forms.COMPACTED` are tried.
        with_gradients: whether gradients are compared in forms without labels, too.

    Raises:
        NotBuiltError: as for `Trial`.
    """

    known = forms.COMPACTED
    differentiated = tuple(forms.PADDED_BATCHES)
    may_be_wrong = ()

    def __init__(
        self, case: Case, option: str, chosen: Iterable[str] = forms.COMPACTED, *, with_gradients: bool = True
    ) -> None:
        assert option in OPTIONS, option
        self.option = option
        if option == "share_prefixes":
            self.lengths = LENGTHS
        super().__init__(case, chosen, with_gradients=with_gradients)
        self.needed = sum(document.numel() for document in self.documents)
        if option == "share_prefixes":
            self.needed = _distinct(self.documents)

    def _draw(self, subject: Subject) -> list[Tensor]:
        documents = super()._draw(subject)
        for one, other, count in ALIKE if self.option == "share_prefixes" else ():
            documents[one][:, :count] = documents[other][:, :count]
        return documents

    def run(self, how: str, patch: Any = tritonpack.patch) -> Row:
        return self._run(how, patch)

    def _prepared(self, how: str, patch: Any) -> Patched:
        model: nn.Module = building.build(self.case, dtype=self.dtype)
        handle = patch(model, **{self.option: True})
        self.saved = handle.saved
        return model, handle

    def _judge(self, subject: Subject, form: str) -> tuple[str, float, str]:
        given, computed = self.saved.tokens_given, self.saved.tokens_computed
        verdict, number, reason = super()._judge(subject, form)
        if verdict != "exact":
            return verdict, number, reason
        given, computed = self.saved.tokens_given - given, self.saved.tokens_computed - computed
        batch = subject.lay_out(forms.laid_out(form), self.documents)
        mask = batch.arguments["attention_mask"]
        before = sum(span.start > 0 and not mask[row, span.start - 1] for row, span in batch.spans)  # one token each
        if given and computed * mask.numel() <= (self.needed + before) * given:
            return verdict, number, reason
        why = f"ran on {computed} of {given} tokens, and {self.needed} would do"
        return "as it is", math.nan, f"{form}: {why}"


def _distinct(documents: list[Tensor]) -> int:
    """The number of distinct tokens, where a token is one of its document's beginnings."""
    rows = [document[0].tolist() for document in documents]
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
