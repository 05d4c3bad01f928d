"""Layers that mix along the row, for batches with a document that is long for its ranks.

Each rank computes pieces of documents. With each piece travel the few rows before it, for convolutions. What a piece
does to the state of a recurrence is combined over ranks, so each piece gets the state before it.

The forward of a recurrent layer calls its convolution and its recurrence as functions, or as its parts. It runs here
with other functions in their places, which run the layer's own functions on pieces. Classes and modules stay unchanged.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tritonpack.parallel.comm import wide
from tritonpack.parallel.layouts import Layout
from tritonpack.parallel.pieces import Pieces, PieceTable
from tritonpack.parallel.recurrences import LIGHTNING, RECURRENCES, Effect, Recurrence, lightning_attention
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.parallel.state_scan import StateScan
from tritonpack.patches.document_places import Documents, batches_of, lay_back
from tritonpack.patches.packed_batch import DocumentLayer, PackedBatch

# Layers in which a token reads a fixed number of tokens before it, and nothing else.
SHORT_REACH = {"Lfm2MoeShortConv", "Lfm2ShortConv", "Lfm3ShortConv", "RwkvFeedForward", "ZayaCCAProjection"}
# Dimension of tokens in arguments and outputs of functions and parts that read tokens before each token.
LOCAL = {"causal_conv1d_fn": -1, "conv_1d": -1, "time_shift": 1}
# Kernels that compute a whole layer. They return None where they can't run, and the layer then runs step by step.
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
MOST_CUT = 8  # pieces of cut documents on a rank, up to which rows stay where they are

Forward = Callable[..., Any]


class LongDocuments:
    """How layers that mix along the row compute the documents of a batch.

    Rows stay on the ranks that own them if each has few pieces. In layouts with many, they travel to a layout in which
    each rank has one run of tokens.

    Args:
        batch: the whole batch, with the padding of the layout.
        sharding: how it is divided.
    """

    def __init__(self, batch: PackedBatch, sharding: Sharding) -> None:
        self.batch, self.sharding = batch, sharding
        ranks = sharding.ranks.size
        self.table = PieceTable.of(batch, sharding.layout)
        if self.table.cut.any() and self.table.most_cut(ranks) > MOST_CUT:
            self.table = PieceTable.of(batch, _in_runs(batch, sharding.layout))
        self._pieces: dict[int, Pieces] = {}

    def forward_of(self, layer: DocumentLayer) -> Forward | None:
        """The forward of a layer on this rank's rows; None if the layer mixes otherwise."""
        module = layer.module
        if layer.own is not None:
            return None
        if type(module).__name__ in SHORT_REACH:
            pieces = self._with_reach(module)
            return self._on(pieces, lambda **arguments: layer.run(arguments, pieces.packed_batch))
        if type(module).__name__ == "MiniMaxLightningAttention":
            return partial(_run_lightning, module, self._at(0))
        pieces = self._with_reach(module)
        forward = _on_pieces(module, pieces)
        return None if forward is None else self._on(pieces, forward)

    def _on(self, pieces: Pieces, forward: Forward) -> Forward:
        """A forward of pieces as a forward of own rows."""
        return lambda **arguments: tree_map(pieces.give_back, forward(**tree_map(pieces.fetch, arguments)))

    def _with_reach(self, module: nn.Module) -> Pieces:
        """The pieces, with the rows that convolutions read, one after the other, and one for layers that shift rows."""
        convolutions = [part for part in module.modules() if isinstance(part, nn.Conv1d)]
        return self._at(max(sum((one.kernel_size[0] - 1) * one.dilation[0] for one in convolutions), 1))

    def _at(self, reach: int) -> Pieces:
        if reach not in self._pieces:
            self._pieces[reach] = Pieces(self.batch, self.sharding, self.table, reach)
        return self._pieces[reach]


def _in_runs(batch: PackedBatch, layout: Layout) -> Layout:
    """A layout of as many ranks, each with one run of rows. All have equally many tokens."""
    begin, length = batch.lengths()
    ends = begin + length
    live = torch.zeros(layout.num_rows + 1, dtype=torch.int64, device="cpu")
    live[begin] += 1
    live[ends] -= 1
    passed = live.cumsum(0)[:-1].cumsum(0)  # tokens up to each row
    share = torch.arange(1, layout.ranks, device="cpu") * int(length.sum()) // layout.ranks
    bounds = torch.searchsorted(passed, share, right=True)
    return Layout(torch.arange(layout.num_rows, device="cpu").tensor_split(bounds))


@cache
def _globals_of(forward: FunctionType) -> set[str]:
    """The names outside of itself that a forward reads; not those of attributes."""
    return {one.argval for one in dis.get_instructions(forward) if one.opname == "LOAD_GLOBAL"}


