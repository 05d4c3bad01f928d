"""A sum over rows of states, computed tile by tile: what a tile computes is gone before the next tile begins.

The gradients are computed in the forward pass, right after each tile's part of the sum. docs/decisions/tiled-loss.md
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tritonpack.checks import describe, is_int
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.head_gradients import Aliases, once_differentiable

HALF = (torch.float16, torch.bfloat16)

TILE_ROWS = 1024  # 525 MB of float32 logits with a vocabulary of 128,256


def check_tile_rows(given: Any, option: str) -> int:
    """The rows of a tile; 0 if nothing is tiled.

    Args:
        given: the value of the option.
        option: its name.

    Raises:
        ValueError: neither a bool nor a positive number.
    """
    if isinstance(given, bool):
        return TILE_ROWS if given else 0
    if is_int(given) and given > 0:
        return int(given)
    raise ValueError(
        f"{option} must be True, False, or the rows of a tile, 1 or more; got {describe(given)}. True stands for "
        f"{TILE_ROWS} rows."
    )


class Tiles(NamedTuple):
    """How a sum is cut into tiles.

    Attributes:
        part: (states, targets) of n rows -> their part of the sum, a number.
        targets: (N,), the target of each row.
        counts: () bool, whether any row counts. If none does, gradients are zero, whatever the sum is divided by.
        rows: the rows of a tile.
        name: of the model, for errors.
    """

    part: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    counts: Tensor
    rows: int
    name: str


def tiled_sum(tiles: Tiles, states: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The sum of `tiles.part` over states (N, ...), with gradients of the states and of the parameters.

    Args:
        parameters: all tensors with a gradient that `part` reads, beside the states.

    Raises:
        UnsupportedModelError: `part` reads another tensor with a gradient, which would get none.
    """
    if not torch.is_grad_enabled():  # which `ctx.needs_input_grad` doesn't say
        return _TiledSum.apply(tiles, states.detach())
    return _TiledSum.apply(tiles, states, *parameters)


class _TiledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: Tiles, states: Tensor, *parameters: Tensor) -> Tensor:
        of_states, *of_parameters = ctx.needs_input_grad[1:]
        wanted = [x for x, needed in zip(parameters, of_parameters, strict=True) if needed]
        gradient = torch.empty_like(states) if of_states else None
        aliases = Aliases(wanted)
        sums: list[Tensor | None] = [None] * len(wanted)
        parts = []
        for a in range(0, max(states.shape[0], 1), tiles.rows):  # one tile without rows tells the dtype of the sum
            tile, targets = states[a : a + tiles.rows].detach(), tiles.targets[a : a + tiles.rows]
            # Hooks that store activations elsewhere would also move logits, which are needed again at once.
            with torch.set_grad_enabled(of_states or bool(wanted)), saved_tensors_hooks(same, same):
                tile.requires_grad_(of_states)
                with aliases.in_place():
                    part = tiles.part(tile, targets)
            parts.append(part.detach())
            if not part.requires_grad:
                continue
            inputs = [tile, *aliases.inputs] if of_states else aliases.inputs
            if a == 0:
                require_known(part, inputs, f"the head of {tiles.name}", "tiled_loss")
            found = list(torch.autograd.grad(part, inputs, allow_unused=True))
            if gradient is not None:
                own = found.pop(0)
                gradient[a : a + tiles.rows] = 0 if own is None else own
            for i, one in enumerate(found):
                sums[i] = add_gradient(sums[i], one)
            del part, found
        ctx.save_for_backward(tiles.counts, gradient, *sums)
        ctx.of_parameters, ctx.rows = of_parameters, tiles.rows
        ctx.dtypes = [x.dtype for x in wanted]
        return torch.stack(parts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:
        counts, gradient, *sums = ctx.saved_tensors
        factor = torch.where(counts.to(factor.device), factor, 0)
        scaled = iter(
            [
                None if x is None else _scaled(x, factor, ctx.rows, dtype)
                for x, dtype in zip(sums, ctx.dtypes, strict=True)
            ]
        )
        own = None if gradient is None else _scaled(gradient, factor, ctx.rows, gradient.dtype)
        return None, own, *(next(scaled) if needed else None for needed in ctx.of_parameters)


def add_gradient(total: Tensor | None, one: Tensor | None) -> Tensor | None:
    """A sum of gradients, in float32 if they have 16 bits: a sum of many tiles would lose digits."""
    if one is None:
        return total
    if total is None:
        return one.float() if one.dtype in HALF else one.clone()
    return total.add_(one)


def _scaled(x: Tensor, factor: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """A tensor times a number, computed in at least float32. A product with 16 bits may round the number first."""
    out = torch.empty_like(x, dtype=dtype)
    number = factor.to(x.device)
    for a in range(0, x.shape[0] if x.ndim else 0, rows):
        piece = x[a : a + rows]
        out[a : a + rows] = (piece.float() if piece.dtype in HALF else piece) * number
    return out if x.ndim else (x * number).to(dtype)


def same(x: Tensor) -> Tensor:
    """A saved tensor as it is."""
    return x


def require_known(part: Tensor, inputs: Sequence[Tensor], what: str, option: str) -> None:
    """Refuse a part that reads a tensor with a gradient which isn't among the inputs.

    Args:
        what: what computed the part, for errors.
        option: the option of `patch` that asked for tiles.
    """
    known = {id(x) for x in inputs}
    made = {x.grad_fn for x in inputs if x.grad_fn is not None}
    for leaf in _leaves(part.grad_fn, made):
        if id(leaf) not in known and leaf._backward_hooks:
            raise UnsupportedModelError(
                f"a tensor of shape {tuple(leaf.shape)} that {what} reads has a hook on its gradient "
                "(register_hook), and is read by code that isn't a function of torch, so the hook would run once per "
                f"tile. Remove the hook, or patch the model without {option}."
            )
        if id(leaf) not in known:
            raise UnsupportedModelError(
                f"{what} reads a tensor of shape {tuple(leaf.shape)} that isn't a parameter of its own, so the "
                f"gradient would be lost. Patch the model without {option}."
            )


def _leaves(node: Any, stop: set[Any]) -> Iterator[Tensor]:
    """The tensors whose gradients a graph accumulates, apart from those behind the nodes in `stop`."""
    seen, left = set(stop), [node]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        left += [following for following, _ in node.next_functions]
