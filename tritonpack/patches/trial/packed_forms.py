"""Every form in which packed documents reach a model, and what becomes of them there, held against each alone."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.trial.outputs import Output, Parts, UnlikeError, apart, outputs_alone, parts_of

LENGTHS = (7, 1, 3, 11)
PADDING = 3  # tokens at the end of a packed row


class MiscountError(ValueError):
    """A call gives neither a value for every token nor one for every document."""


class Results(NamedTuple):
    """What a call gives.

    Attributes:
        values: of all documents in a row, `[t, n]`.
        gradients: of all parameters, or none.
        outputs: by name, those that are compared besides.
    """

    values: Tensor
    gradients: Sequence[Tensor | None] = ()
    outputs: Mapping[str, Output] = {}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents laid out in rows.

    Attributes:
        ids: `[b, t]`, 0 for padding.
        spans: the row of each document, and where it lies in it; documents are counted row by row.
        arguments: what a model is given besides.
        source: the documents of an encoder, where these are the decoder's.
    """

    ids: Tensor
    spans: list[tuple[int, slice]]
    arguments: dict[str, Any]
    source: Batch | None = None

    def gather(self, values: Tensor) -> Tensor:
        """Values of rows `[b, t, n]` as those of all documents, one after the other, `[tokens, n]`."""
        return torch.cat([values[row, span] for row, span in self.spans])


Form = Callable[[list[Tensor]], Batch]  # lays documents `[1, n]` out


def whole(document: Tensor) -> Batch:
    """A document `[1, n]` in a row of its own, with nothing but its tokens."""
    return Batch(document, [(0, slice(None))], {})


def lay_out(rows: Iterable[Iterable[int]], documents: list[Tensor], *, left: bool = False, more: int = 0) -> Batch:
    """Rows of documents, by number, padded to the longest row. The arguments are position ids and the mask.

    Args:
        rows: the numbers of the documents in each row.
        documents: token ids `[1, n]`.
        left: pad on the left.
        more: how many tokens of padding the longest row has.
    """
    rows = [list(row) for row in rows]
    width = max(sum(documents[i].numel() for i in row) for row in rows) + more
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


def _packed(documents: list[Tensor], *drop: str, more: int = 0, **arguments: Any) -> Batch:
    batch = lay_out([range(len(documents))], documents, more=more)
    return _told(batch, *drop, **arguments)


def _told(batch: Batch, *drop: str, **arguments: Any) -> Batch:
    kept = {key: value for key, value in batch.arguments.items() if key not in drop}
    return dataclasses.replace(batch, arguments={**kept, **arguments})


def _collated(documents: list[Tensor]) -> Batch:
    lengths = torch.tensor([d.numel() for d in documents])
    offsets, longest = _offsets(documents), int(lengths.max())
    return _packed(
        documents, "attention_mask", cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest,
        max_length_k=longest, seq_idx=_seq_idx(documents),
    )  # fmt: skip


def _offsets(documents: list[Tensor]) -> Tensor:
    lengths = torch.tensor([d.numel() for d in documents])
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _seq_idx(documents: list[Tensor]) -> Tensor:
    return (_numbered(documents) - 1).to(torch.int32)


def _numbered(documents: list[Tensor], padding: int = 0) -> Tensor:
    lengths = torch.tensor([d.numel() for d in documents])
    return nn.functional.pad(torch.arange(1, len(documents) + 1).repeat_interleave(lengths), (0, padding))[None]


