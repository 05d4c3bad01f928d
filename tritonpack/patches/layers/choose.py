"""Which layers get a forward of their own, and which forward."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from tritonpack.patches.families import MIXERS, OWN_MASKS, POSITION_TABLES
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention, FalconAttention
from tritonpack.patches.layers.embeddings import EsmEmbeddings, MobileBertEmbeddings
from tritonpack.patches.layers.mixers import Capabilities, DocumentByDocument
from tritonpack.patches.layers.positions import LocalPositions
from tritonpack.patches.layers.routers import NllbMoeRouter, SwitchRouter
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parts import InstanceForward

# Layers whose forward is rewritten. Its arguments must have the names that they have in transformers.
REWRITTEN: dict[str, type[InstanceForward]] = {
    "EsmEmbeddings": EsmEmbeddings,
    "FalconAttention": FalconAttention,
    "FalconFlashAttention2": FalconAttention,
    "LayoutLMSelfAttention": EncoderAttention,
    "MarkupLMSelfAttention": EncoderAttention,
    "MobileBertEmbeddings": MobileBertEmbeddings,
    "NllbMoeTop2Router": NllbMoeRouter,
    "SwitchTransformersTop1Router": SwitchRouter,
}


def forward_for(layer: nn.Module, context: PackingContext, capabilities: Capabilities) -> InstanceForward | None:
    """The forward that a layer gets; None if it keeps its own."""
    name, home = type(layer).__name__, type(layer).__module__.rpartition(".")[2]
    if name in POSITION_TABLES:
        return LocalPositions(layer, context)
    if name in MIXERS:
        return DocumentByDocument(layer, context, capabilities)
    if name in REWRITTEN:
        return REWRITTEN[name](layer, context)
    if (home, name) in OWN_MASKS:
        return DocumentMask(layer, context, OWN_MASKS[home, name])
    return None


def fits(module: Any) -> bool:
    """Whether a rewritten layer's forward takes the arguments that our forward expects.

    They may differ in another version of transformers. True for layers that are not rewritten.
    """
    rewritten = REWRITTEN.get(type(module).__name__)
    if rewritten is None:
        return True
    forwards = type(module).forward, rewritten.call
    theirs, ours = (list(inspect.signature(forward).parameters) for forward in forwards)
    return theirs == ours
