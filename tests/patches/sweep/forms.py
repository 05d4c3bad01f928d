"""The forms that a class is tried in: those of `tritonpack.testing`, a collator's, and what else a call may ask for."""

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
    """By tritonpack's own collator, filled up to a multiple of 16 tokens."""
    collator = tritonpack.PackingCollator(pad_to_multiple_of=16, pad_token_id=0)
    batch = collator([{"input_ids": document[0].tolist()} for document in documents])
    ids = batch.pop("input_ids")
    del batch["labels"]
    spans = packed_forms.lay_out([range(len(documents))], documents).spans
    return Batch(ids, spans, batch)


FORMS: dict[str, Form] = {**packed_forms.FORMS, "packing_collator": _collated}

# Forms without a second document in any row: a model without tritonpack may be wrong in them, too.
PADDED = ("padded_right", "padded_left")

# What a call asks for beside its documents, told by position ids.
OUTPUTS: dict[str, dict[str, Any]] = {"hidden_states": {"output_hidden_states": True}}

# Forms that are tried with labels, by what each is called then.
LOSSES: dict[str, str] = {
    f"loss_{form}": form
    for form in (
        "position_ids", "collator", "segments_alone", "segments_padded", "padded_end_mask", "two_rows_padded",
        "packing_collator",
    )
}  # fmt: skip

# Dtypes that are tried with position ids, where the error may be twice what the model alone makes.
LOW: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ALL = (*FORMS, *OUTPUTS, *LOSSES, *LOW)
STOCK = ("position_ids", "all_ones_mask")

# Those whose gradients are compared, too; losses always have theirs.
WITH_GRADIENTS = ("position_ids", "two_rows_padded")

# Forms that a class can't be called in, whatever it is patched with.
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
    """One row of documents, without a word of where they begin."""
    return dataclasses.replace(packed_forms.FORMS["position_ids"](documents), arguments={})


def alone(documents: list[Tensor]) -> Batch:
    """One document, with nothing but its tokens."""
    return packed_forms.whole(documents[0])
