"""The parts of a patch, and the state of the current call, which they read.

A part replaces a method of one module (usually its forward), a checkpointing function, or the name of the attention in
a configuration. It can be installed and removed.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.modules import modules_in
from tritonpack.patches.packed_batch import PackedBatch


@dataclass(frozen=True)
class Call:
    """A call of a patched model; not a tuple, because torch.compile ties a graph to the items of tuples that it reads.

    Attributes:
        outer_batch: the packed batch, read from the arguments of the user's call. The head may not pass all of these
            arguments to the patched modules inside.
        running: whether a patched module runs its layers.
        packed_batch: the packed batch for these layers; None if the rows continue a cache.
    """

    outer_batch: PackedBatch | None = None
    running: bool = False
    packed_batch: PackedBatch | None = None


NO_CALL = Call()


class PackingContext:
    """The state that the parts of a patch share: the current call of each thread.

    torch.compile doesn't guard the state of a thread, so traced code reads the attribute `call`. Within one graph it is
    a value of the graph, so other threads don't change it.

    Attributes:
        call: the current call of traced code.
        active: whether the patch is on the model.
    """

    def __init__(self) -> None:
        self.call = NO_CALL
        self.active = True
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[type[PackingContext], tuple[()]]:
        return PackingContext, ()  # copies of a model share no state

    @property
    def current(self) -> Call:
        """The current call; `NO_CALL` outside of all calls."""
        return self.call if torch.compiler.is_compiling() else getattr(self._of_thread, "call", NO_CALL)

    def run(self, call: Call, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function with this call as the current one."""
        outer, of_thread = self.current, self._of_thread
        self.call = of_thread.call = call
        try:
            return function(*args, **kwargs)
        finally:
            self.call = of_thread.call = outer

    def require_active(self) -> None:
        """Raise if the patch was removed before a layer is recomputed: documents would mix."""
        if not self.active:
            raise ValueError(
                "gradient checkpointing recomputes a layer that was patched in its forward pass and isn't patched now. "
                "Call backward() before unpatch(), or inside of `with tritonpack.patch(model)`."
            )


