"""The forms in which documents reach a model: how they are laid out in rows, and how the call marks them.

`ALL` are tried in models that are patched or named, `COMPACTED` in models patched with `unpad` or `share_prefixes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import tritonpack
from tests.patches.sweep.classes import Case
from tritonpack.patches.measuring import Batch, lay_out

Form = Callable[[list[Tensor]], Batch]  # lays out documents `[1, n]`
LENGTHS = (7, 1, 3, 11)
PADDING = 3  # tokens at the end of a packed row


def whole(document: Tensor) -> Batch:
    """Lay out one document `[1, n]` in a row of its own, with nothing but its tokens."""
    return Batch(document, [(0, slice(0, document.numel()))], {})


def _row(documents: list[Tensor], *kept: str, more: int = 0, **arguments: Any) -> Batch:
    """All documents in one row, with the arguments of `lay_out` that are named, and others."""
    batch = lay_out([range(len(documents))], documents, more=more)
    return replace(batch, arguments={name: batch.arguments[name] for name in kept} | arguments)


def _offsets(documents: list[Tensor]) -> Tensor:
    return torch.tensor([0] + [d.numel() for d in documents], device="cpu").cumsum(0).to(torch.int32)


def _numbered(documents: list[Tensor], padding: int = 0) -> Tensor:
    """A mask `[1, t]` that numbers documents from 1, and is 0 for padding."""
    numbers = torch.cat([torch.full((d.numel(),), i, device="cpu") for i, d in enumerate(documents, 1)])
    return nn.functional.pad(numbers, (0, padding))[None]


def _seq_idx(documents: list[Tensor]) -> Tensor:
    return (_numbered(documents) - 1).to(torch.int32)


def _flattened(documents: list[Tensor]) -> Batch:
    """The arguments of transformers' `DataCollatorWithFlattening`."""
    offsets, longest = _offsets(documents), max(d.numel() for d in documents)
    return _row(
        documents, "position_ids", cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest,
        max_length_k=longest, seq_idx=_seq_idx(documents),
    )  # fmt: skip


def _two_rows_alone(documents: list[Tensor]) -> Batch:
    batch = FORMS["two_rows"](documents)
    return replace(batch, arguments={"position_ids": batch.arguments["position_ids"]})


def _collated(documents: list[Tensor]) -> Batch:
    """Use tritonpack's own collator, with padding to a multiple of 16 tokens."""
    collator = tritonpack.PackingCollator(pad_to_multiple_of=16, pad_token_id=0)
    batch = collator([{"input_ids": document[0].tolist()} for document in documents])
    ids = batch.pop("input_ids")
    del batch["labels"]
    spans = lay_out([range(len(documents))], documents).spans
    return Batch(ids, spans, batch)


FORMS: dict[str, Form] = {
    "position_ids": lambda d: _row(d, "position_ids"),
    "without_cache": lambda d: _row(d, "position_ids", use_cache=False),
    "with_cache": lambda d: _row(d, "position_ids", use_cache=True),
    "all_ones_mask": lambda d: _row(d, "position_ids", "attention_mask"),
    "bool_mask": lambda d: _row(d, "position_ids", attention_mask=_numbered(d) > 0),
    "collator": _flattened,
    "offsets_alone": lambda d: _row(d, cu_seq_lens_q=_offsets(d)),
    "seq_idx_alone": lambda d: _row(d, seq_idx=_seq_idx(d)),
    "segment_mask": lambda d: _row(d, "position_ids", attention_mask=_numbered(d)),
    "segments_alone": lambda d: _row(d, attention_mask=_numbered(d)),
    "segments_padded": lambda d: _row(d, more=PADDING, attention_mask=_numbered(d, PADDING)),
    # Flattening collators pad with position ids of 0 for `pad_to_multiple_of`.
    "padded_end": lambda d: _row(d, "position_ids", more=PADDING),
    "padded_end_mask": lambda d: _row(d, "position_ids", "attention_mask", more=PADDING),
    "two_rows": lambda d: lay_out([range(len(d) - 1), [len(d) - 1]], d),
    "two_rows_alone": _two_rows_alone,
    "two_rows_padded": lambda d: lay_out([[0], range(1, len(d))], d),
    "padded_right": lambda d: lay_out([[i] for i in range(len(d))], d),
    "padded_left": lambda d: lay_out([[i] for i in range(len(d))], d, left=True),
    "packing_collator": _collated,
}

# Arguments with a value for each token, which have another name for a decoder's tokens.
OF_TOKENS = ("attention_mask", "position_ids", "seq_idx")


# Forms with one document in each row: a model without tritonpack may be wrong in them, too.
PADDED = ("padded_right", "padded_left")


def _with_mask_alone(form: str) -> Form:
    def with_mask(documents: list[Tensor]) -> Batch:
        batch = FORMS[form](documents)
        return replace(batch, arguments={"attention_mask": batch.arguments["attention_mask"]})

    return with_mask


def _padded_between(documents: list[Tensor]) -> Batch:
    """Several documents in each of two rows, with padding on the left, between documents and on the right."""
    padding = torch.zeros(1, 2, dtype=torch.long)
    parts = [part for document in documents for part in (document, padding)]
    middle = len(documents) // 2 * 2
    batch = lay_out([range(middle), range(middle, len(parts))], parts, left=True)
    for place in batch.spans[1::2]:
        batch.arguments["attention_mask"][place] = 0
    return replace(batch, spans=batch.spans[::2])


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
    return replace(FORMS["position_ids"](documents), arguments={})


def rows(documents: list[Tensor]) -> Batch:
    """Documents of one length in rows of their own, with nothing but their tokens."""
    batch = lay_out([[number] for number in range(len(documents))], documents)
    return replace(batch, arguments={})


def alone(documents: list[Tensor]) -> Batch:
    """One document, with nothing but its tokens."""
    return whole(documents[0])
