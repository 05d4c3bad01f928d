"""A function of each row, computed tile by tile: backward computes each tile once more, and then its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from tritonpack.patches.head_gradients import Aliases, once_differentiable
from tritonpack.patches.tiles import add_gradient, require_known, same


class RowTiles(NamedTuple):
    """How a function of rows is cut into tiles.

    Attributes:
        function: (n, ...) -> (n, ...), each row by itself.
        parameters: returns the tensors with a gradient that the function reads, as they are now, in a fixed order.
        rows: the rows of a tile.
        what: what the function is, for errors.
    """

    function: Callable[[Tensor], Tensor]
    parameters: Callable[[], list[Tensor]]
    rows: int
    what: str


def map_tiles(tiles: RowTiles, x: Tensor) -> Tensor:
    """`tiles.function` of rows x (N, ...), with gradients of the rows and of the parameters.

    Backward runs with the random numbers and the autocast of the forward pass. Gradients of 16-bit parameters are
    summed over tiles in float32.

    Raises:
        UnsupportedModelError: the function reads a tensor with a gradient that isn't among its parameters.
        RuntimeError: in backward, parameters have changed since the forward pass.
    """
    if not torch.is_grad_enabled():  # which `ctx.needs_input_grad` doesn't say
        return _MapTiles.apply(tiles, x.detach())
    x = _Kept.apply(x)
    return _MapTiles.apply(tiles, x, *tiles.parameters())


class _Kept(torch.autograd.Function):
    """The rows, kept for backward before the function runs.

    So the recomputation of a checkpointed layer, which ends when it has found the last tensor that backward needs,
    doesn't run a function at the end of the layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _MapTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: RowTiles, x: Tensor, *parameters: Tensor) -> Tensor:
        of_x, *of_parameters = ctx.needs_input_grad[1:]
        wanted = [p for p, needed in zip(parameters, of_parameters, strict=True) if needed]
        ctx.tiles, ctx.parameters, ctx.of_parameters = tiles, parameters, of_parameters
        ctx.versions = [p._version for p in parameters]
        ctx.autocast, ctx.random = _autocast_of(x), RandomState(x)
        ctx.kept = x.grad_fn
        if ctx.kept is None:  # rows without gradients
            ctx.save_for_backward(x)
        out: Tensor | None = None
        # With a graph also here: it shows which tensors with gradients the function reads. And autocast of older
        # versions of torch keeps casts of weights that were made without one, which have no gradient.
        with torch.set_grad_enabled(of_x or bool(wanted)), saved_tensors_hooks(same, same):
            for a in range(0, x.shape[0], tiles.rows):
                tile = x[a : a + tiles.rows].detach().requires_grad_(of_x)
                part = tiles.function(tile)
                if a == 0 and part.requires_grad:
                    require_known(part, [tile, *wanted], tiles.what, "tiled_mlp")
                part = part.detach()
                if out is None:
                    out = part.new_empty((x.shape[0], *part.shape[1:]))
                out[a : a + tiles.rows] = part
        assert out is not None, "no rows"
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = (ctx if ctx.kept is None else ctx.kept).saved_tensors
        tiles = ctx.tiles
        of_x = ctx.needs_input_grad[1]
        wanted = _unchanged(ctx)
        aliases = Aliases(wanted)
        own = torch.empty_like(x) if of_x else None
        sums: list[Tensor | None] = [None] * len(wanted)
        with ctx.random.again(), ctx.autocast(), saved_tensors_hooks(same, same):
            for a in range(0, x.shape[0], tiles.rows):
                tile = x[a : a + tiles.rows].detach().requires_grad_(of_x)
                with torch.enable_grad(), aliases.in_place():
                    part = tiles.function(tile)
                if not part.requires_grad:
                    if own is not None:
                        own[a : a + tiles.rows] = 0
                    continue
                inputs = [tile, *aliases.inputs] if of_x else aliases.inputs
                if a == 0:  # also code of others that reads a parameter past its alias
                    require_known(part, inputs, tiles.what, "tiled_mlp")
                found = list(torch.autograd.grad(part, inputs, gradient[a : a + tiles.rows], allow_unused=True))
                if own is not None:
                    piece = found.pop(0)
                    own[a : a + tiles.rows] = 0 if piece is None else piece
                for i, one in enumerate(found):
                    sums[i] = add_gradient(sums[i], one)
                del part, found
        of_wanted = iter([None if s is None else s.to(p.dtype) for s, p in zip(sums, wanted, strict=True)])
        return None, own, *(next(of_wanted) if needed else None for needed in ctx.of_parameters)


def _unchanged(ctx: Any) -> list[Tensor]:
    """The parameters that need gradients, as they are now: FullyShardedDataParallel makes them anew for backward.

    Raises:
        RuntimeError: they have other shapes or values than in the forward pass.
    """
    now: Sequence[Tensor] = ctx.tiles.parameters()
    before: Sequence[Tensor] = ctx.parameters
    if [p.shape for p in now] != [p.shape for p in before]:
        raise RuntimeError(
            f"parameters of {ctx.tiles.what} have other shapes in backward than in the forward pass, and tiled_mlp "
            "computes its tiles once more. Don't shard, freeze or replace parameters in between, or patch the model "
            "without tiled_mlp."
        )
    for new, old, version in zip(now, before, ctx.versions, strict=True):
        if new is old and new._version != version:
            raise RuntimeError(
                f"a parameter of {ctx.tiles.what}, {tuple(new.shape)}, was changed by an inplace operation since the "
                "forward pass, and tiled_mlp computes its tiles once more. Call backward before the optimizer's step."
            )
    return [p for p, needed in zip(now, ctx.of_parameters, strict=True) if needed]


def _autocast_of(x: Tensor) -> Callable[[], Any]:
    """A function that returns a context with the autocast that is in force now for the device of a tensor."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)


class RandomState:
    """The states of the random number generators of the CPU and of a tensor's device at one moment."""

    def __init__(self, x: Tensor) -> None:
        self.kind, self.on_cpu = x.device.type, torch.get_rng_state()
        self.devices, self.on_devices = get_device_states(x)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The states of that moment for the time of a `with` block, those of now after it."""
        kind = self.kind if self.devices else "cuda"
        with torch.random.fork_rng(devices=self.devices, device_type=kind):
            torch.set_rng_state(self.on_cpu)
            set_device_states(self.devices, self.on_devices, device_type=kind)
            yield
