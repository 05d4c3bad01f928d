"""Compaction: a padded batch becomes one row without padding and, with share_prefixes, without repeated beginnings.

The model runs on the row in place of the batch, and its outputs are laid back into the batch. A causal head runs on the
row, too; any other head gets hidden states that were laid back.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.packing.trees.prefixes import joined, prefix_tree
from tritonpack.patches.families import MEDIA_NAMES, is_of_tokens
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import PACKING_ARGUMENTS
from tritonpack.patches.placement import Placement, Row
from tritonpack.patches.targets import IGNORED, before_documents
from tritonpack.patches.tensor_like import TensorLike, as_tensor

# Sharing less than a twentieth of the tokens costs more than it saves.
WORTHWHILE = 0.95

# Arguments that prevent compaction: keys of an encoder, and labels of a module that computes its own loss.
UNCOMPACTED = ("encoder_hidden_states", "labels")

LABELS = {"labels", "shift_labels"}
HEAD_ARGUMENTS = {*LABELS, "logits_to_keep"}  # of causal heads
NOT_COMPARED = {*HEAD_ARGUMENTS, "attention_mask"}  # arguments in which shared tokens may differ

REAL, BEGINS, BEFORE = 1, 2, 4  # flags of tokens: not padding, first of a document, padding right before a document

LOCK = threading.Lock()  # protects all counts: threads may share a model


@dataclass
class Saved:
    """Counts of tokens since the model was patched with `unpad` or `share_prefixes`.

    Attributes:
        tokens_given: tokens of all batches, padding included.
        tokens_computed: tokens on which the model ran.
    """

    tokens_given: int = 0
    tokens_computed: int = 0

    def __str__(self) -> str:
        share = 1 - self.tokens_computed / self.tokens_given if self.tokens_given else 0.0
        return f"{self.tokens_computed:,} of {self.tokens_given:,} tokens computed, {share:.1%} saved"


class Compaction:
    """Makes one row of each batch of a patched model.

    Attributes:
        share_prefixes: whether documents share the tokens that they begin with.
        longest: the longest row that is compacted; longer ones would change rotary embeddings. None for no limit.
        saved: the counts of tokens.
    """

    def __init__(self, share_prefixes: bool, longest: int | None = None) -> None:
        self.share_prefixes, self.longest = share_prefixes, longest
        self.saved = Saved()

    def __call__(
        self, packed_batch: PackedBatch, arguments: dict[str, Any], shifts: bool | None = None,
        labels: Tensor | None = None,
    ) -> PackedBatch:  # fmt: skip
        """Replace the arguments of a batch by the arguments of one row, and return the row's packed batch.

        Waits for the device once, to read the tokens that aren't padding. A call stays unchanged if it uses a cache, is
        one rank's part of a batch, has no padding and nothing to share, or has an argument that belongs neither to
        tokens nor to images. Labels of a causal head on padding are refused.

        Args:
            shifts: whether the causal head that runs on the row shifts its labels; None for a base model.
            labels: the labels that the head's loss reads.
        """
        packed_batch.compacted = True
        may_replace = self._may_replace(packed_batch, arguments, shifts is not None)
        row = self._row(packed_batch, arguments, shifts, labels) if may_replace else None
        total = packed_batch.tokens.numel()
        with LOCK:
            self.saved.tokens_given += total
            self.saved.tokens_computed += total if row is None else (row.shared or row.placement).source.shape[0]
        if row is None:
            return packed_batch
        starts, live = packed_batch.runs()
        mask = None if live is None else row.placement.take(live).int()
        return replace_by_row(packed_batch, row.placement, arguments, mask, row.placement.take(starts), row=row)

    def _may_replace(self, packed_batch: PackedBatch, arguments: dict[str, Any], is_head: bool) -> bool:
        """Return whether one row can replace the batch: each argument has values for tokens or for images."""
        tokens = packed_batch.tokens
        apart = packed_batch.cached or packed_batch.shared or packed_batch.tree_ends is not None
        too_long = self.longest is not None and tokens[1] > self.longest
        if apart or too_long or packed_batch.shape != tokens or arguments.get("use_cache"):
            return False
        own = (*PACKING_ARGUMENTS, *HEAD_ARGUMENTS) if is_head else PACKING_ARGUMENTS
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or name in own:
                continue
            if name in UNCOMPACTED:
                return False
            if value.ndim == 0 or MEDIA_NAMES.fullmatch(name):
                continue
            pairs = value.ndim == 3 and value.shape == (*tokens, tokens[1]) and name != "inputs_embeds"
            if pairs or not is_of_tokens(name, value, tokens):
                return False
        return arguments.get("input_ids") is None or arguments["input_ids"].shape == tokens

    def _row(
        self, packed_batch: PackedBatch, arguments: dict[str, Any], shifts: bool | None, labels: Tensor | None
    ) -> Row | None:
        """Make the row of a batch; None if the batch stays unchanged. Only this function waits for the device."""
        starts, live = packed_batch.runs()
        channels = _channels(packed_batch, arguments) if self.share_prefixes else []
        if not channels and live is None:
            return None
        tokens, device = packed_batch.tokens, starts.device
        live = torch.ones_like(starts) if live is None else live
        flags = REAL * live + BEGINS * starts + BEFORE * before_documents(live)
        length, keep = tokens[1], min(arguments.get("logits_to_keep") or tokens[1], tokens[1])
        targets = [] if labels is None else [pad(labels.to(device), (length - keep, 0), value=IGNORED)]
        table = torch.stack((flags, *targets, *channels)).flatten(1).long().cpu().numpy()
        column = np.arange(tokens.numel()) % length
        predicts = runs = (table[0] & (REAL | BEFORE)) != 0
        if targets and shifts:
            # A padding token runs if the last token of a document predicts its label, such as an end-of-text token.
            runs = predicts | ((table[1] != IGNORED) & np.roll(predicts, 1) & (column > 0))
        source = runs.nonzero()[0]
        tree = _shared_tree(table[0][source], table[-len(channels) :, source]) if channels else None
        if not len(source) or (len(source) == tokens.numel() and tree is None):
            return None
        places = _to_device(device, source)
        row = Row(Placement(tokens, places, places))
        if tree is not None:
            at, real, copied, ends = (_to_device(device, array) for array in tree)
            row = replace(row, shared=Placement(torch.Size((1, len(source))), at, real, copied), ends=ends[None])
        if shifts is None:
            return row
        column -= length - keep  # counted from the first column with logits
        has_logits = column[source] >= 0
        kept = source[has_logits]
        if targets:
            kept_labels = _labels_of(kept, table[1], predicts, column, length, shifts)
            for name in LABELS & arguments.keys():
                arguments[name] = _to_device(arguments[name].device, kept_labels)[None]
        if keep < length:
            arguments["logits_to_keep"] = _to_device(device, has_logits.nonzero()[0])
        elif "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = 0  # all
        places = _to_device(device, kept // length * keep + column[kept])
        return replace(row, logits=Placement(torch.Size((tokens[0], keep)), places, places))


def replace_by_row(
    batch: PackedBatch, placement: Placement, arguments: dict[str, Any], mask: Tensor | None, starts: Tensor | None,
    **others: Any,
) -> PackedBatch:  # fmt: skip
    """Replace the arguments of a batch's tokens by the arguments of a row, and return the row's packed batch."""
    for name, value in list(arguments.items()):
        if name in PACKING_ARGUMENTS:
            del arguments[name]
        elif name not in HEAD_ARGUMENTS and isinstance(value, Tensor) and is_of_tokens(name, value, placement.tokens):
            arguments[name] = placement.take(value)
    arguments.pop("cache_position", None)
    positions = None if batch.position_ids is None else placement.take(batch.position_ids)
    tokens = torch.Size((1, placement.source.shape[0]))
    return PackedBatch(mask, positions, starts, tokens, batch.device, batch.serving, **others)


def lay_back_head(output: Any, row: Row, later: bool) -> Any:
    """Lay the output of a causal head that ran on a row back into the batch.

    With `later` logits are laid back when they are read; a training step doesn't read them.
    """
    assert row.logits is not None
    kind: Any = type(output)
    values = dict(output)
    logits = values.pop("logits", None)
    row.placement.lay_back_all(values)
    if logits is not None and later:
        kind, values["logits"] = _class_of(kind), LazyLogits(row.logits, logits)
    elif logits is not None:
        values["logits"] = row.logits.lay_back(logits)
    return kind(**values)


class LazyLogits(TensorLike):
    """The logits (B, K, vocabulary) of a head that ran on a row; they are laid back when they are read."""

    ndim = 3

    def __init__(self, placement: Placement, values: Tensor) -> None:
        self.placement, self.values = placement, values
        self.shape = torch.Size((*placement.tokens, *values.shape[2:]))
        self.dtype, self.device = values.dtype, values.device
        self.data: Tensor | None = None

    def float(self) -> LazyLogits:
        """Return the logits in float32. accelerate calls it in mixed precision even if nothing reads the logits."""
        return LazyLogits(self.placement, self.values.float())

    def to_tensor(self) -> Tensor:
        if self.data is None:
            with torch.enable_grad():  # the logits are a part of the call's autograd graph
                self.data = self.placement.lay_back(self.values)
        return self.data


class _LazyLogitsOutput:
    """Methods added to the class of an output, which lay back its logits when they are read. `items()` and `values()`
    don't, because accelerate and DDP iterate over them in each call."""

    @property
    def logits(self) -> Tensor:
        return as_tensor(self.__dict__["logits"])

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__["logits"] = value

    def __getitem__(self, key: Any) -> Any:
        key = list(self.keys())[key] if isinstance(key, int) else key  # type: ignore[attr-defined]
        return as_tensor(super().__getitem__(key))  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        return as_tensor(super().get(key, default))  # type: ignore[misc]

    def __reduce__(self) -> Any:
        plain: Any = type(self).__mro__[2]  # copies and pickles have ordinary logits
        return plain(**{name: self[name] for name in self.keys()}).__reduce__()  # type: ignore[attr-defined]


