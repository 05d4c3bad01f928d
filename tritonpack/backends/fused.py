"""Documents by torch's fused attention for CPUs, the kernel behind its scaled_dot_product_attention.

It serves documents of plain attention: all queries see all keys of their document, or each query sees one key more than
the query above. A call reads the rows of its document and nothing else. A causal document takes a call for about
`PIECE_ROWS` queries each, with the keys up to the last one, because the kernel computes blocks of 512 keys whole, also
above the diagonal. docs/decisions/cpu-attention.md has the reasons, and what was measured.

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

# Whether the kernel takes fewer key heads than query heads. Before, it read a key head for every query head, without a
# check. This asks the version, because a trial would fail under the modes and default devices of a caller.
SHARES_KEY_HEADS = torch.__version__ >= "2.9"  # compared as versions

# Which keys of their document the queries see. ALL: each query sees all keys. CAUSAL: the last query sees all keys, and
# every other query sees one key less than the next query. OTHER: the kernel can't compute it.
ALL, CAUSAL, OTHER = range(3)

# Below this the kernel ignores NaN: it takes the largest score of a row with whole vectors of up to 16 numbers, which
# keep NaN, and of the rest by comparisons, which don't. A row of NaN then has no largest score, and would become zeros.
FEWEST_KEYS = 16
# Beyond it the matrix library sums scores in parts, whose sizes depend on those of the matrices. So the scores of
# forward and of backward are rounded in different ways, and large ones give other weights.
WIDEST_KEYS = 256
PIECE_ROWS = 128
MOST_KEYS = 1024  # of a causal document in pieces: their mask takes 4 MiB, and longer documents gain little


class Run(NamedTuple):
    """A call for a document, or for some queries of a document and the keys that they see.

    Attributes:
        row, row_end: the rows of its queries.
        key, key_end: the rows of its keys.
        seen: `ALL` or `CAUSAL`, and `OTHER` of a document that the kernel can't compute.
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
        """The kernel's arguments for which keys are seen."""
        rows, keys = self.row_end - self.row, self.key_end - self.key
        if self.seen == ALL or rows == keys:
            return {"is_causal": self.seen != ALL}
        return {"is_causal": False, "attn_mask": _triangle(dtype)[keys - rows : keys, :keys]}


