"""VisionPackingCollator: makes one row of the outputs of an image-text processor, example by example."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tritonpack.packing.collator import (
    IGNORED_LABEL,
    LABELS,
    MASK,
    PER_TOKEN,
    Columns,
    PackingCollator,
    as_tensor,
    quote,
    read_feature,
    read_features,
)
from tritonpack.packing.lengths import TOKENS
from tritonpack.packing.vision.families import FAMILIES, IMAGES, VIDEOS, Column, Family
from tritonpack.removed import refuse_attributes, refuse_removed

_INSTEAD = "Use the processor's own collator with batches of one example a row; a patched model takes them, too."
_CODES = {IMAGES: 1, VIDEOS: 2}  # of the tokens of a modality in `mm_token_type_ids`
MediaOf = dict[str, Columns]  # of an example: the columns of its images, and of its videos
_ROPE = "get_rope_index"  # transformers' name for the method that makes positions of three axes
_TEXT = (TOKENS, LABELS, MASK, *PER_TOKEN)


@refuse_attributes
class VisionPackingCollator:
    """Packs examples with images and videos into one row, as PackingCollator packs text.

    An example is what the model's processor returns for one conversation, with its pixels as they are: `pixel_values`
    have one row for each image or patch, not for each example. A first axis of size 1 is taken off a column that has
    one axis too many (the `input_ids` of `return_tensors="pt"`). Columns that are None or empty count as absent.

    | column | in the batch |
    |---|---|
    | `input_ids`, `labels`, `mm_token_type_ids` and other columns of tokens | as PackingCollator makes them |
    | columns of images and videos | joined along images or patches, padded where the model leaves padding out |
    | `position_ids` | made. Models with positions of three axes get four rows: the place in the document, and what \
their `get_rope_index` returns for the document alone |

    If no example has labels, they are made from the input ids, -100 for the tokens of images and videos, and for the
    prompts of PaliGemma. Types of tokens that the model reads (`mm_token_type_ids`, Gemma 3's `token_type_ids`) are
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
        self, model: Any, pad_to_multiple_of: int | None = None, pad_token_id: int = 0, per_token: None = None,
        **removed: Any,
    ) -> None:  # fmt: skip
        refuse_removed(removed if per_token is None else ["per_token="], "VisionPackingCollator")
        self._text = PackingCollator(pad_to_multiple_of, pad_token_id)
        self._config = _configuration(model)
        self.model_type: str = self._config.model_type
        self._placeholders = {kind: getattr(self._config, part.token) for kind, part in self.family.parts.items()}
        if pad_token_id in self._placeholders.values():
            raise ValueError(f"pad_token_id={pad_token_id} is the token of images or videos of this model.")
        self._positions = _ModelPositions(model) if self.family.own_positions else None

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
                other, or what PackingCollator refuses, with the document and the column.
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
        return batch | _join_media(self.family, media)

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
        media = _read_media(self.family, example)
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
                    f"has {found} tokens of {kind} (token {placeholders.get(kind)}) in input_ids, {taken}. Pass all "
                    "columns of one call of the processor, and don't truncate input_ids, which cuts images."
                )


