"""Reads where documents begin from the arguments of a forward pass. Contradicting arguments are refused.

A mask of pairs of tokens, (B, 1, T, T), is read if it is block-diagonal and causal: LLaMA-Factory's `neat_packing`
passes such masks. Which documents a row holds is read, nothing else: windows, chunks and images that see all of
themselves come from the model, as for each document alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import describe, mask_as_numbers, require
from tritonpack.masks.block_diagonal import changes
from tritonpack.patches.call_arguments import TREE
from tritonpack.patches.mask_spec import CAUSAL, MaskSpec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving, shown
from tritonpack.patches.tensor_like import TensorLike

SHARED_CONFIG = (
    "Its configuration object may be shared with a patched model, which writes the name there: build this model from "
    "copy.deepcopy(config), made before the other is patched, or patch this model, too, with tritonpack.patch(model)."
)


BEFORE_ROWS = (
    "If inputs_embeds begin with virtual tokens (PEFT's), give each document a row of its own: these lie before rows."
)


class OpenMaskError(ValueError):
    """A mask was used before anything said where its documents begin."""


@dataclass(frozen=True, eq=False)
class OpenMask(TensorLike):
    """A mask that transformers made outside of a patched model's forward pass, so that its documents are not known yet.

    generate() makes such masks before it calls the model, and a model with our name that isn't patched gets one.
    """

    ndim = 4

    attention_mask: Tensor | None
    shape: torch.Size
    query_offset: int | Tensor
    key_offset: int
    spec: MaskSpec
    device: torch.device
    dtype: torch.dtype = torch.bool
    claimed: list[IntervalMask] = field(default_factory=list)  # one at most

    def to(self, *_: Any, **__: Any) -> OpenMask:
        return self

    def to_tensor(self) -> Tensor:
        raise OpenMaskError(
            "this model's attention has tritonpack's name but the model isn't patched, so packed documents would not "
            f"be told apart. {SHARED_CONFIG}"
        )

    def claim(self, arguments: dict[str, Any], serving: Serving) -> IntervalMask:
        """The mask for a call with these arguments; one mask for all layers that claim it."""
        if not self.claimed:
            batch, _, queries, keys = self.shape
            told = {**arguments, "attention_mask": self.attention_mask}
            packed_batch = make_packed_batch(told, torch.Size((batch, queries)), self.device, serving)
            self.claimed.append(packed_batch.interval_mask(keys, self.query_offset, self.key_offset, self.spec))
        return self.claimed[0]


def make_packed_batch(
    arguments: dict[str, Any],
    tokens: torch.Size,
    device: torch.device,
    serving: Serving,
    pad_token: int | None = None,
    reads_pairs: bool = False,
) -> PackedBatch:
    """The packing of a forward pass over tokens of shape (B, T), from the arguments of the call.

    Documents begin where `cu_seq_lens_q` says so (FlashAttention's offsets over the flattened tokens), else where
    `seq_idx` changes ((B, T) document numbers), else where `position_ids` do not ascend by one. A two-dimensional
    `attention_mask` marks padding by 0, and may number documents. Without a mask, `pad_token` tells what is padding
    (see `PackedBatch.not_padding`). `tree_ends` say that rows hold trees, whose position ids are depths. If it
    `reads_pairs`, a causal mask of pairs of tokens tells documents and padding, too.

    Raises:
        ValueError: arguments that contradict each other or the tokens.
    """
    mask = arguments.get("attention_mask")
    pairs = reads_pairs and is_pair_mask(mask)
    if pairs:
        mask = number_documents(mask, tokens).to(device)
    elif mask is not None:
        mask = mask_as_numbers(mask, "attention_mask").to(device)
    position_ids = arguments.get("position_ids")
    if position_ids is not None:
        position_ids = position_ids.to(device)
    told = _boundaries(arguments, tokens, device)
    ids = arguments.get("input_ids")
    filler = None
    if mask is None and pad_token is not None and isinstance(ids, Tensor) and ids.shape == tokens:
        filler = ids == pad_token
    boundaries = next(iter(told.values()), None)
    ends = arguments.get(TREE)
    if ends is not None:
        _require_tree(ends, tokens, {**told, "attention_mask": mask})
        return PackedBatch(None, position_ids, None, tokens, device, serving, tree_ends=ends)
    packed_batch = PackedBatch(mask, position_ids, boundaries, tokens, device, serving, filler=filler, causal=pairs)
    if (mask is not None) + (position_ids is not None) + len(told) > 1:
        _require_agreement(packed_batch, told)
    return packed_batch


def _require_tree(ends: Tensor, tokens: torch.Size, others: dict[str, Tensor | None]) -> None:
    """Refuse ends of subtrees beside other arguments that tell documents apart. The mask checks their values."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"tree_ends and {' and '.join(given)} both say which tokens a token sees. Leave {given[0]} out: in "
            "tree_ends a token outside every tree has its own place, and a document is a tree without branches."
        )
    if ends.shape != tokens:
        raise ValueError(f"tree_ends has shape {tuple(ends.shape)} but the tokens have {tuple(tokens)}.")


