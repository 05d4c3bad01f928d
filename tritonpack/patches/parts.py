"""What a patch puts on a model's modules and takes away again, and the packing of the current call, which it reads.

Parts are methods of instances, most of them forwards, checkpointing functions, and names of attention.
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
    """A call of a patched model. It is no tuple: torch.compile ties a graph to the items of tuples that it reads.

    Attributes:
        told: the packing that was read from the arguments of the model that the user called. Its head may not pass all
            of these arguments to the patched modules inside.
        running: whether a patched module runs its layers.
        packed_batch: the packing for these layers; None where rows are left to the model (a cache is in use).
    """

    told: PackedBatch | None = None
    running: bool = False
    packed_batch: PackedBatch | None = None


OUTSIDE = Call()


class PackingContext:
    """The call that runs now.

    Each thread has its own. torch.compile does not guard what it reads of a thread's state, so traced code reads the
    attribute here. Within one graph it is a value of the graph, whatever other threads do.

    Attributes:
        call: of traced code.
        in_force: whether the patch is on the model.
    """

    def __init__(self) -> None:
        self.call = OUTSIDE
        self.in_force = True
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[type[PackingContext], tuple[()]]:
        return PackingContext, ()  # copies of a model share no state

    @property
    def current(self) -> Call:
        """The call that runs; one without packing outside of all calls."""
        return self.call if torch.compiler.is_compiling() else getattr(self._of_thread, "call", OUTSIDE)

    def run(self, call: Call, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function in a call."""
        outer, of_thread = self.current, self._of_thread
        self.call = of_thread.call = call
        try:
            return function(*args, **kwargs)
        finally:
            self.call = of_thread.call = outer

    def require_in_force(self) -> None:
        """Refuse the recomputation of a layer whose patch isn't on the model any more: documents would mix."""
        if not self.in_force:
            raise ValueError(
                "gradient checkpointing recomputes a layer that was patched in its forward pass and isn't now. Call "
                "backward() before unpatch(), or inside of `with tritonpack.patch(model)`."
            )


