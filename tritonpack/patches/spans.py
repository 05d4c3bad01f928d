"""Losses of question answering on packed rows: over the tokens of each document instead of those of a row."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.loss.loss_utils import ForQuestionAnsweringLoss

from tritonpack.patches.document_places import Documents, require_one_document_a_row
from tritonpack.patches.forwards import is_own
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward

PLACES = ("start_positions", "end_positions")
POSITIONS = {*PLACES}

# Arguments of heads with another loss: they search a row for the best spans, or for the tokens of questions.
SEARCHING = frozenset({"cls_index", "question_positions"})


@dataclass(frozen=True, eq=False)
class Spans:
    """The spans to find in packed documents. They replace the head's `start_positions` and `end_positions`.

    Attributes:
        documents: the documents of the packed rows.
        start: (documents,) int64, the first token of each span, counted from its document's first token. For an ignored
            span it is the longest document's length.
        end: (documents,) int64, the last token of each span, counted in the same way.
        loss: takes (documents, longest) logits, as transformers' `ForQuestionAnsweringLoss` does.
    """

    documents: Documents
    start: Tensor
    end: Tensor
    loss: Callable[..., Tensor]

    def add_loss(self, output: Any, model: str) -> Any:
        """The output with its loss: the mean, over documents, of the loss of each document in a call of its own.

        A position outside of its document is ignored, and a negative position counts as 0.
        """
        logits = [output.get(name) for name in ("start_logits", "end_logits")]
        if any(not isinstance(x, Tensor) or x.shape != self.documents.tokens for x in logits):
            raise ValueError(
                f"{model} gives no start_logits and end_logits for every token of packed rows, so the loss of each "
                "document can't be computed. Pass padded rows, with one document in each."
            )
        start, end = (self.documents.cut(x, fill=-math.inf) for x in logits)
        loss = self.loss(start, end, self.start.to(start.device), self.end.to(end.device))
        return type(output)(**{**output, "loss": loss})  # a new one: the loss comes first in a tuple


def take_spans(arguments: dict[str, Any], packed_batch: PackedBatch, forward: InstanceForward) -> Spans | None:
    """Remove the positions of spans from the arguments of a call whose rows hold several documents, or padding.

    Positions count from the first token of their document. If each document has a row of its own, they count from the
    first token of the row, as the head counts.

    Args:
        arguments: the call's arguments by name; changed in place.
        packed_batch: the packing of the tokens that have logits.
        forward: the patched forward of the model that is called.

    Returns:
        None if the head computes the loss itself: the call has no positions, or its rows hold one document each and
        either no padding or a head whose loss is not known.
    """
    given = {name: x for name in PLACES if (x := arguments.get(name)) is not None}
    if not given:
        return None
    head, instance, name = forward.module, forward.own, forward.name
    if packed_batch.cached or packed_batch.shared:
        if packed_batch.shared or packed_batch.shape == packed_batch.tokens:
            why, remedy = ("use a cache for that", "Leave the cache out")
            if packed_batch.shared:
                why, remedy = ("be shared between ranks for that", "Call the model without SequenceParallel")
            require_one_document_a_row(
                packed_batch,
                f"{name} gives one loss a document where start_positions are given, and packed rows can't {why}. "
                f"{remedy}, or pass padded rows, with one document in each.",
            )
        return None
    documents = Documents.of(packed_batch, always=packed_batch.tells_documents)
    if documents is None:
        return None
    known = is_own(head, instance) and SEARCHING.isdisjoint(inspect.signature(type(head).forward).parameters)
    if not documents.packed and (not known or len(given) == 1 or bool(documents.inside.all())):
        return None
    if not known:
        raise ValueError(
            f"{name} has a loss of its own, which may look for start_positions among all tokens of a row, other "
            "documents included. Pass padded rows, with one document in each."
        )
    for missing in {*POSITIONS} - {*given}:
        raise ValueError(f"{name} was given {', '.join(given)} without {missing}; pass both or neither.")
    count = len(documents) if documents.packed else packed_batch.tokens[0]
    for key, value in given.items():
        if value.shape not in ((count,), (count, 1)):
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, but the packed rows hold {count} documents. Pass {key} of "
                f"shape ({count},): one for each document, in order, counted from the document's first token."
            )
        del arguments[key]
    start, end = (_in_documents(documents, given[key].flatten().to(packed_batch.device)) for key in PLACES)
    return Spans(documents, start, end, _loss_of(head, arguments.get("num_items_in_batch")))


def _in_documents(documents: Documents, places: Tensor) -> Tensor:
    """(documents,) places in documents, from these or from (B,) places in rows that hold one document each.

    A place outside of its document becomes the longest document's length, which the loss ignores.
    """
    places = places.clamp(min=0)
    if not documents.packed:
        places = places[documents.rows] - documents.places[:, 0] % documents.tokens[1]
    inside = (places >= 0) & (places < documents.inside.sum(1))
    return torch.where(inside, places, documents.inside.shape[1])


def _loss_of(head: Any, count: Any) -> Callable[..., Tensor]:
    """The function of a head's loss: its `loss_function`, which users may replace, if its forward calls that.

    Such a function divides the sum of losses by `count`, `num_items_in_batch`; None stands for the mean.
    """
    names = inspect.unwrap(type(head).forward).__code__.co_names
    if "loss_function" not in names:
        return ForQuestionAnsweringLoss
    return head.loss_function if count is None else partial(head.loss_function, num_items_in_batch=count)
