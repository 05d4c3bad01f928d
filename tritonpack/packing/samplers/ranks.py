"""The place of a process among the ranks, and the comparison of settings through the store of the process group."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info

from tritonpack.notices import say_once
from tritonpack.packing.lengths import check_integer

_NOTICE_AFTER = timedelta(seconds=30)
_comparisons = count()  # the ranks number their comparisons alike, because each takes part in all of them


def has_group() -> bool:
    """Return whether torch.distributed has a process group."""
    return dist.is_available() and dist.is_initialized()


def place_among_processes() -> tuple[int, int]:
    """The number of processes of the job and the number of this one, from the process group or from torchrun."""
    if has_group():
        return dist.get_world_size(), dist.get_rank()
    processes, number = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(processes) if processes.isdecimal() else 1, int(number) if number.isdecimal() else 0


def place_in_world(
    num_replicas: int | None, rank: int | None, shard: bool, group: Any = None
) -> tuple[int, int | None]:
    """Return the number of ranks and this process's rank (None unless `shard`); torch.distributed's by default.

    `group` is the group of ranks that share batches and count as one rank; None if every rank has its own.
    """
    if group is not None:
        if num_replicas is not None or rank is not None:
            raise ValueError(f"leave out group, or num_replicas={num_replicas} and rank={rank}: group says both.")
        number, leaders = place_of_group(group)
        return len(leaders), number if shard else None
    processes, number = place_among_processes()
    num_replicas = check_integer(processes if num_replicas is None else num_replicas, "num_replicas")
    if not shard:
        return num_replicas, None
    if rank is None:
        is_known = num_replicas == processes and (has_group() or "RANK" in os.environ)
        if num_replicas > 1 and not is_known:
            raise ValueError(
                f"num_replicas={num_replicas} doesn't say which rank this process is, of {processes} processes. Pass "
                "rank, or call torch.distributed.init_process_group first and leave out num_replicas."
            )
        rank = number if num_replicas > 1 else 0
    elif can_compare(num_replicas) and rank != number:
        raise ValueError(
            f"rank={rank!r:.100} isn't this process, which is rank {number} of the {processes} ranks of the process "
            "group (on several machines LOCAL_RANK differs). Leave out num_replicas and rank."
        )
    return num_replicas, check_integer(rank, "rank", 0, num_replicas - 1, f"because num_replicas is {num_replicas}")


def place_of_group(group: Any) -> tuple[int, list[int]]:
    """The number of a group among all groups like it, and the first rank of each group.

    A group is one dimension of a mesh, or its last dimensions: n ranks at a distance of s. So the world is a mesh
    (a, n, s), and a group is numbered by its place in (a, s). ValueError for other groups.
    """
    if hasattr(group, "get_group"):
        ranks = sorted(group.mesh.flatten().tolist())
    elif has_group() and isinstance(group, dist.ProcessGroup):
        ranks = sorted(dist.get_process_group_ranks(group))
    else:
        raise ValueError(f"group must be a process group or a DeviceMesh, such as mesh['sp']; got {group!r:.100}.")
    world, first = dist.get_world_size(), ranks[0]
    distance = ranks[1] - first if len(ranks) > 1 else 1
    block = len(ranks) * distance
    leaders = [rank for rank in range(world) if rank % block < distance]
    if world % block or first not in leaders or ranks != list(range(first, first + block, distance)):
        raise ValueError(
            f"the ranks {ranks} don't form a dimension of a mesh of {world} ranks. Take the group from "
            "torch.distributed.device_mesh.init_device_mesh(device, (dp, sp), mesh_dim_names=('dp', 'sp'))['sp']."
        )
    return leaders.index(first), leaders


def can_compare(num_replicas: int) -> bool:
    """Return whether every process of the group makes a sampler for this number of ranks, and can compare it.

    Workers of a DataLoader are no ranks. The "fake" backend of torch's tests has no other ranks, and MPI no store.
    """
    return (
        has_group()
        and num_replicas == dist.get_world_size() > 1
        and get_worker_info() is None
        and dist.get_backend() not in ("fake", "mpi")
    )


def compare(what: str, mine: Mapping[str, Any], differ: str, remedy: str, told: Any = None) -> Any:
    """Compare the values of all ranks, and return what rank 0 tells. Every rank of the default group must call this.

    The values go through the store of the process group, not through a collective. So this works on every backend,
    needs no device, and can name the ranks that don't come: a TimeoutError after the timeout of the process group.

    Args:
        what: what the ranks do here, for messages, such as "made this sampler".
        mine: what every rank must have, as plain numbers and strings; ValueError on every rank if they differ.
        differ, remedy: what that error says before and after the values that differ.
        told: what rank 0 tells the others.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    name = f"tritonpack/{next(_comparisons)}"
    keys, verdict = [f"{name}/{number}" for number in range(dist.get_world_size())], f"{name}/verdict"
    store.set(keys[rank], json.dumps(dict(mine)))
    if rank == 0:
        _wait(store, keys, keys, what)
        values = [json.loads(store.get(key)) for key in keys]
        store.set(verdict, json.dumps([_differences(values), told]))
        for key in keys:
            store.delete_key(key)
    _wait(store, [verdict], keys, what)
    differences, told = json.loads(store.get(verdict))
    if differences:
        raise ValueError(f"{differ}: {differences}. {remedy}")
    return told


def _differences(values: Sequence[Mapping[str, Any]]) -> str:
    """The values that differ, and the ranks that have them, such as "seed is 0 on rank 0 and 1 on ranks 1, 2"."""
    differences = []
    for name in values[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, own in enumerate(values):
            ranks_of.setdefault(repr(own[name]), []).append(rank)
        if len(ranks_of) > 1:
            shown = " and ".join(f"{text} on {_names(ranks)}" for text, ranks in ranks_of.items())
            differences.append(f"{name} is {shown}")
    return "; ".join(differences)


def _wait(store: Any, keys: list[str], keys_of_ranks: list[str], what: str) -> None:
    """Wait until the store has all keys. After half a minute say which ranks haven't come."""
    for limit, is_last in ((_NOTICE_AFTER, False), (store.timeout, True)):
        try:
            store.wait(keys, limit)
            return
        except RuntimeError:  # what all stores raise after the time
            absent = [rank for rank, key in enumerate(keys_of_ranks) if not store.check([key])] or [0]
            waiting = (
                f"{_names(absent)} {'has' if len(absent) == 1 else 'have'} not {what}, and rank {dist.get_rank()} "
                f"waits, because all {len(keys_of_ranks)} ranks compare their settings. Every rank must do so, in the "
                "same order. To look at a plan on one rank alone call tritonpack.packing.plan_epoch."
            )
            if is_last:
                raise TimeoutError(f"{waiting} The process group's timeout of {store.timeout} has passed.") from None
            say_once("waiting-for-ranks", waiting)


def _names(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 3", "ranks 0, 1, 2", or the first few of many."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