FORMS: dict[str, Form] = {
    "position_ids": lambda d: _packed(d, "attention_mask"),
    "without_cache": lambda d: _packed(d, "attention_mask", use_cache=False),
    "with_cache": lambda d: _packed(d, "attention_mask", use_cache=True),
    "all_ones_mask": lambda d: _packed(d),
    "bool_mask": lambda d: _packed(d, attention_mask=torch.ones(1, sum(x.numel() for x in d), dtype=torch.bool)),
    "collator": _collated,
    "offsets_alone": lambda d: _packed(d, "attention_mask", "position_ids", cu_seq_lens_q=_offsets(d)),
    "seq_idx_alone": lambda d: _packed(d, "attention_mask", "position_ids", seq_idx=_seq_idx(d)),
    "segment_mask": lambda d: _packed(d, attention_mask=_numbered(d)),
    "segments_alone": lambda d: _packed(d, "position_ids", attention_mask=_numbered(d)),
    "segments_padded": lambda d: _packed(d, "position_ids", more=PADDING, attention_mask=_numbered(d, PADDING)),
    # What flattening collators make of `pad_to_multiple_of`: position ids of 0.
    "padded_end": lambda d: _packed(d, "attention_mask", more=PADDING),
    "padded_end_mask": lambda d: _packed(d, more=PADDING),
    "two_rows": lambda d: lay_out([range(len(d) - 1), [len(d) - 1]], d),
    "two_rows_alone": lambda d: _told(lay_out([range(len(d) - 1), [len(d) - 1]], d), "attention_mask"),
    "two_rows_padded": lambda d: lay_out([[0], range(1, len(d))], d),
    "padded_right": lambda d: lay_out([[i] for i in range(len(d))], d),
    "padded_left": lambda d: lay_out([[i] for i in range(len(d))], d, left=True),
}
# What an encoder-decoder model is told of its decoder's tokens under a name of its own.
OF_TOKENS = ("attention_mask", "position_ids", "seq_idx")


def paired(form: Form, source_of: Callable[[Tensor], Tensor]) -> Form:
    """A form of pairs of documents, as an encoder with a decoder takes them.

    Args:
        form: of one side; both sides have it.
        source_of: makes the encoder's document `[1, m]` of one of the decoder's.

    Returns:
        A function of the decoder's documents.
    """

    def lay_out_both(targets: list[Tensor]) -> Batch:
        source, target = form([source_of(document) for document in targets]), form(targets)
        arguments = {"input_ids": source.ids, **source.arguments}
        arguments |= {f"decoder_{name}": target.arguments[name] for name in OF_TOKENS if name in target.arguments}
        for name in ("cu_seq_lens", "max_length"):  # of the decoder's queries, and the encoder's keys
            if f"{name}_q" in arguments:
                arguments[f"{name}_k"], arguments[f"{name}_q"] = arguments[f"{name}_q"], target.arguments[f"{name}_q"]
        return Batch(target.ids, target.spans, arguments, source)

    return lay_out_both


