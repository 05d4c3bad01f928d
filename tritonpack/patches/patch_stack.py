"""The patches of a model, one above the other: each is put on and left under one lock."""

from __future__ import annotations

import threading

from torch import nn
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.applied_patch import AppliedPatch, Options, applied_to, part_of, to_the_end
from tritonpack.patches.report import holds

LOCK = threading.RLock()  # models are changed one after the other


def put_on(
    model: nn.Module, modules: list[PreTrainedModel], asked: Options, lease: object, *, by_name: bool = False
) -> AppliedPatch:
    """Put a patch on a model, above those that it has. The patch is applied whole, or not at all after an exception.

    Args:
        modules: what `choose_modules` returned.
        lease: stands for the handle of this call. A patch with the same options only gets one lease more.
        by_name: whether the model asked for the patch by its attn_implementation, and not a user by `patch`.

    Raises:
        UnsupportedModelError: the model holds a part of another patched model.
        ValueError: the model is a part of a model that is patched with other options, or shares batches with ranks.
    """
    with LOCK:
        found = applied_to(model)
        require_no_part_of_others(model, found)
        whole = next((applied for applied in found if not applied.gone and holds(applied.model, model)), None)
        if whole is not None and whole.asked == asked:
            whole.leases.append(lease)
            return whole
        if whole is not None and whole.model is not model:
            raise ValueError(
                f"this is a part of a model that is patched with {whole.asked}; patch the whole model to change that."
            )
        if any(base.sharded for other in found for base in other.bases):
            raise ValueError(
                f"this {type(model).__name__} shares its batches inside of SequenceParallel, with the patch that it "
                "had on entry. Leave the context, call patch or setup there, and enter the context again."
            )
        applied = None
        try:
            for other in found:
                other.revert()
            applied = AppliedPatch(model, modules, asked, found, by_name)
            applied.apply()
            applied.leases.append(lease)
            return applied
        except BaseException:
            to_the_end(lambda: _roll_back(applied, found))
            raise


def leave(applied: AppliedPatch, lease: object) -> None:
    """Give up a lease. A patch without leases is taken away, and the patches below it with leases come back.

    Leases end in any order, because several threads may patch one model. A second call does nothing.
    """
    with LOCK:
        if lease not in applied.leases:
            return
        if len(applied.leases) > 1 or not applied.in_force:
            applied.leases.remove(lease)
        else:
            restore(applied)


def restore(applied: AppliedPatch) -> None:
    """Take a patch away with all of its leases, and put back the patches that were there before."""
    with LOCK:
        to_the_end(applied.restore_below)


def require_no_part_of_others(model: nn.Module, found: list[AppliedPatch]) -> None:
    """Refuse a model that holds a part of another patched model: neither could be unpatched without the other.

    `found` are the patches that are in force somewhere in the model.
    """
    for applied in found:
        if not (applied.gone or holds(applied.model, model) or holds(model, applied.model)):
            name, other = type(model).__name__, type(applied.model).__name__
            raise UnsupportedModelError(
                f"the {type(part_of(model, applied)).__name__} in this {name} belongs to {other}, which is patched. "
                f"First unpatch the {other}, then build the {name} around its part, and patch the whole that you train."
            )


def _roll_back(applied: AppliedPatch | None, found: list[AppliedPatch]) -> None:
    if applied is not None:
        applied.revert()
        applied.leases.clear()
    for other in found:
        other.apply()
