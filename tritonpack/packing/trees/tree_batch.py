"""Sequences that begin alike become one row in which each distinct token stands once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonpack.checks import check_flag, describe
from tritonpack.masks.block_diagonal import BlockDiagonalMask, mask_from_intervals
from tritonpack.masks.intervals import WHOLE_DOCUMENT
from tritonpack.masks.tree import ROOT, forest_intervals
from tritonpack.packing.collator import (
    IGNORED_LABEL,
    LABELS,
    LEARNED,
    LEFT_OUT,
    MASK,
    Columns,
    Named,
    join,
    masked_labels,
    quote,
    read_feature,
    read_features,
    read_sequences,
    warn_if_unpatched,
)
from tritonpack.packing.lengths import TOKENS
from tritonpack.packing.trees.prefixes import prefix_tree
from tritonpack.removed import refuse_removed

_TAKEN = (TOKENS, LABELS, *LEARNED, MASK, *LEFT_OUT)


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """A row of N tokens that holds S sequences, and where the tokens of each sequence lie in it.

    Three sequences with 10 tokens need a row of 5:

    >>> batch = pack_tree([[5, 6, 7, 8], [5, 6, 9], [5, 6, 7]])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 2, 3, 2]])
    >>> batch.parents.tolist(), batch.ends.tolist()
    ([-1, 0, 1, 2, 1], [5, 5, 4, 4, 5])
    >>> [tokens.tolist() for tokens in batch.gather(batch.input_ids)]
    [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7]]

    Every token of a sequence after the first is a *target*, unless its label is -100. The token before it predicts it,
    so a token before a branch predicts several targets. Here the token at place 0 predicts one of each sequence:

    >>> batch.logits_to_keep.tolist(), batch.targets.tolist()
    ([0, 1, 2, 0, 1, 0, 1], [6, 7, 8, 6, 9, 6, 7])

    Keep values that differ between sequences (weights, advantages, old log-probabilities) by sequence. `gather` and
    `logprobs` bring what the model returns to the sequences. Gradients of shared tokens add up.

    Attributes:
        input_ids: (1, N) int64. A sequence that begins another lies before it; apart from that the order is by tokens.
        position_ids: (1, N) int64, the place of each token in its sequences.
        ends: (N,) int64, one past the last token of each token's subtree; in host memory, also after `to`.
        parents: (N,) int64, the place of the token before each token, -1 for the first of a tree.
        places: (T,) int64, where the tokens of all sequences lie in the row, one sequence after the other.
        logits_to_keep: (M,) int64, the place in the row that predicts each target, one sequence after the other.
        targets: (M,) int64, the label of each target.
        lengths, target_counts: the number of tokens, and of targets, of each sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    ends: Tensor
    parents: Tensor
    places: Tensor
    lengths: tuple[int, ...]
    logits_to_keep: Tensor
    targets: Tensor
    target_counts: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """N, the number of tokens in the row."""
        return self.input_ids.shape[1]

    @cached_property
    def mask(self) -> BlockDiagonalMask:
        """The mask for `varlen_attention`, on the device of the batch. For layers with windows or chunks make another
        one: `BlockDiagonalMask.from_tree(batch.parents, window=...)`."""
        mask = mask_from_intervals(partial(forest_intervals, self.ends, "ends"), WHOLE_DOCUMENT)
        return mask.to(self.input_ids.device)

    def inputs(self) -> dict[str, Tensor]:
        """The arguments for a patched causal model of transformers, on the device of the batch: `input_ids`,
        `position_ids` and `tree_ends` (1, N), `logits_to_keep` (M,), and the targets as `labels` and `shift_labels`
        (1, M).

        `model(**batch.inputs()).loss` is the mean over the targets of all sequences. The model computes logits only
        where a target is predicted, (1, M, vocabulary). A model that isn't patched ignores `tree_ends` without an
        error. Give it `attention_mask=batch.mask.to_dense()[None, None]`.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "tree_ends": self.ends[None].to(self.input_ids.device),
            "labels": self.targets[None],  # without which transformers computes no loss
            "shift_labels": self.targets[None],  # which the loss takes
            "logits_to_keep": self.logits_to_keep,
        }

    def to(self, device: torch.device | str) -> TreeBatch:
        """The batch on a device, where the values lie that `gather` and `logprobs` take."""
        names = ("input_ids", "position_ids", "parents", "places", "logits_to_keep", "targets")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def gather(self, values: Tensor, **removed: Any) -> list[Tensor]:
        """The values of each sequence, (length, ...) each, in the given order of the sequences.

        `torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)` makes one padded tensor of the result.

        Args:
            values: (1, N, ...), any dtype: hidden states, values of a critic. Gradients of copies add up.

        Raises:
            ValueError: values of another shape or on another device.
        """
        refuse_removed(removed, "gather")
        self._check(values, "values", self.num_tokens)
        return list(values[0].index_select(0, self.places).split(self.lengths))

    def logprobs(self, logits: Tensor, *, kept: bool = False, **removed: Any) -> list[Tensor]:
        """The log-probabilities of the targets of each sequence, (target_counts[s],), at least in float32.

        Args:
            logits: (1, N, vocabulary), floating point, of all tokens of the row; divide them by a temperature first.
            kept: the model got `logits_to_keep=batch.logits_to_keep`, and the logits are (1, M, vocabulary).

        Raises:
            ValueError: logits of another shape or on another device; in host memory, of too small a vocabulary.
        """
        refuse_removed(removed, "logprobs")
        check_flag(kept, "kept")
        self._check(logits, "logits", len(self.targets) if kept else self.num_tokens, "vocabulary")
        scores = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
        normalizers = scores.logsumexp(-1)
        where = torch.arange(len(scores), device=scores.device) if kept else self.logits_to_keep
        try:
            chosen = scores[where, self.targets]
        except IndexError:
            most = f"{scores.shape[-1]} tokens, and the largest target is {int(self.targets.max())}"
            raise ValueError(f"logits have a vocabulary of {most}. Pass logits of the whole vocabulary.") from None
        return list((chosen - normalizers[where]).split(self.target_counts))

    def _check(self, values: Any, name: str, places: int, rest: str = "...") -> None:
        """ValueError unless values are a tensor of shape (1, places, rest) on the batch's device."""
        shape = tuple(values.shape) if isinstance(values, Tensor) else ()
        if shape[:2] != (1, places) or (rest != "..." and len(shape) != 3):
            raise ValueError(
                f"{name} must be of shape (1, {places}, {rest}): the row has N = {self.num_tokens} tokens, and with "
                f"kept=True logits of M = {len(self.targets)} targets. Got {describe(values)}."
            )
        if values.device != self.places.device:
            raise ValueError(
                f"{name} lie on {values.device} and the batch on {self.places.device}; call "
                f"batch.to({str(values.device)!r})."
            )


