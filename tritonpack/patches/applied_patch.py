"""A patch on a model: what it puts there, and how patches, one above the other, are applied and taken away."""

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
from tritonpack.patches.forwards import holds_both_sides
from tritonpack.patches.guards import CONTINUOUS_BATCHING, VirtualTokens
from tritonpack.patches.interface import NAMES
from tritonpack.patches.layers.embeddings import pooler_forward
from tritonpack.patches.layers.mixers import Capabilities
from tritonpack.patches.layers.positions import METHOD, DocumentPositions
from tritonpack.patches.modules import holds, models_in, modules_in
from tritonpack.patches.pipeline import Pipeline
from tritonpack.patches.proof import Proof
from tritonpack.patches.report import make_report

REPLICATE = "_replicate_for_data_parallel"  # the method by which torch.nn.DataParallel makes replicas of a module


class Guard(parts.Refusal):
    """What marks a module of a patch: its replicas, which would share the forwards of the patch, are refused."""

    def __init__(self, module: PreTrainedModel, patch: AppliedPatch) -> None:
        why = (
            f"{type(module).__name__} would run as a replica of torch.nn.DataParallel, but layers of this model have a "
            "forward of their own instance, which would run with the weights of the original. Use "
            "torch.nn.parallel.DistributedDataParallel."
        )
        super().__init__(module, patch.context, why, REPLICATE)
        self.patch = patch


class AppliedPatch(parts.Part):
    """One patch of a model.

    `apply` and `revert` may be called again at any time, also after an interrupt. The patch is found through its
    guards, so a copy of a model has a copy of its patch.

    Attributes:
        model: the model that was given to `patch`.
        asked: the options that the user asked for.
        parts: what the patch puts on modules, in the order of `apply`.
        bases: the forwards of the patched modules, the outermost first.
        heads: the forwards of the models that users may call, the outermost first.
        compaction: removes padding from calls; None if the user hasn't asked for it.
        leases: one object for each handle that is not unpatched yet, the latest last.
        in_force: whether the parts are on the modules. They aren't while a later patch suspends this one.
        below: the patches of this model, or of parts of it, that are suspended until this one is reverted.
        by_name: whether the patch ends when the model gets another name: it asked for it by its attn_implementation.
    """

    model = parts.Part.module

    def __init__(
        self,
        model: nn.Module,
        modules: list[PreTrainedModel],
        asked: Options,
        below: list[AppliedPatch],
        by_name: bool = False,
    ) -> None:
        super().__init__(model)
        self.asked, self.below, self.by_name = asked, below, by_name
        self.leases: list[object] = []
        self.in_force = False
        self.context = parts.PackingContext()
        self.compaction: Compaction | None = None
        if asked.unpad or asked.share_prefixes:
            limits = [limit for module in modules for _, limit in rope_limits(text_config(module.config))]
            self.compaction = Compaction(asked.share_prefixes, min(limits, default=None))
        every, capabilities = list(modules_in(model)), Capabilities()
        found = [forward_for(layer, self.context, capabilities) for layer in every]
        found += [pooler_forward(module, self.context) for module in modules]
        layers = [forward for forward in found if forward is not None]
        self.report = make_report(model, modules, layers, asked)
        self.heads: list[Pipeline] = []
        self.bases = [BaseForward(module, self, modules, layers) for module in modules]
        for module in [module for module in every if isinstance(module, PreTrainedModel)]:
            own = next((base for base in self.bases if base.module is module), None)
            inner = next((base for base in self.bases if base.outermost and holds(module, base.module)), None)
            if own is not None:
                self.heads.append(own)
            elif inner is not None:
                kind = EncoderDecoderForward if holds_both_sides(module) else Pipeline
                self.heads.append(kind(module, self.context, inner))
        # generate() reads the name from the configuration of the whole encoder-decoder model when it makes masks.
        both = [head for head in self.heads if isinstance(head, EncoderDecoderForward)]
        served: list[Any] = [*self.bases, *both]
        names = [parts.AttentionName(one.module, NAMES[one.serving.attention]) for one in served]
        images = [DocumentPositions(m, self.context) for m in every if hasattr(type(m), METHOD)]
        forwards = [*layers, *images, *self.heads]
        guarded = {id(one.module): one.module for one in forwards if isinstance(one.module, PreTrainedModel)}
        guards = [Guard(module, self) for module in guarded.values()]
        entry = "init_continuous_batching"  # it makes every manager of transformers
        managers = [
            parts.Refusal(m, self.context, CONTINUOUS_BATCHING, entry) for m in every if hasattr(type(m), entry)
        ]
        virtual = [VirtualTokens(m, self.context) for m in every if hasattr(type(m), "active_peft_config")]
        checkpoints = [base.checkpoints for base in self.bases if base.checkpoints is not None]
        self.parts: list[parts.Part] = [*names, *checkpoints, *forwards, *guards, *managers, *virtual]
        self.proof = Proof(self)

    @property
    def shares_batches(self) -> bool:
        """Whether the model is in a `SequenceParallel` that was entered."""
        return any(head.shard is not None and head.shard.context.entered for head in self.heads)

    def apply(self) -> None:
        """Install all parts, except those of modules that are no longer in memory."""
        self.in_force = self.context.in_force = True
        for part in self.parts:
            if not part.gone:
                part.install()
        notices.patched_models.update(part.module for part in self.parts if isinstance(part, Guard) and not part.gone)

    def revert(self) -> None:
        """Take all parts away. A configuration gets its name back even if its module is no longer in memory."""
        for part in reversed(self.parts):
            if isinstance(part, Guard) and not part.gone:
                notices.patched_models.discard(part.module)
            if not part.gone or isinstance(part, parts.AttentionName):
                part.remove()
        self.in_force = self.context.in_force = False

    def restore_below(self) -> None:
        """Take this patch away, and put back those that were there before and still have leases."""
        if self.in_force:
            self.revert()
        restore(self.below)
        self.leases.clear()


