"""`tritonpack check MODEL`: whether packing is exact, refused or leaking, with stock transformers and patched."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from tritonpack.cli.files import STANDARD_OUTPUT, require_writable, write_json
from tritonpack.cli.machine import resolve_device
from tritonpack.cli.model_source import NAMED, instead_of, load_config, load_weights, named_class, with_note
from tritonpack.cli.small_copies.comparison import limits, tolerance
from tritonpack.cli.small_copies.judge import Judgement, Results, alone, judge, message
from tritonpack.cli.small_copies.packed_forms import LENGTHS, whole
from tritonpack.cli.small_copies.shrink_rows import REACH
from tritonpack.cli.small_copies.small_copy import Built, NotSmallError, one_line, small_copy, small_model
from tritonpack.cli.small_copies.subject import Subject, subject_of
from tritonpack.cli.words import count
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import patch
from tritonpack.patches.no_trace import quiet
from tritonpack.patches.rope import rope_limits

# Names of forms in `packed_forms`, and the arguments that a user passes to the model in each.
FORMS = {
    "position_ids": "position_ids",
    "without_cache": "position_ids, use_cache=False",
    "all_ones_mask": "position_ids, attention_mask of ones",
    "collator": "position_ids, cu_seq_lens_q, seq_idx (collators)",
    "two_rows": "position_ids, attention_mask, two rows",
}
WORST_FIRST = ("nothing to keep apart", "leak", "error", "inexact", "refused", "exact")
EXIT_CODES = {"exact": 0, "refused": 1}  # 3 for any other verdict; 2 is a wrong command line

_STYLES = {"exact": "green", "refused": "yellow", "leak": "bold red", "inexact": "bold red", "error": "bold red"}

ShowStep = Callable[[str], None]  # writes a step to the progress display


@dataclass
class Column:
    """The judgements with stock transformers, or with the model patched.

    Attributes:
        forms: the judgement of each form.
        whole: a judgement of the model as a whole, if no form was tried: it is refused, or has no attention.
        report: the changes that `patch` made.
    """

    forms: dict[str, Judgement] = field(default_factory=dict)
    whole: Judgement | None = None
    report: str = ""

    @property
    def worst(self) -> Judgement:
        """The judgement of the model as a whole, else the worst of all forms."""
        found = [self.whole] if self.whole else list(self.forms.values())
        return min(found, key=lambda x: WORST_FIRST.index(x.verdict), default=_judgement("not tried"))


def _judgement(verdict: str, reason: str = "") -> Judgement:
    return Judgement(verdict, math.nan, math.nan, reason)


@dataclass(frozen=True)
class Findings:
    """The results of a check.

    Attributes:
        model: the model that was run.
        limit: the largest difference that counts as rounding.
        compared: the values that were compared.
        stock: the results with stock transformers.
        tritonpack: the results with the model patched.
        notes: limits of the check, and differences between the model and its configuration.
        instead_of: the class that the configuration names, if another one was run; else empty.
    """

    model: Built
    limit: float
    compared: str
    stock: Column
    tritonpack: Column
    notes: tuple[str, ...]
    instead_of: str = ""


def examine(name: str, *, weights: bool, device: str, trust_remote_code: bool, path: Path | None) -> int:
    """Check a model, print a table, and write the findings to `path` as JSON. The arguments are the command's options.

    Returns:
        The exit code: 0 if packing with tritonpack is exact, 1 if refused, 3 for anything else.

    Raises:
        ValueError: no such model, or it can't be built or loaded; `path` can't be written.
    """
    if device == "cuda" and not weights:
        raise ValueError("--device is for --weights: small copies run on the CPU")
    where = resolve_device(device)
    require_writable(path, inputs=[Path(name)])
    with quiet(), Console(stderr=True).status(f"reading the configuration of {escape(name)}") as status:
        config = load_config(name, trust_remote_code)
        status.update(f"loading {escape(name)}")
        built = load_weights(name, config, where, trust_remote_code) if weights else None
        try:
            if built is None:
                findings = _check_small_copy(config, status.update, trust_remote_code)
            else:
                findings = _check(config, built, True, status.update)
        except ValueError as error:
            remedy = "" if weights else "; correct its configuration, or load the model with --weights"
            raise ValueError(f"{name}: {error}{remedy}") from error
    _print(Console(stderr=path == STANDARD_OUTPUT), name, weights, findings)
    if path is not None:
        write_json(path, {"model": name, "weights": weights} | as_dict(findings))
    return EXIT_CODES.get(findings.tritonpack.worst.verdict, 3)


def _check_small_copy(config: Any, show_step: ShowStep, trust_remote_code: bool) -> Findings:
    """Check a small random copy of a model in float32, and if it seems inexact in float64."""
    findings = _check_copy_as(config, torch.float32, show_step, trust_remote_code)
    if findings.tritonpack.worst.verdict != "inexact":
        return findings
    try:
        exacter = _check_copy_as(config, torch.float64, show_step, trust_remote_code)
    except ValueError:  # a constant or a cast in the model's own code
        return findings
    same = type(exacter.model.model) is type(findings.model.model)
    return exacter if same and exacter.tritonpack.worst.verdict != "refused" else findings


def _check_copy_as(config: Any, dtype: torch.dtype, show_step: ShowStep, trust_remote_code: bool) -> Findings:
    """Check the class that the configuration names, or else the class of an auto class.

    Raises:
        ValueError: neither can be built small and runs on tokens alone.
    """
    show_step("building a small copy")
    kind, why = named_class(config, trust_remote_code)
    if kind is not None:
        try:
            built = Built(small_model(kind, config).to(dtype), f"{kind.__name__}, {NAMED}")
            return _check(config, built, False, show_step)
        except NotSmallError as error:
            why = f"{kind.__name__}, which can't be built small ({error})"
        except ValueError as error:
            why = f"{kind.__name__}, which doesn't run on tokens alone ({one_line(error.__cause__ or error)})"
    try:
        built = small_copy(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except NotSmallError as error:
        raise ValueError(f"no small copy can be built: {error}") from error
    return _check(config, with_note(built, config, why), False, show_step)


def _check(config: Any, built: Built, weights: bool, show_step: ShowStep) -> Findings:
    """Check a small copy, or with `weights` a model itself, by the tolerances of `testing.check_isolation`.

    Raises:
        ValueError: it doesn't run on tokens alone, and `patch` doesn't refuse it.
    """
    try:
        subject, notes = _callable(subject_of(built.model))
        documents = subject.draw(LENGTHS, 1)
        expected = alone(subject, documents, gradients=not weights)
    except Exception as error:  # a model's own code may raise anything
        refused = _refusal(built)
        if refused is None:
            what = "the model" if weights else "its small copy"
            raise ValueError(f"{what} doesn't run on tokens alone: {one_line(error)}") from error
        return Findings(built, 0.0, "nothing", Column(), refused, built.notes)
    notes = (*built.notes, *notes)
    if not weights and expected.no_gradients:
        notes += (f"gradients weren't compared: {expected.no_gradients}",)
    limit, moved_limit = limits(expected.dtype) if weights else (tolerance(expected.dtype), None)
    stock, patched = _columns(subject, documents, expected, limit, moved_limit, show_step)
    if weights:
        notes += (
            f"the longest document has {count(max(LENGTHS), 'token')}, so longer windows, chunks and selections had no "
            "effect; without --weights a small copy with short ones is checked",
        )
    elif patched.worst.verdict in ("inexact", "error"):
        # Patched calls may be refused for rotary embeddings that depend on the longest document of a call.
        notes += tuple(
            f"rotary embeddings of the type {kind!r} follow the longest document of a call, and differ beyond "
            f"{longest:,} tokens ({REACH} in the small copy); calls whose documents are all shorter are exact"
            for kind, longest in rope_limits(config.get_text_config(decoder=True))[:1]
        )
    compared = "outputs and gradients" if expected.gradients else "outputs"
    return Findings(built, limit, compared, stock, patched, notes, instead_of(config, built))


@torch.no_grad()
def _callable(subject: Subject) -> tuple[Subject, tuple[str, ...]]:
    """The model as it is called with tokens alone, and notes. It is called without a cache if it fails with one.

    Raises:
        Exception: the model runs in neither way.
    """
    (document,) = subject.draw(LENGTHS[-1:], 1)
    try:
        subject.output(whole(document))
    except Exception as error:  # a model's own code may raise anything
        call = subject.call
        uncached = replace(subject, call=lambda ids: {**call(ids), "use_cache": False})
        try:
            uncached.output(whole(document))
        except Exception:
            raise error from None
        note = f"it is called with use_cache=False, because with a cache it fails: {one_line(error)}"
        return uncached, (note,)
    return subject, ()


def _refusal(built: Built) -> Column | None:
    """The results of a model that `patch` refuses; None if it doesn't."""
    with suppress(Exception):  # another error is less telling than the one that keeps the model from running
        try:
            with patch(built.model) as handle:
                handle.prove()
                return None
        except UnsupportedModelError as error:
            return Column(whole=_judgement("refused", str(error)))
    return None


