"""What travels between ranks, without autograd: the collectives in their names of every torch, and groups of ranks.

torch 2.13 renamed the collectives on single tensors and warns at the old names; earlier versions know those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.checks import describe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    GroupLike = dist.ProcessGroup | DeviceMesh | None

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Ranks:
    """A process group and this process's place in it.

    Attributes:
        group: of torch.distributed.
        rank: this process's number within the group.
        size: how many ranks the group has.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def header_device(self) -> torch.device:
        """Where small numbers travel: in host memory if the group has a backend for it, else on the accelerator."""
        kinds = [pair.split(":")[0] for pair in dist.get_backend_config(self.group).split(",")]
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())

    def reaches(self, device: torch.device) -> bool:
        """Whether the group has a backend for tensors on this kind of device."""
        return f"{device.type}:" in dist.get_backend_config(self.group)


def as_ranks(group: GroupLike) -> Ranks:
    """The ranks of a process group, of a one-dimensional DeviceMesh, or (None) of the whole world.

    Raises:
        ValueError: no process group was begun, it isn't a group, the mesh has several dimensions, or this process isn't
            in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there is no process group; call torch.distributed.init_process_group first, in a process that torchrun "
            "started."
        )
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:  # type: ignore[union-attr]
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, {group.mesh_dim_names}; pass one of them, such as "  # type: ignore[union-attr]
                "mesh['sp']."
            )
        group = group.get_group()  # type: ignore[union-attr]
    if group is None:
        group = dist.group.WORLD
    outside = group is dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to ranks that it doesn't name
    if not isinstance(group, dist.ProcessGroup) and not outside:
        raise ValueError(
            f"group must be a process group, a DeviceMesh of one dimension, or None for the whole world; got "
            f"{describe(group)}. Pass a mesh's dimension, such as mesh['sp'], or torch.distributed.new_group(ranks)."
        )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"this process, rank {dist.get_rank()} of the world, isn't in the group; got {group!r:.100}. Pass "
            "the group that it belongs to."
        )
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def gather(x: Tensor, ranks: Ranks) -> tuple[Tensor, Any]:
    """Every rank's x, of one shape on all ranks, as (ranks, *shape); valid after the handle's wait()."""
    x = x.contiguous()
    gathered = x.new_empty(ranks.size, *x.shape)
    return gathered, _start(_all_gather, gathered.view(-1), x.view(-1), ranks)


def scatter_sum(parts: Tensor, ranks: Ranks) -> tuple[Tensor, Any]:
    """The sum over ranks of parts[own rank], parts being (ranks, *shape); valid after the handle's wait()."""
    parts = parts.contiguous()
    total = parts.new_empty(parts.shape[1:])
    return total, _start(_reduce_scatter, total.view(-1), parts.view(-1), ranks)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], ranks: Ranks) -> Tensor:
    """The parts of a flat tensor to their ranks, sent[r] numbers to rank r; from all of them received[r] each."""
    assert x.ndim == 1
    assert x.numel() == sum(sent)
    result = x.new_empty(sum(received))
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=ranks.group)
    return result


def shift(x: Tensor, received: int, ranks: Ranks) -> tuple[Tensor, list[Any]]:
    """A flat tensor to the next rank, and `received` numbers from the one before; valid after the handles' wait()."""
    result, operations = x.new_empty(received), []
    if x.numel():
        operations.append(dist.P2POp(dist.isend, x, _neighbour(ranks, 1), ranks.group))
    if received:
        operations.append(dist.P2POp(dist.irecv, result, _neighbour(ranks, -1), ranks.group))
    return result, dist.batch_isend_irecv(operations) if operations else []


def fill_up(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros after its end along `dim`: gathering and scattering want the same size of every rank."""
    missing = size - x.shape[dim]
    return pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of many ranks are summed: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class _Done:
    def wait(self) -> None:
        pass


def _start(collective: Any, target: Tensor, source: Tensor, ranks: Ranks) -> Any:
    if not target.numel() and not source.numel():  # not every backend takes nothing
        return _Done()
    return collective(target, source, group=ranks.group, async_op=True)


def _neighbour(ranks: Ranks, step: int) -> int:
    return dist.get_global_rank(ranks.group, (ranks.rank + step) % ranks.size)
