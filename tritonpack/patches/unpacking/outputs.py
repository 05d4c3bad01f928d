"""The outputs of calls with one document in each row, laid back into packed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.patches.unpacking.arguments import Group
from tritonpack.patches.unpacking.names import (
    OF_DOCUMENTS,
    OF_DOCUMENTS_ACROSS,
    OF_OTHERS,
    ONE_NUMBER_A_TOKEN,
    SCORES_OF_TOKENS,
    STATES_OF_IMAGES,
)
from tritonpack.patches.unpacking.whole_model import WholeModel


class LaidBack:
    """Lays the outputs of several calls back into packed rows.

    An output with a value for each token of every document becomes (B, T, ...). Any other output of documents becomes
    (documents, ...), in order. If its sizes differ between calls, each row holds the document's own values first, and
    zeros follow.

    Attributes:
        groups: the documents of each call; together they are all documents.
        weights: the weight of each call's loss. The loss of several calls is the weighted mean, or the sum without
            weights.
        of_documents: the name of an output that has one value for each document, if there is any.
    """

    def __init__(self, groups: Sequence[Group], weights: Sequence[Tensor], forward: WholeModel) -> None:
        self.groups, self.weights, self.forward = groups, weights, forward
        self.order = torch.cat([group.numbers for group in groups]).argsort()
        self.of_documents = ""

    def of(self, values: Sequence[Any], name: str = "") -> Any:
        """The output of each call, or the part of it with this name, in packed rows."""
        first = values[0]
        if isinstance(first, Mapping):
            for key in first:
                first[key] = self.of([value[key] for value in values], key)  # type: ignore[index]
            return first
        if isinstance(first, (tuple, list)):
            return type(first)(self.of(some, name) for some in zip(*values, strict=True))
        if not isinstance(first, Tensor) or (self.forward.across and OF_OTHERS.fullmatch(name)):
            return first
        if "ngram" in name:  # ProphetNet's
            raise ValueError(
                f"{self.forward.name} returns {name}, several predictions for each token, which packed rows have no "
                "room for. Give each document a row of its own, unpatched."
            )
        if name.endswith("loss"):
            return self._loss(values)
        laid_back = [self._tokens(name, value, group) for value, group in zip(values, self.groups, strict=True)]
        tokens = [one for one in laid_back if one is not None]
        if len(tokens) == len(values):
            return sum(tokens[1:], start=tokens[0])
        return self._of_documents(name, values)

    def _of_documents(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """An output with one value for each document, in order; the first one if it belongs to images or sounds."""
        axis = int(OF_DOCUMENTS_ACROSS.fullmatch(name) is not None)
        of_documents = [value.shape[axis : axis + 1] for value in values] == [(len(group),) for group in self.groups]
        uneven = len({value.ndim for value in values}) > 1  # Reformer's attention weights, in chunks or not
        if uneven or (name.endswith("attentions") and not of_documents):
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(
                f"{self.forward.name} gives {name} of shapes {shapes} for documents of several lengths, which no one "
                "tensor can hold. Leave output_attentions out, or give each document a row of its own, unpatched."
            )
        if not of_documents:
            return values[0]
        self.of_documents = name
        if len(values) == 1:
            return values[0]
        return torch.cat(_filled_up(values, axis), dim=axis).index_select(axis, self.order.to(values[0].device))

    def _loss(self, values: Sequence[Tensor]) -> Tensor:
        if len(values) == 1:
            return values[0]
        losses = torch.stack([value.view(()) for value in values])
        if not self.weights:
            return losses.nansum()
        weights = torch.stack([weight.to(losses.device) for weight in self.weights])
        return (torch.where(weights > 0, losses, 0) * weights).sum() / weights.sum()

    def _tokens(self, name: str, value: Tensor, group: Group) -> Tensor | None:
        """An output with a value for each token of (documents, longest), in the packed rows (B, T, ...); else None."""
        documents = group.side_of_output(name)
        of_image = "hidden_state" in name and STATES_OF_IMAGES.fullmatch(self.forward.name) is not None
        of_no_tokens = of_image or (name.startswith("decoder_") and not self.forward.decodes)
        if documents is None or of_no_tokens or name.endswith("attentions") or OF_OTHERS.fullmatch(name):
            return None
        shape = documents.inside.shape
        if value.shape[:2] == shape and self._has_tokens(name, value):
            return documents.lay_back(value)
        if value.ndim == 4 and value.shape[1:3] == shape:
            return torch.stack([documents.lay_back(one) for one in value])
        if "router" in name and value.ndim == 2 and value.shape[0] == shape.numel():
            return documents.lay_back(value.unflatten(0, shape)).flatten(0, 1)
        return None

    def _has_tokens(self, name: str, value: Tensor) -> bool:
        """Whether an output of the right shape has a value for each token."""
        if name == "logits" and value.ndim == 2:
            return ONE_NUMBER_A_TOKEN.fullmatch(self.forward.name) is not None
        if OF_DOCUMENTS.fullmatch(name) and (self.forward.one_result or name != "logits"):
            return False
        return value.ndim > 2 or SCORES_OF_TOKENS.fullmatch(name) is not None or name == ""


def _filled_up(values: Sequence[Tensor], axis: int) -> list[Tensor]:
    """Tensors of one size, except along one axis: zeros follow the values of each."""
    largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    filled = []
    for value in values:
        missing = [0 if i == axis else size - value.shape[i] for i, size in enumerate(largest)]
        filled.append(pad(value, [n for more in reversed(missing) for n in (0, more)]))
    return filled
