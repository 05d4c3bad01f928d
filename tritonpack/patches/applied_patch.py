"""A patch of a model: its parts, and the stack of patches of one model, which are applied and reverted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tritonpack import notices
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches import parts
from tritonpack.patches.base_forward import BaseForward
from tritonpack.patches.choose_modules import Options, choose_modules, forward_for
from tritonpack.patches.compact import Compaction
from tritonpack.patches.configurations import rope_limits, text_config
from tritonpack.patches.encoder_decoder import EncoderDecoderForward
from tritonpack.patches.forwards import is_seq2seq
from tritonpack.patches.guards import CONTINUOUS_BATCHING, VirtualTokens
from tritonpack.patches.interface import NAMES
from tritonpack.patches.layers.embeddings import pooler_forward
from tritonpack.patches.layers.mixers import Capabilities
from tritonpack.patches.layers.positions import ROPE_INDEX, DocumentPositions
from tritonpack.patches.modules import holds, models_in, modules_in
from tritonpack.patches.pipeline import Pipeline
from tritonpack.patches.proof import Proof
from tritonpack.patches.report import make_report

REPLICATE = "_replicate_for_data_parallel"  # the method by which torch.nn.DataParallel makes replicas of a module


class ReplicaRefusal(parts.Refusal):
    """Marks a module as patched, and refuses replicas of it by torch.nn.DataParallel."""

    def __init__(self, module: PreTrainedModel, patch: AppliedPatch) -> None:
        why = (
            f"{type(module).__name__} can't run as a replica of torch.nn.DataParallel: its patched forwards belong to "
            "the original model, so the replica would use the original's weights. Use "
            "torch.nn.parallel.DistributedDataParallel."
        )
        super().__init__(module, patch.context, why, REPLICATE)
        self.patch = patch


class AppliedPatch(parts.Part):
    """One patch of a model.

    `apply` and `revert` may be called again at any time, also after an interrupt. A patch is found through the
    `ReplicaRefusal` of a module, so a copy of a model has a copy of its patch.

    Attributes:
        model: the model that was given to `patch`.
        options: the options of `patch`.
        parts: the changes of modules, in the order of `apply`.
        bases: the forwards of the patched modules, the outermost first.
        heads: the forwards of the models that users may call, the outermost first.
        compaction: removes padding from calls; None without `unpad` and `share_prefixes`.
        handle_ids: one object for each handle that isn't unpatched yet, the latest last.
        active: whether the parts are installed. They aren't while a later patch suspends this one.
        suspended: the earlier patches of this model, or of its parts, which come back when this one is reverted.
        by_name: whether attn_implementation made the patch. It then ends when the model gets another name.
    """

    model = parts.Part.module

    def __init__(
        self,
        model: nn.Module,
        modules: list[PreTrainedModel],
        options: Options,
        suspended: list[AppliedPatch],
        by_name: bool = False,
    ) -> None:
        super().__init__(model)
        self.options, self.suspended, self.by_name = options, suspended, by_name
        self.handle_ids: list[object] = []
        self.active = False
        self.context = parts.PackingContext()
        self.compaction: Compaction | None = None
        if options.unpad or options.share_prefixes:
            limits = [limit for module in modules for _, limit in rope_limits(text_config(module.config))]
            self.compaction = Compaction(options.share_prefixes, min(limits, default=None))
        every, capabilities = list(modules_in(model)), Capabilities()
        forwards = [forward_for(layer, self.context, capabilities) for layer in every]
        forwards += [pooler_forward(module, self.context) for module in modules]
        layers = [forward for forward in forwards if forward is not None]
        self.report = make_report(model, modules, layers, options)
        self.heads: list[Pipeline] = []
        self.bases = [BaseForward(module, self, modules, layers) for module in modules]
        for module in [module for module in every if isinstance(module, PreTrainedModel)]:
            own = next((base for base in self.bases if base.module is module), None)
            inner = next((base for base in self.bases if base.outermost and holds(module, base.module)), None)
            if own is not None:
                self.heads.append(own)
            elif inner is not None:
                kind = EncoderDecoderForward if is_seq2seq(module) else Pipeline
                self.heads.append(kind(module, self.context, inner))
        # generate() reads the name from the configuration of the whole encoder-decoder model when it makes masks.
        both = [head for head in self.heads if isinstance(head, EncoderDecoderForward)]
        named: list[Any] = [*self.bases, *both]
        names = [parts.AttentionName(forward.module, NAMES[forward.serving.attention]) for forward in named]
        images = [DocumentPositions(m, self.context) for m in every if hasattr(type(m), ROPE_INDEX)]
        replaced = [*layers, *images, *self.heads]
        models = {id(part.module): part.module for part in replaced if isinstance(part.module, PreTrainedModel)}
        replicas = [ReplicaRefusal(module, self) for module in models.values()]
        init = "init_continuous_batching"  # it makes every manager of transformers
        managers = [parts.Refusal(m, self.context, CONTINUOUS_BATCHING, init) for m in every if hasattr(type(m), init)]
        virtual = [VirtualTokens(m, self.context) for m in every if hasattr(type(m), "active_peft_config")]
        checkpoints = [base.checkpoints for base in self.bases if base.checkpoints is not None]
        self.parts: list[parts.Part] = [*names, *checkpoints, *replaced, *replicas, *managers, *virtual]
        self.proof = Proof(self)

    @property
    def shares_batches(self) -> bool:
        """Return whether the model is inside of a `SequenceParallel` that was entered."""
        return any(head.shard is not None and head.shard.context.entered for head in self.heads)

    def apply(self) -> None:
        """Install all parts, except parts of modules that are no longer in memory."""
        self.active = self.context.active = True
        for part in self.parts:
            if not part.gone:
                part.install()
        refusals = [part for part in self.parts if isinstance(part, ReplicaRefusal)]
        notices.patched_models.update(part.module for part in refusals if not part.gone)

    def revert(self) -> None:
        """Remove all parts. A configuration gets its name back even if its module is no longer in memory."""
        for part in reversed(self.parts):
            if isinstance(part, ReplicaRefusal) and not part.gone:
                notices.patched_models.discard(part.module)
            if not part.gone or isinstance(part, parts.AttentionName):
                part.remove()
        self.active = self.context.active = False

    def revert_and_restore(self) -> None:
        """Remove this patch, and apply the suspended patches that still have handles."""
        if self.active:
            self.revert()
        restore(self.suspended)
        self.handle_ids.clear()


def restore(patches: list[AppliedPatch]) -> None:
    """Apply each patch that has handles. A patch without handles gives way to the patches that it suspended."""
    for patch in patches:
        if patch.handle_ids:
            patch.apply()
        else:
            patch.revert_and_restore()


def applied_to(model: nn.Module) -> list[AppliedPatch]:
    """Return the patches that are active somewhere in a model."""
    patches = (_patch_of(module) for module in models_in(model))
    return list({id(patch): patch for patch in patches if patch is not None}.values())


def _patch_of(module: nn.Module) -> AppliedPatch | None:
    refusal = module.__dict__.get(REPLICATE)
    return refusal.patch if isinstance(refusal, ReplicaRefusal) else None


def finish_if_interrupted(action: Callable[[], None]) -> None:
    """Run an action that may run twice. If an interrupt ends it early, run it again, then raise the interrupt."""
    try:
        action()
    except BaseException:
        action()
        raise


LOCK = threading.RLock()  # one model is patched at a time


def apply_patch(model: nn.Module, options: Options, handle_id: object, *, by_name: bool = False) -> AppliedPatch:
    """Patch a model, above the patches that it has. After an exception nothing is changed.

    Args:
        handle_id: identifies the handle of this call. A patch with the same options only gets one handle more.
        by_name: whether attn_implementation="tritonpack" asks for the patch, and not a call of `patch`.

    Raises:
        UnsupportedModelError: the model can't be packed, or holds a part of another patched model.
        ValueError: the model is a part of a model that is patched with other options, or is inside of SequenceParallel.
    """
    modules = choose_modules(model, options)
    with LOCK:
        patches = applied_to(model)
        refuse_parts_of_patched_models(model, patches)
        outer_patch = next((applied for applied in patches if not applied.gone and holds(applied.model, model)), None)
        if outer_patch is not None and outer_patch.options == options:
            outer_patch.handle_ids.append(handle_id)
            return outer_patch
        if outer_patch is not None and outer_patch.model is not model:
            raise ValueError(
                f"this is a part of a model that is patched with {outer_patch.options}. To change these options call "
                "patch with the whole model."
            )
        if any(other.shares_batches for other in patches):
            raise ValueError(
                f"this {type(model).__name__} is inside of SequenceParallel, where its patch can't change. Leave the "
                "context, call patch or setup, and enter the context again."
            )
        applied = None
        try:
            for other in patches:
                other.revert()
            applied = AppliedPatch(model, modules, options, patches, by_name)
            applied.apply()
            applied.handle_ids.append(handle_id)
            return applied
        except BaseException:
            finish_if_interrupted(lambda: restore(patches) if applied is None else applied.revert_and_restore())
            raise


def release(applied: AppliedPatch, handle_id: object = None) -> None:
    """Release a handle, or all. A patch without handles is removed, and the patches that it suspended come back.

    Handles may be released in any order, because several threads may patch one model. A second call does nothing.

    Raises:
        ValueError: the patch would be removed inside of SequenceParallel.
    """
    with LOCK:
        if handle_id is None or (applied.handle_ids == [handle_id] and applied.active):
            if applied.shares_batches:
                raise ValueError(
                    "the model can't be unpatched inside of SequenceParallel. Leave the context first; it unpatches a "
                    "model that it has patched itself."
                )
            finish_if_interrupted(applied.revert_and_restore)
        elif handle_id in applied.handle_ids:
            applied.handle_ids.remove(handle_id)


def refuse_parts_of_patched_models(model: nn.Module, patches: list[AppliedPatch]) -> None:
    """Refuse a model that holds a part of another patched model: neither could be unpatched without the other.

    `patches` are those that are active somewhere in the model.
    """
    for applied in patches:
        if not (applied.gone or holds(applied.model, model) or holds(model, applied.model)):
            part = next(m for m in models_in(model) if _patch_of(m) is applied)
            name, other = type(model).__name__, type(applied.model).__name__
            raise UnsupportedModelError(
                f"the {type(part).__name__} in this {name} belongs to {other}, which is patched. First unpatch the "
                f"{other}, then build the {name} around its part, and patch the model that you train."
            )
