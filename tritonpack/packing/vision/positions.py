"""Positions of three axes (time, height, width) of one example, by the model's own `get_rope_index`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.packing.columns import Columns

METHOD = "get_rope_index"  # transformers' name for it


class ModelPositions:
    """Calls the `get_rope_index` of a model without its weights.

    The method reads the configuration and a few settings of its module. So a second module of its class gets these,
    and no weights, no submodules, and nothing that a patch puts on the model.
    """

    def __init__(self, module: nn.Module) -> None:
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self._module = object.__new__(type(module))
        nn.Module.__init__(self._module)
        for name, value in plain.items():
            if not callable(value) and not isinstance(value, Tensor):
                object.__setattr__(self._module, name, value)
        self._names = tuple(inspect.signature(getattr(self._module, METHOD)).parameters)

    @classmethod
    def of(cls, model: nn.Module) -> ModelPositions:
        """The positions of the part of a model that has the method.

        Raises:
            ValueError: no part has it.
        """
        for module in model.modules():
            if hasattr(type(module), METHOD):
                return cls(module)
        raise ValueError(
            f"{type(model).__name__} has no {METHOD}, by which its family makes positions; pass the whole model."
        )

    def __call__(self, text: Columns, media: Columns, number: int | str) -> Tensor:
        """(3, n) int64, the positions of one example.

        Args:
            text: `input_ids` (n,), and `mm_token_type_ids` (n,) if the example has images or videos.
            media: the columns of its images and videos.
            number: of the example, for messages.

        Raises:
            ValueError: the method fails, or returns positions of another shape.
        """
        ids = text["input_ids"]
        arguments: dict[str, Any] = {"input_ids": ids[None], **media}
        arguments["mm_token_type_ids"] = text.get("mm_token_type_ids", torch.zeros_like(ids))[None]
        try:
            taken = {name: arguments[name] for name in self._names if name in arguments}
            with torch.device("cpu"):  # where the columns lie, whatever the default device is
                positions: Tensor = getattr(self._module, METHOD)(**taken)[0]
            if positions.shape != (3, 1, len(ids)):
                raise ValueError(f"it returned positions of shape {tuple(positions.shape)}")
        except Exception as error:
            raise ValueError(
                f"document {number} has images or videos for which {type(self._module).__name__}.{METHOD} makes no "
                f"positions ({type(error).__name__}: {error}). Pass all columns of one call of the processor."
            ) from error
        return positions[:, 0]