def with_choices(arguments: dict[str, Any], another: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The arguments of a call in multiple choice, of one row or without offsets: each document is an option, and so is
    the same document in other tokens.

    Args:
        arguments: by name; what has a value for each token is `[b, t]`, and becomes `[b, 2, t]`.
        another: gives other token ids `[b, t]`.
    """
    found = dict(arguments)
    for name, value in arguments.items():
        if name in ("input_ids", *OF_TOKENS):
            found[name] = torch.stack([value, another(value) if name == "input_ids" else value], dim=1)
        elif name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            found[name] = torch.cat([value, value[1:] + value[-1]])
    return found


STOCK_FORMS = ("position_ids", "without_cache", "all_ones_mask")


def values_of(output: Any) -> Tensor:
    """What a call computes, `[b, t, n]` for every token or `[b, n]` for every row: logits, or the hidden states of a
    model without a head."""
    start, end = getattr(output, "start_logits", None), getattr(output, "end_logits", None)
    if start is not None and end is not None and start.ndim == 2:
        return torch.stack([start, end], dim=-1)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return output[0] if logits is None else logits


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and how it is called.

    Attributes:
        model: in evaluation mode, on any device.
        draw: documents `[1, n]` of random token ids, of given lengths and from a seed.
        call: the keyword arguments that carry token ids `[b, t]` into the model.
        values: what is compared, `[b, t, n]`, of an output.
        differentiable: what else a call takes for gradients to be had.
        per_document: whether the values are one row `[documents, ...]` for every document, which may be of other
            sizes and end in zeros.
        stock: whether it is called only with arguments that it knows; an unpatched model is called as it can be.
        forms: the forms that documents reach it in, by name.
        draws: in which the model runs: for one that draws random numbers, they are constant.
    """

    model: nn.Module
    draw: Callable[[tuple[int, ...], int], list[Tensor]]
    call: Callable[[Tensor], dict[str, Any]] = lambda ids: {"input_ids": ids}
    values: Callable[[Any], Tensor] = values_of
    differentiable: dict[str, Any] = dataclasses.field(default_factory=dict)
    per_document: bool = False
    stock: bool = False
    forms: Mapping[str, Form] = dataclasses.field(default_factory=lambda: FORMS)
    draws: AbstractContextManager[Any] = dataclasses.field(default_factory=nullcontext)

    def run(self, batch: Batch) -> Tensor:
        """The values of all documents of a batch, `[tokens, n]` or `[documents, n]`.

        Raises:
            MiscountError: there are more or fewer.
        """
        return self.values_in(self.output(batch), batch)

    def values_in(self, output: Any, batch: Batch) -> Tensor:
        """The values of all documents in the output of a call.

        Raises:
            MiscountError: there are more or fewer.
        """
        values = self.values(output)
        if self.per_document:
            if values.shape[0] != len(batch.spans):
                raise MiscountError(f"it gives {values.shape[0]} scores for {len(batch.spans)} documents")
            return values.flatten(1)
        if values.shape[:2] != batch.ids.shape:
            raise MiscountError(f"it gives values of shape {tuple(values.shape)} for {tuple(batch.ids.shape)} tokens")
        return batch.gather(values)

    def call_model(self, batch: Batch) -> Tensor:
        """What is compared of the model's output, as it comes."""
        return self.values(self.output(batch))

    def output(self, batch: Batch, **given: Any) -> Any:
        """What the model gives, with further arguments."""
        device = next(self.model.parameters()).device
        more = self.differentiable if torch.is_grad_enabled() else {}
        arguments = {**self.call(batch.ids.to(device)), **more, **batch.arguments, **given}
        if self.stock:
            known = inspect.signature(self.model.forward).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                arguments = {key: value for key, value in arguments.items() if key in known}
        arguments = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in arguments.items()}
        with self.draws:
            return self.model(**arguments)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What became of documents packed in one form.

    Attributes:
        verdict: "exact"; "leak": tokens of one document move the values of another; "inexact": a document differs from
            itself alone, and no other moves it; "refused" by tritonpack when called; "error".
        worst: the difference from documents alone in values or gradients, relative to the largest; NaN where there is
            none.
        moved: how far other documents move the values, relative to the largest; NaN where that wasn't tried.
        reason: the form and the number, or the message, behind any verdict but "exact".
        error: what was raised, behind "refused" and "error".
    """

    verdict: str
    worst: float
    moved: float
    reason: str = ""
    error: Exception | None = None


def alone(subject: Subject, documents: list[Tensor], *, gradients: bool = True, all_outputs: bool = False) -> Results:
    """What every form is held against: each document in a call of its own, with nothing but its tokens."""
    with torch.set_grad_enabled(gradients):
        batches = [whole(document) for document in documents]
        calls = [subject.output(batch) for batch in batches]
        parts = [subject.values_in(call, batch) for call, batch in zip(calls, batches, strict=True)]
        values = torch.cat(_as_wide(parts))
        outputs = outputs_alone(calls, subject.forms["position_ids"](documents)) if all_outputs else {}
        return Results(values.detach(), gradients_of(subject.model, values) if gradients else (), outputs)


def gradients_of(model: nn.Module, values: Tensor) -> list[Tensor | None]:
    """The gradients of all parameters, under weights for the values that no two share."""
    weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype, device=values.device).view_as(values)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True))


def difference(
    expected: tuple[Tensor, Sequence[Tensor | None]] | Results, got: tuple[Tensor, Sequence[Tensor | None]] | Results
) -> float:
    """How far values and gradients are from those expected, relative to the largest of each kind.

    Gradients of key biases are mathematically zero.
    """
    wanted, found_values = _as_wide([expected[0], got[0]])
    worst = _largest(wanted - found_values) / float(wanted.abs().max())
    largest = max((float(g.abs().max()) for g in expected[1] if g is not None), default=1.0)
    for a, b in zip(expected[1], got[1], strict=True):
        found = [x for x in (a, b) if x is not None]  # a parameter that takes no part has none
        if found:
            worst = max(worst, _largest(found[0] - found[1] if len(found) == 2 else found[0]) / largest)
    return math.inf if math.isnan(worst) else worst


def _as_wide(values: list[Tensor]) -> list[Tensor]:
    """Values of documents whose sizes differ, with zeros after them."""
    widest = max(x.shape[-1] for x in values)
    return [nn.functional.pad(x, (0, widest - x.shape[-1])) for x in values]


def _largest(difference: Tensor) -> float:
    """The largest absolute value; infinite where there is a NaN, which compares as no larger than anything."""
    return float(difference.abs().nan_to_num(math.inf, math.inf).max())


@torch.no_grad()
def influence(
    subject: Subject, form: str, documents: list[Tensor], outputs: Mapping[str, Output] | None = None
) -> tuple[float, str]:
    """How far other tokens in the first document, or in the last, move the values of the rest.

    Args:
        subject: the model.
        form: a name of the subject's forms.
        documents: token ids `[1, n]`.
        outputs: those that are looked at besides.

    Returns:
        The largest over the values and the outputs, relative to the largest value of each; the name of that output,
        empty for the values.
    """

    def run(documents: list[Tensor]) -> tuple[Tensor, dict[str, Parts]]:
        batch = subject.forms[form](documents)
        output = subject.output(batch)
        parts = {name: parts_of(name, one, output, batch) for name, one in (outputs or {}).items()}
        return subject.values_in(output, batch), parts

    (before, parts), worst, name = run(documents), 0.0, ""
    ends = torch.tensor([1 if subject.per_document else d.numel() for d in documents]).cumsum(0)
    changes = ((0, slice(int(ends[0]), None), slice(1, None)), (-1, slice(0, int(ends[-2])), slice(-1)))
    for changed, kept, others_kept in changes:
        others = list(documents)
        others[changed] = subject.draw((documents[changed].numel(),), 9)[0]
        after, parts_after = run(others)
        before, after = _as_wide([before, after])
        moved = {"": float((after - before)[kept].abs().max() / before.abs().max())}
        moved |= {key: apart(parts[key][others_kept], parts_after[key][others_kept]) for key in parts}
        for key, distance in moved.items():
            if distance > worst:
                worst, name = distance, key
    return worst, name


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
    """Judge one form.

    Args:
        subject: the model.
        form: a name of the subject's forms.
        documents: token ids `[1, n]`.
        expected: as `alone` gives them; gradients are compared where it has any.
        limit: what `difference` may be.
        moved_limit: what `influence` may be, if not the same.
        always: measure the influence of other documents also where a document's values are those that it has alone.
    """
    moved_limit = limit if moved_limit is None else moved_limit
    worst = moved = math.nan
    which = ""
    try:
        batch = subject.forms[form](documents)
        with torch.set_grad_enabled(bool(expected.gradients)):
            output = subject.output(batch)
            values = subject.values_in(output, batch)
        worst = difference(Results(expected.values), Results(values.detach()))
        for name, wanted in expected.outputs.items() if worst <= limit else ():
            found = apart(wanted.parts, parts_of(name, wanted, output, batch))
            worst, which = max((worst, which), (found, name))
        if worst > limit or always or form == "position_ids":
            moved, who = influence(subject, form, documents, expected.outputs)
            if moved > moved_limit:
                reason = f"{form}: {_named(who)}{moved:.0e} from another document, {worst:.0e} in all"
                return Judgement("leak", worst, moved, reason)
        if worst <= limit and expected.gradients:
            got = Results(values.detach(), gradients_of(subject.model, values))
            worst, which = max((worst, which), (difference(expected, got), ""))
    except (MiscountError, UnlikeError) as error:
        return Judgement("inexact", worst, moved, f"{form}: {error}")
    except UnsupportedModelError as error:
        return Judgement("refused", worst, moved, message(form, error), error)
    except Exception as error:  # whatever a model's own code raises is a result here
        return Judgement("error", worst, moved, message(form, error), error)
    if worst <= limit:
        return Judgement("exact", worst, moved)
    return Judgement("inexact", worst, moved, f"{form}: {_named(which)}{worst:.0e}")


def _named(output: str) -> str:
    """How a reason begins that concerns an output other than the values compared first."""
    return f"{output}: " if output else ""


def message(where: str, error: Exception) -> str:
    """An error in one line."""
    return f"{where}: {type(error).__name__}: {error}".split("\n")[0]


def tolerance(dtype: torch.dtype) -> float:
    """Relative. transformers computes norms and rotary angles in float32 whatever the weights are."""
    return (8 if dtype == torch.float64 else 64) * torch.finfo(torch.float32).eps
