"""The forms in which a class is tried: those of trials, a collator's, other outputs, losses, and lower dtypes.

`ALL` are tried in models that are patched or named, `COMPACTED` in models patched with `unpad` or `share_prefixes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tritonpack
from tests.patches.sweep.classes import Case
from tests.small_copies import packed_forms
from tests.small_copies.packed_forms import Batch

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


def _with_mask_alone(form: str) -> Form:
    def lay_out(documents: list[Tensor]) -> Batch:
        batch = FORMS[form](documents)
        return dataclasses.replace(batch, arguments={"attention_mask": batch.arguments["attention_mask"]})

    return lay_out


def _padded_between(documents: list[Tensor]) -> Batch:
    """Several documents in each of two rows, with padding on the left, between documents and on the right."""
    padding = torch.zeros(1, 2, dtype=torch.long)
    parts = [part for document in documents for part in (document, padding)]
    middle = len(documents) // 2 * 2
    batch = packed_forms.lay_out([range(middle), range(middle, len(parts))], parts, left=True)
    for place in batch.spans[1::2]:
        batch.arguments["attention_mask"][place] = 0
    return dataclasses.replace(batch, spans=batch.spans[::2])


# Padded batches, with position ids and a mask, or with a mask alone, as trainers give them.
PADDED_BATCHES: dict[str, Form] = {
    **{form: FORMS[form] for form in PADDED},
    **{f"{form}_mask_alone": _with_mask_alone(form) for form in PADDED},
    "padded_between": _padded_between,
}

# Other outputs that a call may ask for.
STATES = {"output_hidden_states": True}
OUTPUTS: dict[str, dict[str, Any]] = {"hidden_states": STATES, "hidden_states_padded": STATES}

# Forms that are tried with labels: the name with labels, and the form.
WITH_LABELS = (
    "position_ids", "collator", "segments_alone", "segments_padded", "padded_end_mask", "two_rows_padded",
    "packing_collator",
)  # fmt: skip
LOSSES: dict[str, str] = {f"loss_{form}": form for form in (*WITH_LABELS, *PADDED_BATCHES)}

# Dtypes that are tried with position ids. The error may be twice the error of the model alone.
LOW: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ALL = (*FORMS, "hidden_states", *(f"loss_{form}" for form in WITH_LABELS), *LOW)
STOCK = ("position_ids", "all_ones_mask")
COMPACTED = (*PADDED_BATCHES, "hidden_states_padded", *(f"loss_{form}" for form in PADDED_BATCHES))
NAMES = tuple(dict.fromkeys((*ALL, *COMPACTED)))

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


def laid_out(form: str) -> Form:
    """Return the layout of a form; forms that ask for something else use position ids, or rows padded on the right."""
    name = LOSSES.get(form, "padded_right" if form == "hidden_states_padded" else form)
    return {**FORMS, **PADDED_BATCHES}.get(name, FORMS["position_ids"])


def end_to_end(documents: list[Tensor]) -> Batch:
    """One row of documents, without boundaries."""
    return dataclasses.replace(packed_forms.FORMS["position_ids"](documents), arguments={})


def rows(documents: list[Tensor]) -> Batch:
    """Documents of one length in rows of their own, with nothing but their tokens."""
    batch = packed_forms.lay_out([[number] for number in range(len(documents))], documents)
    return dataclasses.replace(batch, arguments={})


def alone(documents: list[Tensor]) -> Batch:
    """One document, with nothing but its tokens."""
    return packed_forms.whole(documents[0])
