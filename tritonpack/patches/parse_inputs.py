"""Reading a packing from the arguments of a forward pass, which may contradict each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritonpack.checks import require
from tritonpack.masks.block_diagonal import changes
from tritonpack.patches.mask_spec import MaskSpec
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving, shown
from tritonpack.patches.tensor_like import TensorLike


class OpenMaskError(ValueError):
    """A mask of which nobody has said where its documents are."""


@dataclass(frozen=True, eq=False)
class OpenMask(TensorLike):
    """A mask that transformers made outside of a patched model's forward pass: it doesn't know the documents yet.

    generate() prepares such masks before it calls the model, and a model whose attention has our name without having
    been patched gets one. `claim` turns it into the mask of a packing.
    """

    attention_mask: Tensor | None
    shape: torch.Size
    query_offset: int | Tensor
    key_offset: int
    spec: MaskSpec
    where: torch.device
    dtype: torch.dtype = torch.bool
    claimed: list[IntervalMask] = field(default_factory=list)  # one at most

    @property
    def device(self) -> torch.device:
        return self.where

    def to(self, *_: Any, **__: Any) -> OpenMask:
        return self

    def to_tensor(self) -> Tensor:
        raise OpenMaskError(
            "this model's attention has tritonpack's name but the model isn't patched, so packed documents would not "
            "be told apart. Call tritonpack.patch(model), or give it a config of its own."
        )

    def claim(self, arguments: dict[str, Any], serving: Serving) -> IntervalMask:
        """The mask for a call with these arguments; the same one for every layer that asks."""
        if not self.claimed:
            batch, _, queries, keys = self.shape
            told = {**arguments, "attention_mask": self.attention_mask}
            packed_batch = make_packed_batch(told, torch.Size((batch, queries)), self.where, serving)
            self.claimed.append(packed_batch.interval_mask(keys, self.query_offset, self.key_offset, self.spec))
        return self.claimed[0]


def make_packed_batch(
    arguments: dict[str, Any],
    tokens: torch.Size,
    device: torch.device,
    serving: Serving,
    pad_token: int | None = None,
) -> PackedBatch:
    """The packing of a forward pass over tokens of shape (B, T), from the arguments it was called with.

    Documents are told apart by `cu_seq_lens_q` (FlashAttention's offsets over the flattened tokens), else `seq_idx`
    ((B, T) document numbers), else where `position_ids` don't ascend by one. A two-dimensional `attention_mask` marks
    padding by 0, and may number documents. Without one, `pad_token` tells what is padding (see
    `PackedBatch.not_padding`).

    Raises:
        ValueError: arguments that contradict each other or the tokens.
    """
    mask = arguments.get("attention_mask")
    if mask is not None:
        if mask.is_floating_point():  # PEFT's virtual tokens make it so
            require(
                ((mask >= 0) & (mask == mask.round())).all(),
                "attention_mask must hold whole numbers, 0 for padding; got others. A mask to be added to scores isn't "
                "supported.",
            )
        mask = mask.to(device=device, dtype=torch.int32)
    position_ids = arguments.get("position_ids")
    if position_ids is not None:
        position_ids = position_ids.to(device)
    boundaries, name = _boundaries(arguments, tokens, device)
    ids = arguments.get("input_ids")
    filler = None
    if mask is None and pad_token is not None and isinstance(ids, Tensor) and ids.shape == tokens:
        filler = ids == pad_token
    packed_batch = PackedBatch(mask, position_ids, boundaries, tokens, device, serving, filler=filler)
    if position_ids is not None and position_ids.ndim < 3:
        if boundaries is not None:
            _require_agreement(packed_batch, boundaries, name)
        if mask is not None and mask.shape == tokens:
            numbered = changes(mask) & (mask != 0)
            numbered[:, 1:] &= mask[:, :-1] != 0
            _require_agreement(packed_batch, numbered, "attention_mask", also=True)
    return packed_batch


def _require_agreement(packed_batch: PackedBatch, boundaries: Tensor, name: str, *, also: bool = False) -> None:
    """Position ids must restart exactly where documents begin; padding may be counted as it likes.

    With `also`, documents may begin where position ids say so and `boundaries` don't.
    """
    positions = packed_batch.position_ids
    assert positions is not None
    told = packed_batch._position_starts()
    told[:, :1] = boundaries[:, :1]
    zeros = (positions == 0).expand(packed_batch.tokens)
    padding = zeros & torch.cat([zeros[:, :1], zeros[:, :-1]], dim=1)  # collators fill up with zeros
    if packed_batch.attention_mask is not None and packed_batch.attention_mask.shape == packed_batch.tokens:
        padding = padding | (packed_batch.attention_mask == 0)
    differ = (boundaries & ~told if also else told != boundaries) & ~padding
    require(
        ~differ.any(),
        lambda: (
            f"{name} and position_ids contradict each other"
            f"{shown(differ, positions.expand(packed_batch.tokens), boundaries)}: by {name} documents begin at "
            f"{_places(boundaries)}, by position_ids at {_places(told)}. Let positions restart where a document "
            "begins, or leave one of the two out."
        ),
    )


def _places(starts: Tensor) -> str:
    if starts.device.type != "cpu":
        return "other places"
    places = starts.flatten().nonzero().flatten().tolist()
    return ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")


def _boundaries(arguments: dict[str, Any], shape: torch.Size, device: torch.device) -> tuple[Tensor | None, str]:
    """Where documents begin, as (B, T) bool, and the name of the argument that said so."""
    cu_q, cu_k = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    seq_idx = arguments.get("seq_idx")
    if cu_q is not None:
        total = shape.numel()
        if cu_k is not None and cu_k is not cu_q:
            differ = "cu_seq_lens_q and cu_seq_lens_k differ; in self-attention they are the same."
            if cu_q.shape != cu_k.shape:
                raise ValueError(differ)
            require((cu_q == cu_k).all(), differ)
        require(
            (cu_q[0] == 0) & (cu_q[-1] == total) & (cu_q[1:] >= cu_q[:-1]).all(),
            lambda: (
                f"cu_seq_lens_q must begin with 0, never decrease and end with the number of tokens, {total} "
                f"({shape[0]} x {shape[1]}){f'; got {cu_q.tolist()!r:.200}' if cu_q.device.type == 'cpu' else ''}."
            ),
        )
        starts = torch.zeros(total + 1, dtype=torch.bool, device=device)
        starts[cu_q.to(device=device, dtype=torch.long)] = True
        starts, name = starts[:-1].view(shape), "cu_seq_lens_q"
    elif isinstance(seq_idx, Tensor):
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)} but the tokens have {tuple(shape)}.")
        starts, name = changes(seq_idx.to(device)), "seq_idx"
    else:
        return None, ""
    starts[:, :1] = True
    return starts, name