def pack_tree(sequences: Sequence[Any], *, labels: Sequence[Any] | None = None) -> TreeBatch:
    """Lay sequences into one row in which sequences that begin alike share the tokens of their common begin.

    The common begins are found by the tokens, at any depth; sequences may come in any order. Sequences with different
    first tokens are trees of their own in the row.

    Args:
        sequences: at least one row of token ids, each with at least one token: lists, arrays or tensors in host memory.
        labels: a row of labels for each sequence, not shifted: the id to predict in the place of a token, mostly the
            token itself, or -100 where a token isn't a target. None: every token after the first is a target.

    Raises:
        ValueError: no sequences, a sequence that is empty, isn't a row of integers, or has a negative token; other
            numbers of labels, or negative ones other than -100. The message names the sequence.
    """
    return _lay(read_sequences(sequences, labels))


def _lay(documents: Sequence[Named]) -> TreeBatch:
    """The batch of documents that are read; ValueError for columns that only some have, and for negative labels."""
    columns, each = join(documents)
    tokens, labels, lengths = columns[TOKENS].numpy(), masked_labels(columns, each), np.array(each)
    starts = np.cumsum(lengths) - lengths
    if (wrong := (labels < 0) & (labels != IGNORED_LABEL)).any():
        name, _ = documents[np.searchsorted(starts, wrong.argmax(), side="right") - 1]
        raise ValueError(f"{name} has the label {labels[wrong][0]}; labels are token ids, or {IGNORED_LABEL}.")
    tree = prefix_tree(tokens, lengths)
    depth = np.arange(len(tokens)) - np.repeat(starts, lengths)
    position_ids = depth[tree.sources]
    targeted = (depth > 0) & (labels != IGNORED_LABEL)
    where = np.flatnonzero(targeted)
    return TreeBatch(
        input_ids=torch.from_numpy(tokens[tree.sources])[None],
        position_ids=torch.from_numpy(position_ids)[None],
        ends=torch.from_numpy(tree.ends),
        parents=torch.from_numpy(np.where(position_ids > 0, tree.places[tree.sources - 1], ROOT)),
        places=torch.from_numpy(tree.places),
        lengths=tuple(each),
        logits_to_keep=torch.from_numpy(tree.places[where - 1]),
        targets=torch.from_numpy(labels[where]),
        target_counts=tuple(np.add.reduceat(targeted, starts, dtype=np.int64).tolist()),
    )


