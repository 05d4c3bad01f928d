"""A padded call of a model as a call with one row, which holds no padding and, if asked for, no token twice.

The row replaces the batch in front of the patched module. Its outputs are laid back behind it (`placement.py`), so
heads and trainers see the batch that they gave.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tritonpack.packing.trees.prefixes import joined, prefix_tree
from tritonpack.patches.call_arguments import PACKING
from tritonpack.patches.head_targets import HeadTargets
from tritonpack.patches.labels import before_documents
from tritonpack.patches.names import OF_OTHERS, is_of_tokens
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.placement import WORTHWHILE, Placement

# Tensors with which a call stays as it is: keys of an encoder, and labels of a module that computes its own loss.
ORDINARY = ("encoder_hidden_states", "labels")

REAL, BEGINS, BEFORE = 1, 2, 4  # what a token is: no padding, a document's first, padding right before a document

LOCK = threading.Lock()  # of all counts: threads may share a model


@dataclass
class Saved:
    """What a patch with `unpad` has saved since it was put on.

    Attributes:
        tokens_given: tokens of all batches, padding included.
        tokens_computed: tokens that the model ran on.
    """

    tokens_given: int = 0
    tokens_computed: int = 0

    def add(self, given: int, computed: int) -> None:
        with LOCK:
            self.tokens_given += given
            self.tokens_computed += computed

    def __str__(self) -> str:
        share = 1 - self.tokens_computed / self.tokens_given if self.tokens_given else 0.0
        return f"{self.tokens_computed:,} of {self.tokens_given:,} tokens computed, {share:.1%} saved"


class Compaction:
    """Makes one row of the batches of a patched module.

    Attributes:
        share_prefixes: whether tokens of common beginnings run once.
        longest: the longest row that isn't left as it is, because longer ones change rotary embeddings; None for any.
        saved: the count of tokens.
    """

    def __init__(self, share_prefixes: bool, longest: int | None = None) -> None:
        self.share_prefixes, self.longest = share_prefixes, longest
        self.saved = Saved()

    def __call__(
        self, packed_batch: PackedBatch, arguments: dict[str, Any], targets: HeadTargets | None = None
    ) -> PackedBatch:
        """Replace the arguments of a call by those of one row, and return its packing.

        Waits for the device once, to learn how many tokens there are, and which. A call stays unchanged if it uses a
        cache or is one rank's part of a batch, if it has no padding and nothing to share, or if an argument belongs
        neither to tokens nor to images.

        Args:
            packed_batch: the packing of the batch.
            arguments: of the patched module's call.
            targets: is told where the tokens lie that predict labels; None without labels.
        """
        tokens, total = packed_batch.tokens, packed_batch.tokens.numel()
        placement = None
        if self._may_replace(packed_batch, arguments):
            starts, live = packed_batch.runs()
            channels = _channels(packed_batch, arguments) if self.share_prefixes else []
            if channels or live is not None:
                placement, ends = _place(tokens, starts, live, channels, targets)
        if placement is None:
            self.saved.add(total, total)
            return packed_batch
        self.saved.add(total, placement.source.shape[0])
        for name, value in list(arguments.items()):
            if name in PACKING:
                del arguments[name]
            elif isinstance(value, Tensor) and is_of_tokens(name, value, tokens):
                arguments[name] = _taken(placement, value, tokens)
        arguments.pop("cache_position", None)
        positions = packed_batch.position_ids
        return PackedBatch(
            None if live is None or ends is not None else placement.take(live).int(),
            None if positions is None else _taken(placement, positions, tokens),
            placement.take(starts) if ends is None else None,
            torch.Size((1, placement.source.shape[0])),
            packed_batch.device,
            packed_batch.serving,
            tree_ends=ends,
            placement=placement,
        )

    def _may_replace(self, packed_batch: PackedBatch, arguments: dict[str, Any]) -> bool:
        """Whether one row can take the place of the batch in a call."""
        tokens = packed_batch.tokens
        if packed_batch.cached or packed_batch.shared or packed_batch.tree_ends is not None:
            return False
        if self.longest is not None and tokens[1] > self.longest:
            return False
        return packed_batch.shape == tokens and _fits(tokens, arguments)


def _place(
    tokens: torch.Size, starts: Tensor, live: Tensor | None, channels: list[Tensor], targets: HeadTargets | None
) -> tuple[Placement | None, Tensor | None]:
    """Where the tokens of a batch lie in one row, None if it stays as it is, and the ends of subtrees in a tree.

    It is a tree if `channels` are given, the numbers (B, T) of tokens that must be equal, and if it is worthwhile. This
    is the one place that waits for the device.
    """
    live = torch.ones_like(starts) if live is None else live
    flags = REAL * live + BEGINS * starts + BEFORE * before_documents(live)
    wanted = [] if targets is None else [targets.wanted]
    table = torch.stack([x.to(starts.device).long().flatten() for x in (flags, *wanted, *channels)]).cpu().numpy()
    source = kept = (table[0] & (REAL | BEFORE)).nonzero()[0]
    places, ends = np.arange(len(kept)), None
    if channels:
        real, padding = (table[0] & REAL).nonzero()[0], (table[0] & BEFORE).nonzero()[0]
        begins = (table[0][real] & BEGINS).nonzero()[0]
        tree = prefix_tree(joined(list(table[-len(channels) :, real])), np.diff(begins, append=len(real)))
        if len(tree.sources) <= WORTHWHILE * len(real):
            slack = len(tree.sources) + np.arange(len(padding))
            source, kept = np.concatenate([real[tree.sources], padding]), np.concatenate([real, padding])
            places, ends = np.concatenate([tree.places, slack]), np.concatenate([tree.ends, slack])
    stays = len(source) in (0, tokens.numel())
    on_device = _on(starts.device, source, kept, *([] if ends is None else [places]))
    placement = None if stays else Placement(tokens, *on_device)
    if targets is not None:
        where = np.full(tokens.numel(), -1)
        where[slice(None) if stays else kept] = np.arange(tokens.numel()) if stays else places
        targets.place(table[1], where, placement)
    return placement, None if ends is None else _on(starts.device, ends)[0][None]


def _on(device: torch.device, *arrays: NDArray[np.int64]) -> list[Tensor]:
    return [torch.from_numpy(x).to(device, non_blocking=True) for x in arrays]


def _channels(packed_batch: PackedBatch, arguments: dict[str, Any]) -> list[Tensor]:
    """The numbers (B, T) of each token that must be equal for two tokens to be one; none if tokens can't be compared:
    a call with embeddings, with images, or with numbers that aren't integers."""
    if arguments.get("input_ids") is None:
        return []
    found = []
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name in PACKING or value.ndim == 0:
            continue
        if value.is_floating_point() or OF_OTHERS.fullmatch(name):
            return []
        several = value.shape[:2] not in _shapes(packed_batch.tokens)  # positions of n kinds, (n, B, T)
        rows = value if several else value.reshape(*value.shape[:2], -1).unbind(-1)
        found += [one.expand(packed_batch.tokens) for one in rows]
    return found


def _taken(placement: Placement, value: Tensor, tokens: torch.Size) -> Tensor:
    """An argument in the row: (B, T, ...), (1, T, ...), or positions of n kinds (n, B, T) as (n, 1, N)."""
    if value.shape[:2] in _shapes(tokens):
        return placement.take(value)
    return torch.stack([placement.take(one) for one in value])


def _shapes(tokens: torch.Size) -> tuple[torch.Size, torch.Size]:
    return tokens, torch.Size((1, tokens[1]))


def _fits(tokens: torch.Size, arguments: dict[str, Any]) -> bool:
    """Whether one row can replace the batch in a call: each argument has a value for each token, or is of images."""
    if arguments.get("use_cache") or any(isinstance(arguments.get(name), Tensor) for name in ORDINARY):
        return False
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name in PACKING or value.ndim == 0 or OF_OTHERS.fullmatch(name):
            continue
        pairs = value.ndim == 3 and value.shape == (*tokens, tokens[1]) and name != "inputs_embeds"
        if pairs or not is_of_tokens(name, value, tokens):
            return False
    return arguments.get("input_ids") is None or arguments["input_ids"].shape == tokens
