"""What layers outside of transformers' interface ask during a forward pass, and the forwards that stand for theirs."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from typing import Any

import torch
from torch import nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.packed_batch import PackedBatch

OUTSIDE = (
    "{} was called outside of its model's forward pass, where nothing says where documents begin. Call the model, or "
    "unpatch it first. Where a checkpointing function of your own recomputes it, use the model's "
    "gradient_checkpointing_enable() or torch's checkpoint_wrapper."
)

UNCLAIMED = "(unclaimed)"  # in the place of the name that a config had, while the config hasn't ours


class _State(threading.local):
    """What one thread is running; the attributes are those of `PackingContext`."""

    def __init__(self) -> None:
        self.running = False
        self.packed_batch: PackedBatch | None = None
        self.told: PackedBatch | None = None


class PackingContext:
    """The packing of the forward pass that is running, for modules that transformers passes nothing to.

    Every thread has a state of its own. torch.compile doesn't guard what it reads of a thread's state, so what is
    traced reads the attributes here: within one graph these are values of the graph, whatever other threads do.

    Attributes:
        running: whether a forward pass of the model is running.
        packed_batch: None outside of a forward pass, and where rows are left to the model (a cache is in use).
        told: the packing that was read from the arguments of the model that the user called, while that runs: its head
            may keep some of them from the patched modules inside.
    """

    def __init__(self) -> None:
        self.running = False
        self.packed_batch: PackedBatch | None = None
        self.told: PackedBatch | None = None
        self._of_thread = _State()

    def __reduce__(self) -> tuple[type[PackingContext], tuple[()]]:
        return PackingContext, ()  # copies of a model share no state

    @property
    def state(self) -> PackingContext | _State:
        """Where to read."""
        return self if torch.compiler.is_compiling() else self._of_thread

    def set(self, running: bool, packed_batch: PackedBatch | None) -> None:
        """Say what is running from now on."""
        for state in (self, self._of_thread):
            state.running, state.packed_batch = running, packed_batch

    def tell(self, told: PackedBatch | None) -> None:
        """Say what the model was told that the user called."""
        for state in (self, self._of_thread):
            state.told = told


class ModuleRef:
    """A module, known to its own hooks without keeping it alive; a copy of the module has a copy that knows it."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)

    @property
    def module(self) -> Any:
        module = self._reference()
        if module is None:
            raise UnsupportedModelError(
                "a part of this model was replaced since it was patched, so nothing says where documents begin. Call "
                "tritonpack.unpatch(model), build the model, and patch the whole."
            )
        return module

    @property
    def gone(self) -> bool:
        """Whether the module isn't in memory any more, because another took its place in the model."""
        return self._reference() is None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleRef:
        return ModuleRef(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> tuple[type[ModuleRef], tuple[nn.Module]]:
        return ModuleRef, (self.module,)


class InstanceForward:
    """Stands for one module's forward from `install` to `remove`; classes stay as they are.

    Where somebody else, such as accelerate, has wrapped it in the meantime, it can't be taken away: then it passes its
    calls on.

    Attributes:
        attribute: the name of the method that it stands for.
    """

    attribute = "forward"

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        self._module, self.context = ModuleRef(module), context
        self.names = parameters_of(type(module), self.attribute)
        self.own: Any = None  # somebody else's forward of this instance, such as accelerate's
        self.wrapper: Any = None  # what somebody else put in place of ours, and which calls ours
        self.installed = False

    @property
    def module(self) -> Any:
        return self._module.module

    @property
    def gone(self) -> bool:
        return self._module.gone

    def install(self) -> None:
        """Take the place of the module's forward; a second call changes nothing."""
        forward = self.module.__dict__.get(self.attribute)
        if forward is not self and (self.wrapper is None or forward is not self.wrapper):
            self.own, self.module.__dict__[self.attribute] = forward, self
        self.installed = True

    def remove(self) -> None:
        """Give the module its own forward back; a second call changes nothing."""
        forward = self.module.__dict__.get(self.attribute)
        if forward is self and self.own is None:
            del self.module.__dict__[self.attribute]
        elif forward is self:
            self.module.__dict__[self.attribute] = self.own
        elif self.installed:
            self.wrapper = forward
        self.installed = False

    @property
    def inner(self) -> Any:
        if self.own is not None:
            return self.own
        return getattr(type(self.module), self.attribute).__get__(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward it stands for: trainers ask which columns of a dataset a model takes."""
        return inspect.signature(self.inner)

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs) if self.installed else self.inner(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What happens instead of the module's own forward."""
        raise NotImplementedError


def parameters_of(kind: type[nn.Module], method: str = "forward") -> list[str]:
    """The names of the arguments of a module class's forward, or of another method.

    transformers 5.13 to 5.15 wrap recurrent layers' forwards without `functools.wraps`, so the wrapper's own variable
    is read.
    """
    forward = getattr(kind, method)
    wrapped = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    return list(inspect.signature(wrapped.get("forward_func", forward)).parameters)[1:]


# By which the hook before a patched module hands what it has read to the module's forward. Through the call, because
# other threads may call the module meanwhile.
HANDED = "tritonpack_packing"


class Running(InstanceForward):
    """A patched module's forward: while it runs, the context holds what the module's hook has read.

    The context is reset where the forward ends by an exception or an interrupt, too; torch calls no hook there.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        packed_batch = kwargs.pop(HANDED, None)
        state = self.context.state
        running, outer = state.running, state.packed_batch
        self.context.set(
            True, outer if running else packed_batch
        )  # the outermost patched module says what the packing is
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.context.set(running, outer)