def require_depths(packed_batch: PackedBatch) -> None:
    """Refuse position ids (B, T) of trees that aren't depths, counted from any number in each tree."""
    given = packed_batch.position_ids
    if given is None or given.ndim != 2 or torch.compiler.is_compiling():
        return
    mask = packed_batch.interval_mask(packed_batch.tokens[1], 0, 0, CAUSAL).mask
    depth = mask.diagonal
    assert depth is not None
    stream = given.expand(packed_batch.tokens).flatten()
    rise = stream - stream[mask.key_start]  # from the first token of the tree
    wrong = rise != depth

    def message() -> str:
        where = ""
        if wrong.device.type == "cpu":
            place = int(wrong.nonzero()[0])
            where = f" at token {place} of the flattened rows, {int(rise[place])} for a depth of {int(depth[place])}"
        return (
            f"tree_ends and position_ids contradict each other{where}: position ids of a tree are depths, which rise "
            "by 1 from a token to each token right below it. Pass mask.diagonal or the position_ids of "
            "tritonpack.pack_tree, or leave position_ids out."
        )

    require(~wrong.any(), message)


def _require_agreement(packed_batch: PackedBatch, told: dict[str, Tensor]) -> None:
    """Refuse arguments that begin documents at different tokens, except in padding. `told` comes from `_boundaries`."""
    mask = packed_batch.attention_mask
    if mask is not None and mask.shape != packed_batch.tokens:
        mask = None  # it covers a cache, too
    everywhere = torch.ones(packed_batch.tokens, dtype=torch.bool, device=packed_batch.device)
    live = everywhere if mask is None else mask != 0
    if len(told) == 2:
        one, other = told.items()
        _require_same(one, other, live)
    positions = packed_batch.position_ids
    if positions is not None and positions.ndim < 3:
        starts = packed_batch._position_starts()
        zeros = (positions == 0).expand(packed_batch.tokens)
        tail = (~zeros).flip(1).cumsum(1).flip(1) == 0
        filled = tail & torch.cat([zeros[:, :1], zeros[:, :-1]], dim=1)  # collators fill rows up with zeros
        starts[:, :1] = True
        for name, boundaries in list(told.items())[:1]:
            _require_same((name, boundaries), ("position_ids", starts), live & ~filled, positions)
        told = {**told, "position_ids": starts}
    if mask is not None and told:
        # Padding ends a document by itself. A mask of 0 and 1 numbers none, unless it was made of pairs.
        inside = live & torch.cat([torch.zeros_like(live[:, :1]), live[:, :-1]], dim=1)
        if not packed_batch.causal:
            inside = inside & (mask > 1).any()
        name, boundaries = next(iter(told.items()))
        where = inside & ~filled if name == "position_ids" else inside
        _require_same(("attention_mask", changes(mask)), (name, boundaries), where, mask)


def _require_same(one: tuple[str, Tensor], other: tuple[str, Tensor], where: Tensor, ids: Tensor | None = None) -> None:
    """Refuse two arguments, each with its name and where documents begin by it, that differ on some tokens.

    Args:
        where: (B, T) bool, the tokens to compare.
        ids: the numbers to show in the message, (B, T) or one row for all; by default where documents begin by `other`.
    """
    (name, starts), (other_name, other_starts) = one, other
    differ = (starts != other_starts) & where
    numbers = other_starts.int() if ids is None else ids.expand(starts.shape)
    repeat = (
        "Let positions restart where a document begins"
        if "position_ids" in (name, other_name)
        else "Let both begin documents at the same tokens"
    )
    require(
        ~differ.any(),
        lambda: (
            f"{name} and {other_name} contradict each other{shown(differ, numbers, starts)}: by {name} documents begin "
            f"at {_places(starts)}, by {other_name} at {_places(other_starts)}. {repeat}, or leave one of the two out."
        ),
    )


def _places(starts: Tensor) -> str:
    if starts.device.type != "cpu":
        return "other places"
    places = starts.flatten().nonzero().flatten().tolist()
    return ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")


