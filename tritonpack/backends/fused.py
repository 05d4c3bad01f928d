"""Attention of documents by torch's fused kernel for CPUs, which scaled_dot_product_attention uses.

It computes documents with full attention, and causal documents, in which each query sees one key more than the query
before it. A call reads only the rows of its document. A causal document is divided into calls of about `PIECE_ROWS`
queries with the keys up to their last one, because the kernel computes whole blocks of 512 keys, also above the
diagonal. docs/decisions/cpu-attention.md has the reasons and the measurements.

Shapes: m queries and k keys of a call, H query heads, n key heads, d head dimension.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.masks.bounds import document_begins
from tritonpack.options import AttentionOptions

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"

# Whether the kernel takes fewer key heads than query heads. Older versions read a key head for every query head,
# without a check. The version decides, because a trial would depend on the modes and the default device of the caller.
SHARES_KEY_HEADS = torch.__version__ >= "2.9"  # compared as versions

# Kinds of documents. ALL: each query sees all keys. CAUSAL: the last query sees all keys, and every other query sees
# one key less than the next query. OTHER: the kernel can't compute it.
ALL, CAUSAL, OTHER = range(3)

# With fewer keys the kernel ignores NaN: it finds the largest score of a row by vectors of up to 16 numbers, which keep
# NaN, and of the rest by comparisons, which drop NaN. A row of NaN would become zeros.
MIN_KEYS = 16
# For larger head dimensions the matrix library sums scores in parts, whose sizes depend on the matrices. So forward and
# backward round scores in different ways, and large scores give different weights.
MAX_HEAD_DIM = 256
PIECE_ROWS = 128
MAX_PIECE_KEYS = 1024  # longer causal documents aren't divided: they gain little, and the mask would exceed 4 MiB


class Run(NamedTuple):
    """A call of the kernel for a document, or for some queries of a document and the keys that they see.

    Attributes:
        row, row_end: the rows of its queries.
        key, key_end: the rows of its keys.
        seen: `ALL`, `CAUSAL`, or `OTHER` for a document that the kernel can't compute.
    """

    row: int
    row_end: int
    key: int
    key_end: int
    seen: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row_end)

    @property
    def keys(self) -> slice:
        return slice(self.key, self.key_end)

    def visible(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the kernel's arguments that describe the visible keys."""
        rows, keys = self.row_end - self.row, self.key_end - self.key
        if self.seen == ALL or rows == keys:
            return {"is_causal": self.seen != ALL}
        return {"is_causal": False, "attn_mask": _triangle(dtype)[keys - rows : keys, :keys]}


def supports(q: Tensor, k: Tensor, options: AttentionOptions) -> bool:
    """Return whether the kernel supports queries and keys like q and k with these options."""
    plain = not options.softcap and options.alibi_slopes is None and not options.dropout_p
    plain = plain and q.shape[2] <= MAX_HEAD_DIM
    return q.device.type == "cpu" and plain and bool(_operators()) and (q.shape[1] == k.shape[1] or SHARES_KEY_HEADS)


@cache
def _operators() -> tuple[Any, ...]:
    """Return the kernel and its backward; nothing if torch lacks them or the arguments that are used here."""
    packets = [getattr(torch.ops.aten, name, None) for name in (FORWARD, f"{FORWARD}_backward")]
    operators = [getattr(packet, "default", None) for packet in packets]
    wanted = {"dropout_p", "is_causal", "attn_mask", "scale"}
    if any(op is None or not wanted <= {x.name for x in op._schema.arguments} for op in operators):
        return ()
    return getattr(torch, FORWARD, operators[0]), operators[1]  # torch's function takes less host time


def documents_of(mask: BlockDiagonalMask) -> list[Run]:
    """Return a run for each document that sees a key, `OTHER` included."""
    start, stop = mask.key_start, mask.key_stop
    begins = document_begins(mask)[: len(start)].nonzero().flatten()
    lasts = torch.cat([begins, begins.new_full((1,), len(start))])[1:] - 1
    other_steps = pad((stop.diff() != 1).cumsum(0), (1, 0))  # number of rows so far without one key more
    # Python does the rest, because for few numbers it is faster than a chain of torch operators.
    others = other_steps[lasts] - other_steps[begins]
    columns = (begins, lasts, start[begins], stop[begins], start[lasts], stop[lasts], others)
    runs = []
    for row, last, key, first_stop, last_start, key_end, other in zip(*map(Tensor.tolist, columns), strict=True):
        rows, keys = last + 1 - row, key_end - key
        if first_stop <= key:
            continue
        seen = OTHER
        if last_start == key and keys >= MIN_KEYS:
            if first_stop == key_end:
                seen = ALL
            elif not other and (keys == rows or keys <= MAX_PIECE_KEYS):
                seen = CAUSAL
        runs.append(Run(row, last + 1, key, key_end, seen))
    return runs


