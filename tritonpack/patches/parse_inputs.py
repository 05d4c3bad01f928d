"""Reads the documents of a call from its arguments. Refuses contradicting arguments and misspelled names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.checks import FLOAT_MASKS, MASKS, describe, holds_numbers, mask_as_numbers, require
from tritonpack.masks.intervals import PAIRS_REMEDY, changes, document_starts, documents_of_pairs
from tritonpack.patches.mask_spec import CAUSAL, MaskSpec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving, excerpt
from tritonpack.patches.tensor_like import TensorLike

# The arguments that mark documents.
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
LENGTHS = (*OFFSETS, "max_length_q", "max_length_k")
TREE = "tree_ends"
TOKEN_ARGUMENTS = ("attention_mask", "position_ids", "seq_idx")
DOCUMENT_ARGUMENTS = (*TOKEN_ARGUMENTS, *OFFSETS, TREE)

# The arguments that mark documents of an encoder and of a decoder, by the names that `make_packed_batch` reads.
ENCODER = {**{name: name for name in TOKEN_ARGUMENTS}, "cu_seq_lens_q": "cu_seq_lens_k"}
DECODER = {**{name: f"decoder_{name}" for name in TOKEN_ARGUMENTS}, "cu_seq_lens_q": "cu_seq_lens_q"}

# The arguments that pass a cache. Since transformers 5.24 "cache" replaces "past_key_values" and "cache_params".
CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")

_documents_of_pairs = torch.compiler.disable(documents_of_pairs)  # a graph would leave out its check

# Attribute of a cache whose first tokens have positions that a patch counted in each document.
COUNTED = "tritonpack_counted"

# The arguments that describe a packed row. A row with one document needs none of them.
PACKING_ARGUMENTS = (*LENGTHS, "seq_idx", "decoder_seq_idx", TREE)

# The form that each of these arguments must have.
FORMS = {
    "attention_mask": (
        "a two-dimensional tensor of bool, signed integers or floats, 0 for padding and 1, or the number of the "
        "document, for tokens"
    ),
    "position_ids": "an integer tensor of shape (B, T), or (T,) for one row",
    "seq_idx": "an integer tensor, int32 or int64, with the number of each token's document, of the tokens' shape",
    "cu_seq_lens_q": (
        "a one-dimensional int32 or int64 tensor, the offsets where documents begin in the flattened rows, and last "
        "the number of tokens"
    ),
    TREE: "an integer tensor of the tokens' shape, int32 or int64, the place after the last token below each token",
}
FORMS |= {"cu_seq_lens_k": FORMS["cu_seq_lens_q"]} | {f"decoder_{name}": FORMS[name] for name in TOKEN_ARGUMENTS}


def cache_of(values: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments or the outputs of a call, under any of its names; None without one."""
    for name, value in values.items():
        if name in CACHES and value is not None:
            return value
    return None


def tokens_of(arguments: Mapping[str, Any], side: str = "") -> tuple[Tensor | None, torch.Size]:
    """Return the tokens of a call and their shape (B, T): ids, or embeddings (B, T, n); None and () without tokens.

    `side` is "decoder_" for the decoder's tokens.
    """
    ids, embeds = arguments.get(f"{side}input_ids"), arguments.get(f"{side}inputs_embeds")
    if ids is not None:
        return ids, ids.shape
    return embeds, torch.Size() if embeds is None else embeds.shape[:-1]


