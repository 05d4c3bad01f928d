"""The verdict on one class, patched or named: packed documents in every form, compared with each document alone."""

from __future__ import annotations

import dataclasses
import math
import re
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tritonpack
from tests.patches.comparison import Parts, apart, gradients_of, tolerance
from tests.patches.sweep import build as building
from tests.patches.sweep import forms
from tests.patches.sweep.classes import Case
from tests.patches.sweep.forms import LENGTHS, LOSSES, LOW, OUTPUTS, PADDED, WITH_GRADIENTS
from tests.patches.sweep.losses import NO_LABELS, Losses
from tests.patches.sweep.outputs import Output, UnlikeError
from tests.patches.sweep.results import VERDICTS, WRONG, Row
from tests.patches.sweep.subject import Gathered, Subject
from tritonpack.patches.forwards import installed, versions

PACKAGE = str(Path(tritonpack.__file__).parent)

# Model types that fill their masks with the least number of float32.
NAN_IN_FLOAT64 = ("fsmt", "layoutlmv2", "led", "longformer", "prophetnet")

# Notes on stand-ins for libraries that build parts of a model, by model type.
STAND_INS = {
    "layoutlmv2": "its visual backbone was a stand-in for detectron2's",
    **dict.fromkeys(("pe_audio_video", "pe_video"), "its classifier of frames was a stand-in for timm's"),
}

Patched = tuple[nn.Module, AbstractContextManager[Any]]


class AloneError(Exception):
    """A model doesn't run by itself in a dtype."""