def restore(patches: list[AppliedPatch]) -> None:
    """Put back those patches that have leases, and below the others those that have."""
    for patch in patches:
        if patch.leases:
            patch.apply()
        else:
            patch.restore_below()


def applied_to(model: nn.Module) -> list[AppliedPatch]:
    """The patches that are in force somewhere in a model."""
    found = (_guarding(module) for module in models_in(model))
    return list({id(patch): patch for patch in found if patch is not None}.values())


def _guarding(module: nn.Module) -> AppliedPatch | None:
    guard = module.__dict__.get(REPLICATE)
    return guard.patch if isinstance(guard, Guard) else None


def to_the_end(action: Callable[[], None]) -> None:
    """Run an action that may be called twice. If an interrupt ends it early, run it again, then raise the interrupt."""
    try:
        action()
    except BaseException:
        action()
        raise


LOCK = threading.RLock()  # models are changed one after the other


def put_on(model: nn.Module, asked: Options, lease: object, *, by_name: bool = False) -> AppliedPatch:
    """Put a patch on a model, above those that it has. The patch is applied whole, or not at all after an exception.

    Args:
        lease: stands for the handle of this call. A patch with the same options only gets one lease more.
        by_name: whether the model asked for the patch by its attn_implementation, and not a user by `patch`.

    Raises:
        UnsupportedModelError: the model can't be packed, or holds a part of another patched model.
        ValueError: the model is a part of a model that is patched with other options, or shares batches with ranks.
    """
    modules = choose_modules(model, asked)
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
        if any(other.shares_batches for other in found):
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
            to_the_end(lambda: restore(found) if applied is None else applied.restore_below())
            raise


def leave(applied: AppliedPatch, lease: object = None) -> None:
    """Give up a lease, or all. A patch without leases is taken away, and the patches below it with leases come back.

    Leases end in any order, because several threads may patch one model. A second call does nothing.

    Raises:
        ValueError: the model would lose its patch inside of SequenceParallel.
    """
    with LOCK:
        if lease is None or (applied.leases == [lease] and applied.in_force):
            if applied.shares_batches:
                raise ValueError(
                    "the model can't be unpatched inside of SequenceParallel. Leave the context first; it restores a "
                    "model that it has patched itself."
                )
            to_the_end(applied.restore_below)
        elif lease in applied.leases:
            applied.leases.remove(lease)


def require_no_part_of_others(model: nn.Module, found: list[AppliedPatch]) -> None:
    """Refuse a model that holds a part of another patched model: neither could be unpatched without the other.

    `found` are the patches that are in force somewhere in the model.
    """
    for applied in found:
        if not (applied.gone or holds(applied.model, model) or holds(model, applied.model)):
            part = next(m for m in models_in(model) if _guarding(m) is applied)
            name, other = type(model).__name__, type(applied.model).__name__
            raise UnsupportedModelError(
                f"the {type(part).__name__} in this {name} belongs to {other}, which is patched. First unpatch the "
                f"{other}, then build the {name} around its part, and patch the whole that you train."
            )