def check_arguments(arguments: dict[str, Any], model: str, known: Collection[str]) -> None:
    """Check the forms and the names of arguments, and make position ids (T,) one row (1, T).

    Args:
        arguments: the arguments of a call by name; None counts as not passed.
        model: the name of the model's class.
        known: the names in the signatures of the model and of its patched module.
    """
    for name, value in list(arguments.items()):
        form = FORMS.get(name)
        if value is None:
            continue
        if form is None:
            if name not in known and (meant := intended_argument(name)):
                raise ValueError(
                    f"{model} was called with {name!r}, which no code reads, so it would not mark documents. Pass "
                    f"{meant}, {FORMS[meant]}, or leave {name!r} out."
                )
            continue
        if name.endswith("attention_mask"):
            tensor = isinstance(value, Tensor) and value.ndim > 1 and value.dtype in (*MASKS, *FLOAT_MASKS)
            fits = tensor or isinstance(value, (TensorLike, dict))
        elif name.endswith("position_ids"):
            fits = isinstance(value, Tensor)
            if fits and value.ndim == 1:
                arguments[name] = value[None]
        else:
            fits = holds_numbers(value) and (name not in OFFSETS or (value.ndim == 1 and value.numel() > 0))
        if not fits:
            raise ValueError(f"{name} must be {form}; got {describe(value)}.")
    if arguments.get("cu_seq_lens_k") is not None and arguments.get("cu_seq_lens_q") is None:
        raise ValueError(
            f"{model} was called with 'cu_seq_lens_k' alone, which marks no documents. Pass cu_seq_lens_q, "
            f"{FORMS['cu_seq_lens_q']}."
        )
    mask = arguments.get("attention_mask")
    if isinstance(mask, dict) and not any(isinstance(x, TensorLike) for x in mask.values()):
        raise ValueError(
            f"attention_mask is a dict of masks ({', '.join(map(repr, mask)) or 'empty'}); a patched model makes the "
            f"masks of its layers itself. {PAIRS_REMEDY}"
        )


# Patterns of other libraries' names and of misspellings: the argument to pass instead.
SIMILAR_NAMES = {
    r"((cu|max|cumulative|packed)_?)?(seq(uence)?|doc(ument)?|segment)s?_?(len(gth)?|offset|start)s?(_[qk])?"
    r"|((cumulative|input)_)?lengths|offsets|((seq(uence)?|doc(ument)?|segment)_)?boundaries|packed_seq_params"
    r"|num_(seq(uence)?|doc(ument)?|segment)s": "cu_seq_lens_q",
    r"((token|packed)_)?(seq(uence)?|doc(ument)?|segment)s?_?(id|idx|index|indice|number)(e?s)?|documents|segments"
    r"|(sample|batch|pack|example|group|episode)_ids": "seq_idx",
    r"pos[a-z]*_?(id|idx|index|indice)(e?s)?|((seq(uence)?|doc(ument)?|segment)_)?pos(ition)?s?": "position_ids",
    r"(sub)?tree_?(ends?|parents?|out|mask|ids)|parents?(_ids)?|tout": "tree_ends",
    r"(att?e?nt?io?n|attn|padding|key_padding|segment|doc(ument)?|block|packing|packed|eod)_?masks?": "attention_mask",
}


@cache
def intended_argument(name: str) -> str | None:
    """Return the argument that is probably meant by a name; None if the name is read, or is unrelated."""
    if name in DOCUMENT_ARGUMENTS:
        return None
    return next((meant for pattern, meant in SIMILAR_NAMES.items() if re.fullmatch(pattern, name.lower())), None)


NOT_PATCHED = (
    "is named 'tritonpack' but the model isn't patched, so packed documents would mix. If it shares its configuration "
    "object with a patched model, build it from copy.deepcopy(config), made before the other model is patched, or call "
    "tritonpack.patch(model) for this model, too. Models that are loaded with attn_implementation='tritonpack' are "
    "patched when they are built, after tritonpack.register(); a name that is written into a configuration later has "
    "no effect."
)


class LazyMaskError(ValueError):
    """A mask was used before its documents were known."""


@dataclass(eq=False)
class LazyMask(TensorLike):
    """A mask that transformers made outside of a patched model's forward pass, so its documents aren't known yet.

    generate() makes such masks before it calls the model. A model that has the name and isn't patched gets one, too.
    """

    ndim = 4

    attention_mask: Tensor | None
    shape: torch.Size
    query_offset: int | Tensor
    key_offset: int
    spec: MaskSpec
    device: torch.device
    dtype: torch.dtype = torch.bool
    resolved: IntervalMask | None = None

    def to(self, *_: Any, **__: Any) -> LazyMask:
        return self

    def to_tensor(self) -> Tensor:
        raise LazyMaskError(f"this model's attention {NOT_PATCHED}")

    def resolve(self, arguments: dict[str, Any], serving: Serving) -> IntervalMask:
        """Return the mask of a call with these arguments. It is made once for all layers."""
        if self.resolved is None:
            batch, _, queries, keys = self.shape
            marks = {**arguments, "attention_mask": self.attention_mask}
            packed_batch = make_packed_batch(marks, torch.Size((batch, queries)), self.device, serving)
            self.resolved = packed_batch.interval_mask(keys, self.query_offset, self.key_offset, self.spec)
        return self.resolved