def _configuration(model: Any) -> Any:
    """The configuration of a model, or of the model that it wraps; ValueError for an unknown family or tower."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be the image-text model that gets the batches, a module; got {type(model).__name__}."
        )
    configs = (getattr(module, "config", None) for module in model.modules())
    config = next((one for one in configs if isinstance(getattr(one, "model_type", None), str)), None)
    if config is None or config.model_type not in FAMILIES:
        named = "a model without a configuration" if config is None else f"model type {config.model_type!r}"
        raise ValueError(f"VisionPackingCollator doesn't know {named}; it knows {', '.join(FAMILIES)}. {_INSTEAD}")
    towers, tower = FAMILIES[config.model_type].towers, config.vision_config.model_type
    if towers and tower not in towers:
        raise ValueError(
            f"VisionPackingCollator doesn't know {config.model_type} with the vision tower {tower!r}, and how many "
            f"tokens an image takes; it knows {', '.join(towers)}. {_INSTEAD}"
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


def _read_media(family: Family, example: Mapping[str, Any]) -> MediaOf:
    """The columns of the images and of the videos of an example, without those that hold nothing, checked."""
    media: MediaOf = {}
    for kind, part in family.parts.items():
        found = {
            name: _read_column(example[name], name, part.columns[name]) for name in part.columns if name in example
        }
        found = {name: tensor for name, tensor in found.items() if tensor.numel()}
        if not found:
            continue
        if absent := [name for name, column in part.columns.items() if not column.optional and name not in found]:
            raise ValueError(
                f"has {next(iter(found))!r} but no {quote(absent)}; pass all columns that the processor returns."
            )
        sizes: dict[str, dict[str, int]] = {}
        for name, tensor in found.items():
            for axis, size in zip(part.columns[name].axes, tensor.shape, strict=True):
                sizes.setdefault(axis, {})[name] = size
        for axis, of_columns in sizes.items():
            if len(set(of_columns.values())) > 1:
                raise ValueError(f"has columns of different numbers of {axis}: {of_columns}; pass one call's.")
        media[kind] = found
    return media


def _read_column(values: Any, name: str, column: Column) -> Tensor:
    """A column as a tensor with the axes of one example, or without elements."""
    axes = ", ".join(column.axes)
    tensor = as_tensor(values, name, f"an array with the axes ({axes}), as return_tensors='pt' makes it,")
    if tensor.ndim == len(column.axes) + 1 and len(tensor) == 1:
        tensor = tensor[0]
    wanted = [
        int(axis[0]) if axis[0].isdigit() else size for axis, size in zip(column.axes, tensor.shape, strict=False)
    ]
    if tensor.numel() and (tensor.ndim != len(column.axes) or [*tensor.shape] != wanted):
        raise ValueError(
            f"has {name} of shape {tuple(tensor.shape)}; it takes ({axes}), as the processor returns it for one "
            "example. Don't take [0] of it or squeeze it."
        )
    return tensor


def _join_media(family: Family, media: Sequence[tuple[str, MediaOf]]) -> Columns:
    """The columns of images and videos of all examples, each after its name, as the model takes them for one row."""
    joined: Columns = {}
    for kind, part in family.parts.items():
        of_kind = [(document, own[kind]) for document, own in media if kind in own]
        for name, column in part.columns.items():
            having = [(document, own[name]) for document, own in of_kind if name in own]
            if not having:
                continue
            if len(having) < len(of_kind):
                raise ValueError(
                    f"{having[0][0]} has {name!r} and another hasn't; give all with {kind} the same columns."
                )
            values = [value for _, value in having]
            first = values[0]
            fixed = [axis for axis in range(1, first.ndim) if axis not in column.padded]
            for (document, _), one in zip(having, values, strict=True):
                if one.dtype != first.dtype or any(one.shape[axis] != first.shape[axis] for axis in fixed):
                    size = f" and one size of {' and '.join(column.axes[axis] for axis in fixed)}" if fixed else ""
                    raise ValueError(
                        f"{name} is {one.dtype} of shape {tuple(one.shape)} in {document} and {first.dtype} of shape "
                        f"{tuple(first.shape)} in {having[0][0]}; the model takes one dtype{size} in a call. Pack "
                        "such examples in different rows."
                    )
            for axis in column.padded:
                most = max(one.shape[axis] for one in values)
                values = [pad(one, [0, 0] * (one.ndim - 1 - axis) + [0, most - one.shape[axis]]) for one in values]
            row = torch.cat(values)
            joined[name] = row[None] if column.of_rows else row
    return joined


class _ModelPositions:
    """Positions of three axes (time, height, width) of one example, by the model's own `get_rope_index`, which runs on
    a second module of its class, without weights, submodules and what a patch puts on the model."""

    def __init__(self, model: nn.Module) -> None:
        module = next((each for each in model.modules() if hasattr(type(each), _ROPE)), None)
        if module is None:
            raise ValueError(f"{type(model).__name__} has no {_ROPE}, which makes positions; pass the whole model.")
        self._module = object.__new__(type(module))
        nn.Module.__init__(self._module)
        for name, value in vars(module).items():
            if not name.startswith("_") and not callable(value) and not isinstance(value, Tensor):
                object.__setattr__(self._module, name, value)
        self._names = tuple(inspect.signature(getattr(self._module, _ROPE)).parameters)

    def __call__(self, name: str, text: Columns, media: MediaOf) -> Tensor:
        """(3, n) int64 of an example's (n,) tokens and its columns of images and videos; its name is for messages."""
        given = {column: values[None] for column, values in text.items()}
        for columns in media.values():
            given |= columns
        try:
            with torch.device("cpu"):  # where the columns lie, whatever the default device is
                taken = {column: given[column] for column in self._names if column in given}
                positions: Tensor = getattr(self._module, _ROPE)(**taken)[0]
            if positions.shape != (3, *given["input_ids"].shape):
                raise ValueError(f"it returned positions of shape {tuple(positions.shape)}")
        except Exception as error:
            raise ValueError(
                f"{name} has images or videos for which {type(self._module).__name__}.{_ROPE} makes no positions "
                f"({type(error).__name__}: {error}). Pass all columns of one call of the processor."
            ) from error
        return positions[:, 0]
