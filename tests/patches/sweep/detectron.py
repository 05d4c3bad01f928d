"""A stand-in for detectron2, which makes the visual backbone of LayoutLMv2 and must be built from source.

It has the names that transformers' configuration and model of LayoutLMv2 read, and a backbone of one convolution with
the stride and the channels of detectron2's. All else of the model is transformers' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor, nn
from transformers.models.layoutlmv2 import configuration_layoutlmv2, modeling_layoutlmv2
from transformers.utils import import_utils

NOTE = "its visual backbone was a stand-in for detectron2's"
# Model types that are built with the stand-in, also where detectron2 is installed: under the weights that the sweep
# draws, the features of its 101 layers would be infinite.
TYPES = ("layoutlmv2",)

CHANNELS, STRIDE = 256, 4  # of the feature that the model reads, "p2", in detectron2's own configuration


class FPN(nn.Module):
    """A backbone that turns (B, 3, H, W) into {"p2": (B, CHANNELS, H / STRIDE, W / STRIDE)}."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, CHANNELS, STRIDE, stride=STRIDE, bias=False)

    def output_shape(self) -> dict[str, Any]:
        return {"p2": SimpleNamespace(channels=CHANNELS, stride=STRIDE)}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"p2": self.convolution(x).relu()}


class GeneralizedRCNN(nn.Module):
    """A detector; the model uses its backbone alone."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.backbone = FPN()


class _Settings(SimpleNamespace):
    """Settings that create their groups on access, as in `settings.MODEL.RPN.SIZE = 3`."""

    def __getattr__(self, name: str) -> _Settings:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, group := _Settings())
        return group


def _settings() -> _Settings:
    model = _Settings(META_ARCHITECTURE="GeneralizedRCNN", PIXEL_MEAN=[103.53, 116.28, 123.675])
    return _Settings(MODEL=model)


REGISTRY = {"GeneralizedRCNN": GeneralizedRCNN}
DETECTRON2 = SimpleNamespace(
    config=SimpleNamespace(get_cfg=_settings),
    layers=SimpleNamespace(FrozenBatchNorm2d=nn.BatchNorm2d),
    modeling=SimpleNamespace(META_ARCH_REGISTRY=REGISTRY, backbone=SimpleNamespace(FPN=FPN)),
)


@contextlib.contextmanager
def stand_in(model_type: str) -> Iterator[None]:
    """Let transformers find the stand-in where it reads detectron2, while a model of a type that needs it is built.

    The names are set in transformers' two modules: they looked for detectron2 when they were imported, and what
    transformers found of a library is cached.
    """
    with contextlib.ExitStack() as stack:
        if model_type in TYPES:
            found = {"detectron2": (lambda: True, "")}
            stack.enter_context(mock.patch.dict(import_utils.BACKENDS_MAPPING, found))
            for module in (configuration_layoutlmv2, modeling_layoutlmv2):
                stack.enter_context(mock.patch.object(module, "detectron2", DETECTRON2, create=True))
            stack.enter_context(mock.patch.object(modeling_layoutlmv2, "META_ARCH_REGISTRY", REGISTRY, create=True))
        yield
