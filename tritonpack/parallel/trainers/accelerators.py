"""The methods of accelerate that a Trainer calls, with the ranks that share batches counted as one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply
from torch import Tensor
from torch.utils.data import IterableDataset

from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.replaced import replaced


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
    leaders: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of groups, which is the number of different batches in a step."""
        return len(self.leaders)

    def pick(self, gathered: Tensor) -> Tensor:
        """The values of the first rank of each group, out of the values of all ranks of the world in their order."""
        world = self.count * self.ranks.size
        return gathered.unflatten(0, (world, -1))[list(self.leaders)].flatten(0, 1)


class _ReplicaState:
    """accelerate's state, in which a replica is a process. `setup` reads `sharing_group`, the ranks of the replica."""

    def __init__(self, own: Any, replica: Replica) -> None:
        vars(self).update(
            _own=own, num_processes=replica.count, process_index=replica.number, sharing_group=replica.ranks.group
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)


@contextmanager
def counted_as_one(accelerator: Any, replica: Replica) -> Iterator[None]:
    """`accelerator.num_processes` is the number of replicas, and `process_index` the number of this one."""
    with ExitStack() as stack:
        replaced(stack, accelerator, "state", _ReplicaState(accelerator.state, replica))
        yield


def share_batches(trainer: Any, replica: Replica, stack: ExitStack) -> None:
    """Give the ranks of a group one batch, and count it once, until the stack ends."""
    accelerator = trainer.accelerator

    def counting(name: str) -> Callable[..., Any]:
        own = getattr(trainer, name)

        @wraps(own)
        def method(*args: Any, **kwargs: Any) -> Any:
            with counted_as_one(accelerator, replica):
                return own(*args, **kwargs)

        return method

    for name in ("get_train_dataloader", "compute_loss"):  # of `setup`, too; losses are multiplied by the replicas
        replaced(stack, trainer, name, counting(name))
    loads, gathers, reduces = accelerator.prepare_data_loader, accelerator.gather, accelerator.reduce
    operations, batch_size = trainer.floating_point_ops, trainer.get_total_train_batch_size

    def prepare_data_loader(loader: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loads(loader, *args, **kwargs)
        seeding = loader.worker_init_fn
        if isinstance(seeding, partial) and "rank" in seeding.keywords:  # workers of a group draw the same numbers
            loader.worker_init_fn = partial(seeding, rank=replica.number)
        with ExitStack() as inner, counted_as_one(accelerator, replica):
            if isinstance(loader.dataset, IterableDataset):  # by default one process would load for all of the world
                replaced(inner, accelerator.dataloader_config, "dispatch_batches", False)
            return loads(loader, *args, **kwargs)

    def reduce(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        counts = reduction != "sum" or replica.ranks.rank == 0  # a mean over equal values needs no care
        return reduces(tensor if counts else recursively_apply(torch.zeros_like, tensor), reduction, scale)

    replaced(stack, accelerator, "prepare_data_loader", prepare_data_loader)
    replaced(stack, accelerator, "gather", lambda tensor: recursively_apply(replica.pick, gathers(tensor)))
    replaced(stack, accelerator, "reduce", reduce)
    replaced(stack, trainer, "floating_point_ops", lambda inputs: operations(inputs) / replica.ranks.size)
    if not hasattr(trainer, "packed_setup"):  # `setup` counts the documents of the data set
        replaced(stack, trainer, "get_total_train_batch_size", lambda args: batch_size(args) // replica.ranks.size)