class Trial:
    """The trial of a class: computes what documents alone give, and judges patched or named models by it.

    Args:
        case: the class.
        chosen: names of forms, of which those in `known` are tried.
        with_gradients: whether the forms of `differentiated` compare them.

    Raises:
        NotBuiltError: no model of the class can be built, or run by itself, or its tokens don't reach each other.
    """

    known: tuple[str, ...] = forms.ALL
    lengths: tuple[int, ...] = LENGTHS
    differentiated: tuple[str, ...] = WITH_GRADIENTS
    may_be_wrong: tuple[str, ...] = PADDED  # forms that aren't judged if a model without tritonpack is wrong in them

    def __init__(self, case: Case, chosen: Iterable[str] = forms.ALL, *, with_gradients: bool = True) -> None:
        self.case, chosen = case, {*chosen}
        self.chosen = forms.callable_forms(case, tuple(form for form in self.known if form in chosen))
        self.notes: list[str] = []
        dtypes = (torch.float64, torch.float32)
        if case.model_type in NAN_IN_FLOAT64:
            dtypes, self.notes = dtypes[1:], ["in float32, because its masks fail in float64"]
        for self.dtype in dtypes:
            try:
                self._build()
                self._run_alone(with_gradients)
                break
            except AloneError as error:  # a constant or a cast in a model's own code may not go with float64
                if self.dtype == torch.float32:
                    raise building.NotBuiltError(str(error)) from error
                self.notes = [f"in float32, because in float64 it {error}"[:120]]
        if note := STAND_INS.get(case.model_type):
            self.notes.append(note)
        self.limit = tolerance(self.dtype)
        if self.dtype == torch.float32:  # gradients go through the layers twice
            self.limit = max(self.limit, 2 * 8 * self._moved_by_rows())
        self.by_loss = not self.expected  # it gives values for images only, and a loss for its text
        tried = self.by_loss or {*LOSSES} & {*self.chosen}
        self.losses = Losses(self.subject, self.documents, self.limit) if tried else None
        if self.losses is not None and self.losses.why_not not in ("", NO_LABELS):
            self.notes.append(f"no loss: {self.losses.why_not[:100]}")
        if self.by_loss and self.losses is not None and self.losses.why_not:
            kinds, why = [*self.subject.outputs], self.losses.why_not
            raise building.NotBuiltError(f"has no value for each token or document: {kinds}, and no loss: {why}")
        if not self._mixes():
            raise building.NotBuiltError("its tokens don't reach each other")
        if self.by_loss:
            self.notes.append("by its loss alone, because it gives no value for each token or document")
            self.chosen = tuple(form for form in self.chosen if form not in OUTPUTS)
        lower = [name for name, dtype in LOW.items() if name in self.chosen and dtype != self.dtype]
        self.errors = {name: error for name in lower if (error := self._error_in(LOW[name])) is not None}

    def _build(self) -> None:
        self.model = building.build(self.case, dtype=self.dtype)
        self.subject = Subject(self.model, stock=True)
        self.documents = self._draw(self.subject)

    def _draw(self, subject: Subject) -> list[Tensor]:
        return subject.draw(self.lengths)

    def _run_alone(self, with_gradients: bool) -> None:
        self.expected_gradients: list[Tensor | None] | None = None
        try:
            with torch.set_grad_enabled(with_gradients):
                found = self.subject.alone(self.documents)
        except Exception as error:  # a model's own code may raise anything
            raise AloneError(f"doesn't run by itself: {message(error)[:200]}") from error
        if unknown := [name for name, x in found.items() if any(part.isnan().any() for part in x.parts)]:
            raise AloneError(f"gives NaN: {', '.join(unknown)}")
        if with_gradients and found:
            try:
                parts = {name: x.parts for name, x in found.items()}
                self.expected_gradients = gradients(self.model, found, parts)
            except Exception as error:
                self.notes.append(f"no gradients: {message(error)[:100]}")
        self.expected = {
            name: dataclasses.replace(x, parts=[part.detach() for part in x.parts]) for name, x in found.items()
        }
        self.subject.expected = self.expected

    @torch.no_grad()
    def _mixes(self) -> bool:
        """Whether documents laid end to end, without boundaries, differ from each alone."""
        batch = self.subject.lay_out(forms.end_to_end, self.documents)
        try:
            if self.by_loss:
                return self._loss_apart(self.subject, forms.end_to_end) > 10 * self.limit
            got = self.subject.gather(self.subject.call(batch), batch)
            return bool(got.problems) or difference(self.expected, got.parts) > 10 * self.limit
        except Exception:
            return True

    @torch.no_grad()
    def _moved_by_rows(self) -> float:
        """How far a document's outputs move beside a row of others, without tritonpack: in experts, by rounding."""
        batch = self.subject.lay_out(forms.rows, [self.documents[-1], *self.subject.draw(self.lengths[-1:], seed=9)])
        try:
            got = self.subject.gather(self.subject.call(batch), batch, strict=False).parts
        except Exception:  # a model that can't run rows, or whose outputs can't be cut into them
            return 0.0
        alone = {name: dataclasses.replace(x, parts=x.parts[-1:]) for name, x in self.expected.items()}
        return difference(alone, {name: parts[:1] for name, parts in got.items()})

    @torch.no_grad()
    def _error_in(self, dtype: torch.dtype) -> float | None:
        """The error of the model alone in another dtype; None where it doesn't run."""
        try:
            subject = Subject(building.build(self.case, dtype=dtype), stock=True)
            if self.by_loss:
                assert self.losses is not None
                return self.losses.difference(Losses(subject, self.documents, self.limit))
            lower = subject.alone(self.documents)
            return difference(self.expected, {name: output.parts for name, output in lower.items()})
        except Exception as error:
            self.notes.append(f"not in {dtype}: {message(error)[:100]}")
            return None

    def run(self, how: str, patch: Any = tritonpack.patch) -> Row:
        """Judge all forms.

        A class that is wrong, or always refused, is judged once more as one that isn't in the table of shown classes:
        `patch` should refuse it.

        Args:
            how: "patch", "name" or "stock".
            patch: what makes a context in which a model packs.
        """
        if how != "stock":
            with assumed(self.case.name, shown=True):
                row = self._run(how, patch)
            if row.verdict in ("exact", "partly"):
                return row
        with assumed(self.case.name, shown=False):
            row = self._run(how, patch)
        row.proven = how != "stock" and row.verdict in ("exact", "partly")
        return row

    def _run(self, how: str, patch: Any) -> Row:
        start = time.perf_counter()
        row = Row(self.case.key, how, "exact")
        try:
            model, context = self._prepared(how, patch)
            getattr(context, "prove", lambda: None)()
        except ValueError as error:
            if not is_ours(error):
                raise
            row.verdict, row.reason = "refused", f"when {'built' if how == 'name' else 'patched'}: {message(error)}"
            row.bare = not has_remedy(str(error))
        else:
            with context as handle:
                row.means = means(handle)
                reasons = self._judge_all(model, how, row)
            if row.forms:
                first = min(row.forms, key=lambda form: VERDICTS.index(row.forms[form]))
                row.verdict, row.reason, row.bare = row.forms[first], reasons[first], first in self.bare
                if row.verdict == "refused" and "exact" in row.forms.values():
                    row.verdict = "partly"
            if how != "stock":
                row.note = "; ".join(self.notes)
            else:
                row.reason = ""
        row.seconds = time.perf_counter() - start
        return row

    def _prepared(self, how: str, patch: Any) -> Patched:
        if how == "name":
            tritonpack.register()
            return building.build(self.case, dtype=self.dtype, attn_implementation="tritonpack"), nullcontext()
        # A new model, because recurrent layers of the one that ran may have kept a state.
        model = building.build(self.case, dtype=self.dtype)
        return model, patch(model) if how == "patch" else nullcontext()

    def _judge_all(self, model: nn.Module, how: str, row: Row) -> dict[str, str]:
        """Fill in a row, and return the reason of every form."""
        subject = Subject(model, stock=how == "stock")
        subject.expected = self.subject.expected
        reasons = {}
        self.bare: set[str] = set()
        for form in self.chosen if how != "stock" else [x for x in forms.STOCK if x in self.chosen]:
            if form in LOSSES and (self.losses is None or self.losses.why_not):
                continue
            if form in LOW:
                if form not in self.errors:
                    continue
                model.to(LOW[form])  # these are the last forms, and have fewer digits each
            row.forms[form], number, reasons[form] = self._judge(subject, form)
            if row.forms[form] == "exact" and form not in LOW:
                row.worst = max(row.worst, number)
            elif row.forms[form] in WRONG:
                row.number = max(row.number, number)
        return reasons

    def _judge(self, subject: Subject, form: str) -> tuple[str, float, str]:
        """Return the verdict of a form, the number, and the reason."""
        limit, problems = self.limit, ()
        if form in LOW:
            limit = 2 * self.errors[form] + 4 * torch.finfo(LOW[form]).eps
        try:
            if form in LOSSES or self.by_loss:
                found = self._loss_apart(subject, forms.laid_out(form))
            else:
                found, problems = self._compare(subject, form)
            if found <= limit:
                return ("shape", math.inf, f"{form}: {'; '.join(problems)}") if problems else ("exact", found, "")
            if form in self.may_be_wrong and self._stock_is_wrong(form):
                return "stock", found, f"{form}: {found:.1e}, and wrong without tritonpack"
            by_values = form not in LOW and form not in LOSSES and not self.by_loss
            if by_values and (moved := self.influence(subject, form)) > limit:
                return "leak", found, f"{form}: {moved:.1e} from another document, {found:.1e} in all"
            return "inexact", found, f"{form}: {found:.1e}"
        except UnlikeError as error:
            return "shape", math.inf, f"{form}: {error}"
        except Exception as error:  # an exception of the model's own code is a result
            verdict = "refused" if is_ours(error) else "stock" if self._fails_too(form, error) else "error"
            self.bare |= {form} if verdict == "refused" and not has_remedy(str(error)) else set()
            return verdict, math.nan, f"{form}: {message(error)}"

    def _loss_apart(self, subject: Subject, form: forms.Form) -> float:
        """Return how far the loss of packed documents, and its gradients, are from those of each alone."""
        assert self.losses is not None
        return self.losses.compare(subject, form)

    def _compare(self, subject: Subject, form: str) -> tuple[float, tuple[str, ...]]:
        """Return how far packed documents are from each alone, and what is wrong with outputs without parts."""
        if form in OUTPUTS:
            return self._compare_more(subject, form)
        expected, differentiated = self.expected, self.expected_gradients is not None and form in self.differentiated
        with torch.set_grad_enabled(differentiated):
            got = self._parts(subject, form)
            found = difference(expected, got.parts)
            if differentiated and found <= self.limit and not got.problems:
                assert self.expected_gradients is not None
                found = max(found, apart(self.expected_gradients, gradients(subject.model, expected, got.parts)))
        return found, got.problems

    @torch.no_grad()
    def _compare_more(self, subject: Subject, form: str) -> tuple[float, tuple[str, ...]]:
        """Compare all outputs that a model gives on request."""
        several = Subject(subject.model, stock=subject.stock)
        several.expected = Subject(self.model, stock=True).alone(self.documents, **OUTPUTS[form])
        got = self._parts(several, form)
        return difference(several.expected, got.parts), got.problems

    def _parts(
        self, subject: Subject, form: str, documents: list[Tensor] | None = None, *, strict: bool = True
    ) -> Gathered:
        batch = subject.lay_out(forms.laid_out(form), self.documents if documents is None else documents)
        return subject.gather(subject.call(batch, **OUTPUTS.get(form, {})), batch, strict=strict)

    @torch.no_grad()
    def influence(self, subject: Subject, form: str) -> float:
        """Return how far other tokens in the first document, or in the last, move the values of the rest."""
        before, worst = self._parts(subject, form, strict=False).parts, 0.0
        for number in (0, len(self.lengths) - 1):
            documents = list(self.documents)
            documents[number] = self.subject.draw((self.lengths[number],), seed=9)[0]
            after = self._parts(subject, form, documents, strict=False).parts
            kept = [i for i in range(len(documents)) if i != number]
            for name in before.keys() & after.keys():
                worst = max(worst, apart([before[name][i] for i in kept], [after[name][i] for i in kept]))
        return worst

    @torch.no_grad()
    def _stock_is_wrong(self, form: str) -> bool:
        """Whether padding changes the outputs of a model without tritonpack."""
        try:
            if self.by_loss:
                return self._loss_apart(self.subject, forms.laid_out(form)) > self.limit
            return difference(self.expected, self._parts(self.subject, form).parts) > self.limit
        except Exception:
            return True

    def _fails_too(self, form: str, error: Exception) -> bool:
        """Whether a model without tritonpack fails in a form in the same way."""
        plain = Subject(self.model)
        plain.expected = self.subject.expected
        try:
            if form in LOSSES or (self.by_loss and form not in LOW):
                self._loss_apart(plain, forms.laid_out(form))
            elif form in LOW:  # the caches of packed rows are left out
                with torch.no_grad():
                    low = Subject(building.build(self.case, dtype=LOW[form]), stock=True)
                    low.alone(self.documents, use_cache=False)
            else:
                with torch.no_grad():
                    self._parts(plain, form)
        except Exception as other:
            return type(other) is type(error) and str(other).split("\n")[0] == str(error).split("\n")[0]
        return False


