"""What a process knows of the other ranks, and how they compare their settings: through the store of the group."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from tritonpack.notices import say_once
from tritonpack.packing.lengths import check_integer

SUBJECT = "made this sampler"  # what ranks do when they compare their samplers
_NOTICE_AFTER = timedelta(seconds=30)
_comparisons = count()  # the ranks number their comparisons alike, because each takes part in all of them


def has_group() -> bool:
    """Whether torch.distributed has a process group."""
    return dist.is_available() and dist.is_initialized()


def place_among_processes() -> tuple[int, int]:
    """The number of processes of the job and the number of this one, from the process group or from the launcher.

    The launcher (torchrun) sets WORLD_SIZE and RANK.
    """
    if has_group():
        return dist.get_world_size(), dist.get_rank()
    count, number = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK"))
    return int(count) if count.isdecimal() else 1, int(number) if number.isdecimal() else 0


def place_in_world(
    num_replicas: int | None, rank: int | None, shard: bool, sharing: Any = None
) -> tuple[int, int | None]:
    """The number of ranks and the rank of this process (None unless `shard`), from torch.distributed if not given.

    Args:
        sharing: the group of ranks that share batches and count as one rank; None if every rank has its own.
    """
    group = has_group()
    if sharing is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError(
                f"group says how many replicas there are, and which one this process belongs to; got num_replicas="
                f"{num_replicas} and rank={rank} beside it. Leave them out, or the group."
            )
        number, leaders = place_of_group(sharing)
        return len(leaders), number if shard else None
    asks = num_replicas is None or (rank is None and shard)
    if asks and not group and (place_among_processes()[0] != 1 or num_replicas not in (None, 1)):
        raise ValueError(
            f"num_replicas={num_replicas} and rank={rank} don't say which rank this process is, and there is no "
            f"process group to ask (WORLD_SIZE is {place_among_processes()[0]}). Call "
            "torch.distributed.init_process_group first, or pass both."
        )
    if num_replicas is None:
        num_replicas = dist.get_world_size() if group else 1
    num_replicas = check_integer(num_replicas, "num_replicas")
    if not shard:
        return num_replicas, None
    if rank is None:
        rank = dist.get_rank() if group else 0
    return num_replicas, check_integer(rank, "rank", 0, num_replicas - 1, f"because num_replicas is {num_replicas}")


def place_of_group(group: Any) -> tuple[int, list[int]]:
    """The number of a group among all groups like it, and the first rank of each group, in the order of their numbers.

    Groups are those of one dimension of a mesh, or of its last dimensions: they have n ranks each, at a distance of s.
    So the world is a mesh (a, n, s), and a group is numbered by its place in (a, s).

    Args:
        group: a process group that this process belongs to, or a DeviceMesh.

    Raises:
        ValueError: no group, or its ranks can't be those of a dimension of a mesh of the whole world.
    """
    if hasattr(group, "get_group"):
        ranks = sorted(group.mesh.flatten().tolist())
    elif has_group() and isinstance(group, dist.ProcessGroup):
        ranks = sorted(dist.get_process_group_ranks(group))
    else:
        raise ValueError(
            f"group must be a process group or a DeviceMesh, such as mesh['sp']; got {group!r:.100}. The group of all "
            "ranks is torch.distributed.group.WORLD, once there is a process group."
        )
    world, size = dist.get_world_size(), len(ranks)
    distance = ranks[1] - ranks[0] if size > 1 else 1
    block = size * distance
    start = ranks[0] // block * block + ranks[0] % distance
    if world % block or ranks != list(range(start, start + block, distance)):
        raise ValueError(
            f"the ranks {ranks} aren't those of a dimension of a mesh of {world} ranks, so nothing says which batches "
            "the other ranks get. Take the group from torch.distributed.device_mesh.init_device_mesh(device, (dp, sp), "
            "mesh_dim_names=('dp', 'sp'))['sp']."
        )
    leaders = [first + place for first in range(0, world, block) for place in range(distance)]
    return leaders.index(start), leaders


def can_compare(num_replicas: int | None) -> bool:
    """Whether a sampler for so many ranks is made by every process of the group, so that they can compare it.

    Workers of a DataLoader are no ranks. The "fake" backend of torch's tests has no other ranks, and MPI no store.
    """
    return (
        has_group()
        and num_replicas == dist.get_world_size() > 1
        and get_worker_info() is None
        and dist.get_backend() not in ("fake", "mpi")
    )


def compare(
    subject: str, mine: Mapping[str, Any], find_fault: Callable[[Sequence[dict[str, Any]]], str]
) -> dict[str, Any]:
    """Compare the values of all ranks. Every rank of the default group must call this.

    Rank 0 reads the values of all ranks and writes its verdict. They go through the store of the process group, not
    through a collective. So this works on every backend, needs no device, and can name the ranks that don't come.

    Args:
        subject: what the ranks do here, for messages, such as "made this sampler".
        mine: the values of this rank, as plain numbers and strings.
        find_fault: called on rank 0 with the values of all ranks; returns an error, or an empty string.

    Returns:
        The values of rank 0.

    Raises:
        ValueError: on every rank, if there is a fault.
        TimeoutError: ranks that don't come within the timeout of the process group.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"tritonpack/{next(_comparisons)}"
    keys = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    store.set(keys[rank], json.dumps(mine))
    if rank == 0:
        _wait(store, keys, keys, subject)
        values = [json.loads(store.get(key)) for key in keys]
        store.set(f"{name}/verdict", json.dumps([find_fault(values), values[0]]))
        for key in keys:
            store.delete_key(key)
    _wait(store, [f"{name}/verdict"], keys, subject)
    fault, first = json.loads(store.get(f"{name}/verdict"))
    if fault:
        raise ValueError(fault)
    return first


