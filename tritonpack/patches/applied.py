"""A patch on a model: what it puts there, and how all of it is applied and taken away, whatever breaks in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import nn
from transformers import PreTrainedModel

from tritonpack import notices
from tritonpack.attention import Backend
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.checkpoints import Checkpoints, release_checkpoint
from tritonpack.patches.continuous_batching import ENTRY, ContinuousBatching
from tritonpack.patches.encoder_decoder import BothSides
from tritonpack.patches.families import DENSE, MIXERS, OWN_MASKS, POSITION_TABLES
from tritonpack.patches.forwards import holds_both_sides
from tritonpack.patches.hooks import PackingHook
from tritonpack.patches.interface import stock_name
from tritonpack.patches.layers.attention import REWRITTEN, DocumentMask
from tritonpack.patches.layers.image_positions import METHOD, DocumentPositions
from tritonpack.patches.layers.mixers import Capabilities, DocumentByDocument
from tritonpack.patches.layers.poolers import stand_in_for_pooler
from tritonpack.patches.layers.positions import LocalPositions
from tritonpack.patches.model_forward import ModelForward
from tritonpack.patches.packed_batch import Serving
from tritonpack.patches.packing_context import UNCLAIMED, InstanceForward, ModuleRef, PackingContext, Running
from tritonpack.patches.report import holds, make_report
from tritonpack.patches.shown import Layout
from tritonpack.patches.tokens import text_config
from tritonpack.patches.unpacking.by_document import ByDocument
from tritonpack.patches.unpacking.document_rows import DocumentRows, StockAttention


class _OfModule(Protocol):
    @property
    def gone(self) -> bool: ...


T = TypeVar("T", bound=_OfModule)


class Guard:
    """The hook before a model that runs with a forward of ours, which a replica of it shares with the original.

    Attributes:
        patch: what put it there.
    """

    def __init__(self, patch: Applied) -> None:
        self.patch = patch

    def __call__(self, module: nn.Module, args: Any) -> None:
        if getattr(module, "_is_replica", False):
            raise UnsupportedModelError(
                f"{type(module).__name__} runs as a replica of torch.nn.DataParallel, but layers of this model have a "
                "forward of their own instance, which would run with the weights of the original. Use "
                "torch.nn.parallel.DistributedDataParallel."
            )


class Applied:
    """One patch of a model.

    `apply` and `revert` may be called again at any time, and after a call that was broken off: they bring about a state
    and don't count. The patch is found through its hooks, so that a copy of a model has a copy of its patch.

    Attributes:
        model: what was given to `patch`.
        asked: the attention and the backend that the user asked for.
        by_name: whether the model asked for it by its attn_implementation, and no caller of `patch`.
        report: what it changes.
        heads: the forwards of the models that users may call, the outermost first.
        leases: one object for each handle that isn't left yet, innermost last.
        below: the patches of this model, or of parts of it, that are suspended until this one is left.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list[PreTrainedModel],
        attention: str,
        backend: Backend,
        below: list[Applied],
        layout: Layout = "packed",
        by_name: bool = False,
    ) -> None:
        self._model = ModuleRef(model)
        self.asked, self.below, self.by_name = (attention, backend), below, by_name
        self.leases: list[object] = []
        self.context = PackingContext()
        self.stand_ins: list[InstanceForward] = []
        self.hooks: list[PackingHook] = []
        self.heads: list[ModelForward] = []
        self.stock: list[StockAttention] = []
        self.continuous: list[ContinuousBatching] = []
        if layout == "packed":
            self._pack(model, modules, attention, backend)
        else:
            self._give_rows(model, modules, layout)

    def _give_rows(self, model: nn.Module, modules: list[PreTrainedModel], layout: Layout) -> None:
        replaced = stock_name(modules[0], modules[0].config._attn_implementation_internal)
        self.report = make_report(model, modules, layout, "", replaced, set())
        self.stand_ins += [DocumentRows(module, self.context, layout == "lengths") for module in modules]
        self.stock += [StockAttention(module) for module in model.modules() if isinstance(module, PreTrainedModel)]

    def _pack(self, model: nn.Module, modules: list[PreTrainedModel], attention: str, backend: Backend) -> None:
        capabilities = Capabilities()
        self.stand_ins = [
            stand_in for layer in model.modules() if (stand_in := _stand_in(layer, self.context, capabilities))
        ]
        poolers = [stand_in_for_pooler(module, self.context) for module in modules]
        self.stand_ins += [pooler for pooler in poolers if pooler is not None]
        replaced = modules[-1].config._attn_implementation_internal
        width = getattr(text_config(modules[-1].config), "hidden_size", 0)
        who = "dense" if modules[-1].config.model_type in DENSE else attention
        self.report = make_report(model, modules, who, backend, replaced, _told_boundaries(self.stand_ins, width))
        self.hooks = [self._hook(module, modules, attention, backend) for module in modules]
        if self.stand_ins:
            self.stand_ins += [Running(module, self.context) for module in modules]
        self.stand_ins += [
            DocumentPositions(module, self.context) for module in model.modules() if hasattr(type(module), METHOD)
        ]
        self.heads += [
            (BothSides if holds_both_sides(module) else ModelForward)(module, self.context, hook)
            for module in model.modules()
            if isinstance(module, PreTrainedModel) and (hook := self._outermost_in(module)) is not None
        ]
        self.stand_ins += self.heads
        generating = (module for module in model.modules() if hasattr(type(module), ENTRY))
        self.continuous = [ContinuousBatching(module, self) for module in generating]

    def _hook(
        self, module: PreTrainedModel, modules: list[PreTrainedModel], attention: str, backend: Backend
    ) -> PackingHook:
        layers = [stand_in.module for stand_in in self.stand_ins]
        return PackingHook(
            module,
            Serving("dense" if module.config.model_type in DENSE else attention, backend),
            patch=self,
            checkpoints=Checkpoints(module, self.context, layers) if layers else None,
            context=self.context,
            mixes=any(isinstance(stand_in, DocumentByDocument) for stand_in in self.stand_ins),
            outermost=not any(other is not module and holds(other, module) for other in modules),
        )

    def _outermost_in(self, module: nn.Module) -> PackingHook | None:
        """The hook of the outermost patched module in a module."""
        return next((hook for hook in self.hooks if hook.outermost and holds(module, hook.module)), None)

    def refuse_losses(self, losses: list[tuple[nn.Module, str]]) -> None:
        """Refuse packed rows with labels in models whose own loss mixes documents.

        Args:
            losses: these models, and what was seen of each.
        """
        seen = {id(model): what for model, what in losses}
        for stand_in in self.stand_ins:
            if isinstance(stand_in, ByDocument):
                stand_in.mixed_loss = seen.get(id(stand_in.module), "")

    @property
    def model(self) -> nn.Module:
        return self._model.module

    @property
    def gone(self) -> bool:
        return self._model.gone

    @property
    def claimants(self) -> list[Claimant]:
        """Whose modules' configurations are given a name of attention."""
        return [*self.hooks, *(head for head in self.heads if isinstance(head, BothSides)), *self.stock]

    def apply(self) -> None:
        """Put everything where it belongs; modules that were replaced and are gone have no place any more."""
        for claimant in _living(self.claimants):  # generate() makes masks by the name of the config of both sides
            claim(claimant)
        for hook in _living(self.hooks):
            if not _keys(hook.module, PackingHook):
                hook.module.register_forward_pre_hook(hook, with_kwargs=True)
        for stand_in in _living(self.stand_ins):
            stand_in.install()
            if isinstance(stand_in.module, PreTrainedModel):
                if not _keys(stand_in.module, Guard):
                    stand_in.module.register_forward_pre_hook(Guard(self))
                notices.patched_models.add(stand_in.module)
        for entry in _living(self.continuous):
            entry.install()

    def revert(self) -> None:
        """Take everything away."""
        for entry in _living(self.continuous):
            entry.remove()
        for stand_in in reversed(_living(self.stand_ins)):
            stand_in.remove()
            for key in _keys(stand_in.module, Guard):
                del stand_in.module._forward_pre_hooks[key]
            notices.patched_models.discard(stand_in.module)
        for hook in _living(self.hooks):
            for key in _keys(hook.module, PackingHook):
                hook.module._forward_pre_hooks_with_kwargs.pop(key, None)
                del hook.module._forward_pre_hooks[key]
        for claimant in self.claimants:
            release(claimant)
        for module in () if self.gone else self.model.modules():
            release_checkpoint(module)

    def suspend_below(self) -> None:
        """Take away the patches that this one stands for."""
        for other in self.below:
            other.revert()

    def restore_below(self) -> None:
        """Take this patch away and put back those that were there before."""
        self.revert()
        for other in self.below:
            other.apply()
        self.leases.clear()