def make_packed_batch(
    arguments: dict[str, Any], tokens: torch.Size, device: torch.device, serving: Serving,
    pad_token: int | None = None, reads_pairs: bool = False,
) -> PackedBatch:  # fmt: skip
    """Make the packed batch of a forward pass over tokens (B, T) from the arguments of the call.

    Documents begin where `cu_seq_lens_q` says so (FlashAttention's offsets over the flattened tokens), else where
    `seq_idx` changes ((B, T) document numbers), else where `position_ids` do not ascend by one. A two-dimensional
    `attention_mask` marks padding by 0, and may number documents. Without a mask, `pad_token` marks padding (see
    `PackedBatch.not_padding`). With `tree_ends` rows hold trees, whose position ids are depths. With `reads_pairs`, the
    mask is a causal mask of pairs of tokens, from which documents and padding are read.

    Raises:
        ValueError: arguments that contradict each other or the tokens.
    """
    mask, position_ids, ends = arguments.get("attention_mask"), arguments.get("position_ids"), arguments.get(TREE)
    if mask is not None:
        numbers = _documents_of_pairs(mask, tokens) if reads_pairs else mask_as_numbers(mask, "attention_mask")
        mask = numbers.to(device)
    if position_ids is not None:
        position_ids = position_ids.to(device)
        if position_ids.shape[-2:] not in (tokens, (1, tokens[1])):
            raise ValueError(
                f"position_ids of shape {tuple(position_ids.shape)} don't fit tokens of shape {tuple(tokens)}."
            )
    marked = arguments.get("cu_seq_lens_q") is not None or arguments.get("seq_idx") is not None
    boundaries = _boundaries(arguments, mask, tokens, device) if marked else {}
    if ends is not None:
        if others := [*boundaries, *([] if mask is None else ["attention_mask"])]:
            raise ValueError(
                f"tree_ends and {' and '.join(others)} both describe the tokens that a token sees. Leave {others[0]} "
                "out: in tree_ends a token outside every tree has its own place, and a document is a tree without "
                "branches."
            )
        if ends.shape != tokens:
            raise ValueError(f"tree_ends has shape {tuple(ends.shape)} but the tokens have {tuple(tokens)}.")
        return PackedBatch(None, position_ids, None, tokens, device, serving, tree_ends=ends)
    ids, filler = arguments.get("input_ids"), None
    if mask is None and pad_token is not None and isinstance(ids, Tensor) and ids.shape == tokens:
        filler = ids == pad_token
    starts = next(iter(boundaries.values()), None)
    packed_batch = PackedBatch(mask, position_ids, starts, tokens, device, serving)
    packed_batch.filler, packed_batch.causal = filler, reads_pairs
    if (mask is not None) + (position_ids is not None) + len(boundaries) > 1:
        _require_agreement(packed_batch, boundaries)
    return packed_batch


def require_depths(packed_batch: PackedBatch) -> None:
    """Refuse position ids (B, T) of trees that aren't depths. Depths may count from any number in each tree."""
    ids = packed_batch.position_ids
    if ids is None or ids.ndim != 2 or torch.compiler.is_compiling():
        return
    first = packed_batch.interval_mask(packed_batch.tokens[1], 0, 0, CAUSAL).mask.key_start  # of each token's tree
    depth, stream = packed_batch.positions().flatten(), ids.expand(packed_batch.tokens).flatten()
    rise = stream - stream[first]
    wrong = rise != depth
    where = ""
    if wrong.device.type == "cpu" and bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        where = f" at token {place} of the flattened rows, {int(rise[place])} for a depth of {int(depth[place])}"
    require(
        ~wrong.any(),
        f"tree_ends and position_ids contradict each other{where}: position ids of a tree are depths, which rise by 1 "
        "from each token to its children. Pass mask.diagonal or the position_ids of tritonpack.pack_tree, or "
        "leave position_ids out.",
    )


