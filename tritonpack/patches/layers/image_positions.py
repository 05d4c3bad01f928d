"""Positions (time, height, width) that multimodal models make of tokens and images themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonpack.patches.document_places import Documents
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward

METHOD = "get_rope_index"  # transformers' name for it


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
