"""Every causal language model type against itself: documents packed in every form, and each document alone.

`python -m tests.patches.sweep` prints a row for each type and the counts; `--stock` runs the same calls without a
patch, which is what packing does to a model today.
"""

import argparse
import csv
import dataclasses
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo

LENGTHS = (7, 1, 3, 11)
VERDICTS = ("exact", "refused", "leak", "inexact", "error", "unbuilt")

Patch = Callable[[PreTrainedModel], AbstractContextManager[Any]]
Results = tuple[Tensor, list[Tensor | None]]  # logits of all documents in a row `[t, n]`, and gradients


@dataclasses.dataclass
class Row:
    """What became of one model type.

    Attributes:
        verdict: The worst of `by_form`, or "refused" or "unbuilt" where no form could be tried. "leak": tokens of one
            document move the logits of another; "inexact": a document differs from itself alone, and no other moves it.
        reason: The form and the number, or the message, behind any verdict but "exact".
        worst: The largest of `forms`; NaN where there is none.
        forms: The difference from documents alone in each form, in logits or gradients, relative to the largest.
        by_form: "exact", "leak", "inexact" or "error", for each form.
    """

    model_type: str
    verdict: str
    reason: str = ""
    worst: float = math.nan
    seconds: float = 0.0
    forms: dict[str, float] = dataclasses.field(default_factory=dict)
    by_form: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents laid out in rows; `spans` says where each of them is."""

    ids: Tensor
    spans: list[tuple[int, slice]]
    arguments: dict[str, Any]

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat([values[row, span] for row, span in self.spans])


def _lay_out(rows: Iterable[Iterable[int]], documents: list[Tensor], *, left: bool = False) -> Batch:
    """Rows of documents, by number, padded to the longest row. The arguments are position ids and the mask."""
    rows = [list(row) for row in rows]
    width = max(sum(documents[i].numel() for i in row) for row in rows)
    ids, places, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
    spans: dict[int, tuple[int, slice]] = {}
    for r, row in enumerate(rows):
        at = width - sum(documents[i].numel() for i in row) if left else 0
        for i in row:
            n = documents[i].numel()
            spans[i] = (r, slice(at, at + n))
            ids[spans[i]], places[spans[i]], mask[spans[i]] = documents[i][0], torch.arange(n), 1
            at += n
    return Batch(ids, [spans[i] for i in range(len(documents))], {"position_ids": places, "attention_mask": mask})


def _packed(documents: list[Tensor], *drop: str, **arguments: Any) -> Batch:
    batch = _lay_out([range(len(documents))], documents)
    kept = {key: value for key, value in batch.arguments.items() if key not in drop}
    return dataclasses.replace(batch, arguments={**kept, **arguments})


def _collated(documents: list[Tensor]) -> Batch:
    lengths = torch.tensor([d.numel() for d in documents])
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return _packed(
        documents, "attention_mask", cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest,
        max_length_k=longest, seq_idx=torch.arange(len(documents)).repeat_interleave(lengths)[None].to(torch.int32),
    )  # fmt: skip


def _numbered(documents: list[Tensor]) -> Tensor:
    lengths = torch.tensor([d.numel() for d in documents])
    return torch.arange(1, len(documents) + 1).repeat_interleave(lengths)[None]


FORMS: dict[str, Callable[[list[Tensor]], Batch]] = {
    "position_ids": lambda d: _packed(d, "attention_mask"),
    "without_cache": lambda d: _packed(d, "attention_mask", use_cache=False),
    "with_cache": lambda d: _packed(d, "attention_mask", use_cache=True),
    "all_ones_mask": lambda d: _packed(d),
    "collator": _collated,
    "segment_mask": lambda d: _packed(d, attention_mask=_numbered(d)),
    "two_rows": lambda d: _lay_out([range(len(d) - 1), [len(d) - 1]], d),
    "padded_right": lambda d: _lay_out([[i] for i in range(len(d))], d),
    "padded_left": lambda d: _lay_out([[i] for i in range(len(d))], d, left=True),
}
STOCK_FORMS = ("position_ids", "without_cache", "all_ones_mask")


def tolerance(model: PreTrainedModel) -> float:
    """Relative. transformers computes norms and rotary angles in float32 whatever the weights are."""
    return (8 if model.dtype == torch.float64 else 64) * torch.finfo(torch.float32).eps


def _logits(model: PreTrainedModel, batch: Batch, *, stock: bool = False) -> Tensor:
    more = zoo.DIFFERENTIABLE.get(model.config.model_type, {}) if torch.is_grad_enabled() else {}
    arguments = {**zoo.call(model, batch.ids), **more, **batch.arguments}
    if stock:  # an unpatched model is called as it can be
        arguments = {key: value for key, value in arguments.items() if _accepts(model, key)}
    return batch.gather(zoo.logits(model, model(**arguments)))


def _accepts(model: nn.Module, name: str) -> bool:
    code = inspect.signature(model.forward).parameters
    return name in code or any(p.kind is p.VAR_KEYWORD for p in code.values())


def _gradients(model: nn.Module, logits: Tensor) -> list[Tensor | None]:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True))


def alone(model: PreTrainedModel, documents: list[Tensor], *, gradients: bool = True) -> Results:
    """What every form is held against: each document in a call of its own, with nothing but its tokens."""
    batches = [Batch(d, [(0, slice(None))], {}) for d in documents]
    logits = torch.cat([_logits(model, batch) for batch in batches])
    return logits.detach(), _gradients(model, logits) if gradients else []


def difference(expected: Results, got: Results) -> float:
    """Relative to the largest value of each kind: gradients of key biases are mathematically zero."""
    worst = float((expected[0] - got[0]).abs().max() / expected[0].abs().max())
    worst = math.inf if math.isnan(worst) else worst
    largest = max((float(g.abs().max()) for g in expected[1] if g is not None), default=1.0)
    for a, b in zip(expected[1], got[1], strict=True):
        if a is not None or b is not None:
            a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)
            worst = max(worst, float((a - b).abs().max()) / largest)
    return worst


@torch.no_grad()
def influence(model: PreTrainedModel, form: str, documents: list[Tensor], *, stock: bool = False) -> float:
    """How far other tokens in the first document, or in the last, move the logits of the rest."""
    before, worst = _logits(model, FORMS[form](documents), stock=stock), 0.0
    ends = torch.tensor([d.numel() for d in documents]).cumsum(0)
    for changed, kept in ((0, slice(int(ends[0]), None)), (-1, slice(0, int(ends[-2])))):
        others = list(documents)
        others[changed] = zoo.documents((documents[changed].numel(),), seed=9)[0]
        after = _logits(model, FORMS[form](others), stock=stock)
        worst = max(worst, float((after - before)[kept].abs().max() / before.abs().max()))
    return worst


def _judge(
    model: PreTrainedModel, form: str, documents: list[Tensor], expected: Results, *, stock: bool
) -> tuple[str, float, str]:
    """Verdict, difference and reason of one form."""
    limit = tolerance(model)
    worst = math.nan
    try:
        logits = _logits(model, FORMS[form](documents), stock=stock)
        worst = difference((expected[0], []), (logits.detach(), []))
        if worst > limit or form == "position_ids":
            moved = influence(model, form, documents, stock=stock)
            if moved > limit:
                return "leak", worst, f"{form}: {moved:.0e} from another document, {worst:.0e} in all"
        if worst <= limit and expected[1]:
            worst = max(worst, difference(expected, (logits.detach(), _gradients(model, logits))))
    except Exception as error:  # whatever a model's own code raises is a result here
        return "error", worst, _message(form, error)
    return ("exact", worst, "") if worst <= limit else ("inexact", worst, f"{form}: {worst:.0e}")


def _message(where: str, error: Exception) -> str:
    return f"{where}: {type(error).__name__}: {error}".split("\n")[0]


def run(
    model_type: str, *, patch: Patch | None = tritonpack.patch, forms: Iterable[str] | None = None,
    attn_implementation: str | None = None, gradients: bool = True,
) -> Row:  # fmt: skip
    """The row of one model type, or variant.

    Args:
        model_type: Of `zoo.MODEL_TYPES` or `zoo.VARIANTS`.
        patch: Makes a context in which the model packs; None leaves the model as it is.
        forms: Names of `FORMS`; all of them by default, without a patch those in `STOCK_FORMS`.
        attn_implementation: Given to the model before it is patched.
        gradients: Compare those of the parameters, too.
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
        expected = alone(model, documents, gradients=gradients and model_type not in zoo.FORWARD_ONLY)
        with patch(model) if patch else nullcontext():
            for form in forms or (FORMS if patch else STOCK_FORMS):
                row.by_form[form], row.forms[form], reasons[form] = _judge(
                    model, form, documents, expected, stock=patch is None
                )
    except tritonpack.UnsupportedModelError as error:
        row.verdict, row.reason = "refused", str(error).split("\n")[0]
    except Exception as error:
        row.verdict, row.reason = "error", _message("alone, or patching", error)
    else:
        order = ("leak", "error", "inexact", "exact")
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