@cache
def _class_of(kind: Any) -> Any:
    return type(kind)(kind.__name__, (_LazyLogitsOutput, kind), {"__module__": kind.__module__})


def _shared_tree(flags: NDArray[np.int64], channels: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...] | None:
    """Place the M tokens of a row in a tree: (source, real, copied, ends), or None if sharing isn't worthwhile.

    `channels`, (n, M), are numbers of each token. Two tokens may be shared if all of their numbers are equal.
    """
    real, padding = (flags & REAL).nonzero()[0], (flags & REAL == 0).nonzero()[0]
    begins = (flags[real] & BEGINS).nonzero()[0]
    tree = prefix_tree(joined(list(channels[:, real])), np.diff(begins, append=len(real)))
    if len(tree.sources) > WORTHWHILE * len(real):
        return None
    slack = len(tree.sources) + np.arange(len(padding))
    return (
        np.concatenate([real[tree.sources], padding]),
        np.concatenate([real, padding]),
        np.concatenate([tree.places, slack]),
        np.concatenate([tree.ends, slack]),
    )


def _labels_of(
    kept: NDArray[np.int64], labels: NDArray[np.int64], predicts: NDArray[np.bool_], column: NDArray[np.int64],
    length: int, shifted: bool,
) -> NDArray[np.int64]:  # fmt: skip
    """Return the labels of the `kept` tokens (S,), which have logits. Labels on padding are refused.

    A loss that shifts labels predicts each label from the previous token in the row. If that isn't the previous token
    in the batch, the label is ignored, as in the batch. Other arrays are (B * T,): the labels, which tokens run and
    predict, and the column of each token, negative before the first column with logits.
    """
    used = predicts[kept - shifted] & (column[kept] >= shifted)
    lost = (labels != IGNORED) & (column >= shifted)
    lost[kept[used]] = False
    if lost.any():
        place = int(lost.nonzero()[0][0])
        row, at = divmod(place, length)
        raise ValueError(
            f"the label {labels[place]} in row {row} would be predicted at token {at - shifted}, which attention_mask "
            f"marks as padding, and padding isn't computed. Set labels of padding to {IGNORED}, as collators of "
            "transformers do."
        )
    return np.where(used, labels[kept], IGNORED)


def _to_device(device: torch.device, array: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _channels(packed_batch: PackedBatch, arguments: dict[str, Any]) -> list[Tensor]:
    """Return numbers (B, T) that must be equal for two tokens to be shared; none for a call with embeddings, images, or
    numbers that aren't integers, in which tokens aren't compared."""
    if arguments.get("input_ids") is None:
        return []
    channels, tokens = [], packed_batch.tokens
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name in (*PACKING_ARGUMENTS, *NOT_COMPARED) or value.ndim == 0:
            continue
        if value.is_floating_point() or MEDIA_NAMES.fullmatch(name):
            return []
        several = value.shape[:2] not in (tokens, (1, tokens[1]))  # positions of n kinds, (n, B, T)
        rows = value if several else value.reshape(*value.shape[:2], -1).unbind(-1)
        channels += [channel.to(packed_batch.device).expand(tokens) for channel in rows]
    return channels