def _require_agreement(packed_batch: PackedBatch, boundaries: dict[str, Tensor]) -> None:
    """Refuse arguments that begin documents at different tokens, except in padding."""
    mask = packed_batch.attention_mask
    if mask is not None and mask.shape != packed_batch.tokens:
        mask = None  # it covers a cache, too
    tokens, device = packed_batch.tokens, packed_batch.device
    live = torch.ones(tokens, dtype=torch.bool, device=device) if mask is None else mask != 0
    if len(boundaries) == 2:
        first, second = boundaries.items()
        _require_same(first, second, live, second[1].int())
    positions = packed_batch.position_ids
    if positions is not None and positions.ndim < 3:
        starts = document_starts(positions).expand(tokens).clone()
        starts[:, :1] = True
        zeros = (positions == 0).expand(tokens)
        tail = (~zeros).flip(1).cumsum(1).flip(1) == 0
        filled = tail & torch.cat([zeros[:, :1], zeros[:, :-1]], dim=1)  # collators fill rows up with zeros
        for first in list(boundaries.items())[:1]:
            _require_same(first, ("position_ids", starts), live & ~filled, positions)
        boundaries = {**boundaries, "position_ids": starts}
    if mask is not None and boundaries:
        # Padding ends a document by itself. A mask of 0 and 1 numbers none, unless it was made of pairs.
        inside = live & pad(live[:, :-1], (1, 0))
        if not packed_batch.causal:
            inside = inside & (mask > 1).any()
        first = next(iter(boundaries.items()))
        where = inside & ~filled if first[0] == "position_ids" else inside
        _require_same(("attention_mask", changes(mask)), first, where, mask)


def _require_same(first: tuple[str, Tensor], second: tuple[str, Tensor], where: Tensor, ids: Tensor) -> None:
    """Refuse two arguments, each a name and the starts of documents, that differ on the tokens `where`.

    The message shows `ids`, (B, T) or one row for all.
    """
    (name, starts), (other_name, other_starts) = first, second
    differ, ids = (starts != other_starts) & where, ids.expand(starts.shape)
    repeat = (
        "Let positions restart where a document begins"
        if "position_ids" in (name, other_name)
        else "Let both begin documents at the same tokens"
    )
    require(
        ~differ.any(),
        lambda: (
            f"{name} and {other_name} contradict each other{excerpt(differ, ids, starts)}: by {name} documents begin "
            f"at {_places(starts)}, by {other_name} at {_places(other_starts)}. {repeat}, or leave one of the two out."
        ),
    )


def _places(starts: Tensor) -> str:
    if starts.device.type != "cpu":
        return "other places"
    places = starts.flatten().nonzero().flatten().tolist()
    return ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")


def _boundaries(
    arguments: dict[str, Any], mask: Tensor | None, shape: torch.Size, device: torch.device
) -> dict[str, Tensor]:
    """Return the starts of documents, (B, T) bool, by the name of each argument that holds offsets or numbers."""
    cu_q, cu_k, seq_idx = (arguments.get(name) for name in (*OFFSETS, "seq_idx"))
    boundaries = {}
    virtual = " If inputs_embeds begin with virtual tokens (PEFT's), give each document its own row."
    virtual = "" if arguments.get("input_ids") is not None else virtual
    if cu_q is not None:
        total = shape.numel()
        if cu_k is not None and cu_k is not cu_q:
            differ = "cu_seq_lens_q and cu_seq_lens_k differ; in self-attention they are the same."
            if cu_q.shape != cu_k.shape:
                raise ValueError(differ)
            require((cu_q == cu_k).all(), differ)
        require(
            # The whole tensor is compared: a slice without the first offset would have size 1 for one document, for
            # which torch.compile makes another graph.
            (cu_q[0] == 0) & (cu_q[-1] == total) & (cu_q == cu_q.cummax(0).values).all(),
            lambda: (
                f"cu_seq_lens_q must begin with 0, never decrease and end with the number of tokens, {total} "
                f"({shape[0]} x {shape[1]}){f'; got {cu_q.tolist()!r:.200}' if cu_q.device.type == 'cpu' else ''}."
                f"{virtual}"
            ),
        )
        starts = torch.zeros(total + 1, dtype=torch.bool, device=device)
        starts[cu_q.to(device=device, dtype=torch.long)] = True
        boundaries["cu_seq_lens_q"] = starts = starts[:-1].view(shape)
        padding = mask[:, :1] == 0 if mask is not None and mask.shape == shape else False
        require(
            (starts[:, :1] | padding).all(),
            lambda: f"in cu_seq_lens_q a document crosses the end of a row of {shape[1]} tokens. Split it there.",
        )
    if isinstance(seq_idx, Tensor):
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)} but the tokens have {tuple(shape)}.{virtual}")
        boundaries["seq_idx"] = changes(seq_idx.to(device))
    for starts in boundaries.values():
        starts[:, :1] = True
    return boundaries
