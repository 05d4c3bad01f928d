"""patch(model) and unpatch(model): hooks on the model and a name in its config; leaving takes both away."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from types import TracebackType
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from tritonpack.attention import Backend
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import interface
from tritonpack.patches.current import Current, HeadForward, InstanceForward, release_checkpoint
from tritonpack.patches.families import DENSE, HEADS, KNOWN, MIXERS, OWN_MASKS, POSITION_TABLES, REFUSED, REFUSED_LAYERS
from tritonpack.patches.hand import HAND_WRITTEN, DocumentMask, fits
from tritonpack.patches.hooks import PackingHook
from tritonpack.patches.mixers import DocumentByDocument, takes_boundaries
from tritonpack.patches.packing import ATTENTIONS, Serving
from tritonpack.patches.positions import LocalPositions
from tritonpack.patches.probe import probe_alone, probe_packed
from tritonpack.patches.report import Report, holds, make_report


class Patch:
    """A patched model; a context manager that unpatches it on leaving, also after an exception."""

    def __init__(self, model: nn.Module, report: Report) -> None:
        self.model = model
        self.report = report

    def unpatch(self) -> None:
        """Restore the model; does nothing if that has been done already."""
        if _hooks(self.model):
            unpatch(self.model)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        return f"Patch({self.report})"


def patch(
    model: nn.Module,
    *,
    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack",
    backend: Backend = "auto",
) -> Patch:
    """Replace a transformers model's attention with varlen attention that keeps packed documents apart.

    Afterwards documents are told apart by whatever says where they begin: `cu_seq_lens_q` or `seq_idx` as collators
    pass them, a two-dimensional `attention_mask` (0 for padding; other numbers number documents), or `position_ids`
    that restart; with or without `use_cache`, in one row or many. Nothing process-wide is replaced and no state
    outlives a forward pass. Patching a patched model again the same way changes nothing.

    Families that the tests show to be exact are patched at once. Any other model is tried on a few tokens first: packed
    documents must equal each alone, and none may move another; what a few tokens can't show (windows longer than they
    are) is for `tritonpack.testing.check_isolation` with longer ones.

    Layers that mix along the row otherwise (recurrences, convolutions) run on each document by itself; a packed batch
    leaves no cache behind in such models. Families whose attention lies outside transformers' interface get a dense
    mask. `Patch.report` says what a model got.

    Args:
        model: a transformers model, or a module that holds one (PEFT's wrappers do).
        attention: "tritonpack" for the kernels; "sdpa" or "eager" keeps transformers' own attention and gives it the
            dense block-diagonal mask, O(T^2) memory.
        backend: of the kernels, as `varlen_attention` takes it: "auto", "triton", "gluon", "blocked" or "reference".

    Returns:
        A handle with `report` and `unpatch()`; as a context manager it unpatches on leaving.

    Raises:
        UnsupportedModelError: (a ValueError) a family that can't be packed exactly; the message says why.
        ValueError: a model that is patched already in another way, or an unknown option.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be 'tritonpack', 'sdpa' or 'eager'; got {attention!r}.")
    if backend not in ("auto", "triton", "gluon", "blocked", "reference"):
        raise ValueError(f"backend must be 'auto', 'triton', 'gluon', 'blocked' or 'reference'; got {backend!r}.")
    if hooks := _hooks(model):
        before = hooks[0][2].asked
        if before != (attention, backend):
            raise ValueError(
                f"this model is patched already, with attention={before[0]!r} and backend={before[1]!r}; call "
                "tritonpack.unpatch(model) first to change that."
            )
        return Patch(model, hooks[0][2].report)
    modules = _supported_modules(model, attention)
    interface.register()
    known = all(module.config.model_type in KNOWN for module in modules)
    alone = None if known else probe_alone(model)
    handle = Patch(model, _apply(model, modules, attention, backend))
    if alone is not None:
        try:
            probe_packed(model, alone)
        except UnsupportedModelError:
            handle.unpatch()
            raise
    return handle


def unpatch(model: nn.Module) -> None:
    """Give a patched model its own attention back.

    Raises:
        ValueError: the model isn't patched.
    """
    found = _hooks(model)
    if not found:
        raise ValueError("this model isn't patched; tritonpack.patch(model) does that.")
    for module, key, hook in found:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
        for after, function in list(module._forward_hooks.items()):
            if getattr(function, "__self__", None) is hook:
                del module._forward_hooks[after]
                module._forward_hooks_always_called.pop(after, None)
        _release(module.config, hook.replaced)
    for inner in model.modules():
        release_checkpoint(inner)
        forward = inner.__dict__.get("forward")
        if isinstance(forward, InstanceForward):
            forward.remove()


def _modules(model: nn.Module) -> list[PreTrainedModel]:
    """The modules that take tokens and an attention mask, outermost first; heads pass both on to the model inside, and
    torch.compile runs the hooks of the outermost module outside of its graph."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    takes_tokens = []
    for module in models:
        parameters = inspect.signature(module.forward).parameters
        if "attention_mask" in parameters and ("input_ids" in parameters or "inputs_embeds" in parameters):
            takes_tokens.append(module)
    modules = [
        module
        for module in takes_tokens
        if not _is_head(module) or not any(other is not module and holds(module, other) for other in takes_tokens)
    ]
    if not modules:
        raise UnsupportedModelError(
            f"{type(models[0]).__name__} (model type {models[0].config.model_type!r}) takes no attention_mask, so it "
            "can't be told where documents begin."
        )
    return modules


def _is_head(module: PreTrainedModel) -> bool:
    return module.base_model is not module or module.get_output_embeddings() is not None


def _supported_modules(model: nn.Module, attention: str) -> list[PreTrainedModel]:
    """The modules to patch; refuses what can't be packed exactly, before anything is changed.

    Raises:
        UnsupportedModelError: with the reason. That of a family comes first: it says more than what its modules lack.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and (why := REFUSED.get(module.config.model_type)):
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {module.config.model_type!r}) can't be packed exactly: {why}."
            )
    modules = _modules(model)
    for module in modules:
        kind = module.config.model_type
        if getattr(module.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {kind!r}) is an encoder with a decoder, whose documents would "
                "have to be told apart on both sides. Decoders by themselves can be patched."
            )
        both_ways = getattr(module.config.get_text_config(), "use_bidirectional_attention", None)
        if kind in ("gemma", "gemma3") and both_ways is True:
            raise UnsupportedModelError(
                f"{type(module).__name__} with use_bidirectional_attention sees both directions in a batch without "
                "padding and one in a batch with it, so there is nothing to be equal to."
            )
        if attention == "sdpa" and not module._supports_sdpa and kind not in DENSE:
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {kind!r}) doesn't support sdpa; use attention='eager' or "
                "'tritonpack'."
            )
    for path, layer in model.named_modules():
        name = type(layer).__name__
        if why := REFUSED_LAYERS.get(name):
            raise UnsupportedModelError(f"{path} ({name}) can't be packed exactly: {why}.")
        if name in HAND_WRITTEN and not fits(layer, HAND_WRITTEN[name]):
            raise UnsupportedModelError(
                f"{path} ({name}) takes other arguments in this version of transformers than the one it was rewritten "
                "for."
            )
    return modules