def difference(expected: Mapping[str, Output], got: Mapping[str, Parts]) -> float:
    """The largest difference over all outputs that both have, relative to the largest value of each."""
    return max((expected[name].difference(got[name]) for name in expected if name in got), default=0.0)


def gradients(model: nn.Module, expected: Mapping[str, Output], got: Mapping[str, Parts]) -> list[Tensor | None]:
    """Gradients of all parameters, for a sum in which each finite value of a token or document has its own weight."""
    found = []
    for name, parts in got.items():
        if more := expected[name].more:
            parts = [part[: len(alone) - more] for part, alone in zip(parts, expected[name].parts, strict=True)]
        values = torch.cat([part.flatten() for part in parts])
        if values.requires_grad:
            values = values.masked_fill(~values.isfinite(), 0)
            found.append(values / (1 + values.detach().abs().max()))
    return gradients_of(model, torch.cat(found))


@contextmanager
def assumed(name: str, *, shown: bool) -> Iterator[None]:
    """Put a class into the table of shown classes, or take it out."""
    table = versions()["versions"]
    before = table.pop(name, None)
    if shown:
        table[name] = {installed()}
    try:
        yield
    finally:
        table.pop(name, None)
        if before is not None:
            table[name] = before


def is_ours(error: BaseException) -> bool:
    """Whether an error is one of tritonpack's ValueErrors."""
    if isinstance(error, tritonpack.UnsupportedModelError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and frames[-1].filename.startswith(PACKAGE)


REMEDY = re.compile(
    r"\b(call|pass|give|use|leave|let|mark|unpatch|patch|tritonpack\.patch|set|load|run|remove|train|build|tell)\b",
    re.I,
)


def has_remedy(text: str) -> bool:
    """Whether a refusal has a remedy: a sentence, or a part of one, begins with one of a few verbs."""
    return any(REMEDY.match(part.strip()) for part in re.split(r"[.;:,]\s", text))


def message(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:480]


def means(handle: Any) -> str:
    """Describe a handle's report; empty for a model without a handle."""
    report = getattr(handle, "report", None)
    if report is None:
        return ""
    told = {"dense": report.attention == "dense", "by document": report.by_document, "positions": report.positions}
    return ", ".join(word for word, is_told in told.items() if is_told)
