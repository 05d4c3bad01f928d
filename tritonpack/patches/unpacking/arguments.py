"""The arguments of a packed call, cut into arguments of calls with one document in each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonpack.patches.labels import IGNORED
from tritonpack.patches.unpacking.document_places import Documents
from tritonpack.patches.unpacking.names import OF_OTHERS, OF_TOKENS_AFTER_ALL, mask_of
from tritonpack.patches.unpacking.whole_model import WholeModel


@dataclass(frozen=True, eq=False)
class Group:
    """Documents that run in one call.

    Attributes:
        numbers: (n,) int64, their numbers among all documents of the packed rows.
        count: how many documents the packed rows hold.
        sides: {"" or "decoder": where the tokens of these documents lie}.
    """

    numbers: Tensor
    count: int
    sides: Mapping[str, Documents]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def first(self) -> Documents:
        """The documents of the first side."""
        return next(iter(self.sides.values()))

    def side_of(self, name: str) -> Documents | None:
        """The documents whose tokens an argument may have values for; None for an encoder of images or sounds."""
        of_decoder = "decoder" in self.sides and (name.startswith("decoder_") or name == "labels")
        return self.sides.get("decoder" if of_decoder else "")

    def side_of_output(self, name: str) -> Documents | None:
        """The documents whose tokens an output may have values for."""
        if name.startswith("encoder_"):
            return self.sides.get("")
        return self.sides.get("decoder") or self.sides[""]


def groups_of(sides: Mapping[str, Documents], by_length: bool, each: bool = False) -> list[Group]:
    """The calls that documents run in: one call, one for each length (on both sides), or one for each document."""
    first = next(iter(sides.values()))
    numbers = torch.arange(len(first), device=first.places.device)
    if not (by_length or each):
        return [Group(numbers, len(first), sides)]
    lengths = torch.stack([documents.inside.sum(1) for documents in sides.values()], dim=1)
    keys = numbers[:, None] if each else lengths
    groups = []
    for key in keys.unique(dim=0):
        chosen = (keys == key).all(1).nonzero().flatten()
        groups.append(Group(chosen, len(first), {side: one.subset(chosen) for side, one in sides.items()}))
    return groups


def batch_of(group: Group, arguments: Mapping[str, Any], forward: WholeModel) -> dict[str, Any]:
    """The arguments of a call with the documents of a group, one in each row.

    Of the packed call's `arguments`, position ids are the only ones that tell documents apart.
    """
    batch: dict[str, Any] = {}
    for name, value in arguments.items():
        documents = group.side_of(name) if forward.decodes or not name.startswith("decoder_") else None
        if OF_OTHERS.fullmatch(name):
            value = getattr(value, "tensor", value)  # of detectron2's ImageList, which LayoutLMv2 takes
        if not isinstance(value, Tensor):
            batch[name] = value
        elif documents is None or name in forward.targets or not is_of_tokens(name, value, documents.tokens):
            batch[name] = _of_documents(name, value, group, forward)
        elif "position_ids" not in name:
            fill = (forward.pad_token or 0) if name.endswith("input_ids") else IGNORED if "labels" in name else 0
            batch[name] = _cut(documents, value, fill)
        elif (positions := _positions(name, value, documents, forward)) is not None:
            batch[name] = positions
    for side, documents in group.sides.items():
        if forward.takes(mask_of(side)) and not bool(documents.inside.all()):  # a few are inexact with a mask of ones
            batch[mask_of(side)] = documents.inside.long()
    return batch


def is_of_tokens(name: str, value: Tensor, tokens: torch.Size) -> bool:
    """Whether an argument has a value for each of (B, T) tokens: (B, T, ...), (1, T, ...), or n positions (n, B, T)."""
    if OF_OTHERS.fullmatch(name) and not OF_TOKENS_AFTER_ALL.fullmatch(name):
        return False
    if name == "labels" and value.is_floating_point():  # scores
        return False
    shapes = (tokens, (1, tokens[1]))
    return value.shape[:2] in shapes or ("position_ids" in name and value.shape[1:] in shapes)


def _cut(documents: Documents, value: Tensor, fill: int) -> Tensor:
    if value.shape[:2] in (documents.tokens, (1, documents.tokens[1])):
        return documents.cut(value, fill=fill)
    return torch.stack([documents.cut(one, fill=fill) for one in value])


def _positions(name: str, given: Tensor, documents: Documents, forward: WholeModel) -> Tensor | None:
    """Positions by document; None where each document counts from 0, because the model makes these itself."""
    positions = _cut(documents, given, 0)
    inside = documents.inside.to(given.device)
    if given.ndim == 2 and bool((positions == inside.cumsum(1) - 1)[inside].all()):
        return None
    if not forward.takes(name):
        raise ValueError(
            f"{name} doesn't count each document from 0, and the model takes no {name}. Let it restart at 0 where a "
            "document begins."
        )
    return positions


def _of_documents(name: str, value: Tensor, group: Group, forward: WholeModel) -> Tensor:
    """The part of an argument without a value for each token that belongs to the documents of a group.

    Targets have one value for each document. Images and sounds come for each document, or for each row, whose
    documents share them. Models that put images among the tokens take all images, in the order of the tokens.
    """
    of_frames = name.startswith("decoder_") and not forward.decodes
    if of_frames and name == mask_of("decoder") and int(value.max()) > 1:
        raise ValueError(
            f"{name} numbers documents up to {int(value.max())}, and {forward.name} takes frames of sound, which "
            "aren't packed. Pass 0 and 1, in a row for each document, in order, with its frames."
        )
    others = value.ndim > 1 and (value.is_floating_point() or of_frames or OF_OTHERS.fullmatch(name) is not None)
    if others and (forward.across or forward.puts_images_among_tokens):
        if forward.by_length and not forward.across:
            raise ValueError(
                f"{forward.name} runs documents of one length at a time, and {name} doesn't say which of them it "
                "belongs to. Give each document a row of its own, unpatched."
            )
        return value
    if value.ndim and value.shape[0] == group.count:
        return value[group.numbers.to(value.device)]
    if others and value.shape[0] == group.first.tokens[0]:
        return value[group.first.rows.to(value.device)]
    if others:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but the packed rows hold {group.count} documents in "
            f"{group.first.tokens[0]} rows. Pass one for each document, in order, or one for each row."
        )
    return value
