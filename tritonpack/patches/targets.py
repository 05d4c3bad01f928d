"""Targets of a loss: labels that it would predict from the wrong token, and the loss of question answering.

Labels of the wrong token are those of the last one of the document before, or of padding. Losses of question answering
are computed over the tokens of each document instead of those of a row.
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
from tritonpack.patches.forwards import holds_both_sides, is_own
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.placement import Documents, require_one_document_a_row

IGNORED = -100
KEY = "first-label"
KEY_PADDING = "padding-label"

# Ends of the names of classes, besides encoder-decoder models, that predict each token at its own place.
OWN_LABELS = ("ForMaskedLM", "ForTokenClassification")


def check_labels(model: PreTrainedModel, arguments: Mapping[str, Any], packed_batch: PackedBatch) -> None:
    """Warn once if a causal loss predicts the first label of a document, or labels from padding, and refuse labels that
    it would shift along a tree.

    Labels on an accelerator are not checked, because reading them would wait for it.
    """
    shifts = shifts_labels(model, arguments)
    if packed_batch.tree_ends is not None and shifts:
        raise ValueError(
            "labels along a row that is a tree would be predicted from tokens of other branches. Pass logits_to_keep, "
            "shift_labels and labels as tritonpack.pack_tree(...).inputs() gives them."
        )
    labels = arguments.get("labels")
    if shifts and KEY not in notices.said and _can_read(labels, packed_batch):
        tokens = packed_batch.not_padding()
        first = packed_batch.runs()[0] & tokens & (labels != IGNORED)
        # Nothing predicts the first token of a row, and padding before a document is no other document.
        unmasked = first[:, 1:] & tokens[:, :-1]
        if bool(unmasked.any()):
            row, place = unmasked.nonzero()[0].tolist()
            notices.say_once(
                KEY,
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
    """Warn once if a loss predicts labels from padding, or `refuse` them.

    Padding sees no token in a patched model, so such a loss isn't the one of stock transformers. Padding right before a
    document is left out: a causal loss predicts the document's first token from it. Labels on an accelerator are not
    checked, because reading them would wait for it.

    Raises:
        ValueError: a mask with numbers above 1, and labels where it is 0: it seems to number documents from 0.
    """
    labels, mask = arguments.get("labels"), packed_batch.attention_mask
    if not _can_read(labels, packed_batch) or mask is None or mask.shape != packed_batch.tokens:
        return
    numbered = not packed_batch.causal and bool((mask > 1).any())
    if KEY_PADDING in notices.said and not numbered and not refuse:
        return
    live, wanted = mask != 0, arguments.get("shift_labels")
    if not isinstance(wanted, Tensor) or wanted.shape != labels.shape:
        wanted = labels if predicts_own_tokens(model) else pad(labels[:, 1:], (0, 1), value=IGNORED)
    lost = (wanted != IGNORED) & ~live & ~before_documents(live)
    if not bool(lost.any()):
        return
    row, place = lost.nonzero()[0].tolist()
    label = int(wanted[row, place])
    what = f"the label {label} in row {row} is predicted at token {place}, which attention_mask says is padding"
    if numbered:
        raise ValueError(
            f"{what}, by the number 0. Number documents from 1: pass attention_mask + 1 if it counts from 0. Otherwise "
            f"set labels of padding to {IGNORED}."
        )
    if refuse:
        raise ValueError(
            f"{what}, and padding isn't computed. Set labels of padding to {IGNORED}, as collators of transformers do."
        )
    notices.say_once(
        KEY_PADDING,
        f"{what}. Padding sees no document in a patched model, so this loss is neither that of the documents nor that "
        f"of stock transformers, which predicts such labels, too. Set labels of padding to {IGNORED}, as collators of "
        "transformers do. If 0 numbers a document, count from 1.",
    )


def before_documents(live: Tensor) -> Tensor:
    """(B, T) bool, the padding right before a document. A causal head predicts the document's first token from it, so
    it stays in batches without padding, as a token that sees nothing."""
    return pad(live[:, 1:], (0, 1)) & ~live


def _can_read(labels: Any, packed_batch: PackedBatch) -> TypeGuard[Tensor]:
    """Whether labels have a value for each token of whole rows, in host memory, and the call marks documents."""
    if torch.compiler.is_compiling() or not isinstance(labels, Tensor):
        return False
    on_host = labels.device.type == packed_batch.device.type == "cpu"
    whole = labels.shape == packed_batch.tokens and not packed_batch.cached and not packed_batch.shared
    return on_host and whole and packed_batch.tells_documents


def takes_targets(loss_function: Any) -> bool:
    """Whether a loss function takes the target of each token, and the number to divide the sum of losses by."""
    return {"shift_labels", "num_items_in_batch"} <= set(inspect.signature(loss_function).parameters)


def predicts_own_tokens(model: PreTrainedModel) -> bool:
    """Whether a model compares each label with its prediction at the same place, as encoder-decoder models do."""
    return holds_both_sides(model) or any(kind.__name__.endswith(OWN_LABELS) for kind in type(model).__mro__)


def shifts_labels(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether a model compares each label with its prediction at the token before: transformers' causal loss does."""
    if arguments.get("shift_labels") is not None:  # they take the place of labels
        return False
    forward = inspect.unwrap(type(model).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "loss_function" in names and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


PLACES = ("start_positions", "end_positions")
POSITIONS = {*PLACES}

# Arguments of heads with another loss: they search a row for the best spans, or for the tokens of questions.
SEARCHING = frozenset({"cls_index", "question_positions"})


def take_spans(
    arguments: dict[str, Any], packed_batch: PackedBatch, forward: InstanceForward
) -> Callable[[Any], Any] | None:
    """Remove the positions of spans from the arguments of a call whose rows hold several documents, or padding.

    Positions count from the first token of their document. If each document has a row of its own, they count from the
    first token of the row, as the head counts. A position outside of its document is ignored, and a negative one counts
    as 0.

    Args:
        packed_batch: the packing of the tokens that have logits.
        forward: the patched forward of the model that is called.

    Returns:
        The function that adds the loss to the output: the mean of the losses of all documents. None if the head
        computes it: the call has no positions, or its rows hold one document each and no padding, or the head's loss is
        not known.
    """
    given = {name: x for name in PLACES if (x := arguments.get(name)) is not None}
    head, name = forward.module, forward.name
    if not given:
        return None
    if packed_batch.cached or packed_batch.shared:
        why, remedy = "use a cache", "Leave the cache out"
        if packed_batch.shared:
            why, remedy = "be shared between ranks", "Call the model without SequenceParallel"
        if packed_batch.shared or packed_batch.shape == packed_batch.tokens:
            require_one_document_a_row(
                packed_batch,
                f"{name} gives one loss a document where start_positions are given, and packed rows can't {why} for "
                f"that. {remedy}, or pass padded rows, with one document in each.",
            )
        return None
    documents = Documents.of(packed_batch, always=packed_batch.tells_documents)
    if documents is None:
        return None
    known = is_own(head, forward.own) and SEARCHING.isdisjoint(inspect.signature(type(head).forward).parameters)
    if not documents.packed and (not known or len(given) == 1 or bool(documents.inside.all())):
        return None
    if not known:
        raise ValueError(
            f"{name} has a loss of its own, which may look for start_positions among all tokens of a row, other "
            "documents included. Pass padded rows, with one document in each."
        )
    for missing in POSITIONS - {*given}:
        raise ValueError(f"{name} was given {', '.join(given)} without {missing}; pass both or neither.")
    count = len(documents) if documents.packed else packed_batch.tokens[0]
    lengths, longest = documents.inside.sum(1), documents.inside.shape[1]
    targets = []
    for key, value in given.items():
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
                f"{name} gives no start_logits and end_logits for every token of packed rows, so the loss of each "
                "document can't be computed. Pass padded rows, with one document in each."
            )
        cut = [documents.cut(x, fill=-math.inf) for x in logits]
        found = loss(*cut, *(target.to(x.device) for target, x in zip(targets, cut, strict=True)))
        return type(output)(**{**output, "loss": found})  # a new one: the loss comes first in a tuple

    return add_loss
