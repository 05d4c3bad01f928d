"""`patch`, its handle `Patch`, and `unpatch`. A model is patched until its last handle is unpatched."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from tritonpack.backends import BACKENDS, Backend
from tritonpack.checks import check_choice, check_flag
from tritonpack.patches.applied_patch import (
    LOCK,
    AppliedPatch,
    applied_to,
    apply_patch,
    finish_if_interrupted,
    refuse_parts_of_patched_models,
    release,
)
from tritonpack.patches.by_name import register
from tritonpack.patches.choose_modules import Options
from tritonpack.patches.compact import Saved
from tritonpack.patches.packed_batch import ATTENTIONS
from tritonpack.patches.report import Report
from tritonpack.removed import refuse_removed


class Patch:
    """The handle of a patched model. As a context manager it unpatches the model at its end, also after an exception.

    A model that is patched twice stays patched until both handles are unpatched, in any order. A handle that goes out
    of scope doesn't unpatch the model.

    Attributes:
        model: the model that was given to `patch`.
    """

    def __init__(self, model: nn.Module, applied: AppliedPatch, handle_id: object) -> None:
        self.model = model
        self._applied, self._handle_id = applied, handle_id

    @property
    def report(self) -> Report:
        """The changes of the patch, and the implementation of attention on the model's current device."""
        return self._applied.report.on_device(self.model)

    @property
    def saved(self) -> Saved | None:
        """The counts of tokens, given and computed; None without `unpad` and `share_prefixes`."""
        compaction = self._applied.compaction
        return None if compaction is None else compaction.saved

    def prove(self) -> None:
        """Prove now, and not in the first call, that the model keeps documents apart, unless it is trusted.

        Call it before torch.compile and before FSDP's `fully_shard`, or on every rank. A second call does nothing.

        Raises:
            UnsupportedModelError: documents don't stay apart, or the model can't be tried; the message says why.
            ValueError: the model has no weights yet, or this patch was removed, or a later patch applies.
        """
        self._require_patched("prove() on the new handle")
        if not self._applied.active:
            raise ValueError("a later patch of this model, with other options, applies. Call prove() on its handle.")
        self._applied.proof.prove_now()

    def unpatch(self) -> None:
        """Release this handle. The model stays patched while it has other handles. A second call does nothing."""
        release(self._applied, self._handle_id)

    def __enter__(self) -> Patch:
        self._require_patched("enter the new handle")
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def _require_patched(self, remedy: str) -> None:
        if self._handle_id not in self._applied.handle_ids:
            raise ValueError(f"this patch was removed; call tritonpack.patch(model) again and {remedy}.")

    def __repr__(self) -> str:
        return f"Patch({self.report})"


def patch(
    model: nn.Module,
    *,
    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack",
    backend: Backend = "auto",
    unpad: bool = False,
    share_prefixes: bool = False,
    **removed: Any,
) -> Patch:
    """Replace a transformers model's attention with varlen attention that keeps packed documents apart.

    A call marks documents by `cu_seq_lens_q` or `seq_idx` as collators pass them, by a two-dimensional `attention_mask`
    (0 for padding; other numbers number documents), or by `position_ids` that restart. It may have one row or many,
    with or without `use_cache`. Only this model changes, and no state is kept after a forward pass. If an exception or
    an interrupt ends `patch`, nothing is changed.

    A patched model may be patched again, also by another thread: it stays patched until every handle is unpatched. The
    options of the latest patch apply until it is unpatched. No call may run while options change: it would be wrong.

    A model is trusted if the tests have shown its class to be exact with the installed version of transformers, and all
    of its code is from transformers. Any other model is proven in its first call, with a few tokens: no document may
    change a bit of another document, and each must give the results that it gives alone. A model that fails is refused
    in each call. `Patch.prove()` does this at once.

    Layers that mix tokens by recurrence or convolution run on each document by itself; a packed batch returns no cache
    from such models. Families with attention outside of transformers' interface get a dense mask. `Patch.report` lists
    the changes.

    Args:
        model: a transformers model, or a module that holds one (PEFT's wrappers do).
        attention: "tritonpack" for the kernels; "sdpa" or "eager" for transformers' own attention with the dense
            block-diagonal mask, O(T^2) memory.
        backend: the backend of the kernels, as `varlen_attention` takes it.
        unpad: whether the model runs without the padding of a padded batch. The tokens are put into one row, and the
            outputs are laid back into the padded batch, with zeros for padding. A call that uses a cache runs
            unchanged; any other call returns no cache.
        share_prefixes: whether documents that begin with the same tokens share them, so that each shared token runs
            once; includes `unpad`. Its outputs are copied to each document, and its gradients are summed. Dropout
            draws once for a shared token.

    Returns:
        A handle with `report` and `unpatch()`; as a context manager it unpatches the model at its end.

    Raises:
        UnsupportedModelError: (a ValueError) the model can't be packed exactly, or not with these options; the message
            says why.
        ValueError: an option that was removed, no model, or a part of a model that is patched with other options.
    """
    refuse_removed(removed, "patch()")
    check_choice(attention, ATTENTIONS, "attention")
    check_choice(backend, BACKENDS, "backend")
    _require_model(model)
    register()
    options = Options(attention, backend, check_flag(unpad, "unpad"), check_flag(share_prefixes, "share_prefixes"))
    if attention != "tritonpack" and (unpad or share_prefixes):
        raise ValueError(
            f"unpad and share_prefixes put all tokens of a batch into one row, in which attention={attention!r} would "
            "compute all pairs. Use attention='tritonpack', or leave both out."
        )
    handle_id = object()

    def release_all() -> None:
        for applied in applied_to(model):
            release(applied, handle_id)

    try:
        return Patch(model, apply_patch(model, options, handle_id), handle_id)
    except BaseException:  # an interrupt, too
        finish_if_interrupted(release_all)
        raise


def unpatch(model: nn.Module) -> None:
    """Remove the latest patch of a model, or of the model that it is a part of.

    Raises:
        ValueError: the model is not patched, or holds a part of another model that is patched.
    """
    _require_model(model)
    with LOCK:
        patches = applied_to(model)
        if not patches:
            raise ValueError("this model isn't patched. Call tritonpack.patch(model) to patch it.")
        refuse_parts_of_patched_models(model, patches)
        for applied in patches:
            release(applied, applied.handle_ids[-1])


def _require_model(model: object) -> None:
    """Refuse an argument that isn't a model, with the remedy for its type."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, str):
        what = f"the name {model!r}; load it first, with AutoModelForCausalLM.from_pretrained({model!r})"
    elif isinstance(model, type):
        what = f"the class {model.__name__}; make a model of it first"
    elif hasattr(model, "to_dict") and hasattr(model, "model_type"):
        what = f"a {type(model).__name__}; make a model of it first, with AutoModelForCausalLM.from_config(config)"
    elif isinstance(getattr(model, "model", None), nn.Module):
        what = f"a {type(model).__name__}, which holds a model; pass that model, its attribute .model"
    elif isinstance(model, (list, tuple, set)):
        what = f"a {type(model).__name__} of {len(model)}; pass one model in each call"
    else:
        what = f"{' '.join(repr(model).split()):.80} of type {type(model).__name__}; pass the model that you train"
    raise ValueError(f"expected a model, an instance of torch.nn.Module; got {what}.")