def _boundaries(arguments: dict[str, Any], shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """Where documents begin, as (B, T) bool, by the names of the arguments that are offsets or numbers."""
    cu_q, cu_k = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    seq_idx = arguments.get("seq_idx")
    told = {}
    virtual = "" if arguments.get("input_ids") is not None else f" {BEFORE_ROWS}"
    if cu_q is not None:
        total = shape.numel()
        if cu_k is not None and cu_k is not cu_q:
            differ = "cu_seq_lens_q and cu_seq_lens_k differ; in self-attention they are the same."
            if cu_q.shape != cu_k.shape:
                raise ValueError(differ)
            require((cu_q == cu_k).all(), differ)
        require(
            # A slice without the first offset would have one entry for one document, and torch.compile then makes
            # another graph.
            (cu_q[0] == 0) & (cu_q[-1] == total) & (cu_q == cu_q.cummax(0).values).all(),
            lambda: (
                f"cu_seq_lens_q must begin with 0, never decrease and end with the number of tokens, {total} "
                f"({shape[0]} x {shape[1]}){f'; got {cu_q.tolist()!r:.200}' if cu_q.device.type == 'cpu' else ''}."
                f"{virtual}"
            ),
        )
        starts = torch.zeros(total + 1, dtype=torch.bool, device=device)
        starts[cu_q.to(device=device, dtype=torch.long)] = True
        told["cu_seq_lens_q"] = starts[:-1].view(shape)
    if isinstance(seq_idx, Tensor):
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)} but the tokens have {tuple(shape)}.{virtual}")
        told["seq_idx"] = changes(seq_idx.to(device))
    for starts in told.values():
        starts[:, :1] = True
    return told


ROWS_AT_ONCE = 1024  # of the comparison with the documents that were read

# Addends up to here give weights of exactly 0: float16's minimum, to which an overflow of larger ones is clamped.
HIDDEN = torch.finfo(torch.float16).min

REMEDY = (
    "Mark documents by position_ids, cu_seq_lens_q, seq_idx or a two-dimensional mask with the number of each token's "
    "document, or unpatch the model to use a mask of your own."
)


def is_pair_mask(mask: Any) -> bool:
    """Whether an attention mask is a tensor with a value for each pair of tokens, and none that a patch has made."""
    return isinstance(mask, Tensor) and not isinstance(mask, TensorLike) and mask.ndim == 4


@torch.compiler.disable  # a graph would leave out the check
def number_documents(mask: Tensor, tokens: torch.Size) -> Tensor:
    """The number of each token's document in its row from 1, and 0 for padding, as (B, T) int32.

    A token that sees no key is padding. The mask is compared with that of the documents pair by pair: in host memory at
    once, on an accelerator by an assertion there, which doesn't wait.

    Args:
        mask: (B or 1, 1, T, T), True or 0 where a query sees a key, False or -65504 or less where it doesn't.
        tokens: (B, T).

    Raises:
        ValueError: another shape or dtype, a cache, or a mask that isn't block-diagonal and causal; the message names
            the row and the pair.
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
                f"{_first(mask, ~known)}. A patched model adds no bias to scores. {REMEDY}"
            ),
        )
    seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
    count = seen.sum(-1)
    live = count > 0
    starts = live & (count == 1)  # the first token of a document sees itself alone
    places = torch.arange(length, device=mask.device)
    begin = torch.where(starts, places, -1).cummax(1).values
    for first in range(0, length, ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        expected = live[:, some, None] & (places >= begin[:, some, None]) & (places <= places[some, None])
        differ = seen[:, some] != expected
        require(~differ.any(), lambda first=first, differ=differ: _message(differ, seen, begin, first))  # type: ignore[misc]
    return torch.where(live, starts.cumsum(1), 0).to(torch.int32).expand(rows, length)


def _first(mask: Tensor, wrong: Tensor) -> str:
    if wrong.device.type != "cpu":
        return ""
    row, _, query, key = wrong.nonzero()[0].tolist()
    return f": {mask[row, 0, query, key].item():g} in row {row} for token {query} and token {key}"


def _message(differ: Tensor, seen: Tensor, begin: Tensor, first: int) -> str:
    where = ""
    if differ.device.type == "cpu":
        row, query, key = differ.nonzero()[0].tolist()
        query += first
        verb = "sees" if seen[row, query, key] else "doesn't see"
        where = f": in row {row} token {query} {verb} token {key}"
        start = int(begin[row, query])
        where += (
            f", and its document begins at token {start}"
            if start >= 0
            else ", and no token before it sees itself alone, as the first token of a document does"
        )
    return (
        f"attention_mask isn't block-diagonal and causal{where}. From a mask of pairs a patched model reads documents, "
        "in which each token sees exactly itself and the tokens before it, and padding, which sees nothing. Windows "
        f"and images come from the model. {REMEDY}"
    )
