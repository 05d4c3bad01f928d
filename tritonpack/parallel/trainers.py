"""transformers' Trainer, and TRL's trainers, inside of SequenceParallel: the ranks of a group count as one process.

A context doesn't know the trainers of its model: they may be built before it or inside of it. So while a context is
entered, `Trainer.train`, `evaluate` and `predict` look whether the trainer's model is in a context. If so, they change
this trainer alone, until they return: its loader gives the ranks of a group one batch, which is counted once.

TRL's trainers that generate (GRPO, RLOO) need a cache for it, so every rank generates whole sequences. Ranks draw
different random numbers, so all ranks of a group take the completions of their first one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.utils import is_accelerate_available

from tritonpack.packing.samplers.ranks import place_of_group
from tritonpack.parallel.comm import Ranks, first_object
from tritonpack.parallel.replaced import replaced

# Packages whose losses are tested on ranks. If one reads logits of all tokens, torch refuses the shapes.
KNOWN_LOSSES = frozenset({"transformers", "trl", "axolotl"})
# Methods of TRL's trainers that generate.
_GENERATES, _SCORES, _REWARDS = "_generate_single_turn", "_generate_and_score_completions", "_calculate_rewards"

_entered: list[Any] = []  # contexts, SequenceParallel
_watching = ExitStack()  # restores the class Trainer
_sharing: set[int] = set()  # ids of the trainers that share batches now


def watch(context: Any) -> None:
    """Let trainers share batches while this context is entered."""
    if not _entered and is_accelerate_available():  # without it there are no trainers
        from transformers import Trainer

        for name in ("train", "evaluate", "predict"):
            replaced(_watching, Trainer, name, _watched(getattr(Trainer, name)))
    _entered.append(context)


def unwatch(context: Any) -> None:
    """End what `watch` began. A second call does nothing."""
    if context in _entered:
        _entered.remove(context)
    if not _entered:
        _watching.close()


def _watched(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        context = None if id(trainer) in _sharing else _context_of(trainer)
        if context is None:
            return own(trainer, *args, **kwargs)
        with ExitStack() as stack:
            _sharing.add(id(trainer))
            stack.callback(_sharing.discard, id(trainer))
            context.cover_heads()
            _check(trainer, context)
            number, leaders = place_of_group(context.ranks.group)
            replica = Replica(context.ranks, number, leaders)
            _share_batches(trainer, replica, context, stack)
            if all(hasattr(trainer, name) for name in (_GENERATES, _SCORES, _REWARDS)):
                _share_generations(trainer, replica, context, stack)
            return own(trainer, *args, **kwargs)

    return method


def _context_of(trainer: Any) -> Any:
    """The entered context of a trainer's model, or None."""
    modules = {id(module) for module in trainer.model.modules()} if trainer.model is not None else set()
    shared = (one for one in _entered if one.running and not modules.isdisjoint(map(id, one.shared_modules)))
    return next(shared, None)


@dataclass(frozen=True)
class Replica:
    """The ranks of a group, which share batches, among all replicas of the model.

    Attributes:
        ranks: the group.
        number: of this group, from 0.
        leaders: the first rank of each group, as numbers of the world.
    """

    ranks: Ranks
    number: int
    leaders: list[int]

    @contextmanager
    def as_process(self, accelerator: Any) -> Iterator[None]:
        """`accelerator.num_processes` is the number of replicas, and `process_index` the number of this one."""
        state = copy.copy(accelerator.state)
        state.num_processes, state.process_index = len(self.leaders), self.number
        state.sharing_group = self.ranks.group  # which `tritonpack.setup` reads
        with ExitStack() as stack:
            replaced(stack, accelerator, "state", state)
            yield

    def pick(self, gathered: Tensor) -> Tensor:
        """The values of the first rank of each group, out of the values of all ranks of the world in their order."""
        world = len(self.leaders) * self.ranks.size
        return gathered.unflatten(0, (world, -1))[self.leaders].flatten(0, 1)