def applied_to(model: nn.Module) -> list[Applied]:
    """The patches that are in force somewhere in a model."""
    found: list[Applied] = []
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, Guard) and not any(hook.patch is other for other in found):
                found.append(hook.patch)
    return found


def part_of(model: nn.Module, applied: Applied) -> nn.Module | None:
    """The outermost module of a model in which a patch is in force."""
    for module in model.modules():
        if any(isinstance(hook, Guard) and hook.patch is applied for hook in module._forward_pre_hooks.values()):
            return module
    return None


def _living(some: Sequence[T]) -> list[T]:
    return [one for one in some if not one.gone]


def _keys(module: nn.Module, kind: type) -> list[int]:
    """Under which numbers a module has hooks of ours: one at most, because patches of a module don't overlap."""
    return [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)]


def to_the_end(action: Callable[[], None]) -> None:
    """Run an action that may be called twice to its end, also where an interrupt breaks it off, and raise that then."""
    try:
        action()
    except BaseException:
        action()
        raise


def _stand_in(layer: nn.Module, context: PackingContext, capabilities: Capabilities) -> InstanceForward | None:
    """What gives a layer a forward of ours, or None for layers that keep their own."""
    name, home = type(layer).__name__, type(layer).__module__.rpartition(".")[2]
    make: Callable[[], InstanceForward] | None = None
    if name in POSITION_TABLES:
        make = partial(LocalPositions, layer, context)
    elif name in MIXERS:
        make = partial(DocumentByDocument, layer, context, capabilities)
    elif name in REWRITTEN:
        make = partial(REWRITTEN[name], layer, context)
    elif (home, name) in OWN_MASKS:
        make = partial(DocumentMask, layer, context, OWN_MASKS[home, name])
    return None if make is None else make()


