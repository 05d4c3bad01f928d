"""The forms in which documents reach a model: how they are laid out in rows, and how the call marks them.

`ALL` are tried in models that are patched or named, `COMPACTED` in models patched with `unpad` or `share_prefixes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import tritonpack
from tritonpack.patches.measuring import Batch, lay_out

Form = Callable[[list[Tensor]], Batch]  # lays out documents `[1, n]`
LENGTHS = (7, 1, 3, 11)
PADDING = 3  # tokens at the end of a packed row
PLACES, MASK = "position_ids", "attention_mask"
OF_TOKENS = (MASK, PLACES, "seq_idx")  # arguments with a value for each token


def in_one_row(count: int) -> Iterable[Iterable[int]]:
    return [range(count)]


def in_rows(count: int) -> Iterable[Iterable[int]]:
    return [[number] for number in range(count)]


def form(
    *kept: str, rows: Callable[[int], Iterable[Iterable[int]]] = in_one_row, left: bool = False, more: int = 0,
    **made: Any,
) -> Form:  # fmt: skip
    """Return a form: documents are laid out by their numbers in rows, which `lay_out` pads.

    Args:
        kept: the arguments of `lay_out` that the call has.
        made: other arguments of the call, or functions of the documents that make them.
    """

    def lay(documents: list[Tensor]) -> Batch:
        batch = lay_out(rows(len(documents)), documents, left=left, more=more)
        told = {name: make(documents) if callable(make) else make for name, make in made.items()}
        return replace(batch, arguments={name: batch.arguments[name] for name in kept} | told)

    return lay


def _offsets(documents: list[Tensor]) -> Tensor:
    return torch.tensor([0] + [d.numel() for d in documents], device="cpu").cumsum(0).to(torch.int32)


def _longest(documents: list[Tensor]) -> int:
    return max(d.numel() for d in documents)


def _numbered(documents: list[Tensor], padding: int = 0) -> Tensor:
    """A mask `[1, t]` that numbers documents from 1, and is 0 for padding."""
    numbers = torch.cat([torch.full((d.numel(),), i, device="cpu") for i, d in enumerate(documents, 1)])
    return nn.functional.pad(numbers, (0, padding))[None]


def _seq_idx(documents: list[Tensor]) -> Tensor:
    return (_numbered(documents) - 1).to(torch.int32)


def _collated(documents: list[Tensor]) -> Batch:
    """Use tritonpack's own collator, with padding to a multiple of 16 tokens."""
    collator = tritonpack.PackingCollator(pad_to_multiple_of=16, pad_token_id=0)
    batch = collator([{"input_ids": document[0].tolist()} for document in documents])
    told = {name: x for name, x in batch.items() if name not in ("input_ids", "labels")}
    return Batch(batch["input_ids"], lay_out([range(len(documents))], documents).spans, told)


def _last_apart(count: int) -> Iterable[Iterable[int]]:
    return [range(count - 1), [count - 1]]


FORMS: dict[str, Form] = {
    "position_ids": form(PLACES),
    "without_cache": form(PLACES, use_cache=False),
    "with_cache": form(PLACES, use_cache=True),
    "all_ones_mask": form(PLACES, MASK),
    "bool_mask": form(PLACES, attention_mask=lambda d: _numbered(d) > 0),
    "collator": form(  # transformers' DataCollatorWithFlattening
        PLACES, cu_seq_lens_q=_offsets, cu_seq_lens_k=_offsets, max_length_q=_longest, max_length_k=_longest,
        seq_idx=_seq_idx,
    ),
    "offsets_alone": form(cu_seq_lens_q=_offsets),
    "seq_idx_alone": form(seq_idx=_seq_idx),
    "segment_mask": form(PLACES, attention_mask=_numbered),
    "segments_alone": form(attention_mask=_numbered),
    "segments_padded": form(more=PADDING, attention_mask=lambda d: _numbered(d, PADDING)),
    # Flattening collators pad with position ids of 0 for `pad_to_multiple_of`.
    "padded_end": form(PLACES, more=PADDING),
    "padded_end_mask": form(PLACES, MASK, more=PADDING),
    "two_rows": form(PLACES, MASK, rows=_last_apart),
    "two_rows_alone": form(PLACES, rows=_last_apart),
    "two_rows_padded": form(PLACES, MASK, rows=lambda n: [[0], range(1, n)]),
    "padded_right": form(PLACES, MASK, rows=in_rows),
    "padded_left": form(PLACES, MASK, rows=in_rows, left=True),
    "packing_collator": _collated,
}  # fmt: skip

# Forms with one document in each row: a model without tritonpack may be wrong in them, too.
PADDED = ("padded_right", "padded_left")


def _padded_between(documents: list[Tensor]) -> Batch:
    """Several documents in each of two rows, with padding on the left, between documents and on the right."""
    padding = torch.zeros(1, 2, dtype=torch.long)
    parts = [part for document in documents for part in (document, padding)]
    middle = len(documents) // 2 * 2
    batch = lay_out([range(middle), range(middle, len(parts))], parts, left=True)
    for place in batch.spans[1::2]:
        batch.arguments[MASK][place] = 0
    return replace(batch, spans=batch.spans[::2])


# Padded batches, with position ids and a mask, or with a mask alone, as trainers give them.
PADDED_BATCHES: dict[str, Form] = {
    **{name: FORMS[name] for name in PADDED},
    "padded_right_mask_alone": form(MASK, rows=in_rows),
    "padded_left_mask_alone": form(MASK, rows=in_rows, left=True),
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
LOSSES: dict[str, str] = {f"loss_{name}": name for name in (*WITH_LABELS, *PADDED_BATCHES)}

# Dtypes that are tried with position ids. The error may be twice the error of the model alone.
LOW: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ALL = (*FORMS, "hidden_states", *(f"loss_{name}" for name in WITH_LABELS), *LOW)
COMPACTED = (*PADDED_BATCHES, "hidden_states_padded", *(f"loss_{name}" for name in PADDED_BATCHES))
NAMES = tuple(dict.fromkeys((*ALL, *COMPACTED)))

# Forms of `ALL` whose gradients are compared, too; those of losses and of padded batches with an option always are.
WITH_GRADIENTS = ("position_ids", "two_rows_padded")

alone = form(rows=in_rows)  # each document in a row of its own, with nothing but its tokens
end_to_end = form()  # documents without boundaries


def laid_out(name: str) -> Form:
    """Return the layout of a form; forms that ask for something else use position ids, or rows padded on the right."""
    name = LOSSES.get(name, "padded_right" if name == "hidden_states_padded" else name)
    return {**FORMS, **PADDED_BATCHES}.get(name, FORMS["position_ids"])