def pieces(run: Run) -> list[Run]:
    """Return the run, or divide a causal document into about equal numbers of queries with the keys up to their
    last."""
    rows = run.row_end - run.row
    number = round(rows / PIECE_ROWS)
    if run.seen != CAUSAL or number < 2 or run.key_end - run.key > MAX_PIECE_KEYS:
        return [run]
    # Key counts are multiples of 16, because the kernel handles the rest of a vector number by number.
    behind = run.key_end - run.key - rows
    ends = [run.row + -(-(behind + rows * i // number) // 16) * 16 - behind for i in range(1, number)] + [run.row_end]
    return [
        run._replace(row=row, row_end=end, key_end=run.key_end - (run.row_end - end))
        for row, end in zip([run.row, *ends[:-1]], ends, strict=True)
    ]


def forward(run: Run, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Compute out [m, H, D_v] and lse [H, m] of a run from the rows of its queries and keys in one dtype."""
    key_factor, product_factor = _factors(options.scale)
    width = max(q.shape[2], v.shape[2])
    qs, vs = _for_kernel(q, width), _for_kernel(v, width)
    ks = _for_kernel(_scaled(k, key_factor), width)
    out, lse = _operators()[0](qs, ks, vs, **run.visible(q.dtype), scale=product_factor)
    out, lse = _narrowed(out, v.shape[2]), lse.squeeze(0)
    if options.sinks is None:
        return out, lse
    sinks = options.sinks[:, None]
    largest = torch.maximum(lse, sinks)  # a sink is a further key without a value
    weight = torch.exp(lse - largest)
    total = weight + torch.exp(sinks - largest)
    return out * (weight / total).T[..., None], largest + total.log()


def backward(
    run: Run,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [m, H, D], dk [k, n, D] and dv [k, n, D_v] of a run from the rows of its queries and keys."""
    head_dim, head_dim_v = q.shape[2], v.shape[2]
    if dlse is not None:
        # The kernel has no gradient of lse. A further column of v with ones has the same effect: it adds dlse to dP,
        # and nothing to delta, because this column of out is 0 (docs/math.md, section 3).
        dout, v = torch.cat([dout, dlse.T[..., None]], 2), pad(v, (0, 1), value=1.0)
    key_factor, product_factor = _factors(options.scale)
    width = max(head_dim, v.shape[2])
    inputs = (_for_kernel(x, width) for x in (dout, q, _scaled(k, key_factor), v, out))
    gradients = _operators()[1](*inputs, lse[None], dropout_p=0.0, **run.visible(q.dtype), scale=product_factor)
    dq, dk, dv = map(_narrowed, gradients, (head_dim, head_dim, head_dim_v))
    return dq, _scaled(dk, key_factor), dv


def _factors(scale: float) -> tuple[float, float]:
    """Split the scale into a factor of the keys and a factor of the kernel's products.

    The kernel's backward scales within the product and its forward after it. If the factor isn't a power of two, these
    round in different ways, and large scores lose digits in backward.
    """
    return (1.0, scale) if math.frexp(scale)[0] == 0.5 else (scale, 1.0)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


@cache
def _triangle(dtype: torch.dtype) -> Tensor:
    """Return (MAX_PIECE_KEYS, MAX_PIECE_KEYS), 0 up to the diagonal and -inf above. Masks are slices of it."""
    return torch.full((MAX_PIECE_KEYS, MAX_PIECE_KEYS), -math.inf, dtype=dtype, device="cpu").triu(1)


def _for_kernel(x: Tensor, width: int) -> Tensor:
    """Turn [rows, H, d] into [1, H, rows, width]. Narrower heads are padded with zeros. The last dimension is dense,
    and rows don't overlap, as matrix products require. Long documents are copied head by head, because products then
    read rows faster."""
    if x.shape[2] < width:
        x = pad(x, (0, width - x.shape[2]))
    if x.stride(2) != 1 or x.stride(0) < width:
        x = x.clone(memory_format=torch.contiguous_format)
    heads_first = x.transpose(0, 1).unsqueeze(0)
    return heads_first.contiguous() if x.shape[0] > MAX_PIECE_KEYS else heads_first


def _narrowed(x: Tensor, width: int) -> Tensor:
    """Turn [1, H, rows, d] into [rows, H, width]: the inverse of `_for_kernel`."""
    x = x.squeeze(0).transpose(0, 1)
    return x if x.shape[2] == width else x[..., :width]