def _read(document: Any) -> list[Columns]:
    """The columns of a document for a tree; ValueError for other columns."""
    if isinstance(document, Mapping) and (others := document.keys() - {*_TAKEN}):
        raise ValueError(
            f"has {quote(others)}, which TreeCollator doesn't take; it takes {quote(_TAKEN)}. Remove such columns "
            "(dataset.remove_columns). For losses of other values, such as advantages, use pack_tree with its gather."
        )
    return read_feature(document)


class TreeCollator:
    """Makes a batch of one row from documents that begin alike, for transformers.Trainer or any DataLoader.

    The batch is `TreeBatch.inputs()` of the documents: each distinct token stands once, and the loss of a patched
    causal model is the mean over the same predicted tokens as for a padded batch. Documents may come in any order.

    >>> documents = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [5, 6, 8, 9]}]
    >>> documents[1]["labels"] = [-100, -100, 8, 9]
    >>> batch = TreeCollator()(documents)
    >>> batch["input_ids"].tolist(), batch["tree_ends"].tolist()
    ([[5, 6, 7, 8, 9]], [[5, 5, 3, 5, 5]])
    >>> batch["logits_to_keep"].tolist(), batch["shift_labels"].tolist()
    ([1, 1, 3], [[7, 8, 9]])

    A document has `input_ids`, and may have `labels`, `completion_mask`, `assistant_masks`, `attention_mask` and
    `length`, as for PackingCollator. All other columns are refused by name.
    """

    def __init__(self, capacity: None = None) -> None:
        refuse_removed([] if capacity is None else ["capacity="], "TreeCollator")

    def __call__(self, features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> dict[str, Tensor]:
        """Collate one batch: the tensors of `TreeBatch.inputs`, in host memory.

        Args:
            features: one mapping per document, or lists of such mappings, groups for example.

        Raises:
            ValueError: no features, a column that isn't taken or that some documents don't have, labels that contradict
                a mask, and what `pack_tree` refuses. The message names the document.
        """
        documents = read_features(features, "TreeCollator", _read)
        batch = _lay(documents)
        warn_if_unpatched(
            len(documents),
            "unpatched-tree",
            f"TreeCollator laid {len(documents)} documents into one tree, and no model is patched in this process. "
            "Other models ignore tree_ends and let the documents see each other. Call tritonpack.patch(model) before "
            "the first batch.",
        )
        return batch.inputs()
