"""What a process knows of the other ranks, and how they compare their settings: through the store of the group."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from types import MappingProxyType
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
    if sharing is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError(
                f"group says how many replicas there are, and which one this process belongs to; got num_replicas="
                f"{num_replicas} and rank={rank} beside it. Leave them out, or the group."
            )
        number, leaders = place_of_group(sharing)
        return len(leaders), number if shard else None
    processes, number = place_among_processes()
    if not has_group() and (num_replicas is None or (rank is None and shard)):
        if processes != 1 or num_replicas not in (None, 1):
            raise ValueError(
                f"num_replicas={num_replicas} and rank={rank} don't say which rank this process is, and there is no "
                f"process group to ask (WORLD_SIZE is {processes}). Call torch.distributed.init_process_group first, "
                "or pass both."
            )
        number = 0
    num_replicas = check_integer(processes if num_replicas is None else num_replicas, "num_replicas")
    if not shard:
        return num_replicas, None
    rank = number if rank is None else rank
    return num_replicas, check_integer(rank, "rank", 0, num_replicas - 1, f"because num_replicas is {num_replicas}")


def place_of_group(group: Any) -> tuple[int, list[int]]:
    """The number of a group among all groups like it, and the first rank of each group, in the order of their numbers.

    A group is one dimension of a mesh, or its last dimensions: n ranks at a distance of s. So the world is a mesh
    (a, n, s), and a group is numbered by its place in (a, s).

    Raises:
        ValueError: no process group and no DeviceMesh, or ranks that aren't those of a dimension of a mesh of the
            whole world.
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
    subject: str,
    mine: Mapping[str, Any],
    own: Mapping[str, Any] = MappingProxyType({}),
    differ: str = "",
    remedy: str = "",
) -> dict[str, Any]:
    """Compare the values of all ranks. Every rank of the default group must call this.

    Rank 0 reads the values of all ranks and writes its verdict. They go through the store of the process group, not
    through a collective. So this works on every backend, needs no device, and can name the ranks that don't come.

    Args:
        subject: what the ranks do here, for messages, such as "made this sampler".
        mine: what every rank must have, as plain numbers and strings; or {"fault": ...}, an error of this rank.
        own: what ranks may have of their own; no two may have the same "rank".
        differ, remedy: what the error says before and after the values that differ.

    Returns:
        What rank 0 has of its own.

    Raises:
        ValueError: on every rank, if values differ or a rank has an error.
        TimeoutError: ranks that don't come within the timeout of the process group.
    """
    store = dist.distributed_c10d._get_default_store()
    name = f"tritonpack/{next(_comparisons)}"
    keys = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    store.set(keys[rank], json.dumps([dict(mine), dict(own)]))
    if rank == 0:
        _wait(store, keys, keys, subject)
        shared, owns = zip(*(json.loads(store.get(key)) for key in keys), strict=True)
        store.set(f"{name}/verdict", json.dumps([_find_fault(shared, owns, differ, remedy), owns[0]]))
        for key in keys:
            store.delete_key(key)
    _wait(store, [f"{name}/verdict"], keys, subject)
    fault, first = json.loads(store.get(f"{name}/verdict"))
    if fault:
        raise ValueError(fault)
    return first


def _find_fault(shared: Sequence[Any], owns: Sequence[Any], differ: str, remedy: str) -> str:
    """The error that all ranks raise; an empty string if they agree."""
    for rank, values in enumerate(shared):
        if "fault" in values:
            return f"rank {rank} {values['fault']}"
    differences = []
    for name in shared[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, values in enumerate(shared):
            ranks_of.setdefault(repr(values[name]), []).append(rank)
        if len(ranks_of) > 1:
            has = " and ".join(f"{text} on {name_ranks(who)}" for text, who in ranks_of.items())
            differences.append(f"{name} is {has}")
    if differences:
        return f"{differ}: {'; '.join(differences)}. {remedy}"
    numbers = [own.get("rank") for own in owns]
    for number in {*numbers} - {None}:
        if numbers.count(number) > 1:
            same = [process for process, other in enumerate(numbers) if other == number]
            return (
                f"the samplers on {name_ranks(same)} of the process group all have rank={number}, so documents would "
                "be seen twice and others never. Leave out num_replicas and rank, or pass rank="
                "torch.distributed.get_rank(), which LOCAL_RANK isn't on several machines."
            )
    return ""


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
            compare(SUBJECT, {"fault": f"can't make its {made}: {reason}"})
        raise


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


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 3", "ranks 0, 1, 2", or the first few of many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
