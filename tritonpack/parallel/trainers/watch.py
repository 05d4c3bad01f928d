"""transformers' Trainer inside of SequenceParallel: the ranks of a group count as one process, and get one batch.

A context doesn't know the trainers of its model: they may be built before it or inside of it. So while a context is
entered, `Trainer.train`, `evaluate` and `predict` look whether the trainer's model is in a context. If so, they change
this trainer alone, until they return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers.utils import is_accelerate_available

from tritonpack.packing.samplers.ranks import place_of_group
from tritonpack.parallel.replaced import replaced

_ENTRIES = ("train", "evaluate", "predict")

_entered: list[Any] = []  # contexts, SequenceParallel
_watching = ExitStack()  # restores the class Trainer
_sharing: set[int] = set()  # ids of the trainers that share batches now

# Packages whose losses are tested on ranks. If one reads logits of all tokens, torch refuses the shapes.
KNOWN_LOSSES = frozenset({"transformers", "trl", "axolotl"})


def watch(context: Any) -> None:
    """Let trainers share batches while this context is entered."""
    if not _entered and is_accelerate_available():  # without it there are no trainers
        from transformers import Trainer

        for name in _ENTRIES:
            replaced(_watching, Trainer, name, _watched(getattr(Trainer, name)))
    _entered.append(context)


def unwatch(context: Any) -> None:
    """End what `watch` began. A second call does nothing."""
    if context in _entered:
        _entered.remove(context)
    if not _entered:
        _watching.close()


def _watched(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with _shared(trainer):
            return own(trainer, *args, **kwargs)

    return method


@contextmanager
def _shared(trainer: Any) -> Iterator[None]:
    """The trainer counts the ranks of a group as one process, if its model is in an entered context."""
    context = None if id(trainer) in _sharing else _context_of(trainer)
    if context is None:
        yield
        return
    from tritonpack.parallel.trainers.accelerators import Replica, share_batches
    from tritonpack.parallel.trainers.generations import share_generations

    with ExitStack() as stack:
        context.cover_heads()
        _sharing.add(id(trainer))
        stack.callback(_sharing.discard, id(trainer))
        number, leaders = place_of_group(context.ranks.group)
        replica = Replica(context.ranks, number, tuple(leaders))
        _check(trainer, context)
        share_batches(trainer, replica, stack)
        share_generations(trainer, replica, context, stack)
        own_loss, own_step = trainer.compute_loss, trainer.prediction_step

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            context.cover_heads()  # `train` puts Liger-Kernel's forward into the model after the context was entered
            return own_loss(*args, **kwargs)

        def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as inner:
                if not prediction_loss_only:  # predictions are those of whole batches
                    replaced(inner, context, "gather_outputs", True)
                return own_step(model, inputs, prediction_loss_only, *args, **kwargs)

        replaced(stack, trainer, "compute_loss", compute_loss)
        replaced(stack, trainer, "prediction_step", prediction_step)
        yield


def _context_of(trainer: Any) -> Any:
    """The entered context of a trainer's model, or None."""
    modules = {id(module) for module in trainer.model.modules()} if trainer.model is not None else set()
    shared = (one for one in _entered if one.running and not modules.isdisjoint(map(id, one.shared_modules)))
    return next(shared, None)


def _check(trainer: Any, context: Any) -> None:
    """ValueError for settings with which the ranks of a group can't get one batch, or count as one process."""
    own = getattr(trainer, "compute_loss_func", None) is not None
    losses = (vars(kind)["compute_loss"] for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
    homes = (loss.__module__.partition(".")[0] for loss in losses)
    home = next(home for home in homes if home != "tritonpack")  # `setup` calls the trainer's own
    if not context.gather_outputs and (own or home not in KNOWN_LOSSES):
        what = "a compute_loss_func" if own else f"a compute_loss of its own ({type(trainer).__name__})"
        raise ValueError(
            f"this Trainer has {what}, and inside of SequenceParallel a model's logits are this rank's rows: a mean "
            "over them would be wrong without an error. Pass SequenceParallel(..., gather_outputs=True), with which "
            "logits are those of the whole batch."
        )
    accelerating = getattr(trainer.args, "accelerator_config", None)
    for option, given, remedy in (
        ("dispatch_batches", getattr(accelerating, "dispatch_batches", None), "leave it at None: every rank loads"),
        ("eval_use_gather_object", getattr(trainer.args, "eval_use_gather_object", False), "leave it at False"),
    ):
        if given:
            raise ValueError(f"with SequenceParallel a Trainer can't have {option}=True: {remedy}.")
    sizes = {name: getattr(trainer, f"get_{name}_size", lambda: 1)() for name in ("tp", "cp", "sp")}
    if any(size > 1 for size in sizes.values()):
        raise ValueError(
            f"the Trainer shares batches among processes itself ({sizes}), so SequenceParallel would share them twice. "
            "Leave one of them out."
        )
