"""Exchange by all-to-all (Ulysses): each rank computes some heads over all rows of the batch.

Rank r of R computes the heads from H r / R to H (r + 1) / R with the mask of the whole batch, so the layout doesn't
change its work. It receives the key heads that these heads use. If several ranks use a key head, each gets a copy, and
its gradients are summed. If H isn't a multiple of R, some ranks compute one head more than others.

A rank computes its heads in chunks: the inputs of the next chunk and the outputs of the one before travel meanwhile. A
key head travels with the first chunk that uses it, and its gradients with the last one. Nothing is computed while the
first inputs travel, or the last outputs.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import all_to_all, wide
from tritonpack.parallel.exchanges.call import Call, Gradients
from tritonpack.parallel.exchanges.merge import exact

CHUNKS = 4  # or fewer, if a rank has fewer query heads

Spans = tuple[slice, ...]  # for each rank some heads, numbered over all ranks
Shipment = Sequence[tuple[Tensor, Spans]]  # tensors that travel together, and the heads of each that a rank computes
Addition = Callable[[Sequence[Tensor]], None]  # waits for a shipment and adds it to tensors with the own rows


@dataclass(frozen=True)
class Chunk:
    """The heads that ranks compute at a time.

    Attributes:
        queries: for each rank its query heads.
        keys: for each rank the key heads that these use.
        new_keys: for each rank those of `keys` that no chunk before uses.
        done_keys: for each rank those of `keys` that no chunk after uses.
    """

    queries: Spans
    keys: Spans
    new_keys: Spans
    done_keys: Spans


def ulysses(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out (n, H, D_v) of this rank's n rows, and lse (H, n) if `want_lse`."""
    return _Ulysses.apply(call, want_lse, q, k, v, sinks)


