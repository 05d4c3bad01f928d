"""Reads documents from a mask of pairs of tokens, (B, 1, T, T), which LLaMA-Factory's `neat_packing` passes.

Which documents a row holds is read, nothing else: windows, chunks and images that see all of themselves come from the
model, as for each document alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonpack.checks import describe, require

# Addends up to here give weights of exactly 0: float16's minimum, to which an overflow of larger ones is clamped.
HIDDEN = torch.finfo(torch.float16).min

REMEDY = (
    "Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask with the number of each token's "
    "document, or unpatch the model to use a mask of your own."
)


@torch.compiler.disable  # a graph would leave out the check
def number_documents(mask: Tensor, tokens: torch.Size) -> Tensor:
    """The number of each token's document in its row from 1, and 0 for padding, as (B, T) int32.

    A token that sees no key is padding. Every row of pairs is checked: in host memory at once, on an accelerator by an
    assertion there, which doesn't wait.

    Args:
        mask: (B or 1, 1, T, T), True or 0 where a query sees a key, False or -65504 or less where it doesn't.
        tokens: (B, T).
    """
    rows, length = tokens
    if mask.shape not in ((rows, 1, length, length), (1, 1, length, length)):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}. A patched model reads documents from a mask of pairs of "
            f"shape {(rows, 1, length, length)}: one for all heads, and without keys of a cache. {REMEDY}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            "a mask of pairs must be bool, True where a token sees another, or floating point, to be added to scores; "
            f"got attention_mask {describe(mask)}. Convert it with mask.bool() if 1 stands for a pair that is seen."
        )
    if mask.dtype != torch.bool:
        known = (mask == 0) | (mask <= HIDDEN)
        require(
            known.all(),
            lambda: (
                "attention_mask holds addends other than 0 and the smallest numbers (at most -65504)"
                f"{f', such as {mask[~known][0].item():g}' if mask.device.type == 'cpu' else ''}. A patched model adds "
                f"no bias to scores. {REMEDY}"
            ),
        )
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    places, bits = torch.arange(length, device=mask.device), seen.view(torch.uint8)
    count, first, last = seen.sum(-1), bits.argmax(-1), length - 1 - bits.flip(-1).argmax(-1)
    live = count > 0
    starts = live & (count == 1)  # the first token of a document sees itself alone
    begin = torch.where(starts, places, -1).cummax(1).values
    wrong = live & ((first != begin) | (last != places) | (count != places - begin + 1))

    def message() -> str:
        where = ""
        if wrong.device.type == "cpu":
            row, query = wrong.nonzero()[0].tolist()
            start, where = int(begin[row, query]), f": in row {row} token {query} "
            if start < 0:
                where += "sees others, and neither it nor a token before it sees itself alone"
            else:
                sees = seen[row, query]
                key = int((sees != ((places >= start) & (places <= query))).nonzero()[0])
                verb = "sees" if sees[key] else "doesn't see"
                where += f"{verb} token {key}, and its document begins at token {start}"
        return (
            f"attention_mask isn't block-diagonal and causal{where}. From a mask of pairs a patched model reads "
            "documents, in which each token sees exactly itself and the tokens before it, and padding, which sees "
            f"nothing. Windows and images come from the model. {REMEDY}"
        )

    require(~wrong.any(), message)
    return torch.where(live, starts.cumsum(1), 0).to(torch.int32).expand(rows, length)
