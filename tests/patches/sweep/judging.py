"""The verdict on one class, patched or named: its documents in every form, compared with each document alone."""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tritonpack
from tests.patches.sweep import forms
from tests.patches.sweep.classes import Case, NotBuiltError, build, load, no_text
from tests.patches.sweep.forms import LENGTHS, LOSSES, LOW, OUTPUTS, PADDED, WITH_GRADIENTS
from tests.patches.sweep.results import HOWS, NEVER, OPTIONS, VERDICTS, Row
from tests.patches.sweep.subject import Losses, Outputs, Subject, difference, expected_losses, losses_of
from tests.patches.zoo import apart, gradients_of, tolerance
from tritonpack.patches.applied_patch import applied_to
from tritonpack.patches.forwards import installed, versions

PACKAGE = str(Path(tritonpack.__file__).parent)

# With share_prefixes: documents of several groups, in no order.
OF_GROUPS = (9, 6, 11, 4, 8, 7, 5, 7)
# A document, the one that it begins like, and the number of common tokens. Two of a group may have more in common, one
# is the beginning of its group, and two are equal.
ALIKE = ((2, 0, 4), (3, 0, 4), (4, 0, 6), (5, 1, 3), (7, 5, 7))


class Reference:
    """The outputs, gradients and losses of documents alone, or `alike`, in a model without a patch.

    Raises:
        NotBuiltError: no model of the class can be built, or run by itself, or its tokens don't reach each other.
    """

    def __init__(self, case: Case, names: Iterable[str], *, alike: bool) -> None:
        self.case, self.alike, self.notes = case, alike, list[str]()
        for dtype in (torch.float64, torch.float32):
            try:
                self._run_alone(dtype)
                break
            except NotBuiltError:
                raise
            except Exception as error:  # a constant or a cast in a model's own code may not go with float64
                self.notes = [f"in float32, because in float64 it fails: {message(error)[:80]}"]
        else:
            raise NotBuiltError(self.notes[0].replace("in float32, because in float64", "by itself"))
        self.limit = tolerance(self.dtype)
        if self.dtype == torch.float32:  # gradients go through the layers twice
            self.limit = max(self.limit, 2 * 8 * self._moved_by_rows())
        if not self._mixes():
            raise NotBuiltError("its tokens don't reach each other")
        self.losses: Losses | None = None
        try:
            if {*LOSSES} & {*names}:
                self.losses = expected_losses(self.subject, self.documents, self.limit)
        except Exception as error:  # whatever a model's own code raises
            self.notes += [f"no loss: {message(error)[:100]}"] if str(error) else []
        lower = [name for name in {*names} & {*LOW} if LOW[name] != self.dtype]
        self.errors = {name: error for name in lower if (error := self._error_in(LOW[name])) is not None}

    @torch.enable_grad()
    def _run_alone(self, dtype: torch.dtype) -> None:
        self.dtype, self.subject = dtype, Subject(build(self.case, dtype=dtype), stock=True)
        self.documents = self.subject.draw(OF_GROUPS if self.alike else LENGTHS)
        for one, other, count in ALIKE if self.alike else ():
            self.documents[one][:, :count] = self.documents[other][:, :count]
        found = self.subject.alone(self.documents)
        if not found or any(part.isnan().any() for parts in found.values() for part in parts):
            raise ValueError(f"it gives NaN, or no value for each token or document: {list(found)}")
        self.gradients: list[Tensor | None] | None = None
        try:
            self.gradients = gradients(self.subject.model, found)
        except Exception as error:
            self.notes.append(f"no gradients: {message(error)[:100]}")
        self.expected = {name: [part.detach() for part in parts] for name, parts in found.items()}

    @torch.no_grad()
    def _mixes(self) -> bool:
        """Whether documents laid end to end, without boundaries, differ from each alone."""
        try:
            got = self.subject.call(self.subject.lay_out(forms.end_to_end, self.documents))
            return difference(self.expected, got) > 10 * self.limit
        except Exception:
            return True

    @torch.no_grad()
    def _moved_by_rows(self) -> float:
        """How far a document's outputs move beside a row of others, without tritonpack: in experts, by rounding."""
        rows = [self.documents[-1], *self.subject.draw((self.documents[-1].numel(),), seed=9)]
        got = self.subject.call(self.subject.lay_out(forms.alone, rows))
        both = {name: parts[-1:] for name, parts in self.expected.items() if name in got}
        return difference(both, {name: got[name][:1] for name in both})

    @torch.no_grad()
    def _error_in(self, dtype: torch.dtype) -> float | None:
        """The error of the model alone in another dtype; None where it doesn't run."""
        try:
            lower = Subject(build(self.case, dtype=dtype), stock=True).alone(self.documents)
            return difference({name: self.expected[name] for name in lower if name in self.expected}, lower)
        except Exception as error:
            self.notes.append(f"not in {dtype}: {message(error)[:100]}")
            return None