class Part:
    """One thing that a patch puts on a module, which it doesn't keep alive. A copy of the module has a copy of it.

    An interrupt may come at any line, so `install` and `remove` may be called again: a second call changes nothing.
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
                "a part of this model was replaced since it was patched, so nothing says where documents begin. Call "
                "tritonpack.unpatch(model), build the model, and patch the whole."
            )
        return module

    @property
    def gone(self) -> bool:
        """Whether the module is not in memory any more, because another one took its place in the model."""
        return self._module() is None

    def install(self) -> None: ...

    def remove(self) -> None: ...


class InstanceForward(Part):
    """A forward for one module, in place of its class's. Classes stay unchanged.

    If other code, such as accelerate, has wrapped this forward in the meantime, `remove` leaves the wrapper, and this
    forward passes its calls on.

    Attributes:
        attribute: the name of the method that this object replaces.
        name: the name of the module's class.
        names: the names of the method's arguments.
        own: a forward that this instance had before, such as accelerate's; None if it had none.
        wrapper: what other code has put in place of this forward, and which calls it.
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
        """Whether this is the module's forward, or the module's forward wraps this one."""
        forward = self.module.__dict__.get(self.attribute)
        while forward is not None and forward is not self:
            forward = getattr(forward, "__wrapped__", getattr(forward, "own", None))
        return forward is self

    @property
    def packed_batch(self) -> PackedBatch | None:
        """The packing of the current forward pass; None if a cache is in use. Outside of a forward pass: an error."""
        call = self.context.current
        if call.packed_batch is None and not call.running:
            raise ValueError(
                f"{self.name} was called outside of its model's forward pass, where nothing says where documents "
                "begin. Call the model, or unpatch it first. Where a checkpointing function of your own recomputes it, "
                "use the model's gradient_checkpointing_enable() or torch's checkpoint_wrapper."
            )
        return call.packed_batch

    @property
    def inner(self) -> Any:
        """The forward that ran before the patch."""
        if self.own is not None:
            return self.own
        module = self.module
        return getattr(type(module), self.attribute).__get__(module)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the replaced forward. Trainers read from it which columns of a dataset a model takes."""
        return inspect.signature(self.inner)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs) if self.installed else self.inner(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any: ...


class Refusal(InstanceForward):
    """A method that raises an error with the reason."""

    def __init__(self, module: nn.Module, context: PackingContext, reason: str, attribute: str = "forward") -> None:
        self.attribute = attribute
        super().__init__(module, context)
        self.reason = reason

    def call(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(self.reason)


def parameters_of(kind: type[nn.Module], method: str = "forward") -> list[str]:
    """The names of the arguments of a module class's forward, or of another method.

    transformers 5.13 to 5.15 wrap forwards of recurrent layers without `functools.wraps`. There the variable of the
    wrapper that holds the wrapped function is read.
    """
    forward = getattr(kind, method)
    wrapped = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    return list(inspect.signature(wrapped.get("forward_func", forward)).parameters)[1:]


class AttentionName(Part):
    """Another name of the attention in the configuration of a module.

    Models may share a configuration. It gets its own name back when the last of these models is unpatched.

    Attributes:
        config: the configuration, as long as it has the other name because of this object; else None.
        before: the name that it had before any patch.
    """

    config: Any = None
    before: str | None = None

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name

    def install(self) -> None:
        config = self.module.config
        others = _holders.setdefault(id(config), weakref.WeakSet())
        self.before = next((one.before for one in others), config._attn_implementation_internal)
        self.config = config
        others.add(self)
        config._attn_implementation_internal = self.name

    def remove(self) -> None:
        if self.config is None:
            return
        others = _holders.get(id(self.config), weakref.WeakSet())  # without the parts of copies
        others.discard(self)
        if all(other.gone for other in others):
            self.config._attn_implementation_internal = self.before
            _holders.pop(id(self.config), None)
        self.config = None


# {id of a configuration: the parts that gave it another name, which keep it in memory}. By identity, because
# configurations compare by value. Models are patched one after the other (`applied_patch.py`), so this needs no lock.
_holders: dict[int, weakref.WeakSet[AttentionName]] = {}


# The attributes that hold a module's checkpointing function: of transformers' layers, and of torch's CheckpointWrapper,
# which FSDP and accelerate put around layers.
ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
HOLDERS = {"gradient_checkpointing", "checkpoint_fn"}  # attributes of modules that have, or may get, such a function


class Checkpoint:
    """A module's checkpointing function, which sets the packing of the forward pass again in the recomputation.

    The recomputation may run in another thread, and after other batches.
    """

    def __init__(self, own: Any, context: PackingContext) -> None:
        self.own, self.context = own, context

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        call = self.context.current

        def run(*args: Any, **kwargs: Any) -> Any:
            self.context.require_in_force()
            return self.context.run(call, function, *args, **kwargs)

        return self.own(run, *args, **kwargs)


class Checkpoints(Part):
    """The checkpointing functions inside a patched module.

    Wrappers may be put around layers after the model was patched, so every call looks for these functions again.
    """

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        super().__init__(module)
        self.context = context
        self.holders = self._find()

    def hold(self) -> None:
        """Replace all checkpointing functions that the module has now."""
        if not torch.compiler.is_compiling():
            self.holders = self._find()
        for holder in self.holders:
            for attribute in ATTRIBUTES:
                own = holder.__dict__.get(attribute)
                if own is not None and not isinstance(own, Checkpoint):
                    holder.__dict__[attribute] = Checkpoint(own, self.context)

    def remove(self) -> None:
        for module in modules_in(self.module):
            for attribute in ATTRIBUTES:
                if isinstance(held := module.__dict__.get(attribute), Checkpoint):
                    module.__dict__[attribute] = held.own

    def _find(self) -> list[nn.Module]:
        modules = modules_in(self.module)
        return [m for m in modules if hasattr(type(m), "gradient_checkpointing") or not HOLDERS.isdisjoint(m.__dict__)]
