"""The first call of a patched module shows that its layers attend through tritonpack, by the mask of the call.

A layer's forward that was replaced after the model was patched may compute attention by itself; then documents would
see each other, and nothing would say so. So the first call is watched: while a layer or its attention runs, the call's
mask must be used. Later calls cost nothing, and what torch.compile traces is never watched.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.forwards import by_class, forward_of, is_own, mixes, takes_tokens_and_mask
from tritonpack.patches.towers import takes_tokens

if TYPE_CHECKING:
    from tritonpack.patches.hooks import PackingHook
    from tritonpack.patches.packed_batch import PackedBatch

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what layers ask for the attention function of a name

# What FSDP, checkpointing and torch.compile put into the names of the modules that they wrap.
_WRAPPED = re.compile(r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")


_local = threading.local()  # `watch`: of the call that a thread runs; modules inside may read the call for themselves


class FirstCall:
    """What the first call of a patched module is held against: its layers as they were when it was patched.

    Attributes:
        attending: the names of the layers that ask transformers' interface for their attention.
        mixing: the names of all layers in which documents may mix.
        forwards: what these run; None where the model came pickled.
        dense: whether attention lies outside of the interface and gets the mask as a tensor.
    """

    def __init__(self, module: nn.Module, dense: bool) -> None:
        layers = dict(_inside(module))
        attends, mixing = by_class(_attends), by_class(mixes)
        self.attending = frozenset(
            name for name, layer in layers.items() if attends(type(layer)) and takes_tokens(layer)
        )
        self.mixing = frozenset(name for name, layer in layers.items() if mixing(type(layer)))
        self.forwards: frozenset[Any] | None = frozenset(forward_of(layers[name]) for name in self.mixing)
        self.dense = dense

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forwards": None}  # a function is pickled by its name, which another one may have

    def is_as_patched(self, layer: nn.Module) -> bool:
        """Whether a layer's forward is transformers' own, or the one that it had when it was patched."""
        return self.forwards is None or is_own(layer) or forward_of(layer) in self.forwards

    def watch(self, hook: PackingHook, module: nn.Module, packed_batch: PackedBatch) -> None:
        """Watch the call of a module that begins now.

        Not where parts of it are compiled, nor with a cache, whose masks don't know their packing. A module inside one
        that is watched adds to what that one shows.
        """
        for left in [other for other in module._forward_hooks.values() if isinstance(other, Watch)]:
            if left.thread == threading.get_ident():  # of a call that was interrupted
                left.stop()
        outer: Watch | None = getattr(_local, "watch", None)
        if outer is not None and any(module is layer for layer in outer.layers.values()):
            packed_batch.watch = outer
        elif any(_is_compiled(layer) for layer in module.modules()):
            hook.first_call = None
        elif not packed_batch.cached:
            packed_batch.watch = _local.watch = Watch(self, hook, module, packed_batch)


class Watch:
    """The hook after a module's first call, and the count of how often the call's mask was used.

    Attributes:
        thread: the thread that runs the call; others may call the same module meanwhile.
        uses: how often a mask of the call was attended by or written out as a tensor.
        written_first: whether that was done while no layer ran, for all of them: what they do with it can't be seen.
        entered: the layers that ran, by name.
        missing: those that ran without a use of the mask.
    """

    def __init__(self, first_call: FirstCall, hook: PackingHook, module: nn.Module, packed_batch: PackedBatch) -> None:
        self.first_call, self.hook, self.packed_batch = first_call, hook, packed_batch
        self.thread = threading.get_ident()
        self.uses, self.written_first = 0, False
        self.running: list[tuple[str, int]] = []
        self.entered: set[str] = set()
        self.missing: set[str] = set()
        self.layers = dict(_inside(module))
        attending = {name for name in self.layers if _unwrapped(name) in first_call.attending}
        self.watched = attending | {_layer_of(name) for name in attending} - {""}
        self.handles = [module.register_forward_hook(self, always_call=True)]
        for name in self.watched:
            layer = self.layers[name]
            self.handles.append(layer.register_forward_pre_hook(partial(self._enter, name)))
            self.handles.append(layer.register_forward_hook(partial(self._leave, name)))

    def use(self) -> None:
        """A mask of the call is attended by, or written out as a tensor."""
        self.uses += 1
        self.written_first |= not self.running

    def stop(self) -> None:
        """Take all hooks away."""
        self.packed_batch.watch = _local.watch = None
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str, layer: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self.thread:
            self.running.append((name, self.uses))
            self.entered.add(name)

    def _leave(self, name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self.thread:
            _, uses = self.running.pop()
            if uses == self.uses:
                self.missing.add(name)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The call is done.

        Raises:
            UnsupportedModelError: layers computed attention by themselves, or may have.
        """
        if threading.get_ident() != self.thread:
            return
        self.stop()
        if output is None:  # torch calls us after an exception, too
            return
        if wrong := self._wrong(module):
            raise UnsupportedModelError(
                f"layers of this {type(module).__name__} don't attend through tritonpack, so packed documents would "
                f"see each other: {_described(wrong)}. Their code was replaced after the model was patched, or "
                "transformers' changed. Call tritonpack.unpatch(model), and patch the model once everything else has "
                "changed it: what isn't transformers' own is then tried first."
            )
        self.hook.first_call = None

    def _wrong(self, module: nn.Module) -> dict[str, nn.Module]:
        """The layers that ran past the mask, or that may have since they aren't what they were."""
        known = self.first_call.is_as_patched
        names = {name for name in self.missing if not (self.written_first and known(self.layers[name]))}
        if self.first_call.dense and not self.uses:
            names.add("")
        mixing = self.first_call.mixing
        for name, layer in self.layers.items():
            mixed = mixes(type(layer)) or _unwrapped(name) in mixing
            if mixed and name not in self.watched and not known(layer):
                inside = {_layer_of(w) or w for w in self.watched if not name or w.startswith(f"{name}.")}
                names |= inside - self.entered if inside else {name}
        # Of a layer and its attention the latter says more.
        return {n: self.layers[n] for n in sorted(names) if not any(other.startswith(f"{n}.") for other in names)}


def _described(layers: dict[str, nn.Module]) -> str:
    shown = []
    for name, layer in list(layers.items())[:4]:
        forward = forward_of(layer)
        code = f"{forward.__module__}.{getattr(forward, '__qualname__', type(forward).__name__)}"
        shown.append(f"{name or 'the model itself'} ({type(layer).__name__}, which runs {code})")
    return ", ".join(shown) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")


def _inside(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and those in it, by name, without towers: models that turn images or sounds into embeddings."""
    yield name, module
    for child_name, child in module.named_children():
        if not isinstance(child, PreTrainedModel) or takes_tokens_and_mask(child):
            yield from _inside(child, f"{name}.{child_name}" if name else child_name)


def _attends(kind: Any) -> bool:
    """Whether layers of a class ask transformers' interface for their attention: its name is in their code."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def _unwrapped(name: str) -> str:
    return _WRAPPED.sub("", name).rstrip(".")


def _layer_of(name: str) -> str:
    """The layer that an attention layer lies in: up to its number in a list."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found[0] if found else ""


def _is_compiled(layer: nn.Module) -> bool:
    forward = layer.__dict__.get("forward")
    return (
        layer._compiled_call_impl is not None
        or isinstance(layer, OptimizedModule)
        or hasattr(forward, "_torchdynamo_orig_callable")
    )