class Trial:
    """Judges patched or named models of a class in the chosen forms.

    With an option, causal models compute padded batches as one row; then "exact" requires that no padding was computed,
    and no shared token twice. If results are right and tokens weren't saved, the verdict is "as it is".
    """

    def __init__(self, case: Case, option: str = "", chosen: Iterable[str] = forms.NAMES) -> None:
        self.case, self.option, self.dtype, chosen = case, option, torch.float64, {*chosen}
        self.names = [name for name in (forms.COMPACTED if option else forms.ALL) if name in chosen]
        self.differentiated = forms.PADDED_BATCHES if option else WITH_GRADIENTS
        self.may_be_wrong = () if option else PADDED  # they aren't judged if a model without tritonpack is wrong

    @cached_property
    def reference(self) -> Reference:
        """It isn't computed for a class that is refused before any call."""
        return Reference(self.case, self.names, alike=self.option == "share_prefixes")

    def run(self, how: str, patch: Any = tritonpack.patch) -> Row:
        """Judge all forms of a model that packs in a context that `patch` makes.

        A class that can't be called, or is wrong, is judged once more as one that isn't in the table of shown classes:
        its proof should refuse it, or the calls that are wrong.
        """
        if self.option:
            return self._run(how, partial(patch, **{self.option: True}))
        try:
            with assumed(self.case.name, shown=True):
                row = self._run(how, patch)
            if row.verdict in ("exact", "partly", "refused"):
                return row
        except NotBuiltError:
            self.dtype = torch.float32
        with assumed(self.case.name, shown=False):
            row = self._run(how, patch)
        row.proven = row.verdict in ("exact", "partly")
        return row

    def _run(self, how: str, patch: Callable[[nn.Module], Any]) -> Row:
        start = time.perf_counter()
        row = Row(self.case.key, how, "exact")
        try:
            handle = self._patched(how, patch)
            getattr(handle, "prove", lambda: None)()
        except ValueError as error:
            if not is_ours(error):
                raise
            row.verdict, row.reason = "refused", f"when patched: {message(error)}"
            row.bare = not has_remedy(str(error))
        else:
            if self.dtype != self.reference.dtype:
                self.dtype = self.reference.dtype
                handle = self._patched(how, patch)
            with handle as entered:
                row.means = means(entered)
                reasons = self._judge_all(entered, row)
            if row.forms:
                first = min(row.forms, key=lambda form: VERDICTS.index(row.forms[form]))
                row.verdict, row.reason = row.forms[first], reasons[first]
                row.bare = row.verdict == "refused" and not has_remedy(row.reason)
                if row.verdict == "refused" and "exact" in row.forms.values():
                    row.verdict = "partly"
            row.note = "; ".join(self.reference.notes)
        row.seconds = time.perf_counter() - start
        return row

    def _patched(self, how: str, patch: Callable[[nn.Module], Any]) -> Any:
        """Patch a new model, because recurrent layers of one that ran may have kept a state."""
        named = {"attn_implementation": "tritonpack"} if how == "name" else {}
        self.model = build(self.case, dtype=self.dtype, **named)
        is_named = bool(applied_to(self.model))
        handle = patch(self.model)
        assert how != "name" or is_named, "it has the name and isn't patched"
        return handle

    def _judge_all(self, handle: Any, row: Row) -> dict[str, str]:
        """Fill in a row, and return the reason of every form."""
        subject, reasons = Subject(self.model), {}
        for form in self.names:
            if form in LOSSES and self.reference.losses is None:
                continue
            if form in LOW:
                if form not in self.reference.errors:
                    continue
                self.model.to(LOW[form])  # these are the last forms, and have fewer digits each
            before = (handle.saved.tokens_given, handle.saved.tokens_computed) if self.option else (0, 0)
            row.forms[form], number, reason = self._judge(subject, form)
            if row.forms[form] == "exact" and form not in LOW:
                row.worst = max(row.worst, number)
                if self.option and (reason := self._not_saved(subject, form, handle.saved, before)):
                    row.forms[form] = "as it is"
            reasons[form] = reason and f"{form}: {reason}"
        return reasons

    def _not_saved(self, subject: Subject, form: str, saved: Any, before: tuple[int, int]) -> str:
        """How many tokens too many were computed in calls of a form; empty if there were none."""
        given, computed = saved.tokens_given - before[0], saved.tokens_computed - before[1]
        batch = subject.lay_out(forms.laid_out(form), self.reference.documents)
        mask, rows = batch.arguments[forms.MASK], [document[0].tolist() for document in self.reference.documents]
        needed = sum(map(len, rows))
        if self.option == "share_prefixes":  # a token is one of its document's beginnings
            needed = len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
        padding = sum(span.start > 0 and not mask[row, span.start - 1] for row, span in batch.spans)  # one token each
        if given and computed * mask.numel() <= (needed + padding) * given:
            return ""
        return f"ran on {computed} of {given} tokens, and {needed} would do"

    def _judge(self, subject: Subject, form: str) -> tuple[str, float, str]:
        """Return the verdict of a form, the number, and the reason."""
        limit, failed = self.reference.limit, None
        if form in LOW:
            limit = 2 * self.reference.errors[form] + 4 * torch.finfo(LOW[form]).eps
        try:
            number = self._apart(subject, form)
            if number <= limit:
                return "exact", number, ""
            reason = f"{number:.1e}"
        except Exception as error:  # an exception of the model's own code is a result
            number, reason, failed = math.nan, message(error), error
            if is_ours(error):
                return "refused", number, reason
        if (failed or form in self.may_be_wrong) and self._stock_is_wrong(form, failed):
            return "stock", number, f"{reason}, and wrong without tritonpack"
        return "error" if failed else "wrong", number, reason

    def _apart(self, subject: Subject, form: str) -> float:
        """Return how far values of documents, losses or gradients are from the expected ones."""
        reference, layout = self.reference, forms.laid_out(form)
        if form in LOSSES:
            assert reference.losses is not None
            return reference.losses.difference(losses_of(subject, reference.documents, layout))
        differentiated = reference.gradients is not None and form in self.differentiated
        expected, batch = reference.expected, subject.lay_out(layout, reference.documents)
        if more := OUTPUTS.get(form, {}):
            with torch.no_grad():
                expected = reference.subject.alone(reference.documents, **more)
        with torch.set_grad_enabled(differentiated):
            got = subject.call(batch, **more)
            found = difference(expected, got)
            if differentiated and found <= reference.limit:
                assert reference.gradients is not None
                got = {name: got[name] for name in expected}
                found = max(found, apart(reference.gradients, gradients(subject.model, got)))
        return found

    def _stock_is_wrong(self, form: str, error: Exception | None) -> bool:
        """Whether a model without tritonpack is wrong in a form, or fails in the same way."""
        try:
            found = self._apart(Subject(self.reference.subject.model, stock=error is None), form)
            return error is None and found > self.reference.limit
        except Exception as other:
            return error is None or (type(other), str(other)[:80]) == (type(error), str(error)[:80])


