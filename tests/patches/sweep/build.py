"""Build a tiny random model of any class, with a configuration by the zoo's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.layoutlmv2 import modeling_layoutlmv2

from tests.patches import zoo
from tests.patches.sweep.classes import Case, load
from tests.patches.zoo import PARTS, part_of, spread
from tritonpack.patches.interface import use_eager_if_sdpa_differs

LABELS = 3  # of classification
TWO = ("QUESTION", "PRETRAINING", "NEXT_SENTENCE")  # mappings whose heads have two of their own


class NotBuiltError(Exception):
    """No model of a class can be built; the message says why."""


def build(case: Case, *, dtype: torch.dtype = torch.float64, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build a tiny random model of a class, in evaluation mode, with the same weights in every call.

    Raises:
        NotBuiltError: with the reason.
    """
    cls = load(case)
    if why := zoo.UNBUILT.get(case.model_type):
        raise NotBuiltError(why)
    try:
        config = _fit(_config(case), cls)
        torch.manual_seed(0)  # a few parts draw their constants at construction
        with zoo.without_timm(), without_detectron2():
            model = cls._from_config(config, experts_implementation="eager", attn_implementation=attn_implementation)
    except Exception as error:
        if attn_implementation == "tritonpack" and isinstance(error, ValueError) and "tritonpack" in str(error):
            raise
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]) from error
    use_eager_if_sdpa_differs(model)
    spread(model, torch.Generator().manual_seed(0))
    return model.to(dtype).eval()


class VisualBackbone(nn.Module):
    """A stand-in for the backbone of LayoutLMv2 in detectron2, which must be built from source.

    Under the weights that the sweep draws, the features of its own 101 layers would be infinite.
    """

    cfg = SimpleNamespace(MODEL=SimpleNamespace(PIXEL_MEAN=[0.0] * 3, PIXEL_STD=[1.0] * 3))

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 256, 4, stride=4, bias=False)
        self.pool = nn.AdaptiveAvgPool2d(config.image_feature_pool_shape[:2])
        for name in ("pixel_mean", "pixel_std"):
            self.register_buffer(name, torch.zeros(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.convolution(images).relu()).flatten(2).mT


@contextlib.contextmanager
def without_detectron2() -> Iterator[None]:
    replaced = {"LayoutLMv2VisualBackbone": VisualBackbone, "detectron2": mock.MagicMock()}
    replaced["detectron2"].layers.FrozenBatchNorm2d = nn.BatchNorm2d
    with mock.patch.multiple(modeling_layoutlmv2, **replaced, requires_backends=mock.DEFAULT, create=True):
        yield


def overrides(case: Case) -> dict[str, Any]:
    """Return the fields that a head requires of its configuration."""
    head = {"num_labels": 2 if any(part in m for m in case.mappings for part in TWO) else LABELS}
    row = zoo.ROWS.get(case.model_type, {})
    if case.name == "T5GemmaEncoderModel":
        head["is_encoder_decoder"] = False
    if "is_decoder" in row and "CAUSAL_LM" not in case.mappings:
        head["is_decoder"] = False
    return head


def _config(case: Case) -> Any:
    if case.name == "JevForDecision" and case.model_type != "jev":  # a head around any model
        config = zoo.tiny_config("jev")
        config.text_config = zoo.tiny_config(case.model_type)
        return config
    return zoo.tiny_config(case.model_type, **overrides(case))


def _fit(config: Any, cls: Any) -> Any:
    """Return the configuration, or the part of it, that a class takes."""
    wanted = cls.config_class
    if config.model_type in PARTS and isinstance(part_of(config), wanted):
        return part_of(config)
    if isinstance(config, wanted):
        return config
    for name in config.sub_configs or {}:
        part = getattr(config, name, None)
        if isinstance(part, wanted):
            return part
    return config
