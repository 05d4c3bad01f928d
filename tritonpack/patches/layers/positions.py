"""Positions that a layer or a model of images counts along the row: patched models count them in each document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.packed_batch import IntervalMask, PackedBatch
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.placement import Documents


class LocalPositions(InstanceForward):
    """A table of absolute positions that counts the tokens of a row: looked up by the place in the document."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed_batch = self.context.current.packed_batch
        if packed_batch is None:
            return self.inner(*args, **kwargs)
        module: Any = self.module
        if isinstance(module, nn.Embedding):
            table, places = module.weight, packed_batch.places() + getattr(module, "offset", 0)
        else:
            self.inner(*args, **kwargs)  # it extends a sinusoidal table if needed
            counts = hasattr(module, "create_position_ids_from_input_ids")
            ids = self.bound(args, kwargs).get("input_ids") if counts else None
            table, places = module.weights, from_padding(packed_batch, ids, getattr(module, "padding_idx", -1))
        found = nn.functional.embedding(places, table)
        return _Indexed(found) if type(self.module).__name__ in ADDS_AXES else found


def from_padding(packed_batch: PackedBatch, ids: Tensor | None, padding: int) -> Tensor:
    """(B, T) int64, places in documents as fairseq counts them: from padding + 1.

    If token ids (B, T) are given, padding tokens inside a document aren't counted, and have the place `padding`.
    """
    if ids is None:
        return packed_batch.places() + padding + 1
    real = (ids != padding).long()
    if packed_batch.tree_ends is not None:
        return (packed_batch.positions() + 1 - _above(1 - real, packed_batch.tree_ends)) * real + padding
    count = real.cumsum(1)
    starts, _ = packed_batch.runs()
    before = torch.where(starts, count - real, 0).cummax(1).values
    return (count - before) * real + padding


def _above(marked: Tensor, ends: Tensor) -> Tensor:
    """(B, T) int64, how many marked tokens lie on the path from the root of a tree to each token, itself included.

    Args:
        marked: (B, T) int64, 0 or 1.
        ends: (B, T), the place after the last token below each token.
    """
    steps = nn.functional.pad(marked, (0, 1))
    return steps.scatter_add(1, ends.long(), -marked).cumsum(1)[:, :-1]


# RoFormer adds the axes of batch and heads to its table's rows, by [None, None]. Ours have a batch already.
ADDS_AXES = ("RoFormerSinusoidalPositionalEmbedding",)


@dataclass(frozen=True)
class _Indexed:
    found: Tensor

    def __getitem__(self, _: Any) -> Tensor:
        return self.found[:, None]


def temperature(module: nn.Module, mask: IntervalMask) -> Tensor | None:
    """(B, 1, T, 1): a query's scale at its place in the document, divided by its scale at its place in the row.

    Layers without positions in models for long contexts scale queries up along the row. None for all other layers.
    """
    rule = TEMPERATURES.get(type(module).__name__)
    if rule is None or mask.packed_batch is None:
        return None
    places = mask.packed_batch.places()
    in_row = torch.arange(places.shape[1], device=places.device).expand_as(places)
    return (rule(module, places) / rule(module, in_row))[:, None, :, None]


def _llama4(module: Any, places: Tensor) -> Tensor:
    if module.use_rope or not module.attn_temperature_tuning:
        return torch.ones(places.shape, dtype=torch.float32, device=places.device)
    return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0


def _inkling(module: Any, places: Tensor) -> Tensor:
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return torch.ones(places.shape, dtype=torch.float32, device=places.device)
    beyond = ((places + 1).float() / config.log_scaling_n_floor).clamp(min=1.0)
    return 1.0 + config.log_scaling_alpha * torch.log(beyond)


# Attention layers whose queries are scaled by their place in the row, whatever position ids the model is given.
TEMPERATURES = {"Llama4TextAttention": _llama4, "InklingAttention": _inkling}

METHOD = "get_rope_index"  # transformers' name: makes positions (time, height, width) of tokens and images


class DocumentPositions(InstanceForward):
    """The method by which a model makes positions of its tokens and images. It runs with each document as a row.

    The method takes tokens (B, T), the sizes of all images in order, and a mask. It returns positions (n, B, T), and
    the difference between each row's next position and its number of tokens. Waits for the device, as the method does.
    """

    attribute = METHOD

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        packed_batch, ids = arguments.get("attention_mask"), arguments.get("input_ids")
        if not isinstance(packed_batch, PackedBatch):
            call = self.context.current
            packed_batch = call.packed_batch if call.running else call.told
        if packed_batch is None or packed_batch.cached or ids is None or ids.shape != packed_batch.tokens:
            return self.inner(**arguments)
        documents = Documents.of(packed_batch)
        if documents is None:
            return self.inner(**arguments)
        rows = {
            name: documents.cut(value) if isinstance(value, Tensor) and value.shape[:2] == documents.tokens else value
            for name, value in arguments.items()
        }
        rows["attention_mask"] = documents.inside.long()
        positions, ahead = self.inner(**rows)
        last = torch.cat([documents.rows[1:] != documents.rows[:-1], documents.rows.new_ones(1, dtype=torch.bool)])
        return torch.stack([documents.lay_back(one) for one in positions]), ahead[last]


def leave_positions_to_model(packed_batch: PackedBatch, arguments: dict[str, Any]) -> None:
    """Remove two-dimensional position ids from the arguments of a model that makes positions of tokens and images.

    They were already read to find documents, and they don't count images. They stay if the call has no tokens.
    """
    given = arguments.get("position_ids")
    own = not packed_batch.cached and arguments.get("input_ids") is not None
    if own and isinstance(given, Tensor) and given.ndim == 2 and not packed_batch.shared:
        arguments["position_ids"] = None
