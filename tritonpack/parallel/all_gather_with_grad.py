"""Gather the shards of all ranks into one tensor, with a gradient for each shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.checks import check_choice, is_int
from tritonpack.parallel.comm import Ranks, as_ranks, gather, gather_objects, pad_to, scatter_sum, wide

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike

Backward = Literal["sum", "slice"]


class AllGatherWithGrad:
    """Gathers the ranks' shards of a tensor, differentiably: `AllGatherWithGrad(group, dim=1)(shard)`.

    Two backwards are offered. docs/sequence-parallelism.md has a table of the losses for which each is exact; it also
    depends on whether gradients are then summed or averaged over these ranks (DDP and FSDP average).

    - "sum" (default): the gradient of a shard is the sum of the gradients that all ranks compute for it, by a
      reduce-scatter, in float32 for half precision. It is exact for a loss that every rank computes alike under DDP or
      FSDP. It alone is exact if a loss reads rows of several ranks, such as log probabilities shifted by one token.
    - "slice": each rank takes its own rows of its own gradient, without communication.

    Call it with a shard of any dtype, (..., size, ...), on every rank of the group. It returns the whole tensor,
    (..., sum of sizes, ...), in the same dtype. With "sum", backward must run on every rank, too.

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for the whole world.
        dim: the dimension along which the ranks' shards follow each other; negative counts from the last. The default
            is the sequence of (batch, sequence, ...).
        lengths: each rank's size along `dim`. None exchanges the shapes first: shards that don't fit raise on every
            rank, and a group without a backend for host memory waits for the device. With lengths nothing waits, but a
            shard of another size raises on its own rank alone.
        backward: "sum" or "slice".

    Raises:
        ValueError: this process isn't in the group, or an argument is malformed. A call raises on every rank (with
            `lengths`: on the rank at fault) for `dim` out of range, and for shards that differ in dtype, in another
            dimension, in `dim`, in `backward` or in whether they need gradients.
    """

    def __init__(
        self,
        group: GroupLike = None,
        dim: int = 1,
        lengths: Sequence[int] | None = None,
        backward: Backward = "sum",
    ) -> None:
        self.ranks = as_ranks(group)
        check_choice(backward, get_args(Backward), "backward")
        if not is_int(dim):
            raise ValueError(f"dim must be an integer; got {dim!r}.")
        if lengths is not None:
            lengths = list(lengths)
            if len(lengths) != self.ranks.size or not all(is_int(n) and n >= 0 for n in lengths):
                raise ValueError(
                    f"lengths must hold an integer of at least 0 for each of {self.ranks.size} ranks; got {lengths}."
                )
        self.dim, self.lengths, self.backward = dim, lengths, backward

    @classmethod
    def apply(cls, shard: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`AllGatherWithGrad(*args, **kwargs)(shard)`, in the form in which autograd functions are called."""
        return cls(*args, **kwargs)(shard)

    def __call__(self, shard: Tensor) -> Tensor:
        if self.lengths is None:
            lengths = _exchange_lengths(shard, self.dim, self.backward, self.ranks)
        else:
            lengths = self.lengths
            own = lengths[self.ranks.rank]
            if not -shard.ndim <= self.dim < shard.ndim or shard.shape[self.dim] != own:
                raise ValueError(
                    f"lengths give rank {self.ranks.rank} {own} along dim {self.dim}, but its shard is "
                    f"{tuple(shard.shape)}. Pass every rank's size, or lengths=None to exchange them."
                )
        return _Gather.apply(shard, self.dim % shard.ndim, lengths, self.backward, self.ranks)


class _Gather(torch.autograd.Function):
    """(shard, dim, lengths, backward, ranks) -> the whole tensor."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, lengths: list[int], backward: Backward, ranks: Ranks) -> Tensor:
        ctx.arguments = dim, lengths, backward, ranks
        gathered = gather(pad_to(shard, dim, max(lengths)), ranks)()
        if dim == 0 and len(set(lengths)) == 1:
            return gathered.flatten(0, 1)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(gathered, lengths, strict=True)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        dim, lengths, backward, ranks = ctx.arguments
        parts = gradient.split(lengths, dim)
        if backward == "slice":
            return parts[ranks.rank], None, None, None, None
        padded = [pad_to(part.to(wide(part.dtype)), dim, max(lengths)) for part in parts]
        total = scatter_sum(torch.stack(padded), ranks)()
        return total.narrow(dim, 0, lengths[ranks.rank]).to(gradient.dtype), None, None, None, None


def _exchange_lengths(shard: Tensor, dim: int, backward: Backward, ranks: Ranks) -> list[int]:
    """Each rank's size along `dim`; raises on every rank if the shards don't fit each other."""
    header = None
    if isinstance(shard, Tensor) and ranks.reaches(shard.device):
        notes = [str(shard.dtype).removeprefix("torch."), f"backward={backward!r}"]
        if torch.is_grad_enabled() and shard.requires_grad and backward == "sum":
            notes.append("needs gradients")
        header = tuple(shard.shape), dim, ", ".join(notes)
    headers: list[tuple[tuple[int, ...], int, str] | None] = gather_objects(header, ranks)
    present = [one for one in headers if one is not None]
    texts = ["no such tensor" if one is None else f"{one[0]} along dim={one[1]}, {one[2]}" for one in headers]
    given = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    if len(present) < len(headers):
        raise ValueError(f"shards must be tensors that the backend of the group can reach; got {given}.")
    if not all(-len(shape) <= dim < len(shape) for shape, dim, _ in present):
        raise ValueError(f"dim must be one of the shard's dimensions on every rank; got {given}.")
    if len({(shape[:dim], dim % len(shape), shape[dim:][1:], notes) for shape, dim, notes in present}) > 1:
        raise ValueError(
            "the ranks' shards may differ in their size along dim alone, and either all or none need gradients; got "
            f"{given}."
        )
    return [shape[dim] for shape, dim, _ in present]
