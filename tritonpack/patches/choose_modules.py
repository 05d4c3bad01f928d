"""Chooses the modules to patch and the forwards of layers, or refuses the model with the reason."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from tritonpack.backends import Backend
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import families
from tritonpack.patches.configurations import is_bidirectional
from tritonpack.patches.forwards import takes_dense_mask, takes_tokens_and_mask
from tritonpack.patches.interface import takes_sdpa
from tritonpack.patches.layers.attention import DocumentMask, EncoderAttention, FalconAttention
from tritonpack.patches.layers.embeddings import EsmEmbeddings
from tritonpack.patches.layers.mixers import Capabilities, DocumentByDocument
from tritonpack.patches.layers.positions import LocalPositions
from tritonpack.patches.modules import holds, models_in, modules_in, paths_of
from tritonpack.patches.parts import InstanceForward, PackingContext
from tritonpack.patches.proof import refuse_layers_in_trees

ON_PADDED_ROWS = "Train it on padded rows, unpatched."


class Options(NamedTuple):
    """The options of `patch`."""

    attention: str = "tritonpack"
    backend: Backend = "auto"
    unpad: bool = False
    share_prefixes: bool = False

    def __str__(self) -> str:
        chosen = {name: value for name, value in self._asdict().items() if value != Options._field_defaults[name]}
        return ", ".join(f"{name}={value!r}" for name, value in chosen.items()) or "the defaults"


def choose_modules(model: nn.Module, options: Options) -> list[PreTrainedModel]:
    """Return the modules to patch, the outermost first. The model isn't changed.

    The reason of a family is reported first, because it says more than a missing argument.

    Raises:
        UnsupportedModelError: documents can't be packed; the message says why.
    """
    for module in models_in(model):
        if why := families.REFUSED.get(type(module).__name__) or families.REFUSED.get(module.config.model_type):
            raise UnsupportedModelError(f"{_named(module)} can't be packed exactly: {why}. {ON_PADDED_ROWS}")
    modules = _modules(model)
    for module in modules:
        _require_maskable(module, modules, options)
    for layer in modules_in(model):
        kind = type(layer).__name__
        if why := families.REFUSED_LAYERS.get(kind):
            (path,) = paths_of([layer], model)
            raise UnsupportedModelError(f"{path} ({kind}) can't be packed exactly: {why}. {ON_PADDED_ROWS}")
    if options.share_prefixes:
        refuse_layers_in_trees(model)
    return modules


def _require_maskable(module: PreTrainedModel, modules: list[PreTrainedModel], options: Options) -> None:
    """Refuse a module in which a mask can't keep documents apart with these options."""
    names = inspect.signature(module.forward).parameters
    mixes = "encoder_hidden_states" in names and "encoder_attention_mask" not in names
    if mixes and module.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{_named(module)} takes no mask for its cross-attention, which would mix documents. "
            f"{ON_PADDED_ROWS.rstrip('.')}, or patch its decoder alone."
        )
    typed = any(other.config.model_type in families.PROMPT_TYPES and holds(other, module) for other in modules)
    if module.config.model_type in families.BOTH_WAYS and is_bidirectional(module.config) and not typed:
        raise UnsupportedModelError(
            f"{type(module).__name__} with use_bidirectional_attention sees both directions in a batch without padding "
            "and one direction in a batch with padding, so results of packed rows aren't defined. Set it to False, or "
            "train on one document in each row, unpatched."
        )
    if getattr(module, "attention_type", None) == "block_sparse":
        raise UnsupportedModelError(
            f"{type(module).__name__} with attention_type='block_sparse' attends in blocks that are counted from the "
            "beginning of the row. Call model.set_attention_type('original_full') before you patch it."
        )
    dense = takes_dense_mask(module)
    if options.attention == "sdpa" and not takes_sdpa(module) and not dense:
        what = "sdpa" if not module._supports_sdpa else "sdpa with its softcap"
        raise UnsupportedModelError(f"{_named(module)} doesn't support {what}; use attention='eager' or 'tritonpack'.")
    if not (options.unpad or options.share_prefixes):
        return
    for applies, why in (
        (dense, "takes a dense mask, whose memory grows with the square of the row length"),
        (module.config.is_encoder_decoder, "is an encoder with a decoder, whose rows form pairs"),
        (families.ONE_DOCUMENT_A_ROW.fullmatch(type(module).__name__), "makes one vector of each row"),
    ):
        if applies:
            raise UnsupportedModelError(
                f"{_named(module)} {why}. unpad and share_prefixes would put all tokens of a batch into one row; leave "
                "both out."
            )


def _named(module: PreTrainedModel) -> str:
    return f"{type(module).__name__} (model type {module.config.model_type!r})"


def takes_text(model: PreTrainedModel) -> bool:
    """Return whether a model in this one takes tokens, or embeddings of tokens and a mask. Towers of images don't."""
    ids, models = {"input_ids", "decoder_input_ids"}, models_in(model)
    return any(takes_tokens_and_mask(m) or ids & {*inspect.signature(type(m).forward).parameters} for m in models)


def _modules(model: nn.Module) -> list[PreTrainedModel]:
    """Return the modules that take tokens and an attention mask, the outermost first.

    Heads are left out, because they pass both on to the model inside, and torch.compile runs the hooks of the outermost
    module outside of its graph.
    """
    models = models_in(model)
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    takes_tokens = [module for module in models if takes_tokens_and_mask(module)]

    def is_head(module: PreTrainedModel) -> bool:
        head = module.base_model is not module or module.get_output_embeddings() is not None
        return head and any(other is not module and holds(module, other) for other in takes_tokens)

    modules = [module for module in takes_tokens if not is_head(module)]
    if not modules:
        raise UnsupportedModelError(
            f"{_named(models[0])} takes no attention_mask, so its documents can't be kept apart. {ON_PADDED_ROWS}"
        )
    return modules


# New forwards of layers, by class.
LAYER_FORWARDS: dict[str, type[InstanceForward]] = {
    "EsmEmbeddings": EsmEmbeddings,
    "FalconAttention": FalconAttention,
    "FalconFlashAttention2": FalconAttention,
    "LayoutLMSelfAttention": EncoderAttention,
    "MarkupLMSelfAttention": EncoderAttention,
}


def forward_for(layer: nn.Module, context: PackingContext, capabilities: Capabilities) -> InstanceForward | None:
    """Return the new forward of a layer; None if it keeps its own."""
    name, home = type(layer).__name__, type(layer).__module__.rpartition(".")[2]
    if name in families.MIXERS:
        return DocumentByDocument(layer, context, capabilities)
    if (home, name) in families.OWN_MASKS:
        return DocumentMask(layer, context, families.OWN_MASKS[home, name])
    kind = LocalPositions if name in families.POSITION_TABLES else LAYER_FORWARDS.get(name)
    return None if kind is None else kind(layer, context)
