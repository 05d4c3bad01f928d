"""The first call of a patched module is watched: it must show that its layers use the mask of the call.

A layer's forward that was replaced after the model was patched may compute attention by itself. Documents would see
each other then, without an error. So while a layer or its attention runs in the first call, the call's mask must be
used. Later calls cost nothing. Code that torch.compile traces isn't watched.
"""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.forwards import by_class, forward_of, inside, is_own, mixes, uses_interface
from tritonpack.patches.towers import takes_tokens

if TYPE_CHECKING:
    from tritonpack.patches.packed_batch import PackedBatch

# Parts of names that FSDP, checkpointing and torch.compile add to the modules that they wrap.
_WRAPPED = re.compile(r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")

_local = threading.local()  # `watch`: the watch of the call that a thread runs


class FirstCall:
    """The layers of a module when it was patched, for comparison in its first call.

    Attributes:
        attending: the names of the layers that take their attention from transformers' interface.
        mixing: the names of all layers in which documents may mix.
        forwards: the forwards of these; None if the model was pickled since.
        dense: whether attention doesn't use the interface and gets the mask as a tensor.
        done: whether no further call is watched.
    """

    def __init__(self, module: nn.Module, dense: bool) -> None:
        layers = dict(inside(module))
        attends, mixing = by_class(uses_interface), by_class(mixes)
        self.attending = frozenset(
            name for name, layer in layers.items() if attends(type(layer)) and takes_tokens(layer)
        )
        self.mixing = frozenset(name for name, layer in layers.items() if mixing(type(layer)))
        self.forwards: frozenset[Any] | None = frozenset(forward_of(layers[name]) for name in self.mixing)
        self.dense, self.done = dense, False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forwards": None}  # a function is pickled by its name, which may then name another one

    def is_as_patched(self, layer: nn.Module) -> bool:
        """Whether a layer's forward is transformers' own, or the one that it had when it was patched."""
        return self.forwards is None or is_own(layer) or forward_of(layer) in self.forwards

    def watch(self, module: nn.Module, packed_batch: PackedBatch) -> None:
        """Watch the call of a module that begins now, if nothing in it is compiled and no cache is used.

        Uses inside of a watched module count for that module's watch.
        """
        for left in [other for other in module._forward_hooks.values() if isinstance(other, Watch)]:
            if left.thread == threading.get_ident():  # of a call that was interrupted
                left.stop()
        outer: Watch | None = getattr(_local, "watch", None)
        if outer is not None and any(module is layer for layer in outer.layers.values()):
            packed_batch.on_use = outer.use
        elif any(_is_compiled(layer) for layer in module.modules()):
            self.done = True
        elif not packed_batch.cached:
            _local.watch = Watch(self, module, packed_batch)
            packed_batch.on_use = _local.watch.use


class Watch:
    """The hook after a module's first call, which counts the uses of the call's mask.

    Attributes:
        thread: the thread that runs the call; others may call the same module meanwhile.
        uses: how often attention used a mask of the call, or a mask was written out as a tensor.
        written_first: whether a use happened outside of all layers. All layers may use that tensor, unobserved.
        entered: the names of the layers that ran.
        missing: the names of those that ran without a use of the mask.
    """

    def __init__(self, first_call: FirstCall, module: nn.Module, packed_batch: PackedBatch) -> None:
        self.first_call, self.packed_batch = first_call, packed_batch
        self.thread = threading.get_ident()
        self.uses, self.written_first = 0, False
        self.running: list[tuple[str, int]] = []
        self.entered: set[str] = set()
        self.missing: set[str] = set()
        self.layers = dict(inside(module))
        attending = {name for name in self.layers if _unwrapped(name) in first_call.attending}
        self.watched = attending | {_layer_of(name) for name in attending} - {""}
        self.handles = [module.register_forward_hook(self, always_call=True)]
        for name in self.watched:
            layer = self.layers[name]
            self.handles.append(layer.register_forward_pre_hook(partial(self._enter, name)))
            self.handles.append(layer.register_forward_hook(partial(self._leave, name)))

    def use(self) -> None:
        """Count a use of a mask of the call."""
        self.uses += 1
        self.written_first |= not self.running

    def stop(self) -> None:
        """Remove all hooks."""
        self.packed_batch.on_use = _local.watch = None
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
        """End the watch after the call. Refuse layers that computed attention by themselves, or may have."""
        if threading.get_ident() != self.thread:
            return
        self.stop()
        if output is None:  # torch calls the hook after an exception, too
            return
        if wrong := self._wrong(module):
            raise UnsupportedModelError(
                f"layers of this {type(module).__name__} don't attend through tritonpack, so packed documents would "
                f"see each other: {_described(wrong)}. Their code was replaced after the model was patched, or "
                "transformers' changed. Call tritonpack.unpatch(model), and patch the model after all other changes: "
                "code that isn't transformers' own is tried then."
            )
        self.first_call.done = True

    def _wrong(self, module: nn.Module) -> dict[str, nn.Module]:
        """The layers that ran without the mask, and the replaced layers that may have run without it."""
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
        # Name a layer's attention instead of the layer.
        return {n: self.layers[n] for n in sorted(names) if not any(other.startswith(f"{n}.") for other in names)}


def _described(layers: dict[str, nn.Module]) -> str:
    shown = []
    for name, layer in list(layers.items())[:4]:
        forward = forward_of(layer)
        code = f"{forward.__module__}.{getattr(forward, '__qualname__', type(forward).__name__)}"
        shown.append(f"{name or 'the model itself'} ({type(layer).__name__}, which runs {code})")
    return ", ".join(shown) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")


def _unwrapped(name: str) -> str:
    return _WRAPPED.sub("", name).rstrip(".")


def _layer_of(name: str) -> str:
    """The name of the layer around an attention layer: up to its number in a list."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found[0] if found else ""


def _is_compiled(layer: nn.Module) -> bool:
    forward = layer.__dict__.get("forward")
    return (
        layer._compiled_call_impl is not None
        or isinstance(layer, OptimizedModule)
        or hasattr(forward, "_torchdynamo_orig_callable")
    )
