"""Every causal language model type against itself: documents packed in every form, and each document alone.

`python -m tests.patches.sweep` prints a row for each type and the counts; `--stock` runs the same calls without a
patch, which is what packing does to a model today.
"""

import argparse
import csv
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tritonpack.patches.trial import packed_forms
from tritonpack.patches.trial.packed_forms import FORMS, LENGTHS, STOCK_FORMS, Results, difference

__all__ = [
    "FORMS", "LENGTHS", "STOCK_FORMS", "Row", "alone", "counts", "difference", "influence", "judge", "run",
    "tolerance", "write_csv", "write_markdown",
]  # fmt: skip

VERDICTS = ("exact", "refused", "leak", "inexact", "error", "unbuilt")

Patch = Callable[[PreTrainedModel], AbstractContextManager[Any]]


@dataclasses.dataclass
class Row:
    """What became of one model type.

    Attributes:
        verdict: The worst of `by_form`, or "refused" or "unbuilt" where no form could be tried. "leak": tokens of one
            document move the logits of another; "inexact": a document differs from itself alone, and no other moves it.
        reason: The form and the number, or the message, behind any verdict but "exact".
        worst: The largest of `forms`; NaN where there is none.
        forms: The difference from documents alone in each form, in logits or gradients, relative to the largest.
        by_form: "exact", "leak", "inexact", "refused" or "error", for each form.
    """

    model_type: str
    verdict: str
    reason: str = ""
    worst: float = math.nan
    seconds: float = 0.0
    forms: dict[str, float] = dataclasses.field(default_factory=dict)
    by_form: dict[str, str] = dataclasses.field(default_factory=dict)


def _subject(model: PreTrainedModel, *, stock: bool = False) -> packed_forms.Subject:
    return packed_forms.Subject(
        model, zoo.documents, call=lambda ids: zoo.call(model, ids), values=lambda output: zoo.logits(model, output),
        differentiable=zoo.DIFFERENTIABLE.get(model.config.model_type, {}), stock=stock,
    )  # fmt: skip


def _logits(model: PreTrainedModel, batch: packed_forms.Batch) -> Tensor:
    return _subject(model).run(batch)


def tolerance(model: PreTrainedModel) -> float:
    return packed_forms.tolerance(model.dtype)


def alone(model: PreTrainedModel, documents: list[Tensor], *, gradients: bool = True) -> Results:
    return packed_forms.alone(_subject(model), documents, gradients=gradients)


def influence(model: PreTrainedModel, form: str, documents: list[Tensor], *, stock: bool = False) -> float:
    return packed_forms.influence(_subject(model, stock=stock), form, documents)[0]


def judge(
    model: PreTrainedModel, form: str, documents: list[Tensor], expected: Results, *, stock: bool = False
) -> packed_forms.Judgement:
    return packed_forms.judge(_subject(model, stock=stock), form, documents, expected, tolerance(model))


