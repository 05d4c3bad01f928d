"""`patch` and `unpatch`: a model is patched until its last handle is unpatched."""

from __future__ import annotations

import inspect
import threading
from types import TracebackType
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from tritonpack.backends import BACKENDS, Backend
from tritonpack.checks import check_choice
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.applied import Applied, applied_to, part_of, to_the_end
from tritonpack.patches.by_name import register
from tritonpack.patches.families import BOTH_WAYS, DENSE, PROMPT_TYPES, REFUSED, REFUSED_LAYERS
from tritonpack.patches.forwards import takes_tokens_and_mask
from tritonpack.patches.layers.choose import fits
from tritonpack.patches.packed_batch import ATTENTIONS
from tritonpack.patches.probe import require_evidence
from tritonpack.patches.report import Report, holds
from tritonpack.patches.shown import LAYOUTS, Layout
from tritonpack.patches.tokens import is_bidirectional

Losses = list[tuple[nn.Module, str]]  # models whose own loss mixes packed documents, and what a trial found

_lock = threading.RLock()  # models are patched one after the other


class SettingError(UnsupportedModelError):
    """The model can be packed with another setting, which the message names."""


class Patch:
    """The handle of a patched model. As a context manager it unpatches the model on leaving, also after an exception.

    Patches nest: a model that is patched twice stays patched until both handles are unpatched, the inner one first. A
    handle that goes out of scope changes nothing.

    Attributes:
        model: the model that was given to `patch`.
        report: what the patch changed.
    """

    def __init__(self, model: nn.Module, applied: Applied, lease: object) -> None:
        self.model = model
        self.report: Report = applied.report
        self._applied, self._lease = applied, lease

    def unpatch(self) -> None:
        """Restore the state before this patch. A second call does nothing.

        Raises:
            ValueError: a later patch is still in force.
        """
        with _lock:
            applied = self._applied
            if self._lease not in applied.leases:
                return
            if applied.leases[-1] is not self._lease or not any(applied is other for other in applied_to(self.model)):
                raise ValueError(
                    "this model, or a model that holds it, was patched again since, and that patch is still in force. "
                    "Leave the patches in the opposite order: the last one first."
                )
            _leave(applied)

    def __enter__(self) -> Patch:
        if self._lease not in self._applied.leases:
            raise ValueError("this patch was undone; call tritonpack.patch(model) again and enter the new handle.")
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

    A call marks documents by `cu_seq_lens_q` or `seq_idx` as collators pass them, by a two-dimensional `attention_mask`
    (0 for padding; other numbers number documents), or by `position_ids` that restart. It may have one row or many,
    with or without `use_cache`. Only this model changes, and no state outlives a forward pass. A patch is applied whole
    or, after an exception or an interrupt, not at all.

    A patched model may be patched again: it stays patched until every handle is unpatched, the last one first. If a
    later patch has another attention or backend, that one is in force until it is unpatched.

    A class that the tests show to be exact with the installed version of transformers is patched at once. Of any other
    class a small random copy is tried first, in float32 on the CPU: each packed document must give the same results as
    alone, and no document may change another. That takes a second or two, once in a process.

    Layers that mix tokens otherwise (recurrences, convolutions) run on each document by itself; a packed batch leaves
    no cache in such models. Families whose attention lies outside transformers' interface get a dense mask.
    `Patch.report` says what the model got.

    Args:
        model: a transformers model, or a module that holds one (PEFT's wrappers do).
        attention: "tritonpack" for the kernels; "sdpa" or "eager" for transformers' own attention with the dense
            block-diagonal mask, O(T^2) memory.
        backend: the backend of the kernels, as `varlen_attention` takes it.

    Returns:
        A handle with `report` and `unpatch()`; as a context manager it unpatches the model on leaving.

    Raises:
        UnsupportedModelError: (a ValueError) the model can't be packed exactly; the message says why.
        ValueError: an unknown option, no model, or a part of a model that is patched in another way.
    """
    check_choice(attention, ATTENTIONS, "attention")
    check_choice(backend, BACKENDS, "backend")
    _require_model(model)
    modules, layout, losses = _evident_modules(model, attention, backend)
    handle = None
    try:
        with _lock:
            handle = _patch(model, modules, attention, backend, layout, losses)
        return handle  # noqa: RET504
    except BaseException:
        if handle is not None:  # an interrupt on the way out
            to_the_end(handle.unpatch)
        raise


def unpatch(model: nn.Module) -> None:
    """Leave the last patch of a model, or of the model that it is a part of: restore the state before that patch.

    Raises:
        ValueError: the model is not patched, or holds a part of another model that is patched.
    """
    _require_model(model)
    with _lock:
        found = applied_to(model)
        if not found:
            raise ValueError("this model isn't patched; tritonpack.patch(model) does that.")
        _require_no_part_of_others(model, found)
        for applied in found:
            _leave(applied)


def patch_by_name(model: PreTrainedModel) -> Applied:
    """Patch a model that has attn_implementation="tritonpack", until it gets another name.

    Raises:
        UnsupportedModelError: for the same reasons as in `patch`.
    """
    modules, layout, losses = _evident_modules(model, "tritonpack", "auto")
    with _lock:
        return _patch(model, modules, "tritonpack", "auto", layout, losses, by_name=True)._applied


def restore(applied: Applied) -> None:
    """Take a patch away, and put back the patches that were there before."""
    with _lock:
        to_the_end(applied.restore_below)


def tokens_enter(model: PreTrainedModel) -> bool:
    """Whether some module of a model takes tokens, or embeddings of tokens and a mask. Towers of images don't."""
    return any(takes_tokens_and_mask(one) or _takes_tokens(one) for one in _models(model))


def _patch(
    model: nn.Module,
    modules: list[PreTrainedModel],
    attention: str,
    backend: Backend,
    layout: Layout,
    losses: Losses,
    *,
    by_name: bool = False,
) -> Patch:
    found, lease = applied_to(model), object()
    _require_no_part_of_others(model, found)
    whole = next((applied for applied in found if not applied.gone and holds(applied.model, model)), None)
    if whole is not None and whole.asked == (attention, backend):
        try:
            whole.leases.append(lease)
            return Patch(model, whole, lease)
        except BaseException:
            if lease in whole.leases:
                whole.leases.remove(lease)
            raise
    if whole is not None and whole.model is not model:
        raise ValueError(
            f"this is a part of a model that is patched with attention={whole.asked[0]!r} and "
            f"backend={whole.asked[1]!r}; patch the whole model to change that."
        )
    applied = None
    try:
        for other in found:
            other.revert()
        applied = Applied(model, modules, attention, backend, found, layout, by_name)
        applied.refuse_losses(losses)
        applied.apply()
        applied.leases.append(lease)
        return Patch(model, applied, lease)
    except BaseException:
        to_the_end(lambda: _roll_back(applied, found))
        raise


def _evident_modules(
    model: nn.Module, attention: str, backend: Backend
) -> tuple[list[PreTrainedModel], Layout, Losses]:
    """The modules to patch, the first layout in which they are exact, and the modules whose own losses mix documents.

    This runs without the lock, because a trial builds models in a thread of its own.

    Raises:
        UnsupportedModelError: there is no such layout; the message says why documents can't be packed.
    """

    def patch_untried(small: nn.Module, layout: Layout) -> None:
        Applied(small, _modules_for(small, layout, attention), attention, "auto", [], layout).apply()

    register()
    refusals: list[UnsupportedModelError] = []
    for layout in LAYOUTS:
        try:
            modules = _modules_for(model, layout, attention)
            losses = require_evidence(model, layout, attention, patch_untried) or []
        except SettingError:
            raise
        except UnsupportedModelError as error:
            refusals.append(error)
        else:
            if layout != "packed" and (attention, backend) != ("tritonpack", "auto"):
                raise ValueError(
                    f"{type(model).__name__} keeps its own attention and gives each document a row of its own, so "
                    f"attention={attention!r} and backend={backend!r} would do nothing. Leave both out."
                )
            return modules, layout, losses
    raise refusals[0]


def _modules_for(model: nn.Module, layout: Layout, attention: str) -> list[PreTrainedModel]:
    """The modules to patch for a layout: those that get a packing, or all that users may call with tokens."""
    if layout == "packed":
        return _supported_modules(model, attention)
    modules = [one for one in _models(model) if _takes_tokens(one)]
    if not modules:
        raise UnsupportedModelError(f"{type(model).__name__} takes no tokens.")
    return modules


def _models(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _takes_tokens(module: PreTrainedModel) -> bool:
    names = inspect.signature(type(module).forward).parameters
    return not {"input_ids", "decoder_input_ids"}.isdisjoint(names)


def _require_no_part_of_others(model: nn.Module, found: list[Applied]) -> None:
    """Refuse a model that holds a part of another patched model: neither could be unpatched without the other.

    Raises:
        UnsupportedModelError: with the order of steps that works.
    """
    for applied in found:
        if not (applied.gone or holds(applied.model, model) or holds(model, applied.model)):
            name, other = type(model).__name__, type(applied.model).__name__
            raise UnsupportedModelError(
                f"the {type(part_of(model, applied)).__name__} in this {name} belongs to {other}, which is patched. "
                f"First unpatch the {other}, then build the {name} around its part, and patch the whole that you train."
            )


def _roll_back(applied: Applied | None, found: list[Applied]) -> None:
    if applied is not None:
        applied.revert()
        applied.leases.clear()
    for other in found:
        other.apply()


def _leave(applied: Applied) -> None:
    if len(applied.leases) > 1:
        applied.leases.pop()
    else:
        restore(applied)


def _require_model(model: object) -> None:
    """Refuse an argument that is not a model.

    Raises:
        ValueError: with what was given: a name, a class, a configuration, or something else.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, str):
        what = f"the name {model!r}; load it first, with AutoModelForCausalLM.from_pretrained({model!r})"
    elif isinstance(model, type):
        what = f"the class {model.__name__}; make a model of it first"
    elif hasattr(model, "to_dict") and hasattr(model, "model_type"):
        what = f"a {type(model).__name__}; make a model of it first, with AutoModelForCausalLM.from_config(config)"
    else:
        what = f"{model!r:.80} of type {type(model).__name__}"
    raise ValueError(f"expected a model, an instance of torch.nn.Module; got {what}.")


def _modules(model: nn.Module) -> list[PreTrainedModel]:
    """The modules that take tokens and an attention mask, outermost first.

    Heads are left out: they pass both on to the model inside, and torch.compile runs the hooks of the outermost module
    outside of its graph.
    """
    models = _models(model)
    if not models:
        raise UnsupportedModelError(f"expected a transformers model; got {type(model).__name__}.")
    takes_tokens = [module for module in models if takes_tokens_and_mask(module)]
    modules = [
        module
        for module in takes_tokens
        if not _is_head(module) or not any(other is not module and holds(module, other) for other in takes_tokens)
    ]
    if not modules:
        raise UnsupportedModelError(
            f"{type(models[0]).__name__} (model type {models[0].config.model_type!r}) takes no attention_mask, so "
            "nothing can tell it where documents begin."
        )
    return modules


def _is_head(module: PreTrainedModel) -> bool:
    return module.base_model is not module or module.get_output_embeddings() is not None


def _supported_modules(model: nn.Module, attention: str) -> list[PreTrainedModel]:
    """The modules to patch. Nothing is changed before a refusal.

    Raises:
        UnsupportedModelError: the model can't be packed exactly. The reason of a family comes first: it says more than
            what its modules lack.
    """
    for module in _models(model):
        if why := REFUSED.get(module.config.model_type):
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {module.config.model_type!r}) can't be packed exactly: {why}. "
                "Train it on one document per row, unpatched."
            )
    modules = _modules(model)
    for module in modules:
        kind = module.config.model_type
        names = inspect.signature(module.forward).parameters
        meets = "encoder_hidden_states" in names and "encoder_attention_mask" not in names
        if meets and getattr(module.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} (model type {kind!r}) takes no mask for its cross-attention, so documents "
                "would not be told apart there. Train it on one document per row, unpatched; decoders by themselves "
                "can be patched."
            )
        typed = any(other.config.model_type in PROMPT_TYPES and holds(other, module) for other in modules)
        if kind in BOTH_WAYS and is_bidirectional(module.config) and not typed:
            raise SettingError(
                f"{type(module).__name__} with use_bidirectional_attention sees both directions in a batch without "
                "padding and one in a batch with it, so there is nothing to be equal to. Set it to False, or train on "
                "one document per row, unpatched."
            )
        if getattr(module, "attention_type", None) == "block_sparse":
            raise SettingError(
                f"{type(module).__name__} with attention_type='block_sparse' attends in blocks that are counted from "
                "the beginning of the row. Call model.set_attention_type('original_full') before you patch it."
            )
        if attention == "sdpa" and not module._supports_sdpa and kind not in DENSE:
            raise SettingError(
                f"{type(module).__name__} (model type {kind!r}) doesn't support sdpa; use attention='eager' or "
                "'tritonpack'."
            )
    for path, layer in model.named_modules():
        name = type(layer).__name__
        if why := REFUSED_LAYERS.get(name):
            raise UnsupportedModelError(f"{path} ({name}) can't be packed exactly: {why}.")
        if not fits(layer):
            raise UnsupportedModelError(
                f"{path} ({name}) takes other arguments in this version of transformers than in the version that its "
                "forward was rewritten for."
            )
    return modules