def _apply(model: nn.Module, modules: list[PreTrainedModel], attention: str, backend: Backend) -> Report:
    replaced = modules[-1].config._attn_implementation_internal
    who = "dense" if modules[-1].config.model_type in DENSE else attention
    text_config = modules[-1].config.get_text_config()
    once = _keep_apart_by_themselves(model, getattr(text_config, "hidden_size", 0))
    report = make_report(model, modules, who, backend, replaced, once)
    current = Current()
    stand_ins = [make for layer in model.modules() if (make := _stand_in(layer, current, once)) is not None]
    mixes = any(make.func is DocumentByDocument for make in stand_ins)
    for module in modules:
        serving = Serving("dense" if module.config.model_type in DENSE else attention, backend)
        before = _claim(module.config, interface.NAMES[serving.attention])
        hook = PackingHook(
            module,
            serving,
            current=current if stand_ins else None,
            head=current if module.config.model_type in HEADS else None,
            mixes=mixes,
            outermost=not any(other is not module and holds(other, module) for other in modules),
            replaced=before,
            asked=(attention, backend),
            report=report,
        )
        module.register_forward_pre_hook(hook, with_kwargs=True)
        if stand_ins:
            module.register_forward_hook(hook.after, always_call=True)
    for make in stand_ins:
        make()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in modules and module.config.model_type in HEADS:
            HeadForward(module, current)
    return report


def _stand_in(layer: nn.Module, current: Current, once: set[type]) -> partial[Any] | None:
    """What gives a layer a forward of ours, or None for layers that keep their own."""
    name, home = type(layer).__name__, type(layer).__module__.rpartition(".")[2]
    if name in POSITION_TABLES:
        return partial(LocalPositions, layer, current)
    if name in MIXERS:
        return partial(DocumentByDocument, layer, current, type(layer) in once)
    if name in HAND_WRITTEN:
        return partial(HAND_WRITTEN[name], layer, current)
    if (home, name) in OWN_MASKS:
        return partial(DocumentMask, layer, current, OWN_MASKS[home, name])
    return None


def _keep_apart_by_themselves(model: nn.Module, hidden_size: int) -> set[type]:
    """The classes of mixing layers that need only be told where documents begin; one layer of each is tried."""
    mixers = {type(layer): layer for layer in model.modules() if type(layer).__name__ in MIXERS}
    return {kind for kind, layer in mixers.items() if takes_boundaries(layer, hidden_size)}


# Configs whose attention has our name: how many patched modules share each, and the name it had. By identity, because
# configs compare by value and models may share one; gone with the config, because another may get its address.
_claims: dict[int, tuple[weakref.ref[Any], int, str | None]] = {}


def _claim(config: Any, name: str) -> str | None:
    """Give a config our name; returns the one it had before any patch."""
    key = id(config)
    _, count, before = _claims.get(key, (None, 0, config._attn_implementation_internal))
    _claims[key] = weakref.ref(config, lambda _: _claims.pop(key, None)), count + 1, before
    config._attn_implementation_internal = name
    return before


def _release(config: Any, before: str | None) -> None:
    """Give a config its own name back when the last patched module lets go of it (a copy's config has none)."""
    reference, count, before = _claims.pop(id(config), (None, 1, before))
    if reference is not None and count > 1:
        _claims[id(config)] = reference, count - 1, before
    else:
        config._attn_implementation_internal = before


def _hooks(model: nn.Module) -> list[tuple[PreTrainedModel, int, PackingHook]]:
    return [
        (module, key, hook)
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, PackingHook)
    ]
