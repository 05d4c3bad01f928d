"""Calls of the backends: with autograd, and as operators `tritonpack::attention` and `tritonpack::attention_backward`.

Operators are opaque to `torch.compile`, which calls them in one graph for all token counts. They take only tensors and
numbers; `plan` makes these from a mask and the options. Eager calls skip the operators, because torch's dispatcher and
its autograd for operators take more host time than all other steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from tritonpack.backends import BackendModule, load, loaded
from tritonpack.backends.tile_table import TileTables
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions

PLAIN = frozenset((Tensor, Parameter))


class Arguments(NamedTuple):
    """The arguments of both operators after their tensors, in the order of the schema below.

    Attributes:
        key_start, key_stop, diagonal, key_places: the mask's bounds of keys, and the places of queries and keys.
        query_start, query_stop: the bounds of the mask's transpose.
        is_tree: whether the mask is a mask of trees.
        forward_tiles, key_tiles, query_tiles, blocks: the tables that the backend's `plan_tiles` made.
        scale, softcap, sinks, alibi_slopes, dropout_p, dropout_seed, pack_invariant: as in `AttentionOptions`.
        backend: a name from `backends.BACKENDS`, not "auto".
    """

    key_start: Tensor
    key_stop: Tensor
    query_start: Tensor
    query_stop: Tensor
    diagonal: Tensor | None
    key_places: Tensor | None
    is_tree: bool
    forward_tiles: Tensor | None
    key_tiles: Tensor | None
    query_tiles: Tensor | None
    blocks: Tensor | None
    scale: float
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: Tensor | None
    pack_invariant: bool
    backend: str


_ARGUMENTS = (
    "Tensor key_start, Tensor key_stop, Tensor query_start, Tensor query_stop, Tensor? diagonal, "
    "Tensor? key_places, bool is_tree, Tensor? forward_tiles, Tensor? key_tiles, Tensor? query_tiles, Tensor? blocks, "
    "float scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, float dropout_p, Tensor? dropout_seed, "
    "bool pack_invariant, str backend"
)


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute out (T_q, H, D_v) and lse (H, T_q), differentiable in q, k, v and the options' sinks.

    Raises:
        ValueError: inside of a transform of torch.func, or with tangents of forward-mode differentiation.
    """
    inputs = (q, k, v) if options.sinks is None else (q, k, v, options.sinks)
    if not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active()
        or (forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in inputs))
    ):
        raise ValueError(
            "tritonpack's attention can't run inside of a transform of torch.func (grad, vjp, jvp, vmap), nor with "
            "tangents of torch.autograd.forward_ad. For a gradient use loss.backward() or torch.autograd.grad, also "
            "with torch.func.functional_call; or patch the model with attention='sdpa'."
        )
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if not _is_plain_call(*inputs):
        return attention(q, k, v, *plan(q, k, v, mask, options, backend, backward=backward))
    mask.check_unwritten()
    module = loaded.get(backend) or load(backend)
    tiles = module.plan_tiles(q, k, v, mask, options, backward=backward)
    if backward:
        return _Attention.apply(q, k, v, options.sinks, mask, options, tiles, module, backend)
    return _run(module.forward, q, k, v, mask, options, tiles)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors of one device to autocast's dtype if autocast is on; float64 stays, as in torch."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "meta"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x

    return tuple(cast(x) for x in tensors)


def _is_plain_call(*tensors: Tensor) -> bool:
    """Return whether a call may skip the operators: without compiler, tracer, dispatch mode or subclasses of Tensor."""
    return (
        not torch.compiler.is_compiling()
        and PLAIN.issuperset(map(type, tensors))
        and not tensors[0].is_meta
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
    )


def _run(function: Callable[..., tuple[Any, ...]], x: Tensor, *others: Any) -> Any:
    """Call `forward` or `backward` of a backend without autocast, because the backend chooses the precision of
    products. Outputs and gradients are made contiguous, as in the fake functions below."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            results = function(x, *others)
    else:
        results = function(x, *others)
    return *map(Tensor.contiguous, results[:3]), *results[3:]  # the fourth may be None


class _Attention(torch.autograd.Function):
    """Eager autograd path; same results as torch.ops.tritonpack.attention without the dispatcher's cost."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: BlockDiagonalMask,
        options: AttentionOptions, tiles: TileTables, backend: BackendModule, name: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = _run(backend.forward, q, k, v, mask, options, tiles)
        ctx.save_for_backward(q, k, v, out, lse, sinks, options.alibi_slopes, options.dropout_seed)
        ctx.others = mask, options, tiles, backend, name
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, slopes, seed = ctx.saved_tensors
        mask, options, tiles, backend, name = ctx.others
        mask.check_unwritten()
        if sinks is not None or slopes is not None or seed is not None:
            options = replace(options, sinks=sinks, alibi_slopes=slopes, dropout_seed=seed)
        if dout is None:
            dout = torch.zeros_like(out)
        if _is_plain_call(dout, q) and not torch.is_grad_enabled():
            dq, dk, dv, dsinks = _run(backend.backward, dout, dlse, q, k, v, out, lse, mask, options, tiles)
        else:  # with gradients enabled, because the operator's derivative is an error with a remedy
            arguments = _arguments(mask, options, tiles, name)
            dq, dk, dv, dsinks = attention_backward(dout, dlse, q, k, v, out, lse, *arguments)
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None, None


