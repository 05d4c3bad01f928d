"""Judge whether documents packed in a form equal each document alone, in outputs and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tests.small_copies.comparison import apart, gradients_of, influence
from tests.small_copies.outputs import Output, outputs_alone, tensors_in
from tests.small_copies.packed_forms import whole
from tests.small_copies.small_copy import one_line
from tests.small_copies.subject import Subject
from tritonpack.errors import UnsupportedModelError


class Results(NamedTuple):
    """The results of each document alone.

    Attributes:
        outputs: the outputs by name.
        gradients: the gradients of all parameters, from a weighted sum of the main output; empty if they aren't
            compared.
        no_gradients: why there are no gradients although they were asked for.
    """

    outputs: Mapping[str, Output]
    gradients: Sequence[Tensor | None] = ()
    no_gradients: str = ""

    @property
    def main(self) -> str:
        """The name of the output whose gradients are compared: the logits, else the first."""
        return "logits" if "logits" in self.outputs else next(iter(self.outputs))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the main output."""
        return self.outputs[self.main].parts[0].dtype

    @property
    def values(self) -> Tensor:
        """The main output of all documents, one after the other."""
        return torch.cat([*self.outputs[self.main].parts])


@dataclass(frozen=True)
class Judgement:
    """The verdict on one form.

    Attributes:
        verdict: "exact"; "leak": tokens of one document move the outputs of another; "inexact": a document differs from
            itself alone, and no other moves it; "refused" by tritonpack when called; "error".
        worst: the difference from documents alone in outputs or gradients, relative to the largest; NaN where there is
            none.
        moved: how far other documents move the outputs, relative to the largest; NaN where that wasn't tried.
        reason: the form and the number, or the message, for any verdict but "exact".
        error: the exception, for "refused" and "error".
    """

    verdict: str
    worst: float
    moved: float
    reason: str = ""
    error: Exception | None = None

    @property
    def wrong(self) -> bool:
        """Whether packed documents gave other results than documents alone."""
        return self.verdict in ("leak", "inexact")


def alone(subject: Subject, documents: list[Tensor], *, gradients: bool = True) -> Results:
    """Run each document in a call of its own, with nothing but its tokens.

    Outputs that are the same for all documents, or that have a NaN, are left out, except the main output.

    Raises:
        ValueError: the model gives no value for each token or document, or none that is finite.
    """
    with torch.no_grad():
        results = Results(_outputs(subject, documents))
    if not gradients:
        return results
    try:
        with torch.enable_grad():
            main = _outputs(subject, documents)[results.main]
            return results._replace(gradients=_gradients(subject, main.parts))
    except Exception as error:  # some models can't be differentiated
        return results._replace(no_gradients=one_line(error))


def judge(
    subject: Subject,
    form: str,
    documents: list[Tensor],
    expected: Results,
    limit: float,
    *,
    moved_limit: float | None = None,
    always: bool = False,
) -> Judgement:
    """Judge documents `[1, n]` packed in one of the subject's forms.

    Differences from the results of `alone` up to `limit` count as rounding, and so does an influence of other documents
    up to `moved_limit` (None means `limit`). Gradients are compared if there are expected ones. `always` measures the
    influence of other documents also where there is no difference.
    """
    worst = moved = math.nan
    try:
        with torch.no_grad():
            got, problems = subject.parts(subject.forms[form](documents), expected.outputs)
        worst, which = max(((expected.outputs[name].difference(got[name]), name) for name in got), default=(0.0, ""))
        if worst > limit or problems or always or form == "position_ids":
            last = len(documents) - 1
            seen = influence(
                lambda changed: subject.parts(subject.forms[form](changed), expected.outputs, strict=False)[0],
                documents,
                {i: subject.draw((documents[i].numel(),), 9)[0] for i in (0, last)},
            )
            moved = seen.size
            if moved > (limit if moved_limit is None else moved_limit):
                reason = f"{form}: {seen.output}: {moved:.0e} from another document, {worst:.0e} in all"
                return Judgement("leak", worst, moved, reason)
        if problems:
            return Judgement("inexact", worst, moved, f"{form}: {problems[0]}")
        if worst <= limit and expected.gradients:
            with torch.enable_grad():
                got, _ = subject.parts(subject.forms[form](documents), expected.outputs)
                found = apart(expected.gradients, _gradients(subject, got[expected.main]))
            worst, which = max((worst, which), (found, "gradients"))
    except UnsupportedModelError as error:
        return Judgement("refused", worst, moved, message(form, error), error)
    except Exception as error:  # a model's own code may raise anything
        return Judgement("error", worst, moved, message(form, error), error)
    if worst <= limit:
        return Judgement("exact", worst, moved)
    return Judgement("inexact", worst, moved, f"{form}: {which}: {worst:.0e}")


def _outputs(subject: Subject, documents: list[Tensor]) -> dict[str, Output]:
    calls = [subject.values(subject.output(whole(document))) for document in documents]
    found = outputs_alone(calls, subject.forms["position_ids"](documents))
    if not found or ("logits" in dict(tensors_in(calls[0])) and "logits" not in found):
        raise ValueError("it gives no value for each token or document")
    main = Results(found).main
    if any(bool(part.isnan().any()) for part in found[main].parts):
        raise ValueError(f"its {main} aren't finite")
    others = {name: x for name, x in found.items() if not any(bool(part.isnan().any()) for part in x.parts)}
    return {name: x for name, x in others.items() if name == main or not x.is_constant}


def _gradients(subject: Subject, parts: Sequence[Tensor]) -> list[Tensor | None]:
    return gradients_of(subject.model, torch.cat([part.flatten() for part in parts]))


def message(where: str, error: Exception) -> str:
    """An error in one line, after the place where it was raised."""
    return f"{where}: {type(error).__name__}: {error}".split("\n")[0]
