"""Layers that mix along the row, for batches with a document that is long for its ranks.

Each rank computes all that concerns single tokens for its own rows. In a convolution it also gets the rows just before
its own (a halo). In a recurrence it computes some heads, or channels, over all rows: heads don't depend on each other,
so no rank waits for the state of another.

The forward of such a layer calls its convolution and its recurrence as functions of its module. It runs here with other
functions under these names, which exchange rows and call the layer's own functions. Classes and modules stay unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.parallel.exchanges.trade import Trade
from tritonpack.parallel.exchanges.ulysses import divide_heads
from tritonpack.parallel.row_travel import RowTravel
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.parallel.whole_documents import filled, in_one_row
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.unpacking.document_places import Documents, batches_of, lay_back


@dataclass(frozen=True)
class Scan:
    """The arguments of a function that computes a recurrence.

    Attributes:
        heads: tensors (1, rows, H, ...) with a row per token. The first one has the widths of the output.
        groups: tensors (1, rows, G, ...), each of whose G groups is for H / G consecutive heads.
        parameters: tensors (H, ...).
        rows_last: whether tensors are (1, H, rows), and groups (1, N, rows), one group for all heads.
    """

    heads: tuple[str, ...]
    groups: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    rows_last: bool = False


CONVOLUTION = "causal_conv1d_fn"
SCANS = {
    "torch_chunk_gated_delta_rule": Scan(("value", "g", "beta"), ("query", "key")),
    "chunk_kimi_delta_attention": Scan(("value", "query", "key", "g", "beta")),
    "mamba2_chunk_scan": Scan(("hidden_states", "dt"), ("B", "C"), ("A", "D", "dt_bias")),
    "mamba_selective_scan": Scan(("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "delta_bias"), rows_last=True),
}
# Kernels that compute a whole layer. They return None where they can't run, and the layer then runs step by step.
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")


class LongDocuments:
    """The rows of a batch as layers with a recurrence or a convolution need them.

    Args:
        batch: the whole batch, with the padding of the layout.
        sharding: how it is divided.
    """

    def __init__(self, batch: PackedBatch, sharding: Sharding) -> None:
        self.batch, self.sharding = batch, sharding
        self._halos: dict[int, _Halo] = {}

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """The forward of a layer with functions that exchange rows; None if the layer mixes otherwise."""
        own = inspect.unwrap(type(module).forward)
        called = own.__code__.co_names if isinstance(own, FunctionType) else ()
        if CONVOLUTION not in called:
            return None
        others: dict[str, Any] = dict.fromkeys(FUSED, lambda *_, **__: None)
        others[CONVOLUTION] = partial(self._convolve, own.__globals__[CONVOLUTION])
        for name in SCANS.keys() & set(called):
            others[name] = partial(self._scan, own.__globals__[name], SCANS[name])
        forward = FunctionType(own.__code__, own.__globals__ | others, own.__name__, own.__defaults__, own.__closure__)
        forward.__kwdefaults__ = own.__kwdefaults__
        return forward.__get__(module)

    def _convolve(self, own: Callable[..., Tensor], x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(1, channels, rows) of own rows -> the same, by the layer's own function on own rows and their halo."""
        reach = weight.shape[-1] - 1
        if reach not in self._halos:
            self._halos[reach] = _Halo(self.batch, self.sharding, reach)
        halo = self._halos[reach]
        rows = halo.fetch(x[0].T)

        def run(documents: Documents) -> Tensor:
            return own(documents.cut(rows).transpose(1, 2), weight, *args, **kwargs).transpose(1, 2)

        batches = batches_of(halo.packed_batch)
        return halo.own_rows(lay_back(batches, [run(documents) for documents in batches]))[None].mT

    def _scan(self, own: Callable[..., Any], scan: Scan, *args: Any, **kwargs: Any) -> Any:
        """The layer's own function on all rows of some heads."""
        names = list(inspect.signature(own).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        traded = [name for name in (*scan.heads, *scan.groups) if given.get(name) is not None]
        tensors = [_with_heads(given[name], name in scan.groups, scan) for name in traded]
        heads = tensors[0].shape[1]
        groups = next((x.shape[1] for name, x in zip(traded, tensors, strict=True) if name in scan.groups), heads)
        head_spans, group_spans = divide_heads(heads, groups, self.sharding.ranks.size)
        spans = [group_spans if name in scan.groups else head_spans for name in traded]
        mine, my_groups = (some[self.sharding.ranks.rank] for some in (head_spans, group_spans))
        trading: Any = self.sharding  # it has ranks and layout, which are all that a trade reads
        local = dict(zip(traded, Trade.apply(trading, True, spans, *tensors), strict=True))
        shared = my_groups.stop - my_groups.start
        if shared > 1 and mine.stop - mine.start != heads // groups * shared:  # groups that heads of two ranks use
            index = torch.arange(mine.start, mine.stop) // (heads // groups) - my_groups.start
            local |= {name: local[name][:, index.to(local[name].device)] for name in local.keys() & {*scan.groups}}
        parameters = {name: given[name][mine] for name in scan.parameters if given.get(name) is not None}
        result: Any = None

        def run(documents: Documents) -> Tensor:
            nonlocal result
            changed = {name: self._cut(x, documents, given[name].ndim, name, scan) for name, x in local.items()}
            changed |= parameters
            result = own(
                *[changed.get(name, x) for name, x in zip(names, args, strict=False)],
                **{name: changed.get(name, x) for name, x in kwargs.items()},
            )
            out = result[0] if isinstance(result, tuple) else result
            return out.mT if scan.rows_last else out

        if mine.start == mine.stop:  # there are fewer heads than ranks
            out = local[traded[0]]
            result = (out, None) if "output_final_state" in names else out
        else:
            batches = batches_of(self.batch)
            out = lay_back(batches, [run(documents) for documents in batches]).flatten(0, 1)
            out = out[..., None] if scan.rows_last else out
        out = Trade.apply(trading, False, [head_spans], out.contiguous())[0]
        out = out[None, ..., 0].mT if scan.rows_last else out[None]
        return (out, None) if isinstance(result, tuple) else out

    def _cut(self, x: Tensor, documents: Documents, dims: int, name: str, scan: Scan) -> Tensor:
        """All rows of some heads, (rows, heads, width), as documents in the form of the function's argument."""
        x = documents.cut(x.unflatten(0, self.batch.tokens))
        if scan.rows_last:
            return (x[:, :, 0] if name in scan.groups else x[..., 0]).mT.contiguous()
        return x if dims == 4 else x[..., 0]


class _Halo:
    """Own rows of documents, and the rows before them that a convolution reads, as pieces of documents.

    Attributes:
        packed_batch: the pieces, as a batch of one row.
    """

    def __init__(self, batch: PackedBatch, sharding: Sharding, reach: int) -> None:
        begin, length = batch.lengths()
        layout, rank = sharding.layout, sharding.ranks.rank
        place = torch.full((layout.num_rows,), -1)  # in its document; -1 for padding
        document = torch.repeat_interleave(torch.arange(length.shape[0]), length)
        steps = torch.arange(document.shape[0]) - (length.cumsum(0) - length)[document]
        place[begin[document] + steps] = steps
        wanted = [_with_halo(rows, place, reach) for rows in layout.rows_on_host]
        self._travel = RowTravel(layout, sharding.ranks, wanted, batch.device)
        mine = wanted[rank]
        first = (place[mine] == 0) | (mine.diff(prepend=mine.new_tensor([-2])) != 1)
        self.packed_batch = in_one_row(first.nonzero()[:, 0].diff(append=torch.tensor([mine.shape[0]])), batch)
        own = layout.rows_on_host[rank]
        live = place[own] >= 0
        self._own = live.nonzero()[:, 0].to(batch.device)
        self._places = torch.searchsorted(mine, own[live]).to(batch.device)
        self._rows = own.shape[0]

    def fetch(self, x: Tensor) -> Tensor:
        """The pieces, (1, n, ...), from own rows (rows, ...)."""
        return filled(self._travel.fetch(x)[None], self.packed_batch)

    def own_rows(self, x: Tensor) -> Tensor:
        """Own rows (rows, ...) of the pieces' outputs, (1, n, ...). Padding gets zeros."""
        return x.new_zeros(self._rows, *x.shape[2:]).index_copy(0, self._own, x[0, self._places])


def _with_halo(rows: Tensor, place: Tensor, reach: int) -> Tensor:
    """Rows without padding, and up to `reach` rows of the same document before each; ascending int64."""
    own = torch.zeros(place.shape[0], dtype=torch.bool)
    own[rows] = place[rows] >= 0
    wanted = own.clone()
    for step in range(1, reach + 1):
        wanted[:-step] |= own[step:] & (place[step:] >= step)
    return wanted.nonzero()[:, 0]


def _with_heads(x: Tensor, is_group: bool, scan: Scan) -> Tensor:
    """An argument as (rows, heads, width)."""
    x = x[0]
    if scan.rows_last:
        return x.T[:, None] if is_group else x.T[..., None]
    return x if x.ndim == 3 else x[..., None]
