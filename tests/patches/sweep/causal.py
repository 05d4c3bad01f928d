"""One causal language model type: documents packed in every form, compared with each document alone.

`judging.py` does the same for every class, with more forms and with losses; tests of patches call these functions.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.small_copies import comparison
from tests.small_copies import judge as judging
from tests.small_copies.comparison import apart
from tests.small_copies.judge import Judgement, Results
from tests.small_copies.packed_forms import FORMS, LENGTHS, Batch
from tests.small_copies.subject import Subject

__all__ = ["FORMS", "LENGTHS", "STOCK_FORMS", "Row", "alone", "difference", "judge", "logits", "run", "tolerance"]

STOCK_FORMS = ("position_ids", "without_cache", "all_ones_mask")

# Verdicts of forms, the worst first.
VERDICTS = ("leak", "error", "inexact", "refused", "exact")

Patch = Callable[[PreTrainedModel], AbstractContextManager[Any]]
ValuesAndGradients = tuple[Tensor, Sequence[Tensor | None]]


@dataclasses.dataclass
class Row:
    """The verdicts on one model type.

    Attributes:
        verdict: the worst of `by_form`, or "refused" or "unbuilt" where no form could be tried.
        reason: the form and the number, or the message, for any verdict but "exact".
        worst: the largest difference from documents alone in any form; NaN where there is none.
        by_form: the judge's verdict for each form.
    """

    model_type: str
    verdict: str
    reason: str = ""
    worst: float = math.nan
    by_form: dict[str, str] = dataclasses.field(default_factory=dict)


def _subject(model: PreTrainedModel, *, stock: bool = False) -> Subject:
    return Subject(
        model, zoo.documents, call=lambda ids: zoo.call(model, ids), values=lambda output: zoo.logits(model, output),
        stock=stock,
    )  # fmt: skip


def logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The logits `[tokens, n]` of all documents of a batch, one after the other."""
    (values,) = _subject(model).tensors(batch).values()
    return batch.gather(values)


def tolerance(model: PreTrainedModel) -> float:
    return comparison.tolerance(model.dtype)


def difference(expected: ValuesAndGradients, got: ValuesAndGradients) -> float:
    """The largest difference in values or gradients, relative to the largest expected one of each."""
    return max(apart([expected[0]], [got[0]]), apart(expected[1], got[1]))


def alone(model: PreTrainedModel, documents: list[Tensor], *, gradients: bool = True) -> Results:
    return judging.alone(_subject(model), documents, gradients=gradients)


def judge(
    model: PreTrainedModel, form: str, documents: list[Tensor], expected: Results, *, stock: bool = False
) -> Judgement:
    return judging.judge(_subject(model, stock=stock), form, documents, expected, tolerance(model))


def run(
    model_type: str, *, patch: Patch | None = tritonpack.patch, forms: Iterable[str] | None = None,
    gradients: bool | Collection[str] = True,
) -> Row:  # fmt: skip
    """The row of one model type, or variant.

    Args:
        model_type: an entry of `zoo.MODEL_TYPES` or `zoo.VARIANTS`.
        patch: makes a context in which the model packs; None leaves the model as it is.
        forms: names of `FORMS`; all of them by default, without a patch those in `STOCK_FORMS`.
        gradients: compare those of the parameters, too, in all forms or in those of these names.
    """
    if model_type in zoo.UNBUILT:
        return Row(model_type, "unbuilt", zoo.UNBUILT[model_type])
    dtype = torch.float32 if model_type in zoo.FLOAT32_ONLY else torch.float64
    model = zoo.tiny_model(model_type, dtype=dtype)
    documents = zoo.documents(LENGTHS)
    found: dict[str, Judgement] = {}
    try:
        expected = alone(model, documents, gradients=bool(gradients) and model_type not in zoo.FORWARD_ONLY)
        with patch(model) if patch else nullcontext():
            for form in forms or (FORMS if patch else STOCK_FORMS):
                compared = gradients if isinstance(gradients, bool) else form in gradients
                told = expected if compared else expected._replace(gradients=())
                found[form] = judge(model, form, documents, told, stock=patch is None)
    except tritonpack.UnsupportedModelError as error:
        return Row(model_type, "refused", str(error).split("\n")[0])
    except Exception as error:
        return Row(model_type, "error", judging.message("alone, or when patched", error))
    first = min(found.values(), key=lambda one: VERDICTS.index(one.verdict))
    worst = max((one.worst for one in found.values() if not math.isnan(one.worst)), default=math.nan)
    return Row(model_type, first.verdict, first.reason, worst, {form: one.verdict for form, one in found.items()})