@contextmanager
def raise_faults_on_all_ranks(made: str, num_replicas: int | None) -> Iterator[None]:
    """Tell the other ranks, which `compare` their values, of an error on this one, so that all ranks raise it.

    Every rank compares its values once, when it makes its sampler or in its stead here. So a part of the construction
    before the sampler gets a context of its own, and none may surround the sampler.

    Args:
        made: what the ranks make here, such as "sampler".
        num_replicas: as given to the sampler.
    """
    try:
        yield
    except Exception as error:
        if num_replicas is None and has_group():
            num_replicas = dist.get_world_size()
        if can_compare(num_replicas):
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            compare(SUBJECT, {"fault": f"can't make its {made}: {reason}"}, find_raised)
        raise


def find_raised(values: Sequence[Mapping[str, Any]]) -> str:
    """The first fault that `raise_faults_on_all_ranks` tells, with its rank; an empty string if there is none."""
    return next((f"rank {rank} {each['fault']}" for rank, each in enumerate(values) if each.get("fault")), "")


def _wait(store: Any, keys: Sequence[str], keys_of_ranks: Sequence[str], subject: str) -> None:
    """Wait until the store has all keys. After half a minute say which ranks haven't come."""
    deadline = time.monotonic() + store.timeout.total_seconds()
    while True:
        try:
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            return store.wait(list(keys), min(left, _NOTICE_AFTER))
        except RuntimeError:  # what all stores raise after the time
            if store.check(list(keys)):
                return None
            absent = [rank for rank, key in enumerate(keys_of_ranks) if not store.check([key])] or [0]
            waiting = (
                f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not {subject}, and rank "
                f"{dist.get_rank()} waits, because all {len(keys_of_ranks)} ranks compare their settings. Every rank "
                f"must do so, in the same order and with the same num_replicas. To look at a plan on one rank alone "
                "call tritonpack.packing.plan_epoch."
            )
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{waiting} The process group's timeout of {store.timeout} has passed.") from None
            say_once("waiting-for-ranks", waiting)


def describe_differences(values: Sequence[Mapping[str, Any]]) -> str:
    """Which values differ on which ranks, such as "seed is 0 on rank 0 and 5 on ranks 1 to 3"; "" if none does."""
    found = []
    for name in dict.fromkeys(name for value in values for name in value):
        ranks_of: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks_of.setdefault(repr(value[name]) if name in value else "missing", []).append(rank)
        if len(ranks_of) > 1:
            found.append(f"{name} is " + " and ".join(f"{text} on {name_ranks(who)}" for text, who in ranks_of.items()))
    return "; ".join(found)


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 3", "ranks 0, 1, 2", or the first few of many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
