"""The forms in which a class is tried: those of trials, a collator's, other outputs, losses, and lower dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tritonpack
from tests.patches.sweep.classes import Case
from tritonpack.patches.trial import packed_forms
from tritonpack.patches.trial.packed_forms import Batch

Form = Callable[[list[Tensor]], Batch]


def _collated(documents: list[Tensor]) -> Batch:
    """Use tritonpack's own collator, with padding to a multiple of 16 tokens."""
    collator = tritonpack.PackingCollator(pad_to_multiple_of=16, pad_token_id=0)
    batch = collator([{"input_ids": document[0].tolist()} for document in documents])
    ids = batch.pop("input_ids")
    del batch["labels"]
    spans = packed_forms.lay_out([range(len(documents))], documents).spans
    return Batch(ids, spans, batch)


FORMS: dict[str, Form] = {**packed_forms.FORMS, "packing_collator": _collated}

# Forms with one document in each row: a model without tritonpack may be wrong in them, too.
PADDED = ("padded_right", "padded_left")

# Other outputs that a call may ask for, with position ids.
OUTPUTS: dict[str, dict[str, Any]] = {"hidden_states": {"output_hidden_states": True}}

# Forms that are tried with labels: the name with labels, and the form.
LOSSES: dict[str, str] = {
    f"loss_{form}": form
    for form in (
        "position_ids", "collator", "segments_alone", "segments_padded", "padded_end_mask", "two_rows_padded",
        "packing_collator",
    )
}  # fmt: skip

# Dtypes that are tried with position ids. The error may be twice the error of the model alone.
LOW: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ALL = (*FORMS, *OUTPUTS, *LOSSES, *LOW)
STOCK = ("position_ids", "all_ones_mask")

# Forms whose gradients are compared, too; those of losses always are.
WITH_GRADIENTS = ("position_ids", "two_rows_padded")

# Forms in which a class can't be called, with or without a patch.
NOT_CALLABLE: dict[str, tuple[str, ...]] = {
    # They pass a use_cache of their own beside the one that is given.
    "T5GemmaForTokenClassification": ("with_cache", "without_cache"),
    "T5Gemma2ForTokenClassification": ("with_cache", "without_cache"),
    # It takes one row, and no use_cache.
    "JevForDecision": (
        "two_rows", "two_rows_alone", "two_rows_padded", "padded_right", "padded_left", "with_cache", "without_cache",
    ),
}  # fmt: skip


def callable_forms(case: Case, chosen: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(form for form in chosen if form not in NOT_CALLABLE.get(case.name, ()))


def end_to_end(documents: list[Tensor]) -> Batch:
    """One row of documents, without boundaries."""
    return dataclasses.replace(packed_forms.FORMS["position_ids"](documents), arguments={})


def alone(documents: list[Tensor]) -> Batch:
    """One document, with nothing but its tokens."""
    return packed_forms.whole(documents[0])
