"""Positions that a layer, or a model of images, counts along the row. Patched models count them in each document."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.patches.packed_batch import IntervalMask, PackedBatch
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.placement import Documents, lay_back


class LocalPositions(InstanceForward):
    """A table of absolute positions that counts along the row. It is looked up by the position in the document."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed_batch = self.context.current.packed_batch
        if packed_batch is None:
            return self.inner(*args, **kwargs)
        module: Any = self.module
        if isinstance(module, nn.Embedding):
            table, places = module.weight, packed_batch.places() + getattr(module, "offset", 0)
        else:
            self.inner(*args, **kwargs)  # extends a sinusoidal table if needed
            counts = hasattr(module, "create_position_ids_from_input_ids")
            ids = self.bound(args, kwargs).get("input_ids") if counts else None
            table, places = module.weights, from_padding(packed_batch, ids, getattr(module, "padding_idx", -1))
        rows = nn.functional.embedding(places, table)
        return _Indexed(rows) if self.name == "RoFormerSinusoidalPositionalEmbedding" else rows


def from_padding(packed_batch: PackedBatch, ids: Tensor | None, padding: int) -> Tensor:
    """Return (B, T) int64, positions in documents as fairseq counts them, from padding + 1.

    If token ids (B, T) are given, padding tokens inside a document aren't counted, and have the position `padding`.
    """
    if ids is None:
        return packed_batch.places() + padding + 1
    real = (ids != padding).long()
    if packed_batch.tree_ends is not None:
        filler = 1 - real  # counted on the path from the root of a tree to each token, this token included
        above = nn.functional.pad(filler, (0, 1)).scatter_add(1, packed_batch.tree_ends.long(), -filler).cumsum(1)
        return (packed_batch.positions() + 1 - above[:, :-1]) * real + padding
    count = real.cumsum(1)
    starts, _ = packed_batch.runs()
    before = torch.where(starts, count - real, 0).cummax(1).values
    return (count - before) * real + padding


class _Indexed:
    """Rows of RoFormer's table. RoFormer adds axes of batch and heads by [None, None]; ours already have a batch."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __getitem__(self, _: Any) -> Tensor:
        return self.rows[:, None]


def temperature(module: nn.Module, mask: IntervalMask) -> Tensor | None:
    """Return (B, 1, T, 1), a query's scale at its place in the document divided by its scale at its place in the row.

    Layers without position embeddings scale queries up along the row in some models. None for all other layers.
    """
    rule = TEMPERATURES.get(type(module).__name__)
    if rule is None or mask.packed_batch is None:
        return None
    places = mask.packed_batch.places()
    in_row = torch.arange(places.shape[1], device=places.device).expand_as(places)
    return (rule(module, places.float() + 1) / rule(module, in_row.float() + 1))[:, None, :, None]


def _llama4(module: Any, counts: Tensor) -> Tensor:
    if module.use_rope or not module.attn_temperature_tuning:
        return torch.ones_like(counts)
    return torch.log1p(torch.floor(counts / module.floor_scale)) * module.attn_scale + 1.0


def _inkling(module: Any, counts: Tensor) -> Tensor:
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return torch.ones_like(counts)
    return 1.0 + config.log_scaling_alpha * torch.log((counts / config.log_scaling_n_floor).clamp(min=1.0))


# Attention layers that scale queries by their place in the row and ignore position ids.
TEMPERATURES = {"Llama4TextAttention": _llama4, "InklingAttention": _inkling}

ROPE_INDEX = "get_rope_index"  # transformers' method that makes positions (time, height, width) of tokens and images


class DocumentPositions(InstanceForward):
    """The method by which a model makes positions of its tokens and images. It runs with each document in its own row.

    The method takes tokens (B, T), the sizes of all images in order, and a mask. It returns positions (n, B, T), and
    the difference between each row's next position and its number of tokens. Waits for the device, like the method.
    """

    attribute = ROPE_INDEX

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        packed_batch, ids = arguments.get("attention_mask"), arguments.get("input_ids")
        if not isinstance(packed_batch, PackedBatch):
            call = self.context.current
            packed_batch = call.packed_batch if call.running else call.outer_batch
        documents = None
        if packed_batch is not None and not packed_batch.cached and ids is not None:
            documents = Documents.of(packed_batch) if ids.shape == packed_batch.tokens else None
        if documents is None:
            return self.inner(**arguments)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.shape[:2] == documents.tokens:
                arguments[name] = documents.cut(value)
        positions, ahead = self.inner(**{**arguments, "attention_mask": documents.inside.long()})
        last = torch.cat([documents.rows[1:] != documents.rows[:-1], documents.rows.new_ones(1, dtype=torch.bool)])
        return torch.stack([lay_back([documents], [axis]) for axis in positions]), ahead[last]


def leave_positions_to_model(packed_batch: PackedBatch, arguments: dict[str, Any]) -> None:
    """Remove two-dimensional position ids from the arguments of a model that makes positions of tokens and images.

    They don't count images, and the documents have already been read from them. They stay if the call has no token ids.
    """
    ids = arguments.get("position_ids")
    own = not packed_batch.cached and arguments.get("input_ids") is not None
    if own and isinstance(ids, Tensor) and ids.ndim == 2 and not packed_batch.shared:
        arguments["position_ids"] = None