def divide_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Spans, Spans]:
    """For each rank its query heads, at least one, and the key heads that they use."""
    own = tuple(slice(heads * rank // ranks, heads * (rank + 1) // ranks) for rank in range(ranks))
    return own, _used_keys(own, heads // kv_heads)


@cache
def divide_chunks(heads: int, kv_heads: int, ranks: int, divides_groups: bool) -> tuple[Chunk, ...]:
    """The chunks, equally many for every rank, with at least one query head of each.

    Without `divides_groups`, all query heads of a rank that use a key head are in one chunk.
    """
    own, own_keys = divide_heads(heads, kv_heads, ranks)
    units, size = (own, 1) if divides_groups else (own_keys, heads // kv_heads)
    count = min(CHUNKS, *(unit.stop - unit.start for unit in units))

    def part(span: slice, unit: slice, number: int) -> slice:
        first, stop = (unit.start + (unit.stop - unit.start) * n // count for n in (number, number + 1))
        return slice(max(first * size, span.start), min(stop * size, span.stop))

    queries = [
        tuple(part(span, unit, number) for span, unit in zip(own, units, strict=True)) for number in range(count)
    ]
    keys = [_used_keys(spans, heads // kv_heads) for spans in queries]
    chunks = []
    for number, (some, used) in enumerate(zip(queries, keys, strict=True)):
        starts = [span.start for span in used] if number == 0 else [span.stop for span in keys[number - 1]]
        stops = [span.stop for span in used] if number + 1 == count else [span.start for span in keys[number + 1]]
        new = tuple(slice(max(start, span.start), span.stop) for start, span in zip(starts, used, strict=True))
        done = tuple(slice(span.start, min(stop, span.stop)) for stop, span in zip(stops, used, strict=True))
        chunks.append(Chunk(some, used, new, done))
    return tuple(chunks)


def _used_keys(spans: Spans, group: int) -> Spans:
    return tuple(slice(span.start // group, (span.stop - 1) // group + 1) for span in spans)


class _Ulysses(torch.autograd.Function):
    """(call, want_lse, q, k, v, sinks) -> out (n, H, D_v) and, if wanted, lse (H, n) of this rank's n rows."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, want_lse: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out, lse, saved = forward(call, q, k, v, sinks, want_lse=want_lse, save=any(ctx.needs_input_grad))
        ctx.save_for_backward(*saved, sinks)
        ctx.others = call, q.shape[1], k.shape[1], v.shape[2]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call, heads, kv_heads, width = ctx.others
        *saved, sinks = ctx.saved_tensors
        if dout is None:
            dout = saved[0].new_zeros(call.layout.lengths[call.ranks.rank], heads, width)
        return None, None, *backward(call, kv_heads, dout, dlse, saved, sinks)


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, want_lse: bool, save: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """out (n, H, D_v) of this rank's n rows, lse (H, n) if wanted, and what `backward` needs.

    These are the inputs and results of this rank's heads in each chunk, so that backward doesn't send them again: q, k,
    v, out and lse.
    """
    rank, group = call.ranks.rank, q.shape[1] // k.shape[1]
    chunks = divide_chunks(q.shape[1], k.shape[1], call.ranks.size, call.divides_groups)
    inputs = [[(q, chunk.queries), (k, chunk.new_keys), (v, chunk.new_keys)] for chunk in chunks]
    totals = [q.new_zeros(q.shape[0], q.shape[1], v.shape[2])]
    if want_lse:
        totals.append(q.new_zeros(q.shape[0], q.shape[1], 1, dtype=exact(q.dtype)))
    saved: list[Tensor] = []
    ks, vs = k[:0], v[:0]
    add: Addition | None = None
    for chunk, (qs, new_ks, new_vs) in zip(chunks, _travel(call, inputs), strict=True):
        ks, vs = (_append(new, old, chunk.keys[rank]) for new, old in ((new_ks, ks), (new_vs, vs)))
        results = [
            call.forward(qs[:, at], ks[:, at_keys], vs[:, at_keys], call.mask, heads, sinks)
            for heads, at, at_keys in _runs(chunk.queries[rank], chunk.keys[rank], group)
        ]
        outs, lses = (torch.cat(some, dim) for dim, some in zip((1, 0), zip(*results, strict=True), strict=True))
        if add is not None:
            add(totals)
        add = to_rows(call, [(x, chunk.queries) for x in ([outs, lses.T[..., None]] if want_lse else [outs])])
        if save:
            saved += [qs, ks, vs, outs, lses]
    assert add is not None  # every rank has a query head
    add(totals)
    return totals[0], totals[1][..., 0].T if want_lse else None, saved


def backward(
    call: Call, kv_heads: int, dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor], sinks: Tensor | None
) -> Gradients:
    """dq, dk, dv of this rank's rows, and its part of dsinks."""
    (rows, heads, _), rank = dout.shape, call.ranks.rank
    chunks = divide_chunks(heads, kv_heads, call.ranks.size, call.divides_groups)
    q, k, v = saved[:3]  # of the first chunk
    seeds = [dout] if dlse is None else [dout, dlse.T[..., None]]
    totals = [
        q.new_zeros(rows, heads, q.shape[2]),
        *(x.new_zeros(rows, kv_heads, x.shape[2], dtype=wide(x.dtype)) for x in (k, v)),
    ]
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    held = [k[:, :0], v[:, :0]]  # gradients of a key head that the next chunk uses, too
    add: Addition | None = None
    inputs = [[(seed, chunk.queries) for seed in seeds] for chunk in chunks]
    for number, (chunk, (douts, *dlses)) in enumerate(zip(chunks, _travel(call, inputs), strict=True)):
        q, k, v, out, lse = saved[5 * number : 5 * number + 5]
        results = []
        for run, at, at_keys in _runs(chunk.queries[rank], chunk.keys[rank], heads // kv_heads):
            *gradients, dsink = call.backward(
                douts[:, at], dlses[0][:, at, 0].T if dlses else None, q[:, at], k[:, at_keys], v[:, at_keys],
                out[:, at], lse[at], call.mask, run, sinks,
            )  # fmt: skip
            results.append(gradients)
            if dsinks is not None:
                dsinks[run] = dsink
        dq, *dkv = (torch.cat(some, 1) for some in zip(*results, strict=True))
        dkv = [_add_first(x, before) for x, before in zip(dkv, held, strict=True)]
        done = chunk.done_keys[rank].stop - chunk.done_keys[rank].start
        held = [x[:, done:] for x in dkv]
        if add is not None:
            add(totals)
        complete = [(x[:, :done].to(q.dtype), chunk.done_keys) for x in dkv]
        add = to_rows(call, [(dq, chunk.queries), *complete])
    assert add is not None
    add(totals)
    dq, dk, dv = (x.to(q.dtype) for x in totals)
    return dq, dk, dv, dsinks


def _runs(queries: slice, keys: slice, group: int) -> list[tuple[slice, slice, slice]]:
    """A chunk's query heads as runs, each with equally many query heads per key head.

    These are whole groups and the pieces at both ends. For each the query heads, numbered over all ranks, and the
    places of query and key heads within the chunk.
    """
    first, last = -(-queries.start // group) * group, queries.stop // group * group
    bounds = [(queries.start, first), (first, last), (last, queries.stop)]
    if first > last:  # all within one group
        bounds = [(queries.start, queries.stop)]
    return [
        (
            slice(start, stop),
            slice(start - queries.start, stop - queries.start),
            slice(start // group - keys.start, (stop - 1) // group + 1 - keys.start),
        )
        for start, stop in bounds
        if start < stop
    ]


def _append(new: Tensor, before: Tensor, used: slice) -> Tensor:
    """The key heads that a chunk uses: new ones, after the last one of the chunk before if it is used again."""
    again = used.stop - used.start - new.shape[1]
    carried = before[:, before.shape[1] - again :]
    if not again:
        return new
    return torch.cat([carried, new], 1) if new.shape[1] else carried


def _add_first(x: Tensor, held: Tensor) -> Tensor:
    """x (T, heads, D) with `held` added to its first heads, in `comm.wide`."""
    if held.shape[1]:
        x = x.to(wide(x.dtype))
        x[:, : held.shape[1]] += held
    return x


def _travel(call: Call, shipments: Sequence[Shipment]) -> Iterator[list[Tensor]]:
    """What arrives of each chunk. The next chunk travels meanwhile."""
    coming = to_heads(call, shipments[0])
    for shipment in shipments[1:]:
        arrived = coming()
        coming = to_heads(call, shipment)
        yield arrived
    yield coming()


def to_heads(call: Call, shipment: Shipment) -> Callable[[], list[Tensor]]:
    """Start to send (own rows, all heads, D) of each tensor; the results are (all rows, own heads, D)."""
    if len({x.dtype for x, _ in shipment}) > 1:  # tensors of one dtype travel in one message
        separate = [to_heads(call, [one]) for one in shipment]
        return lambda: [arrive()[0] for arrive in separate]
    rank, size = call.ranks.rank, call.ranks.size
    pieces = [[x[:, spans[r]] for x, spans in shipment] for r in range(size)]
    widths = [(spans[rank].stop - spans[rank].start, x.shape[2]) for x, spans in shipment]
    coming = _exchange(call, pieces, [[(rows, *width) for width in widths] for rows in call.layout.lengths])

    def arrive() -> list[Tensor]:
        wholes = [torch.cat(parts) for parts in zip(*coming(), strict=True)]
        return wholes if call.layout.in_order else [call.layout.unshard(whole) for whole in wholes]

    return arrive


def to_rows(call: Call, shipment: Shipment) -> Addition:
    """Start to send (all rows, own heads, D) of each tensor to the owners of rows.

    The result adds what arrives to tensors (own rows, all heads, D), one for each; copies of a head are summed in the
    order of ranks.
    """
    if len({x.dtype for x, _ in shipment}) > 1:
        separate = [to_rows(call, [one]) for one in shipment]

        def add_each(totals: Sequence[Tensor]) -> None:
            for add_one, total in zip(separate, totals, strict=True):
                add_one([total])

        return add_each
    rows, size = call.layout.lengths[call.ranks.rank], call.ranks.size
    pieces = [[call.layout.shard(x, r) for x, _ in shipment] for r in range(size)]
    shapes = [[(rows, spans[r].stop - spans[r].start, x.shape[2]) for x, spans in shipment] for r in range(size)]
    coming = _exchange(call, pieces, shapes)

    def add(totals: Sequence[Tensor]) -> None:
        for (_, spans), total, parts in zip(shipment, totals, zip(*coming(), strict=True), strict=True):
            for heads, part in zip(spans, parts, strict=True):
                total[:, heads] += part

    return add


def _exchange(
    call: Call, pieces: list[list[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> Callable[[], list[list[Tensor]]]:
    """Start to send the tensors pieces[r] to rank r, and to receive tensors of shapes[r] from it, in one message."""
    sent = [sum(x.numel() for x in piece) for piece in pieces]
    counts = [[math.prod(shape) for shape in some] for some in shapes]
    message = torch.cat([x.flatten() for piece in pieces for x in piece])
    coming = all_to_all(message, sent, [sum(count) for count in counts], call.ranks)

    def arrive() -> list[list[Tensor]]:
        flat = iter(coming().split([n for count in counts for n in count]))
        return [[next(flat).view(shape) for shape in some] for some in shapes]

    return arrive
