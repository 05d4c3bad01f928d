"""`tritonpack check MODEL`: whether packing is exact, refused or leaking, with stock transformers and patched."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from tritonpack.cli.machine import require_writable, resolve_device
from tritonpack.cli.model_source import NAMED, NamedClass, load_config, load_weights
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import patch
from tritonpack.patches.positions import rope_limits
from tritonpack.patches.trial.comparison import limits, tolerance
from tritonpack.patches.trial.judge import Judgement, Results, alone, judge, message
from tritonpack.patches.trial.packed_forms import LENGTHS, whole
from tritonpack.patches.trial.shrink_rows import REACH
from tritonpack.patches.trial.small_copy import (
    Built,
    NotSmallError,
    one_line,
    small_copy,
    small_model,
)
from tritonpack.patches.trial.subject import Subject, subject_of
from tritonpack.patches.trial.undisturbed import quiet

# Forms by their names in `packed_forms`, and what a user would say.
FORMS = {
    "position_ids": "position_ids",
    "without_cache": "position_ids, use_cache=False",
    "all_ones_mask": "position_ids, attention_mask of ones",
    "collator": "position_ids, cu_seq_lens_q, seq_idx (collators)",
    "two_rows": "position_ids, attention_mask, two rows",
}
WORST_FIRST = ("leak", "error", "inexact", "refused", "exact")
EXIT_CODES = {"exact": 0, "refused": 1}  # 3 for anything else; 2 is a command line that was wrong

_STYLES = {"exact": "green", "refused": "yellow", "leak": "bold red", "inexact": "bold red", "error": "bold red"}


@dataclass
class Column:
    """What became of all forms, with stock transformers or patched.

    Attributes:
        refused: why `patch` refuses the model; empty if it doesn't.
        report: what `patch` changed.
    """

    forms: dict[str, Judgement] = field(default_factory=dict)
    refused: str = ""
    report: str = ""

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        return min((found.verdict for found in self.forms.values()), key=WORST_FIRST.index, default="not tried")

    @property
    def reason(self) -> str:
        """Of the worst form."""
        return self.refused or next((x.reason for x in self.forms.values() if x.verdict == self.verdict), "")


@dataclass(frozen=True)
class Findings:
    """What a check found.

    Attributes:
        name: what was typed.
        weights: whether the model itself was run, not a small copy of it.
        model: what was run.
        limit: what counts as rounding.
        compared: the values that were.
        stock: with stock transformers.
        tritonpack: with the model patched.
        notes: what the numbers don't say.
        instead_of: the class that the configuration names, where another one was run; else empty.
    """

    name: str
    weights: bool
    model: Built
    limit: float
    compared: str
    stock: Column
    tritonpack: Column
    notes: tuple[str, ...]
    instead_of: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.tritonpack.verdict, 3)


def examine(name: str, *, weights: bool, device: str, trust_remote_code: bool, path: Path | None) -> int:
    """Check a model, print a table, and write the findings to `path` as JSON if there is one.

    Args:
        name: a model on the Hub, a folder, or a config.json.
        weights: load the model; otherwise a small random copy is built from its configuration.
        device: of the loaded model: "auto", "cpu" or "cuda".
        trust_remote_code: run the code that a model brings.

    Returns:
        The exit code: 0 if packing with tritonpack is exact, 1 if refused, 3 if it leaks, is inexact or fails.

    Raises:
        ValueError: no such model, or it can't be built or loaded; `path` can't be written.
    """
    if device == "cuda" and not weights:
        raise ValueError("--device is for --weights: small copies run on the CPU")
    where = resolve_device(device)
    require_writable(path)
    with quiet():
        config = load_config(name, trust_remote_code)
        if weights:
            built = load_weights(name, config, where, trust_remote_code)
            findings = replace(check_weights(name, built), instead_of=_instead_of(config, built))
        else:
            findings = check_small_copy(name, config, trust_remote_code)
    console = Console()
    _print(console, findings)
    if path is not None:
        path.write_text(json.dumps(as_dict(findings), indent=1) + "\n", encoding="utf-8")
    return findings.exit_code


def check_small_copy(name: str, config: Any, trust_remote_code: bool = False) -> Findings:
    """Check a small random copy of a model, in float32; where that seems inexact, in float64.

    Raises:
        ValueError: no small copy can be built, or it doesn't run.
    """
    findings = _check_small_copy(name, config, torch.float32, trust_remote_code)
    if findings.tritonpack.verdict != "inexact":
        return findings
    try:
        exacter = _check_small_copy(name, config, torch.float64, trust_remote_code)
    except ValueError:  # a constant or a cast in the model's own code
        return findings
    same = type(exacter.model.model) is type(findings.model.model)
    return exacter if same and not exacter.tritonpack.refused else findings


def _check_small_copy(name: str, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Findings:
    """Check the class that the configuration names, or the one that an auto class leads to."""
    named, why = NamedClass.of(config, trust_remote_code), ""
    if named.kind is not None:
        title = named.names[0]
        try:
            built = Built(small_model(named.kind, config).to(dtype), f"{title}, {NAMED}")
            return _check_built(name, config, built, dtype)
        except NotSmallError as error:
            why = f"{title}, which can't be built small ({error})"
        except ValueError as error:
            why = f"{title}, which doesn't run on tokens alone ({one_line(error.__cause__ or error)})"
    try:
        built = small_copy(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except NotSmallError as error:
        raise ValueError(f"{name} can't be built small: {error}; use --weights") from error
    findings = _check_built(name, config, named.replaced_by(built, why), dtype)
    return replace(findings, instead_of=_instead_of(config, built))


def _instead_of(config: Any, built: Built) -> str:
    """The class that a configuration names, where a model is of another one; else empty."""
    names = getattr(config, "architectures", None) or [""]
    return "" if type(built.model).__name__ in names else names[0]


def _check_built(name: str, config: Any, built: Built, dtype: torch.dtype) -> Findings:
    """Check a small copy.

    Raises:
        ValueError: it doesn't run on tokens alone, and `patch` doesn't refuse it.
    """
    try:
        subject, uncached = _callable(subject_of(built.model))
        documents = subject.draw(LENGTHS, 1)
        expected = alone(subject, documents)
    except Exception as error:  # whatever a model's own code raises
        return _refused(name, False, built, error)
    notes = uncached
    if expected.no_gradients:
        notes += (f"gradients weren't compared: {expected.no_gradients}",)
    limit = tolerance(dtype)
    compared = "outputs and gradients" if expected.gradients else "outputs"
    stock, patched = _columns(subject, documents, expected, limit, None)
    if patched.verdict in ("inexact", "error"):
        notes += _reach_notes(config)
    return Findings(name, False, built, limit, compared, stock, patched, (*built.notes, *notes))


def check_weights(name: str, built: Built) -> Findings:
    """Check a model itself, with the tolerances of `tritonpack.testing.check_isolation`.

    Raises:
        ValueError: it doesn't run on tokens alone.
    """
    try:
        subject, uncached = _callable(subject_of(built.model))
        documents = subject.draw(LENGTHS, 1)
        expected = alone(subject, documents, gradients=False)
    except Exception as error:  # whatever a model's own code raises
        return _refused(name, True, built, error)
    note = (
        f"the longest document has {max(LENGTHS)} tokens, so windows, chunks and selections that are longer weren't "
        "felt; without --weights a small copy with short ones is checked"
    )
    limit, moved_limit = limits(expected.dtype)
    columns = _columns(subject, documents, expected, limit, moved_limit)
    return Findings(name, True, built, limit, "outputs", *columns, (*built.notes, *uncached, note))


@torch.no_grad()
def _callable(subject: Subject) -> tuple[Subject, tuple[str, ...]]:
    """How a model is called with tokens alone, without a cache where stock transformers fails with one; a note then.

    Raises:
        Exception: whatever the model raises that runs in neither way.
    """
    (document,) = subject.draw(LENGTHS[-1:], 1)
    try:
        subject.output(whole(document))
    except Exception as error:  # whatever a model's own code raises
        call = subject.call
        uncached = replace(subject, call=lambda ids: {**call(ids), "use_cache": False})
        try:
            uncached.output(whole(document))
        except Exception:
            raise error from None
        note = f"it is called with use_cache=False, because with a cache it fails: {one_line(error)}"
        return uncached, (note,)
    return subject, ()


def _refused(name: str, weights: bool, built: Built, error: Exception) -> Findings:
    """The findings on a model that doesn't run on tokens alone, if `patch` refuses it.

    Raises:
        ValueError: it doesn't.
    """
    try:
        with patch(built.model):
            pass
    except UnsupportedModelError as refusal:
        return Findings(name, weights, built, 0.0, "nothing", Column(), Column(refused=str(refusal)), built.notes)
    except Exception:  # what keeps the model from running is what there is to say
        pass
    copy = "" if weights else "its small copy "
    hint = "" if weights else "; use --weights"
    raise ValueError(f"{name}: {copy}doesn't run on tokens alone: {one_line(error)}{hint}") from error


def _reach_notes(config: Any) -> tuple[str, ...]:
    """What a call is refused for although no document sees another: rotary embeddings that follow its longest one."""
    return tuple(
        f"rotary embeddings of the type {kind!r} are those of a call's longest document, and other ones beyond "
        f"{limit:,} tokens ({REACH} in the small copy); calls whose documents are all shorter aren't concerned"
        for kind, limit in rope_limits(config.get_text_config(decoder=True))[:1]
    )


def _columns(
    subject: Subject, documents: list[Tensor], expected: Results, limit: float, moved_limit: float | None
) -> tuple[Column, Column]:
    """Stock transformers, and patched."""
    model = subject.model
    stock, patched = Column(), Column()

    def fill(column: Column, subject: Subject) -> None:
        for form in FORMS:
            column.forms[form] = judge(subject, form, documents, expected, limit, moved_limit=moved_limit, always=True)

    fill(stock, replace(subject, stock=True))
    try:
        with patch(model) as handle:
            patched.report = str(handle.report)
            fill(patched, subject)
    except UnsupportedModelError as error:
        patched.refused = str(error)
    except Exception as error:  # patching isn't to fail in any other way
        patched.forms = dict.fromkeys(FORMS, Judgement("error", math.nan, math.nan, message("patch", error)))
    return stock, patched


def as_dict(findings: Findings) -> dict[str, Any]:
    """The findings, for JSON: numbers that there are none of are null."""

    def column(found: Column) -> dict[str, Any]:
        forms = {
            name: {"verdict": x.verdict, "worst": _number(x.worst), "moved": _number(x.moved), "reason": x.reason}
            for name, x in found.forms.items()
        }
        return {"verdict": found.verdict, "reason": found.reason, "report": found.report, "forms": forms}

    model = findings.model.model
    return {
        "model": findings.name,
        "weights": findings.weights,
        "model_type": model.config.model_type,  # type: ignore[union-attr]
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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(console: Console, findings: Findings) -> None:
    model = findings.model.model
    size = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    what = "" if findings.weights else "a small random copy of "
    _line(console, f"{findings.name}: {what}{findings.model.kind}; {size:,} parameters, {dtype}")
    if findings.stock.forms:
        _print_forms(console, findings)
    for note in findings.notes:
        _line(console, f"Note: {note}.")
    if findings.tritonpack.report:
        _line(console, findings.tritonpack.report)
    verdict, reason = findings.tritonpack.verdict, findings.tritonpack.reason
    if not reason and findings.instead_of:
        reason = f"for {type(model).__name__}, in place of {findings.instead_of}"
    _line(console, f"tritonpack: {verdict}{': ' if reason else ''}{reason}")


def _print_forms(console: Console, findings: Findings) -> None:
    title = f"{type(findings.model.model).__name__} in place of {findings.instead_of}" if findings.instead_of else None
    rows = Table("packed documents told apart by", "stock", "tritonpack", title=title)
    for form, label in FORMS.items():
        rows.add_row(label, *(_cell(column, form) for column in (findings.stock, findings.tritonpack)))
    console.print(rows)
    _line(
        console,
        f"Numbers: how far {findings.compared} of packed documents are from those of each alone, relative to the "
        f"largest; up to {findings.limit:.0e} is rounding. A leak: they move when another document changes.",
    )


def _line(console: Console, text: str) -> None:
    """Text as it is, neither coloured nor broken where a line of the terminal ends."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cell(column: Column, form: str) -> str:
    if column.refused:
        return f"[{_STYLES['refused']}]refused[/]"
    found = column.forms[form]
    number = "" if math.isnan(found.worst) else f" {found.worst:.0e}"
    detail = f" {found.reason.partition(': ')[2]}" if found.verdict in ("error", "refused") else number
    return f"[{_STYLES[found.verdict]}]{found.verdict}[/]{escape(detail)}"
