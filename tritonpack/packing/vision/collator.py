"""VisionPackingCollator: makes one row of the outputs of an image-text processor, example by example."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritonpack.packing.collator import PackingCollator
from tritonpack.packing.columns import (
    IGNORED_LABEL,
    LABELS,
    PER_TOKEN,
    Columns,
    Name,
    documents_of,
    masked_labels,
    naming,
    quote,
    read_feature,
)
from tritonpack.packing.vision.families import FAMILIES, IMAGES, MODALITIES, VIDEOS, Family
from tritonpack.packing.vision.media import MediaOf, ModelPositions, join_media, read_media

_INSTEAD = "Use the processor's own collator with batches of one example a row; a patched model takes them, too."
_CODES = {IMAGES: 1, VIDEOS: 2}  # of the tokens of a modality in `mm_token_type_ids`
_TEXT = ("input_ids", *LABELS, "attention_mask", *PER_TOKEN)


@dataclass(frozen=True)
class VisionPackingCollator:
    """Packs examples with images and videos into one row, as PackingCollator packs text.

    An example is what the model's processor returns for one conversation. Take its pixels as they are: `pixel_values`
    and its companions have one row for each image or patch, not for each example. A first axis of size 1 is taken off
    a column that has one axis too many (the `input_ids` of `return_tensors="pt"`). A column that is None counts as
    absent, and so does a column of images or videos without elements.

    | column | in the batch |
    |---|---|
    | `input_ids`, `labels`, `mm_token_type_ids` and other columns of tokens | as PackingCollator makes them |
    | columns of images and videos | joined along images or patches, padded where the model leaves padding out |
    | `position_ids` | made. Models with positions of three axes get four rows: the place in the document, and what \
