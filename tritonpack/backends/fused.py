"""Documents by torch's fused attention for CPUs, the kernel behind its scaled_dot_product_attention.

It serves documents of plain attention: all queries see all keys of their document, or each query sees one key more than
the query above. A call reads the rows of its documents and nothing else, and no number is computed from two documents.
docs/decisions/cpu-attention.md has the reasons, and what was measured:

- Equal documents of up to `PIECE_ROWS` tokens that lie end to end are the batch of one call.
- Other causal documents of up to as many tokens are copied to batches, each to a multiple of 16 tokens; so are equal
  ones, if they are fewer than `MANY`.
- A longer causal document takes a call for about `PIECE_ROWS` queries each, with the keys up to the last one, because
  the kernel computes blocks of 512 keys whole, also above the diagonal.

Shapes: b documents of a call, m queries, k keys, H query heads, n key heads, d head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.backends.tile_table import document_begins
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"

# Whether the kernel takes fewer key heads than query heads. Before, it read a key head for every query head, without a
# check. This asks the version, because a trial would fail under the modes and default devices of a caller.
SHARES_KEY_HEADS = torch.__version__ >= "2.9"  # compared as versions

# Which keys of their document the queries see. ALL: each query sees all keys. CAUSAL: the last query sees all keys, and
# every other query sees one key less than the next query. OTHER: the kernel can't compute it. SHORT: `CAUSAL`, with as
# many queries as keys, and few enough for a batch of copies.
ALL, CAUSAL, OTHER, SHORT = range(4)

# Below this the kernel ignores NaN: it takes the largest score of a row with whole vectors of up to 16 numbers, which
# keep NaN, and of the rest by comparisons, which don't. A row of NaN then has no largest score, and would become zeros.
FEWEST_KEYS = 16
# Beyond it the matrix library sums scores in parts, whose sizes depend on those of the matrices. So the scores of
# forward and of backward are rounded in different ways, and large ones give other weights.
WIDEST_KEYS = 256
PIECE_ROWS = 128
MANY = 16  # equal documents; fewer of them share calls with documents of other lengths
BATCH_NUMBERS = 3 * 2**17  # of the queries of a batch of copies; 1.5 MiB stay in caches
MOST_KEYS = 1024  # of a causal document in pieces: their mask takes 4 MiB, and longer documents gain little


class Run(NamedTuple):
    """A call for equal documents that lie end to end, or for some queries of a document and the keys that they see.

    Attributes:
        row, row_end: the rows of their queries.
        key, key_end: the rows of their keys.
        seen: `ALL`, `CAUSAL`, or `SHORT` for documents that are copied (`calls_of`).
        documents: how many these are.
    """

    row: int
    row_end: int
    key: int
    key_end: int
    seen: int
    documents: int

    def take_rows(self, x: Tensor) -> Tensor:
        """The rows of the queries in x, (T_q, ...), as a view [b, m, ...]."""
        return x[self.row : self.row_end].unflatten(0, (self.documents, -1))

    def take_gradients(self, x: Tensor) -> Tensor:
        """`take_rows` of a tensor of gradients."""
        return self.take_rows(x)

    def take_keys(self, x: Tensor) -> Tensor:
        """The rows of the keys in x, (T_k, ...), as a view [b, k, ...]."""
        return x[self.key : self.key_end].unflatten(0, (self.documents, -1))

    def put_rows(self, x: Tensor, values: Tensor) -> None:
        """Write values [b, m, ...] to the rows of the queries in x."""
        self.take_rows(x).copy_(values)

    def add_keys(self, x: Tensor, values: Tensor) -> None:
        """Add values [b, k, ...] to the rows of the keys in x, which pieces of a document share."""
        self.take_keys(x).add_(values)

    def visible(self, dtype: torch.dtype) -> dict[str, Any]:
        """The kernel's arguments for which keys are seen."""
        rows, keys = ((end - begin) // self.documents for begin, end in (self[:2], self[2:4]))
        if self.seen == ALL or rows == keys:
            return {"is_causal": self.seen != ALL}
        return {"is_causal": False, "attn_mask": _triangle(dtype)[keys - rows : keys, :keys]}


class Copies:
    """A call for short documents, each copied to `width` rows; it has the methods of `Run`.

    A document is filled up with copies of its last token, so a call reads its documents and nothing else. The copies
    come after all queries of the document, which don't see them, and their outputs have gradients of zero. Tensors of
    results have one row more than there are tokens. It takes the results of the copies.
    """

    def __init__(self, runs: Sequence[Run], width: int, num_queries: int, num_keys: int) -> None:
        row, row_end, key, key_end = torch.tensor([run[:4] for run in runs], device="cpu").T[..., None]
        place = torch.arange(width, device="cpu")
        self.documents, live = len(runs), place < row_end - row
        self.repeated = (~live).flatten().nonzero().flatten()
        self.rows, self.keys = row + place, key + place
        self.row_places = self.rows.where(live, num_queries).flatten()
        self.key_places = self.keys.where(live, num_keys).flatten()
        self.rows = torch.minimum(self.rows, row_end - 1).flatten()
        self.keys = torch.minimum(self.keys, key_end - 1).flatten()

    def take_rows(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.rows).unflatten(0, (self.documents, -1))

    def take_keys(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.keys).unflatten(0, (self.documents, -1))

    def take_gradients(self, x: Tensor) -> Tensor:
        """The rows of the queries in gradients, with zeros for the copies of last tokens."""
        gradients = x.index_select(0, self.rows).index_fill_(0, self.repeated, 0.0)
        return gradients.unflatten(0, (self.documents, -1))

    def put_rows(self, x: Tensor, values: Tensor) -> None:
        x.index_copy_(0, self.row_places, values.flatten(0, 1))

    def add_keys(self, x: Tensor, values: Tensor) -> None:
        x.index_copy_(0, self.key_places, values.flatten(0, 1))

    def visible(self, dtype: torch.dtype) -> dict[str, Any]:
        return {"is_causal": True}


Call = Run | Copies


def serves(q: Tensor, k: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernel computes attention of queries and keys like q and k with these options."""
    plain = not options.softcap and options.alibi_slopes is None and not options.dropout_p
    plain = plain and q.shape[2] <= WIDEST_KEYS
    return q.device.type == "cpu" and plain and bool(_operators()) and (q.shape[1] == k.shape[1] or SHARES_KEY_HEADS)


@cache
def _operators() -> tuple[Any, ...]:
    """The kernel and its backward; nothing if torch doesn't have them, or not with the arguments that they get here."""
    packets = [getattr(torch.ops.aten, name, None) for name in (FORWARD, f"{FORWARD}_backward")]
    operators = tuple(getattr(packet, "default", None) for packet in packets)
    wanted = {"dropout_p", "is_causal", "attn_mask", "scale"}
    known = all(one is not None and wanted <= {x.name for x in one._schema.arguments} for one in operators)
    return operators if known else ()


def documents_of(mask: BlockDiagonalMask, *, pack_invariant: bool = False) -> Tensor:
    """(documents, 5) int64: row, row_end, key, key_end and what is seen, of each document that sees a key.

    With `pack_invariant` none is `SHORT`.
    """
    begins = document_begins(mask)[: mask.num_queries].nonzero().flatten()
    ends = torch.cat([begins, begins.new_full((1,), mask.num_queries)])[1:]
    start, stop = mask.key_start.long(), mask.key_stop.long()
    live = start[begins] < stop[begins]
    begins, ends = begins[live], ends[live]
    last = ends - 1
    key, key_end = start[begins], stop[last]
    other_steps = pad((stop.diff() != 1).cumsum(0), (1, 0))  # rows so far that see other than one key more
    causal = other_steps[begins] == other_steps[last]
    causal &= (key_end - key == ends - begins) | (key_end - key <= MOST_KEYS)
    seen = torch.where(stop[begins] == key_end, ALL, torch.where(causal, CAUSAL, OTHER))
    short = causal & (key == start[last]) & (key_end - key == ends - begins) & (ends - begins <= PIECE_ROWS)
    seen = torch.where((key == start[last]) & (key_end - key >= FEWEST_KEYS), seen, OTHER)
    if not pack_invariant:
        seen = torch.where(short, SHORT, seen)
    return torch.stack([begins, ends, key, key_end, seen], 1)


def runs_of(documents: Tensor, *, pack_invariant: bool) -> list[Run]:
    """The calls for documents as `documents_of` returns them, none of them `OTHER`.

    With `pack_invariant` no call has two documents, so that nothing depends on the others.
    """
    if not len(documents):
        return []
    row, row_end, key, key_end, seen = documents.T
    like = torch.stack([row_end - row, key_end - key, seen])
    begins = torch.ones(len(documents), dtype=torch.bool, device=documents.device)
    begins[1:] = (like[:, 1:] != like[:, :-1]).any(0) | (row[1:] != row_end[:-1]) | (key[1:] != key_end[:-1])
    begins |= like[:2].amax(0) > (0 if pack_invariant else PIECE_ROWS)
    begins |= like[1] < FEWEST_KEYS  # these are copied to longer rows
    first = begins.nonzero().flatten()
    last = torch.cat([first[1:], first.new_full((1,), len(documents))]) - 1
    few = last - first + 1 < MANY
    seen = torch.where((seen[first] == SHORT) & ~few, CAUSAL, seen[first])
    runs = torch.stack([row[first], row_end[last], key[first], key_end[last], seen, last - first + 1], 1)
    return [piece for run in runs.tolist() for piece in _pieces(Run(*run))]


def _pieces(run: Run) -> list[Run]:
    """The run itself, or a causal document cut to about equal numbers of queries, each with the keys up to its last."""
    rows = run.row_end - run.row
    number = round(rows / PIECE_ROWS)
    if run.seen != CAUSAL or run.documents > 1 or number < 2 or run.key_end - run.key > MOST_KEYS:
        return [run]
    # Their key counts are multiples of a vector, because the kernel takes single numbers for the rest of a row.
    behind = run.key_end - run.key - rows
    ends = [run.row + -(-(behind + rows * i // number) // 16) * 16 - behind for i in range(1, number)] + [run.row_end]
    return [
        run._replace(row=row, row_end=end, key_end=run.key_end - (run.row_end - end))
        for row, end in zip([run.row, *ends[:-1]], ends, strict=True)
    ]


def calls_of(runs: Sequence[Run], q: Tensor, num_keys: int) -> Iterator[Call]:
    """The calls for runs: short documents share calls with others that are copied to the same width."""
    of_width: dict[int, list[Run]] = {}
    for run in runs:
        if run.seen != SHORT:
            yield run
            continue
        rows = (run.row_end - run.row) // run.documents
        of_width.setdefault(-(-rows // 16) * 16, []).extend(
            Run(run.row + begin, run.row + begin + rows, run.key + begin, run.key + begin + rows, SHORT, 1)
            for begin in range(0, rows * run.documents, rows)
        )
    for width, short in of_width.items():
        most = max(BATCH_NUMBERS // (width * q.shape[1] * q.shape[2]), 1)
        for begin in range(0, len(short), most):
            yield Copies(short[begin : begin + most], width, len(q), num_keys)


def forward(run: Call, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """out [b, m, H, D_v] and lse [b, m, H] of a call, given q, k and v of one dtype."""
    of_keys, of_products = _factors(options.scale)
    qs, ks, vs = _as_the_kernel_reads(run.take_rows(q), _scaled(run.take_keys(k), of_keys), run.take_keys(v))
    out, lse = _operators()[0](qs, ks, vs, **run.visible(q.dtype), scale=of_products)
    out, lse = out[..., : v.shape[2]].transpose(1, 2), lse.transpose(1, 2)
    if options.sinks is None:
        return out, lse
    largest = torch.maximum(lse, options.sinks)  # a sink is one key more, without a value
    weight = torch.exp(lse - largest)
    total = weight + torch.exp(options.sinks - largest)
    return out * (weight / total)[..., None], largest + total.log()


def backward(
    run: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [b, m, H, D], dk [b, k, n, D] and dv [b, k, n, D_v] of a call, given inputs of one dtype."""
    douts, vs = run.take_gradients(dout), run.take_keys(v)
    if dlse is not None:
        # The kernel has no gradient of lse. A further value of 1 has the same effect: dP gains dlse, and delta nothing,
        # because the further output is 0 (docs/math.md, section 3).
        douts = torch.cat([douts, run.take_gradients(dlse.T)[..., None]], 3)
        vs = pad(vs, (0, 1), value=1.0)
    of_keys, of_products = _factors(options.scale)
    ks = _scaled(run.take_keys(k), of_keys)
    inputs = _as_the_kernel_reads(douts, run.take_rows(q), ks, vs, run.take_rows(out))
    lses = run.take_rows(lse.T).transpose(1, 2)
    gradients = _operators()[1](*inputs, lses, dropout_p=0.0, **run.visible(q.dtype), scale=of_products)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq[..., : q.shape[2]], _scaled(dk[..., : q.shape[2]], of_keys), dv[..., : v.shape[2]]


def _factors(scale: float) -> tuple[float, float]:
    """The factors of the keys and of the kernel's products, which together are the scale.

    The kernel's backward scales within the product and its forward after it. Unless the factor is a power of two, which
    changes no digit, these round in different ways, and a large score loses digits in backward.
    """
    return (1.0, scale) if math.frexp(scale)[0] == 0.5 else (scale, 1.0)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


@cache
def _triangle(dtype: torch.dtype) -> Tensor:
    """(MOST_KEYS, MOST_KEYS), 0 up to the diagonal and -inf above; its rows are the masks of pieces."""
    return torch.full((MOST_KEYS, MOST_KEYS), -math.inf, dtype=dtype, device="cpu").triu(1)


def _as_the_kernel_reads(*tensors: Tensor) -> list[Tensor]:
    """[b, rows, H, d] as [b, H, rows, d], with zeros behind narrower heads, which change no product, dense in the last
    dimension, and with rows that don't overlap, as matrix products need it."""
    width = max(x.shape[3] for x in tensors)
    wide = [pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in tensors]
    dense = [x.stride(3) == 1 and x.stride(1) >= width for x in wide]
    copy = torch.contiguous_format
    return [(x if ok else x.clone(memory_format=copy)).transpose(1, 2) for x, ok in zip(wide, dense, strict=True)]
