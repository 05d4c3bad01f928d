"""VisionPackingCollator: makes one row of the outputs of an image-text processor, example by example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritonpack.packing.collator import (
    IGNORED_LABEL,
    LABELS,
    MASK,
    PER_TOKEN,
    TOKENS,
    Columns,
    PackingCollator,
    quote,
    read_feature,
    read_features,
)
from tritonpack.packing.vision.families import FAMILIES, IMAGES, VIDEOS, Family
from tritonpack.packing.vision.media import MediaOf, ModelPositions, join_media, read_media
from tritonpack.removed import refuse_removed

_INSTEAD = "Use the processor's own collator with batches of one example a row; a patched model takes them, too."
_CODES = {IMAGES: 1, VIDEOS: 2}  # of the tokens of a modality in `mm_token_type_ids`
_TEXT = (TOKENS, LABELS, MASK, *PER_TOKEN)


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
    PackingCollator does. Types of tokens that the model reads (`mm_token_type_ids`, Gemma 3's `token_type_ids`) are
    made where an example has none.

    Args:
        model: the model that gets the batches, bare or wrapped (PEFT, DistributedDataParallel). Only its configuration
            and its `get_rope_index` are kept, no weights, so workers of a DataLoader get little.
        pad_to_multiple_of, pad_token_id: see PackingCollator.

    Attributes:
        model_type: the type in the model's configuration.

    Raises:
        ValueError: a model of an unknown family, or with an unknown vision tower, or a wrong setting.
    """

    def __init__(
        self, model: Any, pad_to_multiple_of: int | None = None, pad_token_id: int = 0, per_token: None = None
    ) -> None:
        refuse_removed([] if per_token is None else ["per_token="], "VisionPackingCollator")
        self._text = PackingCollator(pad_to_multiple_of, pad_token_id)
        self._config = _configuration(model)
        self.model_type: str = self._config.model_type
        self._placeholders = {kind: getattr(self._config, part.token) for kind, part in self.family.parts.items()}
        if pad_token_id in self._placeholders.values():
            raise ValueError(f"pad_token_id={pad_token_id} is the token of images or videos of this model.")
        self._positions = ModelPositions(model) if self.family.own_positions else None

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
        examples = read_features(features, type(self).__name__, self._read)
        texts, media = [(name, text) for name, (text, _) in examples], [(name, own) for name, (_, own) in examples]
        having = {kind: name for name, own in media for kind in own}  # a document with images, and one with videos
        if len(having) == 2 and not self.family.both_kinds:
            raise ValueError(
                f"{having[IMAGES]} has images and {having[VIDEOS]} has videos; the model type {self.model_type!r} "
                "takes one of them in a call. Pack images and videos in different rows."
            )
        batch: dict[str, Any] = self._text.join(texts, type(self).__name__)
        if not any(LABELS in text for _, text in texts):
            labels = batch[LABELS]
            for token in self._placeholders.values():
                labels[batch[TOKENS] == token] = IGNORED_LABEL
            if self.family.types_of_answers and "token_type_ids" in batch:
                labels[batch["token_type_ids"] == 0] = IGNORED_LABEL
        if self._positions is not None:
            padding = batch[TOKENS].shape[1] - sum(len(text[TOKENS]) for _, text in texts)
            parts = [self._positions(name, *example) for name, example in examples]
            axes = torch.cat([*parts, torch.arange(padding, device="cpu").expand(3, -1)], dim=1)
            batch["position_ids"] = torch.cat([batch["position_ids"], axes])[:, None]
        return batch | join_media(self.family, media)

    def _read(self, example: Any) -> list[tuple[Columns, MediaOf]]:
        """The columns of tokens and the columns of images and videos of an example, checked."""
        if not isinstance(example, Mapping):
            raise ValueError(f"must be a mapping, as the processor returns it; got {type(example).__name__}.")
        example = {column: values for column, values in example.items() if values is not None}
        taken = (*_TEXT, *self.family.columns)
        if unknown := sorted(str(column) for column in example if column not in taken):
            raise ValueError(
                f"has {quote(unknown)}, which VisionPackingCollator can't pack for model type {self.model_type!r}; it "
                f"takes {quote(taken)}. Remove other columns first (dataset.remove_columns)."
            )
        media = read_media(self.family, example)
        (text,) = read_feature({column: _row(example[column], column) for column in _TEXT if column in example})
        self._check_tokens(text, media)
        return [(text, media)]

    def _check_tokens(self, text: Columns, media: MediaOf) -> None:
        """ValueError unless an example has a token for each embedding of its images and videos. Add types of tokens."""
        ids, types, placeholders = text[TOKENS], self.family.types, self._placeholders
        audio = getattr(self._config, "audio_token_id", None)
        if audio is not None and bool((ids == audio).any()):
            raise ValueError(
                f"has tokens of sound (token {audio}) in input_ids; this collator packs images and videos."
            )
        kinds = torch.zeros_like(ids)
        for kind, token in reversed(placeholders.items()):
            kinds[ids == token] = _CODES[kind]
        if types is not None:
            given = text.setdefault(types, kinds)
            if not torch.equal(given != 0, kinds != 0):
                raise ValueError(
                    f"has {types} that aren't 1 for tokens of images, 2 for tokens of videos and 0 for others (tokens "
                    f"{placeholders}); pass both columns of one call of the processor."
                )
            kinds = given
        for kind, code in _CODES.items():
            expected = self.family.parts[kind].count_tokens(self._config, media[kind]) if kind in media else 0
            found = int((kinds == code).sum())
            if found != expected:
                taken = f"but its {quote(media[kind])} take {expected}" if kind in media else f"and no pixels of {kind}"
                raise ValueError(
                    f"has {found} tokens of {kind} (token {placeholders.get(kind)}) in input_ids, {taken}. "
                    "Pass all columns that one call of the processor returns for the text and the images of an "
                    "example, and don't truncate input_ids, which cuts images."
                )


def _configuration(model: Any) -> Any:
    """The configuration of a model, or of the model that it wraps; ValueError for an unknown family or tower."""
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
    """A column of tokens without the axis of a batch of one; ValueError for a batch of several rows."""
    nested = isinstance(values, (list, tuple)) and values and isinstance(values[0], (list, tuple))
    if not nested and getattr(values, "ndim", 1) != 2:
        return values
    if len(values) > 1:
        raise ValueError(
            f"has {len(values)} rows of {name}; pass examples one by one, each as the processor returns it."
        )
    return values[0]
