"""Gather the shards of all ranks into one tensor, with a gradient for each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.checks import is_int
from tritonpack.parallel.comm import Ranks, as_ranks, gather, gather_objects, pad_to, scatter_sum, wide
from tritonpack.removed import refuse_removed

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike


class AllGatherWithGrad:
    """Gathers the ranks' shards of a tensor, differentiably: `AllGatherWithGrad(group, dim=1)(shard)`.

    The gradient of a shard is the sum of the gradients that all ranks compute for it, by a reduce-scatter, in float32
    for half precision. It is exact for a loss that every rank computes alike under DDP or FSDP, which average gradients
    over ranks. docs/sequence-parallelism.md says what to do with other losses, and with gradients that are summed.

    Call it with a shard of any dtype, (..., size, ...), on every rank of the group. It returns the whole tensor,
    (..., sum of sizes, ...), in the same dtype. Backward must run on every rank, too.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for the whole world.
        dim: the dimension along which the ranks' shards follow each other; negative counts from the last. The default
            is the sequence of (batch, sequence, ...).
        lengths: each rank's size along `dim`. None exchanges the shapes first: shards that don't fit raise on every
            rank, and a group without a backend for host memory waits for the device. With lengths nothing waits, but a
            shard of another size raises on its own rank alone.

    Raises:
        ValueError: this process isn't in the group, or an argument is malformed. A call raises on every rank (with
            `lengths`: on the rank at fault) for `dim` out of range, and for shards that differ in dtype, in another
            dimension, in `dim` or in whether they need gradients.
    """

    def __init__(
        self, group: GroupLike = None, dim: int = 1, lengths: Sequence[int] | None = None, **removed: Any
    ) -> None:
        refuse_removed(removed, "AllGatherWithGrad()")
        self.ranks = as_ranks(group)
        if not is_int(dim):
            raise ValueError(f"dim must be an integer; got {dim!r}.")
        if lengths is not None:
            lengths = list(lengths)
            if len(lengths) != self.ranks.size or not all(is_int(n) and n >= 0 for n in lengths):
                raise ValueError(
                    f"lengths must hold an integer of at least 0 for each of {self.ranks.size} ranks; got {lengths}."
                )
        self.dim, self.lengths = dim, lengths

    @classmethod
    def apply(cls, shard: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`AllGatherWithGrad(*args, **kwargs)(shard)`, in the form in which autograd functions are called."""
        return cls(*args, **kwargs)(shard)

    def __call__(self, shard: Tensor) -> Tensor:
        lengths = _exchange_lengths(shard, self.dim, self.ranks) if self.lengths is None else self.lengths
        own = lengths[self.ranks.rank]
        if not -shard.ndim <= self.dim < shard.ndim or shard.shape[self.dim] != own:
            raise ValueError(
                f"lengths give rank {self.ranks.rank} {own} along dim {self.dim}, but its shard is "
                f"{tuple(shard.shape)}. Pass every rank's size, or lengths=None to exchange them."
            )
        return _Gather.apply(shard, self.dim % shard.ndim, lengths, self.ranks)


class _Gather(torch.autograd.Function):
    """(shard, dim, lengths, ranks) -> the whole tensor."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, lengths: list[int], ranks: Ranks) -> Tensor:
        ctx.arguments = dim, lengths, ranks
        gathered = gather(pad_to(shard, dim, max(lengths)), ranks)()
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(gathered, lengths, strict=True)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        dim, lengths, ranks = ctx.arguments
        padded = [pad_to(part.to(wide(part.dtype)), dim, max(lengths)) for part in gradient.split(lengths, dim)]
        total = scatter_sum(torch.stack(padded), ranks)()
        return total.narrow(dim, 0, lengths[ranks.rank]).to(gradient.dtype), None, None, None


def _exchange_lengths(shard: Tensor, dim: int, ranks: Ranks) -> list[int]:
    """Each rank's size along `dim`; raises on every rank if the shards don't fit each other."""
    text, form, length = "no such tensor", None, 0
    if isinstance(shard, Tensor) and ranks.reaches(shard.device):
        shape, needs = tuple(shard.shape), torch.is_grad_enabled() and shard.requires_grad
        text = f"{shape} along dim={dim}, {shard.dtype}{', needs gradients' if needs else ''}"
        if -shard.ndim <= dim < shard.ndim:
            place, length = dim % shard.ndim, shape[dim]
            form = place, shape[:place], shape[place + 1 :], shard.dtype, needs
    headers: list[tuple[str, Any, int]] = gather_objects((text, form, length), ranks)
    forms = {form for _, form, _ in headers}
    if len(forms) > 1 or None in forms:
        given = "; ".join(f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(headers))
        raise ValueError(
            "shards must be tensors that the backend of the group can reach, with the dimension dim. They may differ "
            f"in their size along dim alone, and either all or none need gradients; got {given}."
        )
    return [length for _, _, length in headers]