def plan(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, backend: str, *, backward: bool
) -> Arguments:
    """Make the operators' arguments after q, k and v; with `backward` also for `attention_backward`."""
    mask.check_unwritten()
    tiles = load(backend).plan_tiles(q, k, v, mask, options, backward=backward)
    return _arguments(mask, options, tiles, backend)


def _arguments(mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables, backend: str) -> Arguments:
    transposed = mask.transpose()
    return Arguments(
        key_start=mask.key_start,
        key_stop=mask.key_stop,
        query_start=transposed.key_start,
        query_stop=transposed.key_stop,
        diagonal=mask.diagonal if options.alibi_slopes is not None else None,
        key_places=mask.key_places if options.alibi_slopes is not None else None,
        is_tree=mask.is_tree,
        forward_tiles=tiles.forward,
        key_tiles=tiles.keys,
        query_tiles=tiles.queries,
        blocks=tiles.blocks,
        scale=options.scale,
        softcap=options.softcap,
        sinks=options.sinks,
        alibi_slopes=options.alibi_slopes,
        dropout_p=options.dropout_p,
        dropout_seed=options.dropout_seed,
        pack_invariant=options.pack_invariant,
        backend=backend,
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    backend, *others = _unpack(k, Arguments(*arguments))
    return _run(backend.forward, q, k, v, *others)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    backend, *others = _unpack(k, Arguments(*arguments))
    dq, dk, dv, dsinks = _run(backend.backward, dout, dlse, q, k, v, out, lse, *others)
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=wide)


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(0 if Arguments(*arguments).sinks is None else q.shape[1])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    tensors = [x if isinstance(x, Tensor) else None for x in rest]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.others = [None if isinstance(x, Tensor) else x for x in rest]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    arguments = Arguments(*(x if y is None else y for x, y in zip(tensors, ctx.others, strict=True)))
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsinks = attention_backward(dout, dlse, q, k, v, out, lse, *arguments)
    gradients = dict.fromkeys(Arguments._fields)
    gradients["sinks"] = None if arguments.sinks is None else dsinks
    return dq, dk, dv, *gradients.values()


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "tritonpack's attention has no second derivative, but its backward was differentiated (create_graph=True). For "
        "a gradient penalty use attention with a second derivative, such as torch's math sdpa."
    )


# Not with `torch.library.custom_op`, which imports the compiler at its first call; that takes seconds.
# The namespace is the package's name, so that a copy of this package under another name has operators of its own.
_NAMESPACE = (__package__ or "tritonpack").replace(".", "_")
_library = torch.library.Library(_NAMESPACE, "DEF")


def define_operator(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], differentiate: Callable[..., Any],
    save: Callable[..., None] | None = None,
) -> Any:  # fmt: skip
    """Define an operator of torch.ops.tritonpack on CPUs and GPUs, and return it.

    Args:
        schema: of torch, such as "f(Tensor x) -> Tensor".
        implementation: computes the results.
        fake: makes empty results of the same shapes, for the compiler.
        differentiate, save: `backward` and `setup_context` of `torch.library.register_autograd`.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    torch.library.register_autograd(f"{_NAMESPACE}::{name}", differentiate, setup_context=save, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


attention = define_operator(
    f"attention(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
    _attention, _attention_fake, _differentiate, _save,
)  # fmt: skip
attention_backward = define_operator(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _attention_backward, _attention_backward_fake, _no_second_derivative,
)  # fmt: skip


def _unpack(k: Tensor, args: Arguments) -> tuple[BackendModule, BlockDiagonalMask, AttentionOptions, TileTables]:
    options = AttentionOptions(
        args.scale, args.softcap, args.sinks, args.alibi_slopes, args.dropout_p, args.dropout_seed,
        args.pack_invariant,
    )  # fmt: skip
    mask = BlockDiagonalMask(
        args.key_start, args.key_stop, k.shape[0], args.diagonal, key_places=args.key_places, trusted=True
    )
    if args.is_tree:
        mask = replace(mask, query_start=args.query_start, query_stop=args.query_stop, trusted=True)
    else:
        transposed = BlockDiagonalMask(args.query_start, args.query_stop, args.key_start.shape[0], trusted=True)
        mask.cached("transpose", lambda: transposed)
    tiles = TileTables(args.forward_tiles, args.key_tiles, args.query_tiles, args.blocks)
    return load(args.backend), mask, options, tiles
