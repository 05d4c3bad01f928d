"""Packed rows as batches with one document in each row, and outputs of such batches in packed rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.patches.labels import IGNORED
from tritonpack.patches.unpacking.documents import Documents

# Classes whose results are of a whole row: scores of it, a vector at its last special token, tokens up to its first
# separator.
ONE_DOCUMENT_A_ROW = re.compile(
    r"\w*(ForSequenceClassification|ForNextSentencePrediction|ForMultipleChoice|RewardModel)"
    r"|(CLIP|Tipsv2)Text(Model\w*|Transformer)|BigBirdForQuestionAnswering"
)

# Outputs of a document, whatever their shape.
OF_DOCUMENTS = re.compile(
    r"logits|pool\w*_output|(text|sentence)_embeds|(seq_relationship|sop|cls|mc|relevance)_logits"
)

# Arguments and outputs of images and sounds: they have no value for each token of a row, whatever their shape.
OF_OTHERS = re.compile(
    r"(pixel|image|video|audio|visual|vision|speech|speaker|spectrogram|waveform|input_features|input_values|qformer"
    r"|flattened)\w*|lang_ids?|stop_labels"
)
OF_TOKENS_AFTER_ALL = re.compile(r"\w*position_mask|image_mask|image_attention_mask|visual_pos_masks")

# Outputs of two dimensions that have one value for each token.
SCORES_OF_TOKENS = re.compile(r"(start|end)_logits|duration_outputs")

# Classes whose logits are one number for each token: ELECTRA's discriminator, and TAPAS, which chooses cells.
ONE_NUMBER_A_TOKEN = re.compile(r"\w*ForPreTraining|TapasForQuestionAnswering")

# Classes with features of texts that follow from their sound or their video.
CONDITIONED = re.compile(r"(Clvp|XCLIP)Model\w*")

# Classes whose states are those of their image, which may have as many patches as a document has tokens.
STATES_OF_IMAGES = re.compile(r"BlipForQuestionAnswering")

# Outputs (images, documents) of models that hold texts against images or sounds.
OF_DOCUMENTS_ACROSS = re.compile(r"logits_per_(image|video|audio)|logits_audio_text")


@dataclass(frozen=True, eq=False)
class Group:
    """Documents that run in one call.

    Attributes:
        numbers: (n,) int64, which documents of the packed rows.
        count: of all documents of the packed rows.
        sides: {"" or "decoder": where their tokens are}.
    """

    numbers: Tensor
    count: int
    sides: Mapping[str, Documents]

    @classmethod
    def of_all(cls, sides: Mapping[str, Documents]) -> Group:
        """All documents of packed rows."""
        first = next(iter(sides.values()))
        return cls(torch.arange(len(first), device=first.places.device), len(first), sides)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def tokens(self) -> torch.Size:
        """(B, T), the shape of the packed rows."""
        return next(iter(self.sides.values())).tokens

    @property
    def rows(self) -> Tensor:
        """(n,) int64, the packed row of each document."""
        return next(iter(self.sides.values())).rows

    def side_of(self, name: str) -> Documents | None:
        """Whose tokens an argument may have values for; None for what is of an encoder of images or sounds."""
        of_decoder = "decoder" in self.sides and (name.startswith("decoder_") or name == "labels")
        return self.sides.get("decoder" if of_decoder else "")

    def side_of_output(self, name: str) -> Documents | None:
        """Whose tokens an output may have values for."""
        if name.startswith("encoder_"):
            return self.sides.get("")
        return self.sides.get("decoder") or self.sides[""]


def groups_of(sides: Mapping[str, Documents], by_length: bool, each: bool = False) -> list[Group]:
    """The calls that documents run in: one, one for each length, or one for each document.

    Args:
        sides: the documents of each side, as many of both.
        by_length: only documents of one length, on each side, in a call.
        each: one document in a call.
    """
    if not (by_length or each):
        return [Group.of_all(sides)]
    lengths = torch.stack([documents.inside.sum(1) for documents in sides.values()], dim=1)
    if each:
        lengths = torch.arange(len(lengths), device=lengths.device)[:, None]  # no two alike
    groups = []
    for length in lengths.unique(dim=0):
        numbers = (lengths == length).all(1).nonzero().flatten()
        chosen = {side: one.subset(numbers) for side, one in sides.items()}
        groups.append(Group(numbers, lengths.shape[0], chosen))
    return groups


def mask_of(side: str) -> str:
    """What the mask of a side is called."""
    return f"{side}_attention_mask" if side else "attention_mask"


def batch_of(
    group: Group,
    arguments: Mapping[str, Any],
    *,
    takes: Callable[[str], bool],
    pad_token: int | None,
    targets: Collection[str],
    decodes: bool,
    of_documents: Callable[[str, Tensor, Group], Tensor],
) -> dict[str, Any]:
    """The arguments of a call with the documents of a group, one a row.

    Args:
        group: the documents.
        arguments: of the packed call, by name, without those that tell documents apart but for position ids.
        takes: whether the model takes an argument.
        pad_token: what padding holds.
        targets: arguments that never have a value for each token, whatever their shape.
        decodes: whether the model takes tokens of a decoder; else what its decoder is given isn't of tokens.
        of_documents: returns what the documents of the group get of an argument without a value for each token.
    """
    batch: dict[str, Any] = {}
    for name, value in arguments.items():
        documents = group.side_of(name) if decodes or not name.startswith("decoder_") else None
        if OF_OTHERS.fullmatch(name):
            value = getattr(value, "tensor", value)  # of detectron2's ImageList, which LayoutLMv2 takes
        if not isinstance(value, Tensor):
            batch[name] = value
        elif documents is None or name in targets or not _is_of_tokens(name, value, documents):
            batch[name] = of_documents(name, value, group)
        elif "position_ids" in name:
            positions = _positions(name, value, documents, takes(name))
            if positions is not None:
                batch[name] = positions
        else:
            fill = (pad_token or 0) if name.endswith("input_ids") else IGNORED if "labels" in name else 0
            batch[name] = _cut(documents, value, fill)
    for side, documents in group.sides.items():
        if takes(mask_of(side)) and not bool(documents.inside.all()):  # some are off where a mask masks nothing
            batch[mask_of(side)] = documents.inside.long()
    return batch


def _is_of_tokens(name: str, value: Tensor, documents: Documents) -> bool:
    """Whether an argument has one value a token: (B, T, ...), (1, T, ...), or several kinds of positions (n, B, T)."""
    if OF_OTHERS.fullmatch(name) and not OF_TOKENS_AFTER_ALL.fullmatch(name):
        return False
    if name == "labels" and value.is_floating_point():  # scores
        return False
    rows, length = documents.tokens
    shapes = ((rows, length), (1, length))
    return value.shape[:2] in shapes or ("position_ids" in name and value.shape[1:] in shapes)


def _cut(documents: Documents, value: Tensor, fill: int) -> Tensor:
    rows, length = documents.tokens
    if value.shape[:2] in ((rows, length), (1, length)):
        return documents.cut(value, fill=fill)
    return torch.stack([documents.cut(one, fill=fill) for one in value])


def _positions(name: str, given: Tensor, documents: Documents, taken: bool) -> Tensor | None:
    """Positions by document; None where they count each from 0: then the model makes its own."""
    positions = _cut(documents, given, 0)
    inside = documents.inside.to(given.device)
    if given.ndim == 2 and bool((positions == inside.cumsum(1) - 1)[inside].all()):
        return None
    if not taken:
        raise ValueError(
            f"{name} doesn't count each document from 0, and the model takes no {name}. Let it restart at 0 where a "
            "document begins."
        )
    return positions


class LaidBack:
    """Lays what calls with one document a row give back into packed rows.

    What has a value for each token of every document is (B, T, ...). All else of documents is (documents, ...), in
    order; where calls give other sizes, each document's own comes first in its row, and zeros follow.

    Args:
        groups: of all documents together.
        weights: of each group's loss; of several groups, the loss is their mean. Without any, it is their sum.
        model: the name of its class.
        across: whether the model holds all texts against all images, which aren't of documents.
        decodes: whether the model takes tokens of a decoder; else what its decoder gives isn't of tokens.

    Attributes:
        of_documents: the name of an output that has one value for each document, where there is any.
    """

    def __init__(
        self, groups: Sequence[Group], weights: Sequence[Tensor], model: str, *, across: bool, decodes: bool
    ) -> None:
        self.groups, self.weights, self.model, self.across, self.decodes = groups, weights, model, across, decodes
        self.order = torch.cat([group.numbers for group in groups]).argsort()
        self.of_documents = ""

    def of(self, values: Sequence[Any], name: str = "") -> Any:
        """An output, or a part of one, of each group, in packed rows."""
        first = values[0]
        if isinstance(first, Mapping):
            for key in first:
                first[key] = self.of([value[key] for value in values], key)  # type: ignore[index]
            return first
        if isinstance(first, (tuple, list)):
            return type(first)(self.of(some, name) for some in zip(*values, strict=True))
        if not isinstance(first, Tensor):
            return first
        if "ngram" in name:  # ProphetNet's
            raise ValueError(
                f"{self.model} returns {name}, several predictions for each token, which packed rows have no room for. "
                "Give each document a row of its own, unpatched."
            )
        if name.endswith("loss"):
            return self._loss(values)
        if self.across and OF_OTHERS.fullmatch(name):
            return first
        laid_back = [self._tokens(name, value, group) for value, group in zip(values, self.groups, strict=True)]
        tokens = [one for one in laid_back if one is not None]
        if len(tokens) == len(values):
            return sum(tokens[1:], start=tokens[0])
        axis = int(OF_DOCUMENTS_ACROSS.fullmatch(name) is not None)
        sizes = [value.shape[axis : axis + 1] for value in values]
        of_documents = sizes == [(len(group),) for group in self.groups]
        uneven = len({value.ndim for value in values}) > 1  # Reformer's weights of attention, in chunks or not
        if uneven or (name.endswith("attentions") and not of_documents):
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise ValueError(
                f"{self.model} gives {name} of shapes {shapes} for documents of several lengths, which no one tensor "
                "can hold. Leave output_attentions out, or give each document a row of its own, unpatched."
            )
        if not of_documents:
            return first  # of images, or of sounds
        self.of_documents = name
        if len(values) == 1:
            return first
        values = _filled_up(values, axis)
        return torch.cat(list(values), dim=axis).index_select(axis, self.order.to(first.device))

    def _loss(self, values: Sequence[Tensor]) -> Tensor:
        if len(values) == 1:
            return values[0]
        if not self.weights:
            return torch.stack([value.view(()) for value in values]).nansum()
        weights = torch.stack([weight.to(values[0].device) for weight in self.weights])
        parts = torch.where(weights > 0, torch.stack([value.view(()) for value in values]), 0)
        return (parts * weights).sum() / weights.sum()

    def _tokens(self, name: str, value: Tensor, group: Group) -> Tensor | None:
        """An output with a value for each token of (documents, longest), in the packed rows (B, T, ...)."""
        documents = group.side_of_output(name)
        of_image = "hidden_state" in name and STATES_OF_IMAGES.fullmatch(self.model) is not None
        of_no_tokens = of_image or (name.startswith("decoder_") and not self.decodes)
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
        """Whether an output whose shape is right for it has a value for each token."""
        if name == "logits" and value.ndim == 2:
            return ONE_NUMBER_A_TOKEN.fullmatch(self.model) is not None
        if OF_DOCUMENTS.fullmatch(name) and (self._one_result or name != "logits"):
            return False
        return value.ndim > 2 or SCORES_OF_TOKENS.fullmatch(name) is not None or name == ""

    @property
    def _one_result(self) -> bool:
        return ONE_DOCUMENT_A_ROW.fullmatch(self.model) is not None


def _filled_up(values: Sequence[Tensor], axis: int) -> list[Tensor]:
    """Tensors of one size, but for one axis: zeros follow what each of them holds."""
    largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    filled = []
    for value in values:
        missing = [0 if i == axis else size - value.shape[i] for i, size in enumerate(largest)]
        filled.append(pad(value, [n for more in reversed(missing) for n in (0, more)]))
    return filled
