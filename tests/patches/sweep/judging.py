"""One class, patched or named, in every form: packed documents held against each alone."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import tritonpack
from tests.patches.sweep import build as building
from tests.patches.sweep.classes import Case, load, no_text
from tests.patches.sweep.losses import LOSS_FORMS, Losses
from tests.patches.sweep.subject import Gathered, Layout, ShapeError, Subject
from tritonpack.testing import packed_forms
from tritonpack.testing.packed_forms import FORMS, LENGTHS

# Verdicts, the worst first.
WRONG = ("leak", "inexact", "shape")
VERDICTS = (*WRONG, "error", "partly", "refused", "exact", "stock", "not built", "no text")

# Forms whose gradients are compared, too; and those in which dtypes other than the first are tried.
WITH_GRADIENTS = ("position_ids", "two_rows_padded")
LOW = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OUTPUTS = {"hidden_states": {"output_hidden_states": True}}
HOWS = ("patch", "name", "stock")
PADDED = ("padded_right", "padded_left")
STOCK_FORMS = ("position_ids", "all_ones_mask")

ALL_FORMS = (*FORMS, *OUTPUTS, *LOSS_FORMS, *LOW)

Results = dict[str, Tensor]


@dataclasses.dataclass
class Row:
    """What became of a class.

    Attributes:
        key: of the case.
        how: "patch", "name", or "stock": as it is.
        verdict: one of `VERDICTS`; the worst of `forms`. "refused" is by tritonpack, "stock" a form that fails without
            tritonpack in the same words.
        reason: the form with the number, or the message, behind any verdict but "exact".
        forms: the verdict of every form that was tried.
        worst: the largest difference from documents alone among exact forms, relative to the largest value.
        numbers: that of each form that is wrong.
    """

    key: str
    how: str
    verdict: str
    reason: str = ""
    forms: dict[str, str] = dataclasses.field(default_factory=dict)
    worst: float = 0.0
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def difference(expected: Results, got: Results) -> float:
    """The largest over all outputs that both have, relative to the largest value of each."""
    return max((_apart(expected[name], got[name]) for name in expected if name in got), default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise ShapeError(f"{tuple(b.shape)} instead of {tuple(a.shape)}")
    if a.numel() == 0:
        return 0.0
    unlike = a.isfinite() != b.isfinite()
    if bool(unlike.any()):
        return math.inf
    a, b = (x.detach().double().masked_fill(~x.isfinite(), 0) for x in (a, b))
    largest = float(a.abs().max())
    apart = float((a - b).abs().max())
    return apart / largest if largest else (math.inf if apart else 0.0)


def gradients(model: nn.Module, values: Results) -> Results:
    """Of all parameters, under weights for the values that no two share."""
    total: Any = 0.0
    for value in values.values():
        if value.requires_grad:
            weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
            finite = value.isfinite()
            total = total + (value.masked_fill(~finite, 0) * weights).sum() / (
                1 + float(value.detach()[finite].abs().max())
            )
    return gradients_of(model, total)


def gradients_of(model: nn.Module, total: Tensor) -> Results:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return {name: g for (name, _), g in zip(named, found, strict=True) if g is not None}


def gradient_difference(expected: Results, got: Results) -> float:
    """Relative to the largest gradient of all: those of key biases are mathematically zero."""
    largest = max((float(g.abs().max()) for g in expected.values() if g.numel()), default=0.0) or 1.0
    worst = 0.0
    for name in {*expected, *got}:
        a, b = expected.get(name), got.get(name)
        apart = (a - b) if a is not None and b is not None else (a if a is not None else b)
        assert apart is not None
        if apart.numel():
            found = float(apart.abs().max()) / largest
            worst = max(worst, math.inf if math.isnan(found) else found)
    return worst


class Trial:
    """A class, what documents alone give, and how a patched or a named model compares.

    Raises:
        NotBuiltError: no model of the class can be built or run.
    """

    def __init__(self, case: Case, *, forms: Iterable[str] = ALL_FORMS, with_gradients: bool = True) -> None:
        self.case = case
        self.forms = tuple(forms)
        self.model = building.build(case)
        self.subject = Subject(self.model, stock=True)
        self.documents = self.subject.draw(LENGTHS)
        self.others = self._others()
        self.limit = packed_forms.tolerance(building.base_dtype(case))
        self.expected_gradients: Results | None = None
        self.note = ""
        try:
            self._run_alone(with_gradients)
        except Exception as error:
            raise building.NotBuiltError(f"runs not by itself: {_message(error)}") from error
        if not self.expected:
            raise building.NotBuiltError(f"no output has a value for each token or document: {self.subject.kinds}")
        if not self._mixes():
            raise building.NotBuiltError("its tokens don't reach each other")
        self.losses = Losses(self.subject, self.documents, self.limit) if {*LOSS_FORMS} & {*self.forms} else None
        self.low = {name: self._low(dtype) for name, dtype in LOW.items() if name in self.forms}

    def _run_alone(self, with_gradients: bool) -> None:
        if with_gradients:
            try:
                values = self.subject.alone(self.documents)
                self.expected_gradients = gradients(self.model, values)
                self.expected = {name: x.detach() for name, x in values.items()}
                return
            except Exception as error:
                self.note = f"no gradients: {_message(error)}"
        with torch.no_grad():
            self.expected = self.subject.alone(self.documents)

    @torch.no_grad()
    def _mixes(self) -> bool:
        """Whether documents laid end to end, without a word of where they begin, differ from each alone."""
        layout = self.subject.lay_out(
            lambda d: packed_forms._packed(d, "attention_mask", "position_ids"), self.documents
        )
        try:
            got = self.subject.gather(self.subject.call(layout), layout)
        except Exception:
            return True
        return bool(got.problems) or difference(self.expected, got.values) > 100 * self.limit

    def _others(self) -> list[list[Tensor]]:
        """The documents with other tokens in the first, and with others in the last."""
        found = []
        for changed in (0, -1):
            others = list(self.documents)
            others[changed] = self.subject.draw((others[changed].numel(),), seed=9)[0]
            found.append(others)
        return found

    @torch.no_grad()
    def _low(self, dtype: torch.dtype) -> tuple[Results, float] | None:
        """What the model alone gives in another dtype, and its error against the first."""
        try:
            subject = Subject(copy.deepcopy(self.model).to(torch.float32).to(dtype), stock=True)
            values = subject.alone(self.documents)
            return values, difference(self.expected, values)
        except Exception:
            return None

    def run(self, how: str) -> Row:
        """All forms, with the model patched or named."""
        start = time.perf_counter()
        row = Row(self.case.key, how, "exact")
        reasons: dict[str, str] = {}
        try:
            model, context = self._prepared(how)
        except ValueError as error:
            if not _ours(error):
                raise
            row.verdict, row.reason = "refused", f"when {'patched' if how == 'patch' else 'built'}: {_message(error)}"
            row.seconds = time.perf_counter() - start
            return row
        with context:
            subject = Subject(model, stock=how == "stock")
            subject.kinds = self.subject.kinds
            for form in self.forms if how != "stock" else STOCK_FORMS:
                if form in FORMS or form in OUTPUTS or (self.losses is not None and form in self.losses.forms):
                    self._judge(subject, form, row, reasons, how)
            if how != "stock":
                for name in [name for name in LOW if self.low.get(name)]:
                    model.to(torch.float32).to(LOW[name])
                    self._judge(subject, name, row, reasons, how)
        if row.forms:
            first = min(row.forms, key=lambda form: VERDICTS.index(row.forms[form]))
            row.verdict, row.reason = row.forms[first], reasons.get(first, "")
            if row.verdict == "refused" and "exact" in row.forms.values():
                row.verdict = "partly"
        row.seconds = time.perf_counter() - start
        return row

    def _prepared(self, how: str) -> tuple[nn.Module, AbstractContextManager[Any]]:
        if how == "name":
            return building.build(self.case, attn_implementation="tritonpack"), nullcontext()
        model = copy.deepcopy(self.model)
        return model, tritonpack.patch(model) if how == "patch" else nullcontext()

    def _judge(self, subject: Subject, form: str, row: Row, reasons: dict[str, str], how: str) -> None:
        limit = self.limit
        try:
            if form in LOW:
                values, error = self.low[form]  # type: ignore[misc]
                limit = 2 * error + 16 * torch.finfo(LOW[form]).eps
                with torch.no_grad():
                    got = self._values(subject, "position_ids")
                found, problems = difference(self.expected, got.values), got.problems
            elif self.losses is not None and form in self.losses.forms:
                found, problems = self.losses.compare(subject, form), ()
            else:
                found, problems = self._compare(subject, form)
            if found <= limit and problems:
                found, verdict, reason = math.inf, "shape", f"{form}: {'; '.join(problems)}"
            elif found <= limit:
                verdict, reason = "exact", ""
            else:
                verdict, reason = "inexact", f"{form}: {found:.1e}"
                if form not in LOW and form not in LOSS_FORMS:
                    moved = self.influence(subject, form)
                    if moved > limit:
                        verdict, reason = "leak", f"{form}: {moved:.1e} from another document, {found:.1e} in all"
                    elif form in PADDED and self._stock_is_wrong(form):
                        verdict, reason = "stock", f"{form}: {found:.1e}, and wrong without tritonpack"
        except ShapeError as error:
            found, verdict, reason = math.inf, "shape", f"{form}: {error}"
        except Exception as error:  # whatever a model's own code raises is a result here
            found, verdict = math.nan, "refused" if _ours(error) else "error"
            reason = f"{form}: {_message(error)}"
            if verdict == "error" and self._fails_too(form, error):
                verdict = "stock"
        row.forms[form], reasons[form] = verdict, reason
        if verdict == "exact":
            row.worst = max(row.worst, found if form not in LOW else 0.0)
        elif verdict in WRONG:
            row.numbers[form] = found

    def _layout(self, subject: Subject, form: str, documents: list[Tensor]) -> tuple[Layout, dict[str, Any]]:
        return subject.lay_out(FORMS["position_ids" if form in OUTPUTS else form], documents), OUTPUTS.get(form, {})

    def _values(self, subject: Subject, form: str, documents: list[Tensor] | None = None) -> Gathered:
        layout, more = self._layout(subject, form, self.documents if documents is None else documents)
        return subject.gather(subject.call(layout, **more), layout)

    def _compare(self, subject: Subject, form: str) -> tuple[float, tuple[str, ...]]:
        if form in OUTPUTS:
            return self._compare_more(subject, form)
        differentiated = self.expected_gradients is not None and form in WITH_GRADIENTS
        with torch.set_grad_enabled(differentiated):
            got = self._values(subject, form)
            found = difference(self.expected, got.values)
            if differentiated and found <= self.limit and not got.problems:
                assert self.expected_gradients is not None
                found = max(found, gradient_difference(self.expected_gradients, gradients(subject.model, got.values)))
        return found, got.problems

    @torch.no_grad()
    def _compare_more(self, subject: Subject, form: str) -> tuple[float, tuple[str, ...]]:
        """With all the outputs that a model gives when asked."""
        twin = Subject(self.model, stock=True)
        expected = twin.alone(self.documents, **OUTPUTS[form])
        several = Subject(subject.model, stock=subject.stock)
        several.kinds = twin.kinds
        got = self._values(several, form)
        return difference(expected, got.values), got.problems

    @torch.no_grad()
    def influence(self, subject: Subject, form: str) -> float:
        """How far other tokens in the first document, or in the last, move the values of the rest."""
        before = self._values(subject, form).values
        worst = 0.0
        for others, keep in zip(self.others, (slice(1, None), slice(None, -1)), strict=True):
            after = self._values(subject, form, others).values
            for name in before:
                kind = subject.kinds[name]
                lengths = [1] * len(LENGTHS) if kind.of == "document" else self._lengths(subject, kind.side)
                a, b = (torch.cat(x[name].split(lengths)[keep]) for x in (before, after))
                scale = float(before[name].abs().max()) or 1.0
                moved = float((a - b).abs().nan_to_num(math.inf).max()) / scale
                worst = max(worst, moved)
        return worst

    def _lengths(self, subject: Subject, side: str) -> list[int]:
        documents = subject.targets(self.documents) if side == "decoder" else self.documents
        return [d.numel() for d in documents]

    @torch.no_grad()
    def _stock_is_wrong(self, form: str) -> bool:
        """Whether padding alone, without packing, already changes what a model without tritonpack computes."""
        try:
            return difference(self.expected, self._values(self.subject, form).values) > self.limit
        except Exception:
            return True

    @torch.no_grad()
    def _fails_too(self, form: str, error: Exception) -> bool:
        """Whether a model without tritonpack fails in a form in the same way."""
        plain = Subject(self.model)
        try:
            if self.losses is not None and form in self.losses.forms:
                self.losses.compare(plain, form)
            elif form in LOW:
                return False
            else:
                layout, more = self._layout(plain, form, self.documents)
                plain.call(layout, **more)
        except Exception as other:
            return type(other) is type(error) and str(other).split("\n")[0] == str(error).split("\n")[0]
        return False


def _ours(error: BaseException) -> bool:
    """Whether an error is one of tritonpack's ValueErrors."""
    if isinstance(error, tritonpack.UnsupportedModelError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and "/tritonpack/" in frames[-1].filename


def _message(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def judge_case(
    case: Case, hows: Iterable[str] = HOWS, forms: Iterable[str] = ALL_FORMS, *, with_gradients: bool = True
) -> list[Row]:
    """The rows of one class."""
    start = time.perf_counter()

    def all_rows(verdict: str, reason: str) -> list[Row]:
        return [Row(case.key, how, verdict, reason, seconds=time.perf_counter() - start) for how in hows]

    try:
        cls = load(case)
    except ImportError as error:
        return all_rows("not built", _message(error))
    if why := no_text(cls):
        return all_rows("no text", why)
    try:
        trial = Trial(case, forms=forms, with_gradients=with_gradients)
    except building.NotBuiltError as error:
        return all_rows("not built", str(error))
    rows = []
    alone = time.perf_counter() - start
    for how in hows:
        try:
            rows.append(trial.run(how))
        except Exception as error:
            rows.append(
                Row(case.key, how, "error", f"when {'patched' if how == 'patch' else 'built'}: {_message(error)}")
            )
    if rows:
        rows[0].seconds += alone
    return rows