their `get_rope_index` returns for the document alone |

    If no example has labels, they are made from the input ids, -100 for the tokens of images and videos, and for the
    prompts of PaliGemma. Given labels are kept, but for the first of each document, and combined with masks as
    PackingCollator does. A copy of the input ids may be -100 at the tokens of images and videos. A text without images
    may lack `mm_token_type_ids`, and Gemma 3's `token_type_ids`.

    Attributes:
        model: the model that gets the batches, bare or wrapped (PEFT, DistributedDataParallel). Only its configuration
            and its `get_rope_index` are kept, no weights, so workers of a DataLoader get little.
        model_type: that of the model's configuration.
        pad_to_multiple_of, pad_token_id, per_token: see PackingCollator.

    Raises:
        ValueError: a model of an unknown family, or with an unknown vision tower, or a wrong setting.
    """

    model: InitVar[Any]
    model_type: str = field(init=False)
    pad_to_multiple_of: int | None = None
    pad_token_id: int | None = None
    per_token: Collection[str] = ()
    _config: Any = field(init=False, repr=False)
    _positions: ModelPositions | None = field(init=False, repr=False)
    _text: PackingCollator = field(init=False, repr=False)
    _placeholders: dict[str, int] = field(init=False, repr=False)  # the tokens that images and videos replace

    def __post_init__(self, model: Any) -> None:
        text = PackingCollator(self.pad_to_multiple_of, self.pad_token_id, per_token=self.per_token)
        config = _configuration(model)
        family = FAMILIES[config.model_type]
        placeholders = {kind: getattr(config, part.token) for kind, part in family.parts.items()}
        if self.pad_token_id is not None and self.pad_token_id in placeholders.values():
            raise ValueError(
                f"pad_token_id={self.pad_token_id} is the token of images or videos of this model; pass the "
                "tokenizer's own pad_token_id."
            )
        positions = ModelPositions(model) if family.own_positions else None
        made = {"model_type": config.model_type, "_config": config, "_positions": positions, "_text": text}
        for name, value in {**made, "_placeholders": placeholders}.items():
            object.__setattr__(self, name, value)

    @property
    def family(self) -> Family:
        """The row of the model's type in the table of families."""
        return FAMILIES[self.model_type]

    def __call__(self, features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Collate one batch.

        Args:
            features: one mapping per example, as the processor returns it. A feature may also be a list of examples.

        Returns:
            The batch of PackingCollator, with `position_ids` (1, T), or (4, 1, T) for models with positions of three
            axes, and with the columns of images and videos that the examples have.

        Raises:
            ValueError: an unknown column, images without tokens or tokens without images, columns that contradict each
                other, or what PackingCollator refuses. The message names the document and the column.
        """
        whole, names = documents_of(features, type(self).__name__)
        examples = [self._read(example, name) for name, example in zip(names, whole, strict=True)]
        texts, media = [text for text, _ in examples], [own for _, own in examples]
        having: dict[str, Name] = {}  # a document with images, and one with videos
        for name, own in zip(names, media, strict=True):
            having |= dict.fromkeys(own, name)
        if len(having) == 2 and not self.family.both_kinds:
            raise ValueError(
                f"document {having[IMAGES]} has images and document {having[VIDEOS]} has videos; the model type "
                f"{self.model_type!r} takes one of them in a call. Pack images and videos in different rows."
            )
        self._complete(texts)
        batch: dict[str, Any] = self._text.join(texts, names, type(self).__name__)
        if self._positions is not None:
            padding = batch["input_ids"].shape[1] - sum(len(text["input_ids"]) for text in texts)
            parts = [self._positions(*one) for one in zip(texts, media, names, strict=True)]
            axes = torch.cat([*parts, torch.arange(padding, device="cpu").expand(3, -1)], dim=1)
            batch["position_ids"] = torch.cat([batch["position_ids"], axes])[:, None]
        return batch | join_media(self.family, media, names)

    def _read(self, example: Any, number: Name) -> tuple[Columns, MediaOf]:
        """The columns of tokens and those of images and videos of an example, checked."""
        with naming(f"document {number}"):
            if not isinstance(example, Mapping):
                raise ValueError(f"must be a mapping, as the processor returns it; got {type(example).__name__}.")
            example = {name: values for name, values in example.items() if values is not None}
            taken = (*_TEXT, *self.per_token, *self.family.columns)
            if unknown := sorted(str(name) for name in example if name not in taken):
                raise ValueError(
                    f"has {quote(unknown)}, which VisionPackingCollator can't pack for model type "
                    f"{self.model_type!r}; it takes {quote(taken)}. Remove other columns first "
                    "(dataset.remove_columns)."
                )
            media = read_media(self.family, example)
            tokens = {name: _row(example[name], name) for name in _TEXT if name in example}
            tokens |= {name: example[name] for name in self.per_token if name in example}
        (text,) = read_feature(tokens, number, per_token=self.per_token, never_learned=self._placeholders.values())
        with naming(f"document {number}"):
            self._check_tokens(text, media)
        return text, media

    def _check_tokens(self, text: Columns, media: MediaOf) -> None:
        """ValueError unless an example has a token for each embedding of its images and videos."""
        audio = getattr(self._config, "audio_token_id", None)
        if audio is not None and bool((text["input_ids"] == audio).any()):
            raise ValueError(
                f"has tokens of sound (token {audio}) in input_ids; this collator packs images and videos."
            )
        kinds = self._kinds(text, media)
        for kind, code in _CODES.items():
            expected = self.family.parts[kind].count_tokens(self._config, media[kind]) if kind in media else 0
            found = int((kinds == code).sum())
            if found != expected:
                taken = f"but its {quote(media[kind])} take {expected}" if kind in media else f"and no pixels of {kind}"
                raise ValueError(
                    f"has {found} tokens of {kind} (token {self._placeholders.get(kind)}) in input_ids, {taken}. "
                    "Pass all columns that one call of the processor returns for the text and the images of an "
                    "example, and don't truncate input_ids, which cuts images."
                )

    def _kinds(self, text: Columns, media: MediaOf) -> Tensor:
        """(n,) the modality of each token, by the tokens, or by the column of types that the model reads."""
        ids, kinds, placeholders = text["input_ids"], torch.zeros_like(text["input_ids"]), self._placeholders
        for kind in (VIDEOS, IMAGES):
            if kind in placeholders:
                kinds[ids == placeholders[kind]] = _CODES[kind]
        types = self.family.types
        if types is None or not bool(kinds.any()) or (types not in text and not media):
            return kinds
        if types not in text:
            raise ValueError(
                f"has images or videos and no {types!r}, by which the model tells their tokens from text. The "
                "processor returns it with return_mm_token_type_ids=True."
            )
        given = text[types]
        shared = len(set(placeholders.values())) < len(placeholders)  # GLM-4V marks frames by the token of images
        if not torch.equal(given != 0 if shared else given, kinds != 0 if shared else kinds):
            wanted = [f"{_CODES[kind]} exactly for tokens of {kind} ({token})" for kind, token in placeholders.items()]
            raise ValueError(
                f"has {types} that aren't {' and '.join(wanted)}; pass both columns of one call of the processor."
            )
        return given

    def _complete(self, texts: list[Columns]) -> None:
        """Add columns that only some examples need, and labels if none have any."""
        for name in {MODALITIES, self.family.types or MODALITIES}:
            for text in texts if any(name in text for text in texts) else ():
                if name not in text and not bool(self._kinds(text, {}).any()):
                    text[name] = torch.zeros_like(text["input_ids"])
        for text in () if any("labels" in text for text in texts) else texts:
            text["labels"] = masked_labels(text, [len(text["input_ids"])])
            for token in self._placeholders.values():
                text["labels"][text["labels"] == token] = IGNORED_LABEL
            if self.family.types_of_answers and "token_type_ids" in text:
                text["labels"][text["token_type_ids"] == 0] = IGNORED_LABEL


def _configuration(model: Any) -> Any:
    """The configuration of a model, or of the model that it wraps.

    Raises:
        ValueError: no model, or one of an unknown family, or with an unknown vision tower.
    """
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"model must be the image-text model that gets the batches; got {type(model).__name__}. Pass the model, "
            "not its name, configuration or processor."
        )
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((one for one in configs if isinstance(getattr(one, "model_type", None), str)), None)
    if config is None or config.model_type not in FAMILIES:
        named = "a model without a configuration" if config is None else f"model type {config.model_type!r}"
        raise ValueError(f"VisionPackingCollator doesn't know {named}; it knows {', '.join(FAMILIES)}. {_INSTEAD}")
    towers, tower = FAMILIES[config.model_type].towers, config.vision_config.model_type
    if towers and tower not in towers:
        raise ValueError(
            f"VisionPackingCollator doesn't know {config.model_type} with the vision tower {tower!r}; it knows "
            f"{', '.join(towers)}, because towers differ in their number of tokens for an image. {_INSTEAD}"
        )
    return config


def _row(values: Any, name: str) -> Any:
    """A column of tokens without the axis of a batch of one.

    Raises:
        ValueError: a batch of several rows.
    """
    nested = isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple))
    if not nested and getattr(values, "ndim", 1) != 2:
        return values
    if len(values) > 1:
        raise ValueError(
            f"has {len(values)} rows of {name}; pass examples one by one, each as the processor returns it."
        )
    return values[0]
