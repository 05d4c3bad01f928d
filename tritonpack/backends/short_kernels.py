"""Attention of short documents on a CPU, compiled by numba: forward and backward for documents whose keys fit caches.

All of it is products of small matrices. `_product` computes `ROWS` rows and one vector of columns of a product in
registers, and everything else prepares what it reads: a few rows of queries at a time, and the keys and values of a
document, copied so that their rows are whole vectors. The query heads of a key head are rows of one matrix, token by
token, because they see the same keys.

Nothing is multiplied that lies outside of a document. Rows and columns that fill up a vector or a block of rows have
whatever number was there before, and no result is computed from them: sums run over the rows and columns that exist,
and weights of keys that a query doesn't see are 0.

Shapes of the arguments: q, dout, out (T_q, H, D or D_v), k, v (T_k, n, D or D_v), lse, dlse (T_q, H), float32 or
float64, contiguous; `documents` (documents, 5) row, row_end, key, key_end and a key head; `start`, `stop` (T_q) the
keys that each query sees, within its document, at least one.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import binding

from tritonpack.backends import vectors
from tritonpack.backends.vectors import (
    VECTOR_BYTES,
    add_times,
    exp,
    larger,
    largest_lane,
    load,
    minus,
    number,
    only_lanes,
    plus,
    repeat,
    store,
    store_number,
    sum_of_lanes,
    times,
    will_read,
    will_write,
)
from tritonpack.compilation import COUNTS_NOTHING, compiled

ROWS = 8  # of a product
STRIPE = 32  # rows of queries whose gradients are computed together; a multiple of ROWS
AHEAD = 16  # tokens; rows are asked for when the rows of so many tokens before them are read

# A product and a sum may become one instruction, and nothing else changes: `exp` depends on the order of its sums.
_FASTMATH: Any = {"fastmath": {"contract"}}
# A call passes each array as 13 numbers through memory, which takes longer than what most of these functions do. Their
# machine code is kept with that of their callers.
inlined: Any = numba.njit(nogil=True, error_model="numpy", forceinline=True, **_FASTMATH, **COUNTS_NOTHING)


@inlined
def _write(c: Any, at: int, vector: Any, factor: Any, add: bool) -> None:
    vector = times(vector, repeat(factor))
    store(c, at, plus(load(c, at), vector) if add else vector)


@inlined
def _product(
    a: Any, at: int, row: int, step: int, b: Any, b_at: int, width: int, c: Any, c_at: int, across: int, depth: int,
    factor: Any, add: bool,
) -> None:  # fmt: skip
    """A vector of columns of ROWS rows: c[i, :] = factor * sum of a[i, x] * b[x, :] over x < depth, or += with `add`.

    Row i of a begins at `at + i * row` and its numbers are `step` apart. Rows of b are `width` apart, of c `across`.
    """
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = repeat(c.dtype.type(0))
    for _ in range(depth):
        x = load(b, b_at)
        s0, s1 = add_times(s0, number(a, at), x), add_times(s1, number(a, at + row), x)
        s2, s3 = add_times(s2, number(a, at + 2 * row), x), add_times(s3, number(a, at + 3 * row), x)
        s4, s5 = add_times(s4, number(a, at + 4 * row), x), add_times(s5, number(a, at + 5 * row), x)
        s6, s7 = add_times(s6, number(a, at + 6 * row), x), add_times(s7, number(a, at + 7 * row), x)
        at += step
        b_at += width
    _write(c, c_at, s0, factor, add)
    _write(c, c_at + across, s1, factor, add)
    _write(c, c_at + 2 * across, s2, factor, add)
    _write(c, c_at + 3 * across, s3, factor, add)
    _write(c, c_at + 4 * across, s4, factor, add)
    _write(c, c_at + 5 * across, s5, factor, add)
    _write(c, c_at + 6 * across, s6, factor, add)
    _write(c, c_at + 7 * across, s7, factor, add)


@inlined
def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@inlined
def _place(x: Any, row: int, head: int) -> int:
    return (row * x.shape[1] + head) * x.shape[2]


@inlined
def _fetch(x: Any, row: int, head: int) -> None:
    """Begin to read a row of a head."""
    begin = _place(x, row, head)
    for d in range(0, x.shape[2], 64 // x.itemsize):
        will_read(x, begin + d)


@inlined
def _fetch_to_write(x: Any, row: int, head: int) -> None:
    begin = _place(x, row, head)
    for d in range(0, x.shape[2], 64 // x.itemsize):
        will_write(x, begin + d)


@inlined
def _move(x: Any, x_at: int, y: Any, y_at: int, numbers: int) -> None:
    """Copy numbers from x to y, by vectors, of which the last one ends with the last number."""
    lanes = VECTOR_BYTES // x.itemsize
    if numbers < lanes:
        for d in range(numbers):
            store_number(y, y_at + d, number(x, x_at + d))
    else:
        for d in range(0, numbers, lanes):
            d = min(d, numbers - lanes)
            store(y, y_at + d, load(x, x_at + d))


@inlined
def _copy(x: Any, begin: int, end: int, head: int, copied: Any, width: int) -> None:
    """Rows of a head, `width` numbers apart."""
    for i in range(end - begin):
        _fetch(x, begin + i + AHEAD, head)
        _move(x, _place(x, begin + i, head), copied, i * width, x.shape[2])


@inlined
def _transpose(x: Any, begin: int, end: int, head: int, copied: Any, width: int) -> None:
    """Rows of a head as columns, the numbers of a column `width` apart."""
    for i in range(end - begin):
        _fetch(x, begin + i + AHEAD, head)
        at = _place(x, begin + i, head)
        for d in range(x.shape[2]):
            store_number(copied, d * width + i, number(x, at + d))


@inlined
def _take_rows(x: Any, row: int, n: int, group: int, first: int, last: int, copied: Any, width: int) -> None:
    """Rows `first` to `last` of the queries of a document, beginning at `row`, that read key head n."""
    t, h = row + first // group, first % group
    for i in range(last + 1 - first):
        _fetch(x, t + AHEAD, n * group + h)
        _move(x, _place(x, t, n * group + h), copied, i * width, x.shape[2])
        t, h = _next(t, h, group)


@inlined
def _put_rows(copied: Any, width: int, x: Any, row: int, n: int, group: int, first: int, last: int) -> None:
    t, h = row + first // group, first % group
    for i in range(last + 1 - first):
        _fetch_to_write(x, t + AHEAD, n * group + h)
        _move(copied, i * width, x, _place(x, t, n * group + h), x.shape[2])
        t, h = _next(t, h, group)


@inlined
def _next(t: int, h: int, group: int) -> Any:
    """The token and the head, within its group, of the next row."""
    return (t, h + 1) if h + 1 < group else (t + 1, 0)


@inlined
def _most_keys(documents: Any) -> int:
    most = 0
    for i in range(len(documents)):
        most = max(most, documents[i, 3] - documents[i, 2])
    return most


def forward(
    q: Any, k: Any, v: Any, documents: Any, start: Any, stop: Any, sinks: Any, scale: Any, out: Any, lse: Any
) -> None:
    """Write the rows of the documents in out and lse, for the query heads that read their key head."""
    group, head_dim, head_dim_v = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    none, one, hidden = q.dtype.type(0), q.dtype.type(1), q.dtype.type(-np.inf)
    lanes = VECTOR_BYTES // q.itemsize
    across, width_v = _round_up(_most_keys(documents), lanes), _round_up(head_dim_v, lanes)
    columns = np.zeros(head_dim * across, q.dtype)  # keys
    values = np.zeros(across * width_v, q.dtype)
    rows = np.zeros(ROWS * head_dim, q.dtype)  # queries
    weights = np.zeros(ROWS * across, q.dtype)  # scores before
    sums = np.zeros(ROWS * width_v, q.dtype)
    for document in range(len(documents)):
        row, row_end, key, key_end, n = documents[document]
        _transpose(k, key, key_end, n, columns, across)
        _copy(v, key, key_end, n, values, width_v)
        total = (row_end - row) * group
        for first in range(0, total, ROWS):
            last = min(first + ROWS, total) - 1
            _take_rows(q, row, n, group, first, last, rows, head_dim)
            begin, end = start[row + first // group] - key, stop[row + last // group] - key
            aligned = begin - begin % lanes
            for j in range(aligned, end, lanes):
                _product(rows, 0, head_dim, 1, columns, j, across, weights, j, across, head_dim, scale, False)
            t, h = row + first // group, first % group
            for at in range(0, (last + 1 - first) * across, across):
                seen, unseen = start[t] - key, stop[t] - key
                tops = repeat(hidden)
                for j in range(aligned, end, lanes):
                    scores = only_lanes(load(weights, at + j), seen - j, unseen - j, hidden)
                    store(weights, at + j, scores)
                    tops = larger(tops, scores)
                top = largest_lane(tops)
                if sinks.size and sinks[n * group + h] > top:
                    top = sinks[n * group + h]
                pivot = none if top == hidden else top
                all_weights = repeat(none)
                for j in range(aligned, end, lanes):
                    weight = exp(minus(load(weights, at + j), repeat(pivot)))
                    store(weights, at + j, weight)
                    all_weights = plus(all_weights, weight)
                weight_sum = sum_of_lanes(all_weights)
                if sinks.size:
                    weight_sum += math.exp(sinks[n * group + h] - pivot)
                lse[t, n * group + h] = pivot + math.log(weight_sum)
                inverse = one / weight_sum if weight_sum != none else none
                for j in range(aligned, end, lanes):
                    store(weights, at + j, times(load(weights, at + j), repeat(inverse)))
                t, h = _next(t, h, group)
            depth = end - begin
            for d in range(0, head_dim_v, lanes):
                place = begin * width_v + d
                _product(weights, begin, across, 1, values, place, width_v, sums, d, width_v, depth, one, False)
            _put_rows(sums, width_v, out, row, n, group, first, last)


def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, documents: Any, start: Any, stop: Any,
    scale: Any, dq: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    """Write the rows of the documents in dq, dk and dv, for their key head and the query heads that read it."""
    group, head_dim, head_dim_v = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    none, one = q.dtype.type(0), q.dtype.type(1)
    lanes = VECTOR_BYTES // q.itemsize
    unit = max(lanes, ROWS)
    across, width, width_v = (
        _round_up(_most_keys(documents), unit), _round_up(head_dim, lanes), _round_up(head_dim_v, lanes)
    )  # fmt: skip
    columns, values = np.zeros(head_dim * across, q.dtype), np.zeros(head_dim_v * across, q.dtype)  # transposed
    keys = np.zeros(across * width, q.dtype)
    rows, dqs = np.zeros(STRIPE * width, q.dtype), np.zeros(STRIPE * width, q.dtype)
    douts, outs = np.zeros(STRIPE * width_v, q.dtype), np.zeros(STRIPE * width_v, q.dtype)  # 0 behind a row
    begins, ends = np.zeros(STRIPE, np.int64), np.zeros(STRIPE, np.int64)
    lses, delta = np.zeros(STRIPE, q.dtype), np.zeros(STRIPE, q.dtype)
    weights, dscores = np.zeros(STRIPE * across, q.dtype), np.zeros(STRIPE * across, q.dtype)
    dks, dvs = np.zeros(across * width, q.dtype), np.zeros(across * width_v, q.dtype)
    for document in range(len(documents)):
        row, row_end, key, key_end, n = documents[document]
        _transpose(k, key, key_end, n, columns, across)
        _transpose(v, key, key_end, n, values, across)
        _copy(k, key, key_end, n, keys, width)
        dks[:] = none
        dvs[:] = none
        total = (row_end - row) * group
        for stripe in range(0, total, STRIPE):
            stripe_last = min(stripe + STRIPE, total) - 1
            count = stripe_last + 1 - stripe
            _take_rows(q, row, n, group, stripe, stripe_last, rows, width)
            _take_rows(dout, row, n, group, stripe, stripe_last, douts, width_v)
            _take_rows(out, row, n, group, stripe, stripe_last, outs, width_v)
            t, h = row + stripe // group, stripe % group
            for i in range(count):
                begins[i], ends[i] = start[t] - key, stop[t] - key
                lses[i] = lse[t, n * group + h]
                if lses[i] == -np.inf:
                    lses[i] = np.inf  # so that all weights are 0
                products = repeat(none)
                for at in range(i * width_v, (i + 1) * width_v, lanes):
                    products = plus(products, times(load(douts, at), load(outs, at)))
                delta[i] = sum_of_lanes(products)
                if dlse.size:
                    delta[i] -= dlse[t, n * group + h]
                t, h = _next(t, h, group)
            aligned_first, last_end = begins[0] - begins[0] % unit, _round_up(ends[count - 1], unit)
            for first in range(0, count, ROWS):
                last = min(first + ROWS, count) - 1
                begin, end = begins[first], ends[last]
                for j in range(begin - begin % lanes, end, lanes):
                    at, place = first * across + j, first * width
                    _product(rows, place, width, 1, columns, j, across, weights, at, across, head_dim, scale, False)
                    place = first * width_v
                    _product(douts, place, width_v, 1, values, j, across, dscores, at, across, head_dim_v, one, False)
                for i in range(first, last + 1):
                    at = i * across
                    for j in range(aligned_first, last_end, lanes):
                        weight = dscore = repeat(none)
                        if j < ends[i] and j + lanes > begins[i]:
                            weight = exp(minus(load(weights, at + j), repeat(lses[i])))
                            weight = only_lanes(weight, begins[i] - j, ends[i] - j, none)
                            dscore = times(weight, minus(load(dscores, at + j), repeat(delta[i])))
                            dscore = only_lanes(dscore, begins[i] - j, ends[i] - j, none)
                        store(weights, at + j, weight)
                        store(dscores, at + j, dscore)
                at, depth = first * across + begin, end - begin
                for d in range(0, head_dim, lanes):
                    c_at, place = first * width + d, begin * width + d
                    _product(dscores, at, across, 1, keys, place, width, dqs, c_at, width, depth, scale, False)
            _put_rows(dqs, width, dq, row, n, group, stripe, stripe_last)
            for j in range(aligned_first, last_end, ROWS):
                for d in range(0, head_dim, lanes):
                    place = j * width + d
                    _product(dscores, j, 1, across, rows, d, width, dks, place, width, count, scale, True)
                for d in range(0, head_dim_v, lanes):
                    place = j * width_v + d
                    _product(weights, j, 1, across, douts, d, width_v, dvs, place, width_v, count, one, True)
        for i in range(key_end - key):
            _move(dks, i * width, dk, _place(dk, key + i, n), head_dim)
            _move(dvs, i * width_v, dv, _place(dv, key + i, n), head_dim_v)


@cache
def functions(dtype: Any) -> tuple[Any, Any]:
    """`forward` and `backward` for arrays of a dtype, kept on disk where numba finds a folder that it can write."""
    return _kept(forward, dtype), _kept(backward, dtype)


def _kept(function: Any, dtype: Any) -> Any:
    """numba numbers the files of a function's machine code, one for each dtype and processor.

    Processes that compile for two of these at the same time may choose the same number, and each then reads the code of
    the other. So the function's name depends on whatever its code depends on.
    """
    about = hashlib.sha256(f"{dtype} {binding.get_host_cpu_name()} {binding.get_host_cpu_features()}".encode())
    for source in (__file__, vectors.__file__):
        about.update(Path(source).read_bytes())
    named = FunctionType(function.__code__, globals(), function.__name__)
    named.__qualname__ = f"{function.__name__}-{about.hexdigest()[:16]}"
    return compiled(**_FASTMATH)(named)
