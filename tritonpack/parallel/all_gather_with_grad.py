"""AllGatherWithGrad: the shards of all ranks as one tensor, with a backward that says what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.checks import is_int
from tritonpack.parallel.comm import Ranks, as_ranks, fill_up, gather, scatter_sum, wide

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike

Backward = Literal["sum", "slice"]

_MAX_DIMS = 8
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class AllGatherWithGrad:
    """Gathers the ranks' shards of a tensor, differentiably: `AllGatherWithGrad(group, dim=1)(shard)`.

    Which backward is exact depends on what each rank's loss reads, and on whether data parallelism then sums or
    averages the parameters' gradients over these ranks (DDP and FSDP average). Let rank j compute the loss L_j from
    the gathered tensor, and let the true loss be L:

    | every rank's loss | backward | sum over ranks | average over n ranks |
    |---|---|---|---|
    | the same, L_j = L | "sum" | n times too large | exact |
    | the same, L_j = L | "slice" | exact | n times too small |
    | of its own rows, L = sum of L_j | either | exact | n times too small: multiply the loss by n |
    | also of other ranks' rows, L = sum of L_j | "sum" | exact | n times too small: multiply the loss by n |
    | also of other ranks' rows, L = sum of L_j | "slice" | wrong, by no constant | wrong, by no constant |

    "sum" is the transpose of gathering: a shard's gradient is the sum of what all ranks' losses say about it
    (a reduce-scatter, in float32 for half precision). It is the default, as it is the right one for a loss that every
    rank computes alike under DDP or FSDP, and the only right one where a loss reads across ranks, such as log
    probabilities shifted by one token. "slice" keeps the own rows of this rank's gradient, without communication;
    averaged, a replicated loss's gradients then come out 0.5 and 0.25 of the true ones at 2 and 4 ranks. (Optimizers
    like Adam hide such a factor; gradient clipping, logged norms and other terms of the loss don't.)

    Args:
        group: a process group, a one-dimensional DeviceMesh, or None for the whole world.
        dim: the dimension along which shards are laid one after another, in the order of ranks; negative counts from
            the last. The default is the sequence of (batch, sequence, ...).
        lengths: each rank's size along `dim`. None exchanges the shapes first: shards may then have any size along
            `dim`, and what doesn't fit raises on every rank; where the group has no backend for host memory this
            waits for the device. With lengths nothing is exchanged and nothing waits, but a shard that isn't as they
            say raises on its own rank alone.
        backward: "sum" or "slice".

    Call it with a shard of any dtype, (..., size, ...), on every rank of the group. It returns the whole tensor,
    (..., sum of sizes, ...), in the same dtype. With "sum", backward must be run on every rank too.

    Raises:
        ValueError: this process isn't in the group, an argument is malformed; and when called, on every
            rank (with `lengths`: on the one at fault): `dim` out of range, or shards that differ in dtype, in another
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
        if backward not in ("sum", "slice"):
            raise ValueError(f"backward must be 'sum' or 'slice'; got {backward!r}.")
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
    def apply(
        cls,
        shard: Tensor,
        group: GroupLike = None,
        dim: int = 1,
        lengths: Sequence[int] | None = None,
        backward: Backward = "sum",
    ) -> Tensor:
        """The same in one call, as an autograd function is called."""
        return cls(group, dim, lengths, backward)(shard)

    def __call__(self, shard: Tensor) -> Tensor:
        if self.lengths is None:
            lengths = _exchange_lengths(shard, self.dim, self.backward, self.ranks)
        else:
            lengths = self.lengths
            own = lengths[self.ranks.rank]
            if not -shard.ndim <= self.dim < shard.ndim or shard.shape[self.dim] != own:
                raise ValueError(
                    f"lengths give rank {self.ranks.rank} {own} along dim {self.dim}, but its shard is "
                    f"{tuple(shard.shape)}. Pass every rank's size, or lengths=None to have sizes exchanged."
                )
        return _Gather.apply(shard, self.dim % shard.ndim, lengths, self.backward, self.ranks)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, lengths: list[int], backward: Backward, ranks: Ranks) -> Tensor:
        ctx.arguments = dim, lengths, backward, ranks
        gathered, handle = gather(fill_up(shard, dim, max(lengths)), ranks)
        handle.wait()
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
        filled = [fill_up(part.to(wide(part.dtype)), dim, max(lengths)) for part in parts]
        total, handle = scatter_sum(torch.stack(filled), ranks)
        handle.wait()
        return total.narrow(dim, 0, lengths[ranks.rank]).to(gradient.dtype), None, None, None, None


class _Header(NamedTuple):
    """What ranks tell each other of a shard before it travels.

    Attributes:
        dtype: its number in `_DTYPES`, -1 for what isn't there.
        reached: whether the group has a backend for its device.
        differentiated: whether its backward will exchange.
        sums: whether `backward` is "sum".
        dim: as the user gave it.
        ndim: of the shard; `shape` holds as many numbers.
        shape: the first `_MAX_DIMS` of them.
    """

    dtype: int
    reached: bool
    differentiated: bool
    sums: bool
    dim: int
    ndim: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        dtype = str(_DTYPES[self.dtype]).replace("torch.", "") if self.dtype >= 0 else "another dtype or no tensor"
        notes = ["needs gradients"] * self.differentiated + ["out of the backend's reach"] * (not self.reached)
        return ", ".join([f"{self.shape} {dtype}", f"dim={self.dim}", *notes, *["backward='slice'"] * (not self.sums)])


def _exchange_lengths(shard: Tensor, dim: int, backward: Backward, ranks: Ranks) -> list[int]:
    """Each rank's size along `dim`. Raises on every rank if one's shard doesn't fit the others'."""
    headers = _exchange_headers(shard, dim, backward, ranks)
    given = "; ".join(f"rank {rank}: {header}" for rank, header in enumerate(headers))
    if any(one.dtype < 0 or not one.reached or one.ndim > _MAX_DIMS for one in headers):
        raise ValueError(
            f"shards must be tensors of a plain dtype, with at most {_MAX_DIMS} dimensions, and lie where the group's "
            f"backend can reach them; got {given}."
        )
    if not all(-one.ndim <= one.dim < one.ndim for one in headers):
        raise ValueError(f"dim must be one of the shard's dimensions on every rank; got {given}.")
    axis = dim % shard.ndim
    alike = {one._replace(dim=one.dim % one.ndim, shape=one.shape[:axis] + one.shape[axis + 1 :]) for one in headers}
    if len(alike) > 1:
        raise ValueError(
            "the ranks' shards may differ in their size along dim alone, and either all or none need gradients; got "
            f"{given}."
        )
    return [one.shape[axis] for one in headers]


def _exchange_headers(shard: Tensor, dim: int, backward: Backward, ranks: Ranks) -> list[_Header]:
    whole = isinstance(shard, Tensor)
    shape = list(shard.shape) if whole else []
    numbers = [
        _DTYPES.index(shard.dtype) if whole and shard.dtype in _DTYPES else -1,
        int(not whole or ranks.reaches(shard.device)),
        int(whole and torch.is_grad_enabled() and shard.requires_grad and backward == "sum"),
        int(backward == "sum"),
        dim,
        len(shape),
        *(shape + [0] * _MAX_DIMS)[:_MAX_DIMS],
    ]
    gathered, handle = gather(torch.tensor(numbers, device=ranks.header_device()), ranks)
    handle.wait()
    return [
        _Header(dtype, bool(reached), bool(differentiated), bool(sums), dim, ndim, tuple(shape[:ndim]))
        for dtype, reached, differentiated, sums, dim, ndim, *shape in gathered.tolist()
    ]
