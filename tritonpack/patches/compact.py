"""A padded batch as one row without padding and, if asked for, without a second copy of a common beginning.

The row takes the place of the batch in a call, and its outputs are laid back into the batch afterwards. A causal head
runs on the row, too; any other head gets states that were laid back.
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
from tritonpack.patches.families import OF_OTHERS, is_of_tokens
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import PACKING
from tritonpack.patches.placement import Placement, Row
from tritonpack.patches.targets import IGNORED, before_documents
from tritonpack.patches.tensor_like import TensorLike, as_tensor

# Sharing less than a twentieth of the tokens costs more than it saves.
WORTHWHILE = 0.95

# Tensors with which a call stays as it is: keys of an encoder, and labels of a module that computes its own loss.
ORDINARY = ("encoder_hidden_states", "labels")

LABELS = {"labels", "shift_labels"}
OF_HEADS = {*LABELS, "logits_to_keep"}  # arguments of causal heads
OF_ROWS = {*OF_HEADS, "attention_mask"}  # arguments by which tokens that are equal may differ

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

    def __str__(self) -> str:
        share = 1 - self.tokens_computed / self.tokens_given if self.tokens_given else 0.0
        return f"{self.tokens_computed:,} of {self.tokens_given:,} tokens computed, {share:.1%} saved"


class Compaction:
    """Makes one row of the batches of a patched model.

    Attributes:
        share_prefixes: whether tokens of common beginnings run once.
        longest: the longest row that isn't left as it is, because longer ones change rotary embeddings; None for any.
        saved: the count of tokens.
    """

    def __init__(self, share_prefixes: bool, longest: int | None = None) -> None:
        self.share_prefixes, self.longest = share_prefixes, longest
        self.saved = Saved()

    def __call__(
        self, packed_batch: PackedBatch, arguments: dict[str, Any], shifts: bool | None = None,
        labels: Tensor | None = None,
    ) -> PackedBatch:  # fmt: skip
        """Replace the arguments of a call by those of one row, and return its packing.

        Waits for the device once, to learn how many tokens there are, and which. A call stays unchanged if it uses a
        cache or is one rank's part of a batch, if it has no padding and nothing to share, or if an argument belongs
        neither to tokens nor to images. Labels of a causal head on padding are refused.

        Args:
            shifts: whether the causal head that runs on the row shifts its labels; None for a base model.
            labels: those that the head's loss reads.
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
        return move(packed_batch, row.placement, arguments, mask, row.placement.take(starts), row=row)

    def _may_replace(self, packed_batch: PackedBatch, arguments: dict[str, Any], is_head: bool) -> bool:
        """Whether one row can take the place of the batch: each argument is of tokens or of images."""
        tokens = packed_batch.tokens
        apart = packed_batch.cached or packed_batch.shared or packed_batch.tree_ends is not None
        too_long = self.longest is not None and tokens[1] > self.longest
        if apart or too_long or packed_batch.shape != tokens or arguments.get("use_cache"):
            return False
        own = (*PACKING, *OF_HEADS) if is_head else PACKING
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or name in own:
                continue
            if name in ORDINARY:
                return False
            if value.ndim == 0 or OF_OTHERS.fullmatch(name):
                continue
            pairs = value.ndim == 3 and value.shape == (*tokens, tokens[1]) and name != "inputs_embeds"
            if pairs or not is_of_tokens(name, value, tokens):
                return False
        return arguments.get("input_ids") is None or arguments["input_ids"].shape == tokens

    def _row(
        self, packed_batch: PackedBatch, arguments: dict[str, Any], shifts: bool | None, labels: Tensor | None
    ) -> Row | None:
        """The row of a batch; None if it stays as it is. This is the one place that waits for the device."""
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
            # Padding keeps a label that a document's last token predicts, such as a token for the end.
            runs = predicts | ((table[1] != IGNORED) & np.roll(predicts, 1) & (column > 0))
        source = runs.nonzero()[0]
        tree = _share(table[0][source], table[-len(channels) :, source]) if channels else None
        if not len(source) or (len(source) == tokens.numel() and tree is None):
            return None
        places = _on(device, source)
        row = Row(Placement(tokens, places, places))
        if tree is not None:
            at, real, copied, ends = (_on(device, one) for one in tree)
            row = replace(row, shared=Placement(torch.Size((1, len(source))), at, real, copied), ends=ends[None])
        if shifts is None:
            return row
        column -= length - keep  # counted from the first one that has logits
        shown = column[source] >= 0
        kept = source[shown]
        if targets:
            kept_labels = _labels_of(kept, table[1], predicts, column, length, shifts)
            for name in LABELS & arguments.keys():
                arguments[name] = _on(arguments[name].device, kept_labels)[None]
        if keep < length:
            arguments["logits_to_keep"] = _on(device, shown.nonzero()[0])
        elif "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = 0  # all
        places = _on(device, kept // length * keep + column[kept])
        return replace(row, logits=Placement(torch.Size((tokens[0], keep)), places, places))


def move(
    batch: PackedBatch, placement: Placement, arguments: dict[str, Any], mask: Tensor | None, starts: Tensor | None,
    **others: Any,
) -> PackedBatch:  # fmt: skip
    """Replace the arguments of a batch's tokens by those of a row's, and return the row's packing."""
    for name, value in list(arguments.items()):
        if name in PACKING:
            del arguments[name]
        elif name not in OF_HEADS and isinstance(value, Tensor) and is_of_tokens(name, value, placement.tokens):
            arguments[name] = placement.take(value)
    arguments.pop("cache_position", None)
    positions = None if batch.position_ids is None else placement.take(batch.position_ids)
    tokens = torch.Size((1, placement.source.shape[0]))
    return PackedBatch(mask, positions, starts, tokens, batch.device, batch.serving, **others)


def lay_back_head(output: Any, row: Row, later: bool) -> Any:
    """The output of a causal head that ran on a row, as that of the batch.

    Logits are laid back `later`, when they are read, in a training step, which doesn't read them.
    """
    assert row.logits is not None
    kind: Any = type(output)
    values = dict(output)
    logits = values.pop("logits", None)
    row.placement.lay_back_all(values)
    if logits is not None and later:
        kind, values["logits"] = _class_of(kind), LaidBack(row.logits, logits)
    elif logits is not None:
        values["logits"] = row.logits.lay_back(logits)
    return kind(**values)


class LaidBack(TensorLike):
    """The logits (B, K, vocabulary) of a call whose head ran on a row. An output holds it until they are read."""

    ndim = 3

    def __init__(self, placement: Placement, values: Tensor) -> None:
        self.placement, self.values = placement, values
        self.shape = torch.Size((*placement.tokens, *values.shape[2:]))
        self.dtype, self.device = values.dtype, values.device
        self.data: Tensor | None = None

    def float(self) -> LaidBack:
        """In float32: accelerate asks for it in mixed precision, whoever reads it."""
        return LaidBack(self.placement, self.values.float())

    def to_tensor(self) -> Tensor:
        if self.data is None:
            with torch.enable_grad():  # the graph is that of the call
                self.data = self.placement.lay_back(self.values)
        return self.data


class _LogitsWhenRead:
    """Methods added to the class of an output. `items()` and `values()` lay no logits back, because accelerate and DDP
    go through them in each call."""

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
        plain: Any = type(self).__mro__[2]  # a copy, or a pickle, is of an output with its logits
        return plain(**{name: self[name] for name in self.keys()}).__reduce__()  # type: ignore[attr-defined]


@cache
def _class_of(kind: Any) -> Any:
    return type(kind)(kind.__name__, (_LogitsWhenRead, kind), {"__module__": kind.__module__})


def _share(flags: NDArray[np.int64], channels: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...] | None:
    """Where the M tokens of a row lie in a tree: (source, real, copied, ends), None if it isn't worthwhile.

    `channels`, (n, M), are the numbers of each token that must be equal for two tokens to be one.
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
    """The labels of the `kept` tokens (S,), which have logits, for a loss along the row. Labels on padding are refused.

    A loss that shifts labels predicts each from the token before it in the row. Where that isn't the token before it in
    the batch, the label is left out, as in the batch. Other arrays are (B * T,): labels, which tokens run and predict,
    and the column of each, negative before the first one that has logits.
    """
    used = predicts[kept - shifted] & (column[kept] >= shifted)
    lost = (labels != IGNORED) & (column >= shifted)
    lost[kept[used]] = False
    if lost.any():
        place = int(lost.nonzero()[0][0])
        row, at = divmod(place, length)
        raise ValueError(
            f"the label {labels[place]} in row {row} would be predicted at token {at - shifted}, which "
            f"attention_mask says is padding, and padding isn't computed. Set labels of padding to {IGNORED}, as "
            "collators of transformers do."
        )
    return np.where(used, labels[kept], IGNORED)


def _on(device: torch.device, array: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _channels(packed_batch: PackedBatch, arguments: dict[str, Any]) -> list[Tensor]:
    """The numbers (B, T) of each token that must be equal for two tokens to be one; none if tokens can't be compared:
    a call with embeddings, with images, or with numbers that aren't integers."""
    if arguments.get("input_ids") is None:
        return []
    found, tokens = [], packed_batch.tokens
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or name in (*PACKING, *OF_ROWS) or value.ndim == 0:
            continue
        if value.is_floating_point() or OF_OTHERS.fullmatch(name):
            return []
        several = value.shape[:2] not in (tokens, (1, tokens[1]))  # positions of n kinds, (n, B, T)
        rows = value if several else value.reshape(*value.shape[:2], -1).unbind(-1)
        found += [one.to(packed_batch.device).expand(tokens) for one in rows]
    return found
