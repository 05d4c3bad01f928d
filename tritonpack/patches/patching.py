"""`patch` and `unpatch`: a model is patched until its last handle is unpatched."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from tritonpack.backends import BACKENDS, Backend
from tritonpack.checks import check_choice, check_flag
from tritonpack.patches.applied_patch import (
    LOCK,
    AppliedPatch,
    applied_to,
    leave,
    put_on,
    require_no_part_of_others,
    to_the_end,
)
from tritonpack.patches.by_name import register
from tritonpack.patches.choose_modules import Options
from tritonpack.patches.compact import Saved
from tritonpack.patches.packed_batch import ATTENTIONS
from tritonpack.patches.report import Report
from tritonpack.removed import refuse_removed


class Patch:
    """The handle of a patched model. As a context manager it unpatches the model on leaving, also after an exception.

    A model that is patched twice stays patched until both handles are unpatched, in any order. A handle that goes out
    of scope changes nothing.

    Attributes:
        model: the model that was given to `patch`.
    """

    def __init__(self, model: nn.Module, applied: AppliedPatch, lease: object) -> None:
        self.model = model
        self._applied, self._lease = applied, lease

    @property
    def report(self) -> Report:
        """What the patch changed, and what computes attention where the model lies now."""
        return self._applied.report.on_device(self.model)

    @property
    def saved(self) -> Saved | None:
        """How many tokens the model was given and ran on; None without `unpad` and `share_prefixes`."""
        compaction = self._applied.compaction
        return None if compaction is None else compaction.saved

    def prove(self) -> None:
        """Prove now that the model keeps documents apart, unless its class and code are known to: before torch.compile,
        for example. Otherwise the first call does it. Every rank of FSDP must call it. Once proven, it does nothing.

        Raises:
            UnsupportedModelError: documents don't stay apart, or the model can't be tried; the message says why.
            ValueError: the model has no weights yet, or this patch was undone.
        """
        self._require_lease("prove() on the new handle")
        self._applied.proof.settle()

    def unpatch(self) -> None:
        """Give up this patch. Patches that are still held stay in force. A second call does nothing."""
        leave(self._applied, self._lease)

    def __enter__(self) -> Patch:
        self._require_lease("enter the new handle")
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def _require_lease(self, remedy: str) -> None:
        if self._lease not in self._applied.leases:
            raise ValueError(f"this patch was undone; call tritonpack.patch(model) again and {remedy}.")

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
    with or without `use_cache`. Only this model changes, and no state outlives a forward pass. A patch is applied whole
    or, after an exception or an interrupt, not at all.

    A patched model may be patched again, also by another thread: it stays patched until every handle is unpatched. If a
    later patch has other options, these are in force until it is unpatched.

    A model of a class that the tests show to be exact with the installed version of transformers, and whose code is all
    transformers' own, is trusted. Any other model is proven in its first call, on itself, with a few tokens: no
    document may change a bit of another, and each must give the results that it gives alone. A model that fails is
    refused in each call. `Patch.prove()` does this at once.

    Layers that mix tokens otherwise (recurrences, convolutions) run on each document by itself; a packed batch leaves
    no cache in such models. Families whose attention lies outside transformers' interface get a dense mask.
    `Patch.report` says what the model got.

    Args:
        model: a transformers model, or a module that holds one (PEFT's wrappers do).
        attention: "tritonpack" for the kernels; "sdpa" or "eager" for transformers' own attention with the dense
            block-diagonal mask, O(T^2) memory.
        backend: the backend of the kernels, as `varlen_attention` takes it.
        unpad: whether the model runs on the tokens of a padded batch alone. It puts them into one row, and lays its
            outputs back into the padded batch, with zeros for padding. A call that uses a cache stays as it is; any
            other call leaves none.
        share_prefixes: whether documents that begin with the same tokens share them, so that each distinct token runs
            once; includes `unpad`. Their outputs are copied to each document, and their gradients add up. Dropout
            draws once for a shared token.

    Returns:
        A handle with `report` and `unpatch()`; as a context manager it unpatches the model on leaving.

    Raises:
        UnsupportedModelError: (a ValueError) the model can't be packed exactly, or not with these options; the message
            says why.
        ValueError: an option that was removed, no model, or a part of a model that is patched in another way.
    """
    refuse_removed(removed, "patch()")
    check_choice(attention, ATTENTIONS, "attention")
    check_choice(backend, BACKENDS, "backend")
    _require_model(model)
    register()
    asked = Options(attention, backend, check_flag(unpad, "unpad"), check_flag(share_prefixes, "share_prefixes"))
    if attention != "tritonpack" and (unpad or share_prefixes):
        raise ValueError(
            f"unpad and share_prefixes put all tokens of a batch into one row, and attention={attention!r} computes "
            "all pairs of a row. Use attention='tritonpack', or leave both out."
        )
    lease = object()

    def give_up() -> None:
        for applied in applied_to(model):
            leave(applied, lease)

    try:
        return Patch(model, put_on(model, asked, lease), lease)
    except BaseException:  # also an interrupt on the way out
        to_the_end(give_up)
        raise


def unpatch(model: nn.Module) -> None:
    """Leave the last patch of a model, or of the model that it is a part of: restore the state before that patch.

    Raises:
        ValueError: the model is not patched, or holds a part of another model that is patched.
    """
    _require_model(model)
    with LOCK:
        found = applied_to(model)
        if not found:
            raise ValueError("this model isn't patched; tritonpack.patch(model) does that.")
        require_no_part_of_others(model, found)
        for applied in found:
            leave(applied, applied.leases[-1])


def _require_model(model: object) -> None:
    """Refuse an argument that is not a model, with a remedy for what was given."""
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
