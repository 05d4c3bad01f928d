"""Targets of a loss: checks of labels, and the loss of question answering.

A causal loss would predict the first label of a document from the document before, and may predict labels from padding.
A loss of question answering is computed over the tokens of each document, not of each row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForQuestionAnsweringLoss

from tritonpack import notices
from tritonpack.patches.forwards import is_genuine, is_seq2seq
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.placement import Documents, require_one_document_a_row

IGNORED = -100
FIRST_LABEL = "first-label"
PADDING_LABEL = "padding-label"

# Suffixes of classes, besides encoder-decoder models, that predict each token at its own place.
PREDICT_OWN_TOKENS = ("ForMaskedLM", "ForTokenClassification")


def check_labels(model: PreTrainedModel, arguments: Mapping[str, Any], packed_batch: PackedBatch) -> None:
    """Warn once if a causal loss predicts the first label of a document, or labels from padding. Refuse labels that it
    would shift along a tree.

    Labels on an accelerator aren't checked, because reading them would wait for it.
    """
    shifts = shifts_labels(model, arguments)
    if packed_batch.tree_ends is not None and shifts:
        raise ValueError(
            "labels were passed with tree_ends, and some would be predicted from tokens of other branches. Pass "
            "logits_to_keep, shift_labels and labels as tritonpack.pack_tree(...).inputs() makes them."
        )
    labels = arguments.get("labels")
    if shifts and FIRST_LABEL not in notices.said and _can_read(labels, packed_batch):
        tokens = packed_batch.not_padding()
        first = packed_batch.runs()[0] & tokens & (labels != IGNORED)
        # The first token of a row is never predicted, and padding before a document is no other document.
        unmasked = first[:, 1:] & tokens[:, :-1]
        if bool(unmasked.any()):
            row, place = unmasked.nonzero()[0].tolist()
            notices.say_once(
                FIRST_LABEL,
                f"a document begins at token {place + 1} of row {row}, and its first label is "
                f"{int(labels[row, place + 1])}. {type(model).__name__} then learns to predict that token from the "
                f"document before. Set the first label of each document to {IGNORED}, as tritonpack.PackingCollator "
                "does.",
            )
    if packed_batch.attention_mask is not None:
        check_padding_labels(model, arguments, packed_batch)


def check_padding_labels(
    model: PreTrainedModel, arguments: Mapping[str, Any], packed_batch: PackedBatch, *, refuse: bool = False
) -> None:
    """Warn once if a loss predicts labels from padding; with `refuse`, raise.

    Padding sees no token in a patched model, so such a loss differs from the loss of stock transformers. Padding right
    before a document is allowed: a causal loss predicts the document's first token from it. Labels on an accelerator
    aren't checked, because reading them would wait for it.

    Raises:
        ValueError: a mask with numbers above 1, and labels where it is 0: it probably numbers documents from 0.
    """
    labels, mask = arguments.get("labels"), packed_batch.attention_mask
    if not _can_read(labels, packed_batch) or mask is None or mask.shape != packed_batch.tokens:
        return
    numbered = not packed_batch.causal and bool((mask > 1).any())
    if PADDING_LABEL in notices.said and not numbered and not refuse:
        return
    live, targets = mask != 0, arguments.get("shift_labels")
    if not isinstance(targets, Tensor) or targets.shape != labels.shape:
        own = is_seq2seq(model) or any(kind.__name__.endswith(PREDICT_OWN_TOKENS) for kind in type(model).__mro__)
        targets = labels if own else pad(labels[:, 1:], (0, 1), value=IGNORED)
    on_padding = (targets != IGNORED) & ~live & ~before_documents(live)
    if not bool(on_padding.any()):
        return
    row, place = on_padding.nonzero()[0].tolist()
    label = int(targets[row, place])
    what = f"the label {label} in row {row} is predicted at token {place}, which attention_mask marks as padding"
    if numbered:
        raise ValueError(
            f"{what} by 0. Number documents from 1: pass attention_mask + 1 if it numbers them from 0. Otherwise "
            f"set labels of padding to {IGNORED}."
        )
    if refuse:
        raise ValueError(
            f"{what}, and padding isn't computed. Set labels of padding to {IGNORED}, as collators of transformers do."
        )
    notices.say_once(
        PADDING_LABEL,
        f"{what}. Padding sees no document in a patched model, so this loss is neither the loss of the documents "
        f"nor the loss of stock transformers. Set labels of padding to {IGNORED}, as collators of "
        "transformers do. If 0 numbers a document, number documents from 1.",
    )


def before_documents(live: Tensor) -> Tensor:
    """Return (B, T) bool, True for padding right before a document.

    A causal head predicts the document's first token from it, so compaction keeps it, as a token that sees nothing.
    """
    return pad(live[:, 1:], (0, 1)) & ~live


def _can_read(labels: Any, packed_batch: PackedBatch) -> TypeGuard[Tensor]:
    """Return whether labels can be checked: on the host, with a value for each token of whole rows with documents."""
    if torch.compiler.is_compiling() or not isinstance(labels, Tensor):
        return False
    on_host = labels.device.type == packed_batch.device.type == "cpu"
    whole = labels.shape == packed_batch.tokens and not packed_batch.cached and not packed_batch.shared
    return on_host and whole and packed_batch.marks_documents


def takes_targets(loss_function: Any) -> bool:
    """Return whether a loss function takes shifted labels, and the divisor of the sum of losses."""
    return {"shift_labels", "num_items_in_batch"} <= set(inspect.signature(loss_function).parameters)


def shifts_labels(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Return whether a model compares each label with the prediction at the token before, as causal losses do."""
    if arguments.get("shift_labels") is not None:  # they take the place of labels
        return False
    forward = inspect.unwrap(type(model).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "loss_function" in names and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


SPANS = ("start_positions", "end_positions")

# Arguments of heads with another loss, which searches a row for the best spans, or for the tokens of questions.
SEARCH_ARGUMENTS = frozenset({"cls_index", "question_positions"})


def take_spans(
    arguments: dict[str, Any], packed_batch: PackedBatch, forward: InstanceForward
) -> Callable[[Any], Any] | None:
    """Take start_positions and end_positions out of the arguments of a call whose rows hold several documents, or
    padding.

    Positions count from the first token of their document, or of the row if each document has its own row. A position
    outside of its document is ignored. A negative position counts as 0.

    Args:
        packed_batch: the documents of the tokens that have logits.
        forward: the patched forward of the model that is called.

    Returns:
        A function that adds the loss to the output: the mean of the losses of all documents. None if the head computes
        the loss: the call has no positions, its rows hold one document each and no padding, or the loss isn't known.
    """
    spans = {name: x for name in SPANS if (x := arguments.get(name)) is not None}
    head, name = forward.module, forward.name
    if not spans:
        return None
    if packed_batch.cached or packed_batch.shared:
        why, remedy = "use a cache", "Leave the cache out"
        if packed_batch.shared:
            why, remedy = "be shared between ranks", "Call the model without SequenceParallel"
        if packed_batch.shared or packed_batch.shape == packed_batch.tokens:
            require_one_document_a_row(
                packed_batch,
                f"{name} with start_positions has one loss for each document, and its packed rows can't {why}. "
                f"{remedy}, or pass padded rows, with one document in each.",
            )
        return None
    documents = Documents.of(packed_batch, always=packed_batch.marks_documents)
    if documents is None:
        return None
    parameters = inspect.signature(type(head).forward).parameters
    known = is_genuine(head, forward.own) and SEARCH_ARGUMENTS.isdisjoint(parameters)
    if not documents.packed and (not known or len(spans) == 1 or bool(documents.inside.all())):
        return None
    if not known:
        raise ValueError(
            f"{name} has a loss of its own, which may search all documents of a row for start_positions. Pass padded "
            "rows, with one document in each."
        )
    for missing in {*SPANS} - {*spans}:
        raise ValueError(f"{name} got {', '.join(spans)} without {missing}; pass both or neither.")
    count = len(documents) if documents.packed else packed_batch.tokens[0]
    lengths, longest = documents.inside.sum(1), documents.inside.shape[1]
    targets = []
    for key, value in spans.items():
        if value.shape not in ((count,), (count, 1)):
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, but the packed rows hold {count} documents. Pass {key} of "
                f"shape ({count},): one for each document, in order, counted from the document's first token."
            )
        places = arguments.pop(key).flatten().to(packed_batch.device).clamp(min=0)
        if not documents.packed:  # counted from the first token of a row
            places = places[documents.rows] - documents.places[:, 0] % documents.tokens[1]
        targets.append(torch.where((places >= 0) & (places < lengths), places, longest))  # the loss ignores `longest`
    loss, total = ForQuestionAnsweringLoss, arguments.get("num_items_in_batch")
    if "loss_function" in inspect.unwrap(type(head).forward).__code__.co_names:  # users may replace it
        loss = head.loss_function if total is None else partial(head.loss_function, num_items_in_batch=total)

    def add_loss(output: Any) -> Any:
        logits = [output.get(name) for name in ("start_logits", "end_logits")]
        if any(not isinstance(x, Tensor) or x.shape != documents.tokens for x in logits):
            raise ValueError(
                f"{name} doesn't return start_logits and end_logits for every token of packed rows, so the loss of "
                "each document can't be computed. Pass padded rows, with one document in each."
            )
        cut = [documents.cut(x, fill=-math.inf) for x in logits]
        found = loss(*cut, *(target.to(x.device) for target, x in zip(targets, cut, strict=True)))
        return type(output)(**{**output, "loss": found})  # a new output: the loss comes first in a tuple

    return add_loss