def _share_batches(trainer: Any, replica: Replica, context: Any, stack: ExitStack) -> None:
    """Give the ranks of a group one batch, and count it once, until the stack ends."""
    from accelerate.utils.operations import recursively_apply

    accelerator, size = trainer.accelerator, replica.ranks.size
    loads, gathers, reduces = accelerator.prepare_data_loader, accelerator.gather, accelerator.reduce
    operations, batch_size = trainer.floating_point_ops, trainer.get_total_train_batch_size
    loss = replica.as_process(accelerator)(trainer.compute_loss)  # losses are multiplied by the number of processes
    predicts = trainer.prediction_step

    def prepare_data_loader(loader: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loads(loader, *args, **kwargs)
        seeding = loader.worker_init_fn
        if isinstance(seeding, partial) and "rank" in seeding.keywords:  # workers of a group draw the same numbers
            loader.worker_init_fn = partial(seeding, rank=replica.number)
        with ExitStack() as inner, replica.as_process(accelerator):
            if isinstance(loader.dataset, IterableDataset):  # by default one process would load for all of the world
                replaced(inner, accelerator.dataloader_config, "dispatch_batches", False)
            return loads(loader, *args, **kwargs)

    def reduce(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        counts = reduction != "sum" or replica.ranks.rank == 0  # a mean over equal values needs no care
        return reduces(tensor if counts else recursively_apply(torch.zeros_like, tensor), reduction, scale)

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        context.cover_heads()  # `train` puts Liger-Kernel's forward into the model after the context was entered
        return loss(*args, **kwargs)

    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as inner:
            if not prediction_loss_only:  # predictions are of whole batches
                replaced(inner, context, "gather_outputs", True)
            return predicts(model, inputs, prediction_loss_only, *args, **kwargs)

    replaced(stack, accelerator, "prepare_data_loader", prepare_data_loader)
    replaced(stack, accelerator, "gather", lambda tensor: recursively_apply(replica.pick, gathers(tensor)))
    replaced(stack, accelerator, "reduce", reduce)
    loader = replica.as_process(accelerator)(trainer.get_train_dataloader)  # of `setup`, too
    replaced(stack, trainer, "get_train_dataloader", loader)
    replaced(stack, trainer, "compute_loss", wraps(loss)(compute_loss))
    replaced(stack, trainer, "prediction_step", prediction_step)
    replaced(stack, trainer, "floating_point_ops", lambda inputs: operations(inputs) / size)
    if not hasattr(trainer, "packed_setup"):  # `setup` counts the documents of the data set
        replaced(stack, trainer, "get_total_train_batch_size", lambda args: batch_size(args) // size)


def _share_generations(trainer: Any, replica: Replica, context: Any, stack: ExitStack) -> None:
    """Give the ranks of a group the same completions and rewards, until the stack ends.

    Raises:
        ValueError: settings with which it can't be done.
    """
    args, ranks = trainer.args, replica.ranks
    for name, remedy in (
        ("use_vllm", "vLLM divides prompts among all processes. Pass use_vllm=False."),
        ("log_completions", "TRL gathers completions of all processes, and ranks of a group have the same ones. Pass "
                            "log_completions=False."),
    ):  # fmt: skip
        if getattr(trainer, name, False):
            raise ValueError(f"with SequenceParallel a trainer can't have {name}=True: {remedy}")
    if args.generation_batch_size % (ranks.size * trainer.num_generations):
        raise ValueError(
            f"the {ranks.size} ranks of a group generate together, so a generation batch of "
            f"{args.generation_batch_size} completions is one of {args.generation_batch_size / ranks.size:g} for them, "
            f"which must be a multiple of num_generations={trainer.num_generations}. Raise per_device_train_batch_size "
            "or steps_per_generation, or lower num_generations."
        )
    generates, rewards = context.paused()(getattr(trainer, _GENERATES)), getattr(trainer, _REWARDS)
    scores = replica.as_process(trainer.accelerator)(getattr(trainer, _SCORES))

    @wraps(scores)
    def score(*some: Any, **others: Any) -> Any:
        result = scores(*some, **others)
        torch.set_rng_state(first_object(torch.get_rng_state(), ranks))  # samples are shuffled next
        return result

    @wraps(generates)
    def generate(*some: Any, **others: Any) -> Any:
        return first_object(generates(*some, **others), ranks)

    replaced(stack, trainer, _GENERATES, generate)
    replaced(stack, trainer, _SCORES, score)
    replaced(stack, trainer, _REWARDS, wraps(rewards)(lambda *some, **others: replica.pick(rewards(*some, **others))))
    replaced(stack, args, "generation_batch_size", args.generation_batch_size // ranks.size)


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
            "logits are the whole batch's."
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
