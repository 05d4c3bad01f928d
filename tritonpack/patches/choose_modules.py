"""Chooses the modules of a model to patch, and the forwards of layers, or refuses the model with the reason."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from tritonpack.backends import Backend
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.configurations import is_bidirectional
from tritonpack.patches.families import (
    BOTH_WAYS,
    MIXERS,
    ONE_DOCUMENT_A_ROW,
    OWN_MASKS,
    POSITION_TABLES,
    PROMPT_TYPES,
    REFUSED,
    REFUSED_LAYERS,
)
from tritonpack.patches.forwards import takes_dense_mask, takes_tokens_and_mask
from tritonpack.patches.interface import takes_sdpa
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention, FalconAttention
from tritonpack.patches.layers.embeddings import EsmEmbeddings, MobileBertEmbeddings
from tritonpack.patches.layers.mixers import Capabilities, DocumentByDocument
from tritonpack.patches.layers.positions import LocalPositions
from tritonpack.patches.layers.routers import NllbMoeRouter, SwitchRouter
from tritonpack.patches.parts import InstanceForward, PackingContext
from tritonpack.patches.proof import refuse_layers_in_trees
from tritonpack.patches.report import holds


class Options(NamedTuple):
    """What a user asked `patch` for."""

    attention: str = "tritonpack"
    backend: Backend = "auto"
    unpad: bool = False
    share_prefixes: bool = False

    def __str__(self) -> str:
        chosen = {name: value for name, value in self._asdict().items() if value != Options._field_defaults[name]}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items()) or "the defaults"


def choose_modules(model: nn.Module, asked: Options) -> list[PreTrainedModel]:
    """The modules to patch, the outermost first. Nothing is changed.

    Raises:
        UnsupportedModelError: documents can't be packed; the message says why.
    """
    modules = _supported_modules(model, asked.attention)
    if asked.unpad or asked.share_prefixes:
        _require_one_row(modules)
    if asked.share_prefixes:
        refuse_layers_in_trees(model)
    return modules


def _require_one_row(modules: list[PreTrainedModel]) -> None:
    """Refuse modules for which one row of all tokens of a batch costs more than the batch, or isn't exact."""
    for module in modules:
        kind = f"{type(module).__name__} (model type {module.config.model_type!r})"
        if takes_dense_mask(module):
            raise UnsupportedModelError(
                f"{kind} takes a dense mask, which grows with the square of a row. unpad and share_prefixes would put "
                "all tokens of a batch into one row; leave both out."
            )
        if module.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{kind} is an encoder with a decoder, whose rows belong together in pairs. unpad and share_prefixes "
                "take no such pairs apart; leave both out."
            )
        if ONE_DOCUMENT_A_ROW.fullmatch(type(module).__name__):
            raise UnsupportedModelError(
                f"{kind} makes one vector of each row, and unpad and share_prefixes would put all documents of a batch "
                "into one row; leave both out."
            )


def tokens_enter(model: PreTrainedModel) -> bool:
    """Whether some module of a model takes tokens, or embeddings of tokens and a mask. Towers of images don't."""
    return any(takes_tokens_and_mask(one) or _takes_tokens(one) for one in _models(model))


def _models(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _takes_tokens(module: PreTrainedModel) -> bool:
    names = inspect.signature(type(module).forward).parameters
    return not {"input_ids", "decoder_input_ids"}.isdisjoint(names)


def _modules(model: nn.Module) -> list[PreTrainedModel]:
    """The modules that take tokens and an attention mask, outermost first.

    Heads are left out: they pass both on to the model inside, and torch.compile runs the hooks of the outermost module
    outside of its graph.
    """
    models = _models(model)
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    takes_tokens = [module for module in models if takes_tokens_and_mask(module)]

    def is_head(module: PreTrainedModel) -> bool:
        head = module.base_model is not module or module.get_output_embeddings() is not None
        return head and any(other is not module and holds(module, other) for other in takes_tokens)

    modules = [module for module in takes_tokens if not is_head(module)]
    if not modules:
        raise UnsupportedModelError(
            f"{type(models[0]).__name__} (model type {models[0].config.model_type!r}) takes no attention_mask, so "
            "nothing can tell it where documents begin. Train it on padded rows, unpatched."
        )
    return modules


def _supported_modules(model: nn.Module, attention: str) -> list[PreTrainedModel]:
    """The modules to patch. Nothing is changed before a refusal.

    The reason of a family comes first: it says more than what its modules lack.
    """
    for module in _models(model):
        if why := REFUSED.get(module.config.model_type):
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {module.config.model_type!r}) can't be packed exactly: {why}. "
                "Train it on padded rows, unpatched."
            )
    modules = _modules(model)
    for module in modules:
        kind = module.config.model_type
        names = inspect.signature(module.forward).parameters
        meets = "encoder_hidden_states" in names and "encoder_attention_mask" not in names
        if meets and getattr(module.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {kind!r}) takes no mask for its cross-attention, so documents "
                "would not be told apart there. Train it on padded rows, unpatched; decoders by themselves "
                "can be patched."
            )
        typed = any(other.config.model_type in PROMPT_TYPES and holds(other, module) for other in modules)
        if kind in BOTH_WAYS and is_bidirectional(module.config) and not typed:
            raise UnsupportedModelError(
                f"{type(module).__name__} with use_bidirectional_attention sees both directions in a batch without "
                "padding and one in a batch with it, so there is nothing to be equal to. Set it to False, or train on "
                "one document per row, unpatched."
            )
        if getattr(module, "attention_type", None) == "block_sparse":
            raise UnsupportedModelError(
                f"{type(module).__name__} with attention_type='block_sparse' attends in blocks that are counted from "
                "the beginning of the row. Call model.set_attention_type('original_full') before you patch it."
            )
        if attention == "sdpa" and not takes_sdpa(module) and not takes_dense_mask(module):
            what = "sdpa" if not module._supports_sdpa else "sdpa with its softcap"
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {kind!r}) doesn't support {what}; use attention='eager' or "
                "'tritonpack'."
            )
    for path, layer in model.named_modules():
        name = type(layer).__name__
        if why := REFUSED_LAYERS.get(name):
            raise UnsupportedModelError(
                f"{path} ({name}) can't be packed exactly: {why}. Train it on padded rows, unpatched."
            )
        if not fits(layer):
            raise UnsupportedModelError(
                f"{path} ({name}) takes other arguments in this version of transformers than in the version that its "
                "forward was rewritten for."
            )
    return modules


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