def serves(q: Tensor, k: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernel computes attention of queries and keys like q and k with these options."""
    plain = not options.softcap and options.alibi_slopes is None and not options.dropout_p
    plain = plain and q.shape[2] <= WIDEST_KEYS
    return q.device.type == "cpu" and plain and bool(_operators()) and (q.shape[1] == k.shape[1] or SHARES_KEY_HEADS)


@cache
def _operators() -> tuple[Any, ...]:
    """The kernel and its backward; nothing if torch doesn't have them, or not with the arguments that they get here."""
    packets = [getattr(torch.ops.aten, name, None) for name in (FORWARD, f"{FORWARD}_backward")]
    operators = [getattr(packet, "default", None) for packet in packets]
    wanted = {"dropout_p", "is_causal", "attn_mask", "scale"}
    if any(one is None or not wanted <= {x.name for x in one._schema.arguments} for one in operators):
        return ()
    return getattr(torch, FORWARD, operators[0]), operators[1]  # torch's function takes the host less time


def documents_of(mask: BlockDiagonalMask) -> list[Run]:
    """A run for each document that sees a key, `OTHER` included."""
    start, stop = mask.key_start, mask.key_stop
    begins = document_begins(mask)[: len(start)].nonzero().flatten()
    lasts = torch.cat([begins, begins.new_full((1,), len(start))])[1:] - 1
    other_steps = pad((stop.diff() != 1).cumsum(0), (1, 0))  # rows so far that see other than one key more
    # The host does the rest: on few numbers it is faster than a chain of torch's operators.
    others = other_steps[lasts] - other_steps[begins]
    columns = (begins, lasts, start[begins], stop[begins], start[lasts], stop[lasts], others)
    runs = []
    for row, last, key, first_stop, last_start, key_end, other in zip(*map(Tensor.tolist, columns), strict=True):
        rows, keys = last + 1 - row, key_end - key
        if first_stop <= key:
            continue
        seen = OTHER
        if last_start == key and keys >= FEWEST_KEYS:
            if first_stop == key_end:
                seen = ALL
            elif not other and (keys == rows or keys <= MOST_KEYS):
                seen = CAUSAL
        runs.append(Run(row, last + 1, key, key_end, seen))
    return runs


def pieces(run: Run) -> list[Run]:
    """The run itself, or a causal document cut to about equal numbers of queries, each with the keys up to its last."""
    rows = run.row_end - run.row
    number = round(rows / PIECE_ROWS)
    if run.seen != CAUSAL or number < 2 or run.key_end - run.key > MOST_KEYS:
        return [run]
    # Their key counts are multiples of a vector, because the kernel takes single numbers for the rest of a row.
    behind = run.key_end - run.key - rows
    ends = [run.row + -(-(behind + rows * i // number) // 16) * 16 - behind for i in range(1, number)] + [run.row_end]
    return [
        run._replace(row=row, row_end=end, key_end=run.key_end - (run.row_end - end))
        for row, end in zip([run.row, *ends[:-1]], ends, strict=True)
    ]


def forward(run: Run, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """out [m, H, D_v] and lse [H, m] of a call, given the rows of its queries and keys in one dtype."""
    of_keys, of_products = _factors(options.scale)
    width = max(q.shape[2], v.shape[2])
    qs, vs = _as_the_kernel_reads(q, width), _as_the_kernel_reads(v, width)
    ks = _as_the_kernel_reads(_scaled(k, of_keys), width)
    out, lse = _operators()[0](qs, ks, vs, **run.visible(q.dtype), scale=of_products)
    out, lse = _narrowed(out, v.shape[2]), lse.squeeze(0)
    if options.sinks is None:
        return out, lse
    sinks = options.sinks[:, None]
    largest = torch.maximum(lse, sinks)  # a sink is one key more, without a value
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
    """dq [m, H, D], dk [k, n, D] and dv [k, n, D_v] of a call, given the rows of its queries and keys in one dtype."""
    head_dim, head_dim_v = q.shape[2], v.shape[2]
    if dlse is not None:
        # The kernel has no gradient of lse. A further value of 1 has the same effect: dP gains dlse, and delta nothing,
        # because the further output is 0 (docs/math.md, section 3).
        dout, v = torch.cat([dout, dlse.T[..., None]], 2), pad(v, (0, 1), value=1.0)
    of_keys, of_products = _factors(options.scale)
    width = max(head_dim, v.shape[2])
    inputs = (_as_the_kernel_reads(x, width) for x in (dout, q, _scaled(k, of_keys), v, out))
    gradients = _operators()[1](*inputs, lse[None], dropout_p=0.0, **run.visible(q.dtype), scale=of_products)
    dq, dk, dv = map(_narrowed, gradients, (head_dim, head_dim, head_dim_v))
    return dq, _scaled(dk, of_keys), dv


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


def _as_the_kernel_reads(x: Tensor, width: int) -> Tensor:
    """[rows, H, d] as [1, H, rows, width], with zeros behind narrower heads, which change no product, dense in the last
    dimension, and with rows that don't overlap, as matrix products need it. The heads of long documents are copied one
    after the other, because products read such rows faster."""
    if x.shape[2] < width:
        x = pad(x, (0, width - x.shape[2]))
    if x.stride(2) != 1 or x.stride(0) < width:
        x = x.clone(memory_format=torch.contiguous_format)
    heads_first = x.transpose(0, 1).unsqueeze(0)
    return heads_first.contiguous() if x.shape[0] > MOST_KEYS else heads_first


def _narrowed(x: Tensor, width: int) -> Tensor:
    """[1, H, rows, d] as [rows, H, width]: `_as_the_kernel_reads` undone."""
    x = x.squeeze(0).transpose(0, 1)
    return x if x.shape[2] == width else x[..., :width]