def _columns(
    subject: Subject,
    documents: list[Tensor],
    expected: Results,
    limit: float,
    moved_limit: float | None,
    show_step: ShowStep,
) -> tuple[Column, Column]:
    """The results with stock transformers, and patched."""
    model = subject.model
    stock, patched = Column(), Column()
    if not _mixes_tokens(subject, documents, expected):
        reason = f"in {type(model).__name__} no token sees another; is the number of layers right?"
        nothing = Column(whole=_judgement("nothing to keep apart", reason))
        return nothing, nothing

    def fill(column: Column, subject: Subject, what: str) -> None:
        for form, label in FORMS.items():
            show_step(f"{what}: {label}")
            column.forms[form] = judge(subject, form, documents, expected, limit, moved_limit=moved_limit, always=True)

    fill(stock, replace(subject, stock=True), "stock transformers")
    show_step("patching the model")
    try:
        with patch(model) as handle:
            patched.report = str(handle.report)
            handle.prove()
            fill(patched, subject, "tritonpack")
    except UnsupportedModelError as error:
        patched.whole = _judgement("refused", str(error))
    except Exception as error:  # a bug of tritonpack's, which is a result here
        patched.forms = dict.fromkeys(FORMS, _judgement("error", message("patch", error)))
    return stock, patched