def gradients(model: nn.Module, outputs: Outputs) -> list[Tensor | None]:
    """Gradients of all parameters, for a sum in which each finite value of a token or document has its own weight."""
    found = []
    for parts in outputs.values():
        values = torch.cat([part.flatten() for part in parts])
        if values.requires_grad:
            values = values.masked_fill(~values.isfinite(), 0)
            found.append(values / (1 + values.detach().abs().max()))
    return gradients_of(model, torch.cat(found))


def judge_case(case: Case, hows: Iterable[str] = HOWS, chosen: Iterable[str] = forms.NAMES) -> list[Row]:
    """Return the rows of one class: one for each of `hows`, or one if it takes no text or isn't built."""
    start, trials, rows = time.perf_counter(), dict[str, Trial](), list[Row]()
    try:
        if why := no_text(load(case)):
            return [Row(case.key, HOWS[0], "no text", why)]
    except ImportError as error:
        return [Row(case.key, HOWS[0], "not built", str(error)[:240])]
    for how in hows_of(case, hows):
        option = how if how in OPTIONS else ""
        trial = trials.setdefault(option, Trial(case, option, chosen))
        try:
            rows.append(trial.run(how))
        except NotBuiltError as error:
            rows.append(Row(case.key, how, "not built", str(error)[:240], seconds=time.perf_counter() - start))
        except Exception as error:  # it was neither patched nor refused
            rows.append(Row(case.key, how, "error", f"when patched: {message(error)}"))
        if len(rows) == 1 and rows[0].verdict in NEVER:
            break
    return rows


def hows_of(case: Case, hows: Iterable[str]) -> list[str]:
    """Return those of `hows` that a class is tried in."""
    return [how for how in hows if how not in OPTIONS or case.takes_options]


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
    told = {} if report is None else {
        "dense": report.attention == "dense", "by document": report.by_document, "positions": report.positions,
    }  # fmt: skip
    return ", ".join(word for word, is_told in told.items() if is_told)
