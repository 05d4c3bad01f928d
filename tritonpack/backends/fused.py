"""Documents by torch's fused attention for CPUs, the kernel behind its scaled_dot_product_attention.

It serves documents of plain attention: all queries see all keys of their document, or each query sees one key more than
the query above. A call reads the rows of its documents and nothing else, and no number is computed from two documents.
docs/decisions/cpu-attention.md has the reasons, and what was measured:

- Equal documents of up to `PIECE_ROWS` tokens that lie end to end are the batch of one call.
- Other causal documents of up to as many tokens are copied to batches of about equal lengths; so are equal ones, if
  they are fewer than `MANY`.
- A longer causal document takes a call for about `PIECE_ROWS` queries each, with the keys up to the last one, because
  the kernel computes blocks of 512 keys whole, also above the diagonal.

Shapes: b documents of a call, m queries, k keys, H query heads, n key heads, d head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
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
BATCH_NUMBERS = 3 * 2**18  # of the queries of a call for short documents; 3 MiB stay in the caches of two cores
# Of the queries that fill up a batch of copies. To compute more takes longer than a further call.
PADDING_NUMBERS = 2**13
VECTOR = 16  # numbers; the kernel takes exponentials of whole vectors, and those of the remaining keys one by one
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

    def per_query(self, x: Tensor) -> Tensor:
        """Numbers of heads (H,) as they are added to [b, m, H]."""
        return x

    def put_rows(self, x: Tensor, values: Tensor) -> None:
        """Write values [b, m, ...] to the rows of the queries in x."""
        self.take_rows(x).copy_(values)

    def put_keys(self, x: Tensor, values: Tensor, *, add: bool) -> None:
        """Write values [b, k, ...] to the rows of the keys in x, or add them, as pieces of a document share keys."""
        (self.take_keys(x).add_ if add else self.take_keys(x).copy_)(values)

    def visible(self, dtype: torch.dtype) -> dict[str, Any]:
        """The kernel's arguments for which keys are seen."""
        rows, keys = ((end - begin) // self.documents for begin, end in (self[:2], self[2:4]))
        return _visible(self.seen, rows, keys, keys - rows, 1, dtype)

    def parts(self, most: int) -> Iterator[Run]:
        """The run, cut to at most `most` documents a call."""
        rows, keys = ((end - begin) // self.documents for begin, end in (self[:2], self[2:4]))
        for begin in range(0, self.documents, most):
            end = min(begin + most, self.documents)
            row, row_end, key, key_end = (x * n for n in (rows, keys) for x in (begin, end))
            yield Run(self.row + row, self.row + row_end, self.key + key, self.key + key_end, self.seen, end - begin)


class Copies:
    """A call for short documents of about the same length, which are copied; it has the methods of `Run`.

    Each has as many queries as the longest, and keys to the next multiple of `VECTOR`. A document is filled up with
    copies of its last token, so a call reads its documents and nothing else. The copies come after all queries of the
    document, which don't see them, and their outputs have gradients of zero. Tensors of results have one row more than
    there are tokens. It takes the results of the copies.

    The query heads of a key head are copied to be the queries of one head, token by token, so that the kernel
    multiplies larger matrices. Each key head of a document then is a document of its own: below, b counts them, m is
    the number of tokens times g query heads, and H and n are 1. Without groups of heads all stay as they are.
    """

    def __init__(self, documents: Sequence[Run], q: Tensor, k: Tensor) -> None:
        row, row_end, key, key_end = torch.tensor([run[:4] for run in documents], device="cpu").T[..., None, None]
        self.group = q.shape[1] // k.shape[1]
        self.parts = parts = k.shape[1] if self.group > 1 else 1
        self.queries = max(-(-FEWEST_KEYS // self.group), *(run.row_end - run.row for run in documents))
        self.keys_each = -(-self.queries // VECTOR) * VECTOR
        self.documents = len(documents)
        part = torch.arange(parts, device="cpu")[:, None]
        rows, keys = (
            begin + torch.arange(n, device="cpu") for begin, n in ((row, self.queries), (key, self.keys_each))
        )
        short = torch.int32 if max(len(q), len(k)) * parts < 2**31 else torch.int64  # read faster
        self.rows, self.keys = (
            (torch.minimum(x, end - 1) * parts + part).flatten().to(short)
            for x, end in ((rows, row_end), (keys, key_end))
        )
        self.row_places, self.key_places = (
            torch.where(x < end, x * parts + part, total * parts).flatten()
            for x, end, total in ((rows, row_end, len(q)), (keys, key_end, len(k)))
        )
        self.repeated = (rows >= row_end).expand(-1, parts, -1).flatten().nonzero().flatten()

    def _take(self, x: Tensor, places: Tensor) -> Tensor:
        """Rows (T * parts, ...) of x as [b, rows, heads, ...]."""
        taken = x.view(-1, x.shape[1] // self.parts, *x.shape[2:]).index_select(0, places)
        taken = taken.unflatten(0, (self.documents * self.parts, -1))
        return taken.flatten(1, 2).unsqueeze(2) if self.group > 1 else taken

    def take_rows(self, x: Tensor) -> Tensor:
        return self._take(x, self.rows)

    def take_keys(self, x: Tensor) -> Tensor:
        return self._take(x, self.keys)

    def take_gradients(self, x: Tensor) -> Tensor:
        """The rows of the queries in gradients, with zeros for the copies of last tokens."""
        taken = self._take(x, self.rows)
        taken.view(len(self.rows), -1).index_fill_(0, self.repeated, 0.0)
        return taken

    def per_query(self, x: Tensor) -> Tensor:
        if self.group == 1:
            return x
        return x.view(-1, 1, self.group).repeat(self.documents, self.queries, 1).flatten(1)[..., None]

    def _put(self, x: Tensor, places: Tensor, values: Tensor) -> None:
        rows, values = x.view(len(x) * self.parts, -1), values.reshape(len(places), -1).contiguous()
        if not values.shape[1] * values.element_size() % 16:  # torch copies number by number, so long ones are faster
            rows, values = rows.view(torch.complex128), values.view(torch.complex128)
        rows.index_copy_(0, places, values)

    def put_rows(self, x: Tensor, values: Tensor) -> None:
        self._put(x, self.row_places, values)

    def put_keys(self, x: Tensor, values: Tensor, *, add: bool) -> None:
        self._put(x, self.key_places, values)  # no other call has these keys

    def visible(self, dtype: torch.dtype) -> dict[str, Any]:
        return _visible(CAUSAL, self.queries, self.keys_each, 0, self.group, dtype)


Call = Run | Copies


def _visible(seen: int, rows: int, keys: int, behind: int, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's arguments for `rows` queries, of which the first sees `behind` keys beside its own.

    With a `group` each of them is as many queries.
    """
    if seen == ALL or (rows == keys and group == 1):
        return {"is_causal": seen != ALL}
    return {"is_causal": False, "attn_mask": _visible_mask(rows, keys, behind, group, dtype)}


@lru_cache(maxsize=64)  # the calls of a step; a mask of short documents has up to 128 keys
def _visible_mask(rows: int, keys: int, behind: int, group: int, dtype: torch.dtype) -> Tensor:
    triangle = _triangle(dtype)[behind : behind + rows, :keys]
    return triangle if group == 1 else triangle.repeat_interleave(group, 0)


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


def calls_of(runs: Sequence[Run], q: Tensor, k: Tensor) -> Iterator[Call]:
    """The calls for runs: short documents share calls with others of about their length, to which they are copied."""
    numbers = q.shape[1] * q.shape[2]
    short: list[Run] = []
    for run in runs:
        rows = (run.row_end - run.row) // run.documents
        if run[:4] == (0, len(q), 0, len(k)) and (run.seen != SHORT or rows >= FEWEST_KEYS):
            yield run._replace(seen=CAUSAL) if run.seen == SHORT else run  # its results need no copy
        elif run.seen == SHORT:
            short.extend(run.parts(1))
        else:
            yield from run.parts(max(BATCH_NUMBERS // (rows * numbers), 1))
    short.sort(key=lambda run: run.row_end - run.row)
    batch: list[Run] = []
    padding, longest = 0, 0
    for run in short:
        rows = run.row_end - run.row
        padding += (rows - longest) * len(batch)
        longest = rows
        if padding * numbers > PADDING_NUMBERS or (len(batch) + 1) * rows * numbers > BATCH_NUMBERS:
            yield from _batch(batch, q, k)
            batch, padding = [], 0
        batch.append(run)
    yield from _batch(batch, q, k)


def _batch(documents: list[Run], q: Tensor, k: Tensor) -> Iterator[Call]:
    """The call for documents of a batch; none for none, and one without copies for a single document."""
    if len(documents) > 1 or (documents and documents[0].row_end - documents[0].row < FEWEST_KEYS):
        yield Copies(documents, q, k)
    elif documents:
        yield documents[0]._replace(seen=CAUSAL)


def forward(run: Call, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """out [b, m, H, D_v] and lse [b, m, H] of a call, given q, k and v of one dtype."""
    of_keys, of_products = _factors(options.scale)
    qs, ks, vs = _as_the_kernel_reads(run.take_rows(q), _scaled(run.take_keys(k), of_keys), run.take_keys(v))
    out, lse = _operators()[0](qs, ks, vs, **run.visible(q.dtype), scale=of_products)
    out, lse = out[..., : v.shape[2]].transpose(1, 2), lse.transpose(1, 2)
    if options.sinks is None:
        return out, lse
    sinks = run.per_query(options.sinks)  # a sink is one key more, without a value
    largest = torch.maximum(lse, sinks)
    weight = torch.exp(lse - largest)
    total = weight + torch.exp(sinks - largest)
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
    dimension, and with rows that don't overlap, as matrix products need it. The heads of long documents are copied one
    after the other, because products read such rows faster."""
    width = max(x.shape[3] for x in tensors)
    wide = [pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in tensors]
    dense = [x.stride(3) == 1 and x.stride(1) >= width for x in wide]
    copy = torch.contiguous_format
    kept = [x if ok else x.clone(memory_format=copy) for x, ok in zip(wide, dense, strict=True)]
    return [x.transpose(1, 2).contiguous() if x.shape[1] > MOST_KEYS else x.transpose(1, 2) for x in kept]
