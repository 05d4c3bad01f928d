"""Multiple choice on packed rows: each choice of a row holds one document for each question of the row."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.patches.call_arguments import OFFSETS, TELLING, tokens_of
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.parse_inputs import make_packed_batch
from tritonpack.patches.unpacking.document_places import Documents


@dataclass(frozen=True, eq=False)
class Choices:
    """The documents of packed rows (B, C, T), question by question.

    The d-th document of each choice of a row is an option of the row's d-th question. Questions are counted row by row.

    Attributes:
        documents: the documents of the rows (B * C, T), the C options of the first question first.
        shape: (B, C, T).
    """

    documents: Documents
    shape: torch.Size

    @classmethod
    def of(cls, arguments: dict[str, Any], model: PreTrainedModel, serving: Serving, *, left: bool) -> Choices | None:
        """The choices of a call with packed rows.

        None if the model can read the call itself: its tokens are not (B, C, T), or each choice holds one document and
        the model takes all arguments that tell documents apart. `left` pads documents on the left.
        """
        tokens, shape = tokens_of(arguments)
        if tokens is None or len(shape) != 3 or not compares_choices(model):
            return None
        if isinstance(arguments.get("attention_mask"), PackedBatch):
            return None
        given = {name: x for name in TELLING if isinstance(x := arguments.get(name), Tensor)}
        told = {name: rows_of_choices(x, shape) for name, x in given.items() if name in OFFSETS or x.shape == shape}
        if not told:
            return None
        told["input_ids"] = rows_of_choices(arguments.get("input_ids"), shape)
        rows = torch.Size((shape[0] * shape[1], shape[2]))
        pad = getattr(model.config, "pad_token_id", None)
        packed_batch = make_packed_batch(told, rows, tokens.device, serving, pad)
        foreign = told.keys() - inspect.signature(type(model).forward).parameters.keys()
        documents = Documents.of(packed_batch, left=left, always=bool(foreign))
        return None if documents is None else cls(_by_question(documents, shape, type(model).__name__), shape)


def compares_choices(model: PreTrainedModel) -> bool:
    """Whether a model is a head for multiple choice. In other models, tokens (B, T, n) are columns of codebooks."""
    return any(kind.__name__.endswith("ForMultipleChoice") for kind in type(model).__mro__)


def rows_of_choices(value: Any, shape: torch.Size) -> Any:
    """A value for each token of (B, C, T) as (B * C, T, ...); any other value unchanged."""
    return value.flatten(0, 1) if isinstance(value, Tensor) and value.shape[:3] == shape else value


def _by_question(documents: Documents, shape: torch.Size, model: str) -> Documents:
    """Documents of rows (B * C, T), ordered so that all options of a question are neighbours."""
    counts = torch.bincount(documents.rows, minlength=shape[0] * shape[1]).unflatten(0, (-1, shape[1]))
    if bool((counts != counts[:, :1]).any()):
        raise ValueError(
            f"{model} compares the n-th documents of all choices of a row, but the choices hold different numbers of "
            f"documents, by row: {counts.tolist()!r:.200}. Give each choice of a row one document for each question."
        )
    # By row, then by the place among the documents of a choice; a stable sort leaves the choices in order.
    place = torch.cat([torch.arange(int(n), device=counts.device) for n in counts.flatten()])
    order = torch.argsort(documents.rows // shape[1] * len(documents) + place, stable=True)
    return replace(documents, places=documents.places[order], inside=documents.inside[order])