def _told_boundaries(stand_ins: list[InstanceForward], width: int) -> set[type]:
    """The classes of mixing layers that need only be told where documents begin, on the device where they are now."""
    return {
        type(stand_in.module)
        for stand_in in stand_ins
        if isinstance(stand_in, DocumentByDocument) and stand_in.takes_boundaries(width)
    }


Claimant = PackingHook | BothSides | StockAttention

# Configs whose attention has our name: what claims each for a patched module, and the name that it had. By
# identity, because configs compare by value and models may share one; gone with the config, because another may get
# its address. A claimant is in it at most once, so that claiming and releasing twice is claiming and releasing once.
_claims: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Claimant]], str | None]] = {}


def claim(claimant: Claimant) -> None:
    """Give the config of a module that is patched the name that the patch wants, and note which one it had before any
    patch.

    Models are patched one after the other (`patching.py`). A lock here would stay locked after an interrupt at its end.
    """
    config: Any = claimant.module.config
    key = id(config)
    reference, claimants, before = _claims.get(key, (None, [], config._attn_implementation_internal))
    if reference is None:
        reference = weakref.ref(config, lambda _: _claims.pop(key, None))
    claimant.replaced = before
    _claims[key] = reference, [*_others(claimants, claimant), weakref.ref(claimant)], before
    config._attn_implementation_internal = claimant.attention_name(before)


def release(claimant: Claimant) -> None:
    """Give a config its own name back when the last patched module lets go of it."""
    if claimant.replaced is UNCLAIMED:
        return
    config: Any = _claimed_config(claimant) if claimant.gone else claimant.module.config
    # A copy's config has no claims.
    reference, claimants, before = _claims.get(id(config), (None, [], claimant.replaced))
    others = _others(claimants, claimant)
    if reference is not None and others:
        _claims[id(config)] = reference, others, before
    elif config is not None:
        config._attn_implementation_internal = before
        _claims.pop(id(config), None)
    claimant.replaced = UNCLAIMED


def _claimed_config(claimant: Claimant) -> Any:
    """The config that a claimant whose module is gone has a claim to; None if that is gone, or let go of."""
    for reference, claimants, _ in list(_claims.values()):
        if any(other() is claimant for other in claimants):
            return reference()
    return None


def _others(claimants: list[weakref.ref[Claimant]], claimant: Claimant) -> list[weakref.ref[Claimant]]:
    """The other claims to a config, of modules that live."""
    living = [(other, other()) for other in claimants]
    return [other for other, known in living if known is not None and known is not claimant and not known.gone]
