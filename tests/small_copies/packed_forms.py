"""Every form in which packed documents reach a model: how they are laid out in rows, and how the call marks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.measuring import Batch, lay_out

LENGTHS = (7, 1, 3, 11)
PADDING = 3  # tokens at the end of a packed row


Form = Callable[[list[Tensor]], Batch]  # lays out documents `[1, n]`


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


def _collated(documents: list[Tensor]) -> Batch:
    """The arguments of transformers' `DataCollatorWithFlattening`."""
    offsets, longest = _offsets(documents), max(d.numel() for d in documents)
    return _row(
        documents, "position_ids", cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=longest,
        max_length_k=longest, seq_idx=_seq_idx(documents),
    )  # fmt: skip


def _two_rows_alone(documents: list[Tensor]) -> Batch:
    batch = FORMS["two_rows"](documents)
    return replace(batch, arguments={"position_ids": batch.arguments["position_ids"]})


FORMS: dict[str, Form] = {
    "position_ids": lambda d: _row(d, "position_ids"),
    "without_cache": lambda d: _row(d, "position_ids", use_cache=False),
    "with_cache": lambda d: _row(d, "position_ids", use_cache=True),
    "all_ones_mask": lambda d: _row(d, "position_ids", "attention_mask"),
    "bool_mask": lambda d: _row(d, "position_ids", attention_mask=_numbered(d) > 0),
    "collator": _collated,
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
}

# Arguments with a value for each token, which have another name for a decoder's tokens.
OF_TOKENS = ("attention_mask", "position_ids", "seq_idx")


def paired(form: Form, source_of: Callable[[Tensor], Tensor]) -> Form:
    """Return a form of pairs of documents for encoder-decoder models, as a function of the decoder's documents.

    Both sides have the form `form`. `source_of` makes the encoder's document `[1, m]` of the decoder's.
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
    """Return the arguments of a call in multiple choice: each document and its copy in other tokens are two options.

    Arguments `[b, t]` with a value for each token become `[b, 2, t]`. Offsets are taken for a single row.
    """
    found = dict(arguments)
    for name, value in arguments.items():
        if name in ("input_ids", *OF_TOKENS):
            found[name] = torch.stack([value, another(value) if name == "input_ids" else value], dim=1)
        elif name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            found[name] = torch.cat([value, value[1:] + value[-1]])
    return found
