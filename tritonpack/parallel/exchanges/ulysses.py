"""Exchange by all-to-all (Ulysses): each rank computes some heads over all rows of the batch, or of its set of ranks.

Rank r of R computes the heads from H r / R to H (r + 1) / R with the mask of the whole batch, so the layout doesn't
change its work. It receives the key heads that these heads use. If several ranks use a key head, each gets a copy, and
its gradients are summed. If H isn't a multiple of R, some ranks compute one head more than others.

A rank computes its heads in chunks: the inputs of the next chunk and the outputs of the one before travel meanwhile. A
key head travels with the first chunk that uses it, and its gradients with the last one.

The own rows don't travel. So in forward a rank attends with them to its own keys while the first inputs travel, and to
the keys of others while the last outputs do; the results are merged (merge.py). In backward it computes their pairs
with the keys of others first, for which nothing has to arrive, and their pairs with own keys last, whose gradients
don't leave. No pair is computed twice.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import wide
from tritonpack.parallel.exchanges.call import Call, of_heads, rows_mask
from tritonpack.parallel.exchanges.merge import merge, merge_sinks, sink_gradients
from tritonpack.parallel.exchanges.trade import Addition, Spans, return_rows, send_rows, weave

CHUNKS = 4  # or fewer, if a rank has fewer query heads

OWN = 5  # the tensors that `forward` saves of the own rows, and again of each chunk


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


class Heads(NamedTuple):
    """Query heads and the key heads that they use, both numbered over all ranks; `group` query heads use a key head."""

    queries: slice
    keys: slice
    group: int

    def runs(self) -> list[tuple[slice, slice, slice]]:
        """Runs of heads that each have equally many query heads per key head: whole groups and pieces at both ends.

        For each the query heads, numbered over all ranks, and the places of query and key heads within these heads.
        """
        queries, group = self.queries, self.group
        first, last = -(-queries.start // group) * group, queries.stop // group * group
        bounds = [(queries.start, first), (first, last), (last, queries.stop)]
        if first > last:  # all within one group
            bounds = [(queries.start, queries.stop)]
        return [
            (span, _within(span, queries), _within(slice(start // group, (stop - 1) // group + 1), self.keys))
            for start, stop in bounds
            if start < stop and (span := slice(start, stop))
        ]


class HeadsCall(Call):
    """A call in which each rank computes some heads for the rows of all ranks."""

    @property
    def local(self) -> BlockDiagonalMask:
        """The mask between the rows of these ranks and their keys."""
        return self.mask

    def part(self, name: str, rows: Tensor, keys: Tensor | None) -> BlockDiagonalMask:
        """`local` between some rows and some keys, or all; cached under a name."""
        return self.local.cached((name, self.layout, self.ranks.rank), lambda: self.local.restrict(rows, keys))

    def rows_of_set(self) -> tuple[Tensor, Tensor]:
        """The own rows and the other ranks' rows, among the rows of these ranks."""
        return self.layout.rows[self.ranks.rank], self.layout.others(self.ranks.rank).rows

    def forward_others(
        self, own: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: Heads, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """out and lse of the other ranks' rows q over all keys.

        The last result is what the rows `own` see of keys that aren't in k; None if there are none. `sinks` has all
        heads.
        """
        rows = self.rows_of_set()[1]
        out, lse = _forward(self.of_rows(rows), q, k, v, self.part("other rows", rows, None), heads, sinks)
        return out, lse, None

    def backward_others(
        self, own: Sequence[Tensor], own_dlse: Tensor | None, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, out: Tensor, lse: Tensor, heads: Heads,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """dq of the other ranks' rows, dk, dv, and the gradient of the own rows by keys that aren't in k.

        `own` has dout, q, out and lse of the own rows.
        """
        rows = self.rows_of_set()[1]
        mask = self.part("other rows", rows, None)
        dq, dk, dv = _backward(self.of_rows(rows), dout, dlse, q, k, v, out, lse, mask, heads)
        return dq, dk, dv, None


@dataclass(frozen=True, eq=False)
class AcrossSets(HeadsCall):
    """A call whose ranks have all rows of their set, and not of the batch: on a mesh of two dimensions.

    Attributes:
        exchange: how keys travel across sets; has the functions `forward` and `backward`.
        across: its call, with the ranks that compute the same heads for the other sets.
    """

    divides_groups = False  # because the key head would travel across sets in each of them

    exchange: Any
    across: Call

    @property
    def local(self) -> BlockDiagonalMask:
        return self.across.rows_mask(self.across.ranks.rank)

    def forward_others(
        self, own: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: Heads, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        mine, others = self.rows_of_set()
        whole = weave(self, own, q)
        out, lse = _in_runs(
            heads,
            lambda span, at, keys: self.exchange.forward(self._of(span), whole[:, at], k[:, keys], v[:, keys], None),
            (1, 0),
        )
        own_part = out.index_select(0, mine), lse.index_select(1, mine)
        out, lse = out.index_select(0, others), lse.index_select(1, others)
        if sinks is not None:
            wide_out, lse = merge_sinks(out.to(lse.dtype), lse, sinks[heads.queries])
            out = wide_out.to(q.dtype)
        return out, lse, own_part

    def backward_others(
        self, own: Sequence[Tensor], own_dlse: Tensor | None, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, out: Tensor, lse: Tensor, heads: Heads,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        mine, others = self.rows_of_set()
        dout, q, out = (weave(self, x, y) for x, y in zip(own[:3], (dout, q, out), strict=True))
        lse = weave(self, own[3].T, lse.T).T.contiguous()
        dlse = None if dlse is None or own_dlse is None else weave(self, own_dlse.T, dlse.T).T
        dq, dk, dv = _in_runs(
            heads,
            lambda span, at, keys: self.exchange.backward(
                self._of(span), dout[:, at], None if dlse is None else dlse[at], q[:, at], k[:, keys], v[:, keys],
                out[:, at], lse[at],
            ),
            (1, 1, 1),
        )  # fmt: skip
        return dq.index_select(0, others), dk, dv, dq.index_select(0, mine)

    def _of(self, heads: slice) -> Call:
        """The call across sets, in which the own rows don't attend to keys of their set."""
        return replace(self.across, options=of_heads(self.across.options, heads, None), queries=self.rows_of_set()[1])


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


class Ulysses(torch.autograd.Function):
    """(call, want_lse, q, k, v, sinks) -> out (n, H, D_v) and, if wanted, lse (H, n) of this rank's n rows.

    Saved are q, k, v, out and lse of the own rows for the heads that this rank computes, and then of each chunk: q, out
    and lse of the other ranks' rows, and all keys and values. So backward doesn't send them again.
    """

    @staticmethod
    def forward(
        ctx: Any, call: HeadsCall, want_lse: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rank, group = call.ranks.rank, q.shape[1] // k.shape[1]
        queries, keys = (spans[rank] for spans in divide_heads(q.shape[1], k.shape[1], call.ranks.size))
        chunks = divide_chunks(q.shape[1], k.shape[1], call.ranks.size, call.divides_groups)
        inputs = [[(q, chunk.queries), (k, chunk.new_keys), (v, chunk.new_keys)] for chunk in chunks]
        coming = send_rows(call, inputs[0])
        own, others = call.rows_of_set()
        mine = (q[:, queries], k[:, keys], v[:, keys])
        own_mask = rows_mask(call.local, call.layout, rank, rank)
        own_out, own_lse = _forward(call.of_rows(own), *mine, own_mask, Heads(queries, keys, group))
        own_out = own_out.to(own_lse.dtype)
        totals = [q.new_zeros(q.shape[0], q.shape[1], v.shape[2])]
        if want_lse:
            totals.append(q.new_zeros(q.shape[0], q.shape[1], 1, dtype=own_lse.dtype))
        saved: list[Tensor] = []
        ks, vs = k[:0], v[:0]
        add: Addition | None = None
        for number, chunk in enumerate(chunks):
            qs, *new = coming()
            if number + 1 < len(chunks):
                coming = send_rows(call, inputs[number + 1])
            heads = Heads(chunk.queries[rank], chunk.keys[rank], group)
            at = _within(heads.queries, queries)
            new_ks, new_vs = (weave(call, x[:, chunk.new_keys[rank]], y) for x, y in zip((k, v), new, strict=True))
            ks, vs = (_append(x, old, heads.keys) for x, old in ((new_ks, ks), (new_vs, vs)))
            out, lse, own_part = call.forward_others(mine[0][:, at], qs, ks, vs, heads, sinks)
            if own_part is not None:
                own_out[:, at], own_lse[at] = merge(own_out[:, at], own_lse[at], *own_part)
            if add is not None:
                add(totals)
            add = return_rows(call, [(x, chunk.queries) for x in ([out, lse.T[..., None]] if want_lse else [out])])
            some_keys = ks.index_select(0, others), vs.index_select(0, others)
            near = _forward(
                call.of_rows(own), mine[0][:, at], *some_keys, call.part("keys of others", own, others), heads
            )
            own_out[:, at], own_lse[at] = merge(own_out[:, at], own_lse[at], *near)
            if any(ctx.needs_input_grad):
                saved += [qs, ks, vs, out, lse]
        if sinks is not None:
            own_out, own_lse = merge_sinks(own_out, own_lse, sinks[queries])
        own_out = own_out.to(q.dtype)
        for total, x in zip(totals, (own_out, own_lse.T[..., None]), strict=False):
            total[:, queries] = x
        assert add is not None  # every rank has a query head
        add(totals)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*(x.clone() for x in mine), own_out, own_lse, *saved, sinks)
        ctx.others = call, k.shape[1], q.shape[1]
        ctx.set_materialize_grads(False)
        return totals[0], totals[1][..., 0].T if want_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call, kv_heads, all_heads = ctx.others
        *saved, sinks = ctx.saved_tensors
        own_q, own_k, own_v, own_out, own_lse = saved[:OWN]
        if dout is None:
            dout = own_q.new_zeros(own_q.shape[0], all_heads, own_v.shape[2])
        rank, group = call.ranks.rank, all_heads // kv_heads
        queries, keys = (spans[rank] for spans in divide_heads(all_heads, kv_heads, call.ranks.size))
        chunks = divide_chunks(all_heads, kv_heads, call.ranks.size, call.divides_groups)
        seeds = [dout] if dlse is None else [dout, dlse.T[..., None]]
        inputs = [[(seed, chunk.queries) for seed in seeds] for chunk in chunks]
        coming = send_rows(call, inputs[0])
        own, others = call.rows_of_set()
        own_dout, own_dlse = dout[:, queries], None if dlse is None else dlse[queries]
        sums = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in (own_q, own_k, own_v)]  # of the own rows
        totals = [
            own_q.new_zeros(dout.shape[0], all_heads, own_q.shape[2]),
            *(x.new_zeros(dout.shape[0], kv_heads, x.shape[2], dtype=wide(x.dtype)) for x in (own_k, own_v)),
        ]
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        if dsinks is not None:
            dsinks[queries] = sink_gradients(sinks[queries], own_dout, own_dlse, own_out, own_lse)
        held = [x[:0, :0] for x in sums[1:]]  # gradients of a key head that the next chunk uses, too
        add: Addition | None = None
        for number, chunk in enumerate(chunks):
            q, k, v, out, lse = saved[OWN * (number + 1) : OWN * (number + 2)]
            heads = Heads(chunk.queries[rank], chunk.keys[rank], group)
            at, at_keys = _within(heads.queries, queries), _within(heads.keys, keys)
            mine = own_dout[:, at], own_q[:, at], own_out[:, at], own_lse[at]
            my_dlse = None if own_dlse is None else own_dlse[at]
            some_keys = k.index_select(0, others), v.index_select(0, others)
            mask = call.part("keys of others", own, others)
            near = _backward(call.of_rows(own), mine[0], my_dlse, mine[1], *some_keys, *mine[2:], mask, heads)
            sums[0][:, at] += near[0]
            douts, *dlses = coming()
            if number + 1 < len(chunks):
                coming = send_rows(call, inputs[number + 1])
            their_dlse = dlses[0][..., 0].T if dlses else None
            if dsinks is not None:
                dsinks[heads.queries] += sink_gradients(sinks[heads.queries], douts, their_dlse, out, lse)
            dq, *dkv, far = call.backward_others(mine, my_dlse, douts, their_dlse, q, k, v, out, lse, heads)
            if far is not None:
                sums[0][:, at] += far
            for total, x in zip(sums[1:], dkv, strict=True):
                total[:, at_keys] += x.index_select(0, own)
            theirs = [
                _add_first(x.index_select(0, others).to(wide(x.dtype)) + y, before)
                for x, y, before in zip(dkv, near[1:], held, strict=True)
            ]
            done = chunk.done_keys[rank].stop - chunk.done_keys[rank].start
            held = [x[:, done:] for x in theirs]
            if add is not None:
                add(totals)
            complete = [(x[:, :done].to(dq.dtype), chunk.done_keys) for x in theirs]
            add = return_rows(call, [(dq, chunk.queries), *complete])
        mask = rows_mask(call.local, call.layout, rank, rank)
        last = _backward(
            call.of_rows(own), own_dout, own_dlse, own_q, own_k, own_v, own_out, own_lse, mask,
            Heads(queries, keys, group),
        )  # fmt: skip
        for total, mine_all, x, span in zip(totals, sums, last, (queries, keys, keys), strict=True):
            total[:, span] += (mine_all + x).to(total.dtype)
        assert add is not None
        add(totals)
        return None, None, *(x.to(own_q.dtype) for x in totals), dsinks


def _in_runs(heads: Heads, compute: Callable[..., Sequence[Tensor]], dims: Sequence[int]) -> list[Tensor]:
    """The results of `compute` for each run of heads, joined along these dimensions."""
    results = [compute(*run)[: len(dims)] for run in heads.runs()]
    return [torch.cat(some, dim) for some, dim in zip(zip(*results, strict=True), dims, strict=True)]


def _forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, heads: Heads, sinks: Tensor | None = None
) -> list[Tensor]:
    """out and lse of some query heads. `sinks` has all heads."""
    return _in_runs(
        heads, lambda span, at, keys: call.forward(q[:, at], k[:, keys], v[:, keys], mask, span, sinks), (1, 0)
    )


def _backward(
    call: Call, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: BlockDiagonalMask, heads: Heads,
) -> list[Tensor]:  # fmt: skip
    """dq, dk and dv of some query heads."""
    return _in_runs(
        heads,
        lambda span, at, keys: call.backward(
            dout[:, at], None if dlse is None else dlse[at], q[:, at], k[:, keys], v[:, keys], out[:, at], lse[at],
            mask, span, None,
        ),
        (1, 1, 1),
    )  # fmt: skip


def _within(span: slice, whole: slice) -> slice:
    """Where a span of heads lies within another one."""
    return slice(span.start - whole.start, span.stop - whole.start)


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