def run(
    model_type: str, *, patch: Patch | None = tritonpack.patch, forms: Iterable[str] | None = None,
    attn_implementation: str | None = None, gradients: bool | Collection[str] = True,
) -> Row:  # fmt: skip
    """The row of one model type, or variant.

    Args:
        model_type: Of `zoo.MODEL_TYPES` or `zoo.VARIANTS`.
        patch: Makes a context in which the model packs; None leaves the model as it is.
        forms: Names of `FORMS`; all of them by default, without a patch those in `STOCK_FORMS`.
        attn_implementation: Given to the model before it is patched.
        gradients: Compare those of the parameters, too, in all forms or in those of these names.
    """
    if model_type in zoo.UNBUILT:
        return Row(model_type, "unbuilt", zoo.UNBUILT[model_type])
    start = time.perf_counter()
    row = Row(model_type, "exact")
    dtype = torch.float32 if model_type in zoo.FLOAT32_ONLY else torch.float64
    model = zoo.tiny_model(model_type, dtype=dtype, attn_implementation=attn_implementation)
    documents = zoo.documents(LENGTHS)
    reasons = {}
    try:
        expected = alone(model, documents, gradients=bool(gradients) and model_type not in zoo.FORWARD_ONLY)
        with patch(model) if patch else nullcontext():
            for form in forms or (FORMS if patch else STOCK_FORMS):
                differentiated = gradients if isinstance(gradients, bool) else form in gradients
                told = expected if differentiated else Results(expected.values)
                found = judge(model, form, documents, told, stock=patch is None)
                row.by_form[form], row.forms[form], reasons[form] = found.verdict, found.worst, found.reason
    except tritonpack.UnsupportedModelError as error:
        row.verdict, row.reason = "refused", str(error).split("\n")[0]
    except Exception as error:
        row.verdict, row.reason = "error", packed_forms.message("alone, or patching", error)
    else:
        order = ("leak", "error", "inexact", "refused", "exact")
        first = min(row.by_form, key=lambda form: order.index(row.by_form[form]))
        row.verdict, row.reason = row.by_form[first], reasons[first]
        row.worst = max((d for d in row.forms.values() if not math.isnan(d)), default=math.nan)
    row.seconds = time.perf_counter() - start
    return row


def _cells(row: Row) -> list[str]:
    return [row.model_type, row.verdict, f"{row.worst:.0e}", f"{row.seconds:.2f}", row.reason]


def counts(rows: list[Row]) -> str:
    """The verdicts, counted; and by form where forms differ."""
    lines = ["all forms: " + _counted(row.verdict for row in rows)]
    names = dict.fromkeys(form for row in rows for form in row.by_form)
    lines += [f"{name}: " + _counted(row.by_form[name] for row in rows if name in row.by_form) for name in names]
    return "\n".join(lines)


def _counted(verdicts: Iterable[str]) -> str:
    found = Counter(verdicts)
    return ", ".join(f"{found[v]} {v}" for v in VERDICTS if found[v]) + f" of {found.total()}"


def write_csv(rows: list[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model_type", "verdict", "reason", "worst", "seconds", *FORMS])
        for row in rows:
            cells = [f"{row.forms[form]:.1e} {row.by_form[form]}" if form in row.forms else "" for form in FORMS]
            writer.writerow([row.model_type, row.verdict, row.reason, f"{row.worst:.1e}", f"{row.seconds:.2f}", *cells])


def write_markdown(rows: list[Row], path: Path) -> None:
    lines = ["| type | verdict | worst | seconds | why |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |" for row in rows]
    path.write_text("\n".join([*counts(rows).split("\n"), "", *lines, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.sweep", description=__doc__)
    parser.add_argument(
        "--stock", nargs="?", const="default", metavar="ATTENTION",
        help="no patch; eager or sdpa for that implementation instead of the model's default",
    )  # fmt: skip
    parser.add_argument("--types", nargs="+", default=zoo.MODEL_TYPES, metavar="TYPE", help="model types or variants")
    parser.add_argument("--variants", action="store_true", help="the variants, too")
    parser.add_argument("--forms", nargs="+", choices=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--no-gradients", action="store_true", help="compare logits alone")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for name in [*options.types, *(zoo.VARIANTS if options.variants else ())]:
        rows.append(
            run(
                name, patch=None if options.stock else tritonpack.patch, forms=options.forms,
                attn_implementation=options.stock if options.stock in ("eager", "sdpa") else None,
                gradients=not options.no_gradients,
            )
        )  # fmt: skip
        name, verdict, worst, seconds, reason = _cells(rows[-1])
        print(f"{name:28} {verdict:8} {worst:>6} {seconds:>5}s  {reason[:110]}", flush=True)
    print(counts(rows))
    print(f"{sum(row.seconds for row in rows):.0f}s")
    if options.csv:
        write_csv(rows, options.csv)
    if options.markdown:
        write_markdown(rows, options.markdown)


if __name__ == "__main__":
    main()