def _on_pieces(module: nn.Module, pieces: Pieces) -> Forward | None:
    """The forward of a recurrent layer on pieces; None if it doesn't call a known recurrence."""
    own = inspect.unwrap(type(module).forward)
    if not isinstance(own, FunctionType):
        return None
    called, parts = _globals_of(own), module._modules
    places = {name for name in RECURRENCES if name in called or name.partition(".")[0] in parts}
    if len(places) != 1:
        return None
    name = places.pop()
    recurrence = RECURRENCES[name]
    beside = recurrence.beside
    if beside not in called | parts.keys():
        return None
    others: dict[str, Any] = dict.fromkeys(called.intersection(FUSED), lambda *_, **__: None)
    stand_in = copy.copy(module)  # with the same parts and hooks
    wraps: dict[str, Any] = {
        name: partial(partial, _scan, pieces, recurrence),
        beside: partial(partial, _locally, pieces, LOCAL[beside]),
    }
    for place, wrap in wraps.items():
        part, _, method = place.partition(".")
        if place in called:
            others[place] = wrap(own.__globals__[place])
        elif method:
            inner: Any = copy.copy(parts[part])
            inner.__dict__[method] = wrap(getattr(inner, method))
            stand_in.__dict__[part] = inner
        else:
            stand_in.__dict__[part] = wrap(parts[part])
    forward = FunctionType(own.__code__, own.__globals__ | others, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward.__get__(stand_in)


def _locally(pieces: Pieces, dim: int, own: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function of tokens and the few before them, on each piece with its halo. `dim` is the dimension of tokens."""

    def run(documents: Documents) -> Tensor:
        cut = documents.cut(x.movedim(dim, 1))
        return own(cut.movedim(1, dim), *args, **kwargs).movedim(dim, 1)[:, : cut.shape[1]]

    batches = batches_of(pieces.packed_batch)
    return lay_back(batches, [run(documents) for documents in batches]).movedim(1, dim)


def _scan(pieces: Pieces, recurrence: Recurrence, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A recurrence on all pieces without their halos, whose rows get zeros. States don't leave it."""
    names = list(inspect.signature(own).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    dim = recurrence.dim

    def call(**changed: Any) -> Any:
        """The layer's own function, called in the way in which the layer calls it."""
        positional = [changed.pop(name, x) for name, x in zip(names, args, strict=False)]
        return own(*positional, **kwargs | changed)

    def cut(documents: Documents) -> dict[str, Tensor]:
        rows = {name: given[name] for name in recurrence.rows if given.get(name) is not None}
        return {name: documents.cut(x.movedim(dim, 1)).movedim(1, dim).contiguous() for name, x in rows.items()}

    def outputs(result: Any) -> Tensor:
        return (result[0] if recurrence.pair else result).movedim(dim, 1)

    outs = [outputs(call(**cut(documents))) for documents in pieces.whole]
    found: Tensor | None = None
    if pieces.scan is not None:
        arguments = [cut(documents) for documents in pieces.cut]
        effects = [
            recurrence.effect(partial(call, **changed), given | changed, begins)
            for changed, begins in zip(arguments, pieces.begins, strict=True)
        ]
        found, states = _states_before(pieces.scan, effects, recurrence, given)
        outs += [effect.outputs(state).movedim(dim, 1) for effect, state in zip(effects, states, strict=True)]
    out = lay_back([*pieces.whole, *pieces.cut], outs)
    if found is not None:  # every rank's graph needs the scan, also if none of its pieces has a state before it
        out = out + found[:0].sum().to(out.dtype)
    out = out.movedim(1, dim)
    return (out, None) if recurrence.pair else out


def _states_before(
    scan: StateScan, effects: list[Effect], recurrence: Recurrence, given: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """What the scan finds for own pieces, and the state before each of them."""
    start = _Start.apply(*(x for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()))
    if not effects:
        return scan.before(start.expand(0, 1), lambda first, _: first), []
    effect = effects[0]
    shapes = effect.transition.shape, effect.addition.shape
    sizes = [shape.numel() for shape in shapes]

    def parts(elements: Tensor) -> tuple[Tensor, ...]:
        """(n, width) -> transitions and additions (n, ...)."""
        both = zip(elements.split(sizes, 1), shapes, strict=True)
        return tuple(some.view(-1, *shape) for some, shape in both)

    def flat(transitions: Tensor, additions: Tensor) -> Tensor:
        return torch.cat([transitions.flatten(1), additions.flatten(1)], 1)

    def join(first: Tensor, second: Tensor) -> Tensor:
        return flat(*recurrence.join(*parts(first), *parts(second)))

    own = [torch.stack(some) for some in zip(*((one.transition, one.addition) for one in effects), strict=True)]
    # In one dtype on all ranks: a layer may compute first states, and those after others, in different ones.
    found = scan.before(flat(*own).to(start.dtype) + start, join)
    return found, list(parts(found)[1])


class _Start(torch.autograd.Function):
    """(tensors) -> zero, which needs a gradient if one of the tensors does. It gives them none.

    So gradients travel on every rank or on none, also from ranks without a piece.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return tensors[0].new_zeros((), dtype=wide(tensors[0].dtype))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.count


def _run_lightning(module: Any, pieces: Pieces, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """The forward of MiniMax's linear attention, whose own computes the recurrence in line, on own rows."""
    x = pieces.fetch(hidden_states)
    heads = module.act_fn(module.qkv_proj(x)).unflatten(-1, (module.num_attention_heads, -1)).split(module.head_dim, -1)
    out, _ = _scan(pieces, LIGHTNING, lightning_attention, *heads, module)
    gate = module.output_gate(x).sigmoid()
    return pieces.give_back(module.out_proj(gate * module.norm(out.flatten(2)))), None