def _mixes_tokens(subject: Subject, documents: list[Tensor], expected: Results) -> bool:
    """Whether the values of a token depend on the first token of its document; True if values aren't per token."""
    if len(expected.values) != sum(LENGTHS):
        return True
    others = subject.draw(LENGTHS, 2)
    changed = [torch.cat([b[:, :1], a[:, 1:]], dim=1) for a, b in zip(documents, others, strict=True)]
    later = torch.cat([torch.arange(length, device="cpu") > 0 for length in LENGTHS])
    moved = alone(subject, changed, gradients=False).values
    return not torch.equal(moved[later], expected.values[later])


def as_dict(findings: Findings) -> dict[str, Any]:
    """The findings for JSON; numbers that don't exist are null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def column(found: Column) -> dict[str, Any]:
        forms = {
            name: {"verdict": x.verdict, "worst": number(x.worst), "moved": number(x.moved), "reason": x.reason}
            for name, x in found.forms.items()
        }
        return {"verdict": found.worst.verdict, "reason": found.worst.reason, "report": found.report, "forms": forms}

    model: Any = findings.model.model
    return {
        "model_type": model.config.model_type,
        "class": type(model).__name__,
        "instead_of": findings.instead_of or None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "lengths": list(LENGTHS),
        "compared": findings.compared,
        "limit": findings.limit,
        "notes": list(findings.notes),
        "stock": column(findings.stock),
        "tritonpack": column(findings.tritonpack),
    }


def _print(console: Console, title: str, weights: bool, findings: Findings) -> None:
    def line(text: str) -> None:  # neither coloured nor broken at the width of the terminal
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    model, replaced = findings.model.model, findings.instead_of
    name = type(model).__name__
    size = count(sum(parameter.numel() for parameter in model.parameters()), "parameter")
    copy = "" if weights else "a small random copy of "
    line(f"{title}: {copy}{findings.model.kind}; {size}, {str(model.dtype).removeprefix('torch.')}")
    if findings.stock.forms:
        rows = Table("packed documents marked by", "stock", "tritonpack")
        rows.title = f"{name} in place of {replaced}" if replaced else None
        for form, label in FORMS.items():
            rows.add_row(label, _cell(findings.stock, form), _cell(findings.tritonpack, form))
        console.print(rows)
        line(
            f"Numbers: the largest difference between {findings.compared} of packed documents and of each document "
            f"alone, relative to the largest value; up to {findings.limit:.0e} is rounding. A leak: they change when "
            "another document changes."
        )
    for note in findings.notes:
        line(f"Note: {note}.")
    if findings.tritonpack.report:
        line(findings.tritonpack.report)
    worst = findings.tritonpack.worst
    reason = worst.reason or (f"for {name}, in place of {replaced}" if replaced else "")
    line(f"tritonpack: {worst.verdict}{': ' if reason else ''}{reason}")


def _cell(column: Column, form: str) -> str:
    if column.whole:
        return f"[{_STYLES['refused']}]{column.whole.verdict}[/]"
    found = column.forms[form]
    number = "" if math.isnan(found.worst) else f" {found.worst:.0e}"
    detail = f" {found.reason.partition(': ')[2]}" if found.verdict in ("error", "refused") else number
    return f"[{_STYLES[found.verdict]}]{found.verdict}[/]{escape(detail)}"