class Part:
    """A change of one module. A part doesn't keep its module in memory; a copy of the module has a copy of the part.

    `install` and `remove` may be called twice, because an interrupt may come at any line. The second call does nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))

    @property
    def module(self) -> Any:
        """The module, which must still be in memory."""
        module = self._module()
        if module is None:
            raise UnsupportedModelError(
                "a module of this model was replaced after the model was patched, so the new module doesn't know where "
                "documents begin. Call tritonpack.unpatch(model), build the model, and patch the whole model."
            )
        return module

    @property
    def gone(self) -> bool:
        """Return whether the module is no longer in memory, because another one replaced it in the model."""
        return self._module() is None

    def install(self) -> None: ...

    def remove(self) -> None: ...


class InstanceForward(Part):
    """The forward of one module. It replaces the forward of the class for this instance; the class stays unchanged.

    If other code, such as accelerate, has wrapped this forward in the meantime, `remove` leaves the wrapper in place,
    and this forward then calls the original one.

    Attributes:
        attribute: the name of the method that this object replaces.
        name: the name of the module's class.
        names: the names of the method's arguments.
        own: the forward that this instance had before, such as accelerate's; None if it used the class's.
        wrapper: the function of other code that replaced this forward and calls it.
    """

    attribute = "forward"

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        super().__init__(module)
        self.context, self.name = context, type(module).__name__
        self.names = parameters_of(type(module), self.attribute)
        self.own: Any = None
        self.wrapper: Any = None
        self.installed = False

    def install(self) -> None:
        forward = self.module.__dict__.get(self.attribute)
        if not self.in_place and (self.wrapper is None or forward is not self.wrapper):
            self.own, self.module.__dict__[self.attribute] = forward, self
        self.installed = True

    def remove(self) -> None:
        forward = self.module.__dict__.get(self.attribute)
        if forward is self:
            del self.module.__dict__[self.attribute]
            if self.own is not None:
                self.module.__dict__[self.attribute] = self.own
        elif self.installed:
            self.wrapper = forward
        self.installed = False

    @property
    def in_place(self) -> bool:
        """Return whether this is the module's forward, or is wrapped by it."""
        forward = self.module.__dict__.get(self.attribute)
        while forward is not None and forward is not self:
            forward = getattr(forward, "__wrapped__", getattr(forward, "own", None))
        return forward is self

    @property
    def packed_batch(self) -> PackedBatch | None:
        """The packed batch of the current forward pass; None if it continues a cache. Raises outside of a forward
        pass."""
        call = self.context.current
        if call.packed_batch is None and not call.running:
            raise ValueError(
                f"{self.name} was called outside of its model's forward pass, so it doesn't know where documents "
                "begin. Call the model, or unpatch it first. If your own checkpointing function recomputes this layer, "
                "use the model's gradient_checkpointing_enable() or torch's checkpoint_wrapper instead."
            )
        return call.packed_batch

    @property
    def inner(self) -> Any:
        """The original forward: the one that ran before the patch."""
        original = getattr(type(self.module), self.attribute)
        return original.__get__(self.module) if self.own is None else self.own

    def run_inner(self, *args: Any, **kwargs: Any) -> Any:
        """Call `inner`, which torch.compile would look up by its name after a graph break, and find this forward."""
        original = getattr(type(self.module), self.attribute)
        return original(self.module, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the original forward. Trainers choose the columns of a dataset by it."""
        return inspect.signature(self.inner)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs) if self.installed else self.inner(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any: ...


class Refusal(InstanceForward):
    """A method that raises UnsupportedModelError with the reason."""

    def __init__(self, module: nn.Module, context: PackingContext, reason: str, attribute: str = "forward") -> None:
        self.attribute = attribute
        super().__init__(module, context)
        self.reason = reason

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(self.reason)


def parameters_of(kind: type[nn.Module], method: str = "forward") -> list[str]:
    """Return the names of the arguments of a class's forward, or of another method.

    transformers 5.13 to 5.15 wrap forwards of recurrent layers without `functools.wraps`. For them the function is read
    from the wrapper's closure.
    """
    forward = getattr(kind, method)
    wrapped = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    return list(inspect.signature(wrapped.get("forward_func", forward)).parameters)[1:]


class AttentionName(Part):
    """The name of the patch's attention, written into the configuration of a module.

    Models may share a configuration. The original name comes back when the last of these models is unpatched.

    Attributes:
        config: the configuration that was changed; None while this part isn't installed.
        before: the name in the configuration before any patch.
    """

    config: Any = None
    before: str | None = None

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name

    def install(self) -> None:
        config = self.module.config
        others = _parts_by_config.setdefault(id(config), weakref.WeakSet())
        self.before = next((part.before for part in others), config._attn_implementation_internal)
        self.config = config
        others.add(self)
        config._attn_implementation_internal = self.name

    def remove(self) -> None:
        if self.config is None:
            return
        others = _parts_by_config.get(id(self.config), weakref.WeakSet())  # without the parts of copies
        if all(other is self or other.gone for other in others):
            self.config._attn_implementation_internal = self.before
            _parts_by_config.pop(id(self.config), None)
        others.discard(self)  # last: after an interrupt, the name is still known from this part
        self.config = None


# {id of a configuration: the parts that changed its name and keep it in memory}. The key is the id, because
# configurations compare by value. Models are patched one after the other (`applied_patch.py`), so no lock is needed.
_parts_by_config: dict[int, weakref.WeakSet[AttentionName]] = {}


# Attributes with a module's checkpointing function: in transformers' layers, and in torch's CheckpointWrapper, which
# FSDP and accelerate put around layers.
FUNCTION_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
MARKERS = {"gradient_checkpointing", "checkpoint_fn"}  # of modules that have, or may get, such a function


class Checkpoint:
    """A module's checkpointing function. It restores the call of the forward pass for the recomputation.

    The recomputation may run in another thread, and after other batches.
    """

    def __init__(self, own: Any, context: PackingContext) -> None:
        self.own, self.context = own, context

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.context.current

        def run(*args: Any, **kwargs: Any) -> Any:
            self.context.require_active()
            return self.context.run(call, function, *args, **kwargs)

        return self.own(run, *args, **kwargs)


class Checkpoints(Part):
    """The checkpointing functions of the layers in a patched module.

    Other code may wrap layers after the model was patched, so every call looks for these functions again.
    """

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        super().__init__(module)
        self.context = context
        self.modules = self._find()

    def wrap(self) -> None:
        """Wrap all checkpointing functions that the module has now."""
        if not torch.compiler.is_compiling():
            self.modules = self._find()
        for module in self.modules:
            for attribute in FUNCTION_ATTRIBUTES:
                own = module.__dict__.get(attribute)
                if own is not None and not isinstance(own, Checkpoint):
                    module.__dict__[attribute] = Checkpoint(own, self.context)

    def remove(self) -> None:
        for module in modules_in(self.module):
            for attribute in FUNCTION_ATTRIBUTES:
                if isinstance(function := module.__dict__.get(attribute), Checkpoint):
                    module.__dict__[attribute] = function.own

    def _find(self) -> list[nn.Module]:
        modules = modules_in(self.module)
        return [m for m in modules if hasattr(type(m), "gradient_checkpointing") or not MARKERS.isdisjoint(m.__dict__)]
