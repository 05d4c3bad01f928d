"""Groups of ranks, and the collectives between them, without autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.checks import describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

Arrival = Callable[[], Tensor]  # waits for a collective and returns its result

# torch 2.13 renamed these and warns at the old names; earlier versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Ranks:
    """A process group and this process's place in it.

    Attributes:
        group: of torch.distributed.
        rank: this process's number within the group.
        size: how many ranks the group has.
        dimensions: of a mesh of two dimensions, this process's group along each: rank = first.rank * second.size +
            second.rank. Empty for other groups.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    dimensions: tuple[Ranks, ...] = ()

    def reaches(self, device: torch.device) -> bool:
        """Return whether the group has a backend for tensors on this kind of device."""
        return f"{device.type}:" in dist.get_backend_config(self.group)


def as_ranks(group: GroupLike, *, dimensions: int = 1) -> Ranks:
    """Return the ranks of a process group, a DeviceMesh with at most `dimensions` dimensions, or (None) the world.

    Ranks of a mesh of two dimensions are numbered row by row. A mesh that isn't the whole world gets a process group of
    all its ranks at the first call, which every process of the world must make.

    Raises:
        ValueError: there is no process group; it isn't a group; the mesh has more dimensions, or two whose ranks don't
            ascend row by row; this process isn't in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group first, in a process that torchrun "
            "has started."
        )
    found: Any = dist.group.WORLD if group is None else group
    if hasattr(found, "get_group"):
        if found.ndim > dimensions:
            raise ValueError(
                f"got a DeviceMesh of {found.ndim} dimensions, {found.mesh_dim_names}; pass "
                f"{'one of them' if dimensions == 1 else 'one or two of them'}, such as mesh['sp']."
            )
        if found.ndim == 2 and found.get_coordinate() is not None:
            return _of_two_dimensions(found)
        found = found.get_group() if found.ndim == 1 else dist.GroupMember.NON_GROUP_MEMBER
    member = found is not dist.GroupMember.NON_GROUP_MEMBER
    if member and not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            "ranks share a batch in a process group, a DeviceMesh, or (None) the whole world; got "
            f"{describe(found)}. Pass a mesh's dimension, such as mesh['sp'], or torch.distributed.new_group(ranks)."
        )
    if not member or dist.get_rank(found) < 0:
        raise ValueError(
            f"this process, rank {dist.get_rank()} of the world, isn't in the group; got {group!r:.100}. Pass the "
            "group or the mesh that it belongs to."
        )
    return Ranks(found, dist.get_rank(found), dist.get_world_size(found))


def _of_two_dimensions(mesh: Any) -> Ranks:
    numbers = mesh.mesh.flatten().tolist()
    if numbers != sorted(numbers):
        raise ValueError(
            f"the ranks of a mesh of two dimensions must ascend row by row; got {mesh.mesh.tolist()}. Make it with "
            "init_device_mesh."
        )
    if len(numbers) < dist.get_world_size() and not mesh.mesh_dim_names:
        raise ValueError("a mesh of two dimensions needs names, such as mesh_dim_names=('across', 'within').")
    whole = as_ranks(None if len(numbers) == dist.get_world_size() else mesh._flatten())
    return replace(whole, dimensions=tuple(as_ranks(mesh.get_group(dim)) for dim in range(2)))


def gather(x: Tensor, ranks: Ranks) -> Arrival:
    """Start to gather every rank's x, of one shape on all ranks, as (ranks, *shape)."""
    return _start(_all_gather, x.new_empty(ranks.size, *x.shape), x, ranks)


def scatter_sum(parts: Tensor, ranks: Ranks) -> Arrival:
    """Start to sum parts[own rank] over ranks; parts are (ranks, *shape) on every rank."""
    return _start(_reduce_scatter, parts.new_empty(parts.shape[1:]), parts, ranks)


def all_to_all(x: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Arrival:
    """Start to send sent[r] rows of x, one part after the other, to each rank r, and to receive received[r] from it."""
    result = x.new_empty(sum(received), *x.shape[1:])
    handle = dist.all_to_all_single(result, x.contiguous(), received, sent, group=ranks.group, async_op=True)
    return _arrival(result, [handle])


def shift(x: Tensor, received: int, ranks: Ranks) -> Arrival:
    """Start to send contiguous x to the next rank and to receive `received` rows from the rank before."""
    result, operations = x.new_empty(received, *x.shape[1:]), []
    for operation, tensor, step in ((dist.isend, x, 1), (dist.irecv, result, -1)):
        if tensor.numel():
            neighbour = dist.get_global_rank(ranks.group, (ranks.rank + step) % ranks.size)
            operations.append(dist.P2POp(operation, tensor, neighbour, ranks.group))
    return _arrival(result, dist.batch_isend_irecv(operations) if operations else [])


def gather_objects(value: Any, ranks: Ranks) -> list[Any]:
    """Every rank's value, which may be anything that can be pickled; waits for the device if the backend needs it."""
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, value, group=ranks.group)
    return found


def first_object(value: Any, ranks: Ranks) -> Any:
    """The value of the group's first rank, which may be anything that can be pickled, on every rank."""
    found = [value]
    dist.broadcast_object_list(found, src=dist.get_global_rank(ranks.group, 0), group=ranks.group)
    return found[0]


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros at its end along `dim`, because collectives take tensors of one size from all ranks."""
    missing = size - x.shape[dim]
    return pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of many ranks are summed: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _start(collective: Any, target: Tensor, source: Tensor, ranks: Ranks) -> Arrival:
    if not target.numel() and not source.numel():  # some backends refuse empty tensors
        return _arrival(target, [])
    handle = collective(target.view(-1), source.contiguous().view(-1), group=ranks.group, async_op=True)
    return _arrival(target, [handle])


def _arrival(result: Tensor, handles: list[Any]) -> Arrival:
    def arrive() -> Tensor:
        while handles:
            handles.pop(0).wait()
        return result

    return arrive
