"""Translates transformers' mask functions to intervals of keys around each query's own place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from tritonpack.checks import Reach, Window, check_reach, require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.intervals import WHOLE_DOCUMENT as EVERY_KEY

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ROWS_AT_ONCE = 1024  # of a dense mask


@dataclass(frozen=True)
class MaskSpec:
    """The visible keys of the layers of one kind, within a document.

    Attributes:
        reach: windows and chunks within the document.
        overlay: a mask function in the coordinates of the row, for masks that models compose themselves (prefixes, or
            images whose tokens see each other); else None. An overlay replaces the reach.
    """

    reach: Reach
    overlay: MaskFunction | None = None

    @classmethod
    def of(cls, window: Window, chunk_size: int | None = None) -> MaskSpec:
        """Make a spec of the window (left, right) and the chunk size, as in `BlockDiagonalMask`."""
        return cls(check_reach(window, causal=False, chunk_size=chunk_size))


CAUSAL = MaskSpec.of((-1, 0))
WHOLE_DOCUMENT = MaskSpec(EVERY_KEY)


def read_mask_spec(
    mask_function: Any, local_size: int | None, config: Any, flags: dict[str, Any], queries: int
) -> MaskSpec:
    """Read the spec of a mask from the arguments that transformers passes to its mask function.

    transformers allows a mask to be skipped (`allow_is_causal_skip`, `allow_is_bidirectional_skip`) only if the model
    added nothing to transformers' own function. Then `local_size`, the window or chunk, describes the mask completely.
    Any other function is an overlay. If a model composes its own mask, transformers sets `use_vmap` and forbids to skip
    the mask. It also forbids it for one query that reads a static cache.

    Raises:
        UnsupportedModelError: chunks and an overlay at once, or a size that may belong to chunks or to a window.
        ValueError: the function is not the window of its size and flags.
    """
    bidirectional = "allow_is_bidirectional_skip" in flags
    plain = flags.get("allow_is_bidirectional_skip" if bidirectional else "allow_is_causal_skip", False)
    composed = flags.get("use_vmap", False) or not (plain or queries == 1)
    if mask_function is causal_mask_function:
        return CAUSAL
    if mask_function is bidirectional_mask_function:
        return WHOLE_DOCUMENT
    chunked = local_size is not None and getattr(config, "attention_chunk_size", None) == local_size
    if chunked and (composed or getattr(config, "sliding_window", None) == local_size):
        raise UnsupportedModelError(
            f"a mask of local size {local_size} may be chunks, a window, or one of them combined with the model's own "
            "mask; tritonpack can't decide which. Unpatch the model."
        )
    if chunked:
        return MaskSpec.of((-1, 0), local_size)
    if plain and local_size is not None and not composed:
        left, right = window = (local_size, local_size) if bidirectional else (local_size - 1, 0)
        if not torch.compiler.is_compiling():  # compare them at the keys on both sides of the window's two ends
            zero = torch.zeros((), dtype=torch.long, device="cpu")
            gaps = torch.tensor([-left - 1, -left, 0, right, right + 1], device="cpu")
            seen = mask_function(zero, zero, zero + left + 1, gaps + left + 1)
            if not torch.equal(seen, (gaps >= -left) & (gaps <= right)):
                raise ValueError(
                    f"this model's mask function isn't the window {window} (keys to the left, to the right) of its "
                    "arguments, so tritonpack doesn't know which keys its layers see. Unpatch the model."
                )
        return MaskSpec.of(window)
    return MaskSpec(EVERY_KEY, mask_function)


def overlay_intervals(
    overlay: MaskFunction, rows: Tensor, begin: Tensor, end: Tensor, num_keys: int
) -> tuple[Tensor, Tensor]:
    """Return each query's interval of keys, from a mask function. Outside of graphs every pair is checked.

    Args:
        overlay: as transformers composes it, in the coordinates of the row.
        rows: (B, T) int64, each query's own place.
        begin, end: (B, T) int64, the outer bounds of the keys that it may see; equal if it may see none.

    Returns:
        start and stop, (B, T) int64. They must be one interval around the query's own place (not checked in graphs).
    """
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None].expand_as(rows)
    head, keys = torch.zeros((), dtype=torch.long, device=rows.device), torch.arange(num_keys, device=rows.device)
    end = torch.where((rows >= begin) & (rows < end), end, begin)  # padding sees nothing
    # Find the first and the last key that each query sees, 256 candidates at a time. A graph must fit all lengths.
    query, low, high = (batch[..., None], head, rows[..., None]), begin[..., None], end[..., None]
    first, last, steps = rows, rows, torch.arange(256, device=rows.device)
    for shift in reversed(range(0, 31 if torch.compiler.is_compiling() else num_keys.bit_length(), 8)):
        lower, upper = first[..., None] - (steps << shift), last[..., None] + (steps << shift)
        before = (lower >= low) & overlay(*query, lower.clamp(0, num_keys - 1))
        after = (upper < high) & overlay(*query, upper.clamp(0, num_keys - 1))
        first, last = first - ((before.sum(-1) - 1) << shift), last + ((after.sum(-1) - 1) << shift)
    sees_itself = (end > begin) & overlay(batch, head, rows, rows.clamp(max=num_keys - 1))
    start, stop = torch.where(sees_itself, first, begin), torch.where(sees_itself, last + 1, begin)
    if not torch.compiler.is_compiling():
        for piece in zip(*(x.split(ROWS_AT_ONCE, 1) for x in (batch, rows, begin, end, start, stop)), strict=True):
            number, own, low, high, start_of_piece, stop_of_piece = (x[..., None] for x in piece)
            seen = overlay(number, head, own, keys) & (keys >= low) & (keys < high)
            require(
                (seen == ((keys >= start_of_piece) & (keys < stop_of_piece))).all(),
                "the mask that this model composes lets a token see keys that aren't one interval around its own "
                "place, such as two images with the same number in a document. tritonpack's kernels don't support "
                "this. Give each image its own number, or unpatch the model.",
            )
    return start, stop
