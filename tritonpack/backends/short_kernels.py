"""Attention of short documents on a CPU, compiled by numba: forward and backward for documents whose keys fit caches.

All of it is products of small matrices. `_product` computes `ROWS` rows and one vector of columns of a product in
registers, and everything else prepares what it reads: a few rows of queries at a time, and the keys and values of a
document, copied so that their rows are whole vectors. The query heads of a key head are rows of one matrix, token by
token, because they see the same keys.

Nothing is multiplied that lies outside of a document. Rows and columns that fill up a vector or a block of rows have
whatever number was there before, and no result is computed from them: sums run over the rows and columns that exist,
and weights of keys that a query doesn't see are 0.

Shapes of the arguments: q, dout, out (T_q, H, D or D_v), k, v (T_k, n, D or D_v), lse, dlse (T_q, H), float32 or
float64, contiguous; `documents` (documents, 4) row, row_end, key, key_end; `start`, `stop` (T_q) the keys that each
query sees, within its document.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from tritonpack.backends.vectors import (
    VECTOR_BYTES,
    add_times,
    exp,
    larger,
    largest_lane,
    load,
    minus,
    only_lanes,
    plus,
    repeat,
    store,
    sum_of_lanes,
    times,
    will_read,
    will_write,
)

ROWS = 8  # of a product
STRIPE = 32  # rows of queries whose gradients are computed together; a multiple of ROWS
AHEAD = 16  # tokens; rows are asked for when the rows of so many tokens before them are read

# A product and a sum may become one instruction, and nothing else changes: `exp` depends on the order of its sums.
_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
compiled: Any = numba.njit(**_OPTIONS)
# For loops that allocate no array: otherwise numba counts the references to each array that a function is passed. The
# option isn't public, so a numba without it only takes longer.
_NO_COUNTS: Any = {"_nrt": False} if hasattr(numba.core.options.DefaultOptions, "_nrt") else {}
compiled_without_arrays: Any = numba.njit(**_OPTIONS, **_NO_COUNTS)


@compiled_without_arrays
def _write(c: Any, at: int, vector: Any, factor: Any, add: bool) -> None:
    vector = times(vector, repeat(factor))
    store(c, at, plus(load(c, at), vector) if add else vector)


@compiled_without_arrays
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
        s0, s1 = add_times(s0, a[at], x), add_times(s1, a[at + row], x)
        s2, s3 = add_times(s2, a[at + 2 * row], x), add_times(s3, a[at + 3 * row], x)
        s4, s5 = add_times(s4, a[at + 4 * row], x), add_times(s5, a[at + 5 * row], x)
        s6, s7 = add_times(s6, a[at + 6 * row], x), add_times(s7, a[at + 7 * row], x)
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


@compiled
def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@compiled_without_arrays
def _fetch(x: Any, row: int, head: int) -> None:
    """Begin to read a row of a head."""
    begin = (row * x.shape[1] + head) * x.shape[2]
    for d in range(0, x.shape[2], 64 // x.itemsize):
        will_read(x, begin + d)


@compiled_without_arrays
def _fetch_to_write(x: Any, row: int, head: int) -> None:
    begin = (row * x.shape[1] + head) * x.shape[2]
    for d in range(0, x.shape[2], 64 // x.itemsize):
        will_write(x, begin + d)


@compiled_without_arrays
def _copy(x: Any, begin: int, end: int, head: int, copied: Any, width: int) -> None:
    """Rows of a head, `width` numbers apart."""
    for i in range(end - begin):
        _fetch(x, begin + i + AHEAD, head)
        for d in range(x.shape[2]):
            copied[i * width + d] = x[begin + i, head, d]


@compiled_without_arrays
def _transpose(x: Any, begin: int, end: int, head: int, copied: Any, width: int) -> None:
    """Rows of a head as columns, the numbers of a column `width` apart."""
    for i in range(end - begin):
        _fetch(x, begin + i + AHEAD, head)
        for d in range(x.shape[2]):
            copied[d * width + i] = x[begin + i, head, d]


@compiled
def _most_keys(documents: Any) -> int:
    most = 0
    for i in range(len(documents)):
        most = max(most, documents[i, 3] - documents[i, 2])
    return most


@compiled
def forward(
    q: Any, k: Any, v: Any, documents: Any, start: Any, stop: Any, sinks: Any, scale: Any, out: Any, lse: Any
) -> None:
    """Write the rows of the documents in out and lse."""
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
        row, row_end, key, key_end = documents[document]
        for n in range(k.shape[1]):
            _transpose(k, key, key_end, n, columns, across)
            _copy(v, key, key_end, n, values, width_v)
            total = (row_end - row) * group
            for first in range(0, total, ROWS):
                last = min(first + ROWS, total) - 1
                for i in range(first, last + 1):
                    t, h, at = row + i // group, n * group + i % group, (i - first) * head_dim
                    _fetch(q, t + AHEAD, h)
                    _fetch_to_write(out, t + AHEAD, h)
                    for d in range(head_dim):
                        rows[at + d] = q[t, h, d]
                begin, end = start[row + first // group] - key, stop[row + last // group] - key
                aligned = begin - begin % lanes
                for j in range(aligned, end, lanes):
                    _product(rows, 0, head_dim, 1, columns, j, across, weights, j, across, head_dim, scale, False)
                for i in range(first, last + 1):
                    t, h, at = row + i // group, n * group + i % group, (i - first) * across
                    seen, unseen = start[t] - key, stop[t] - key
                    tops = repeat(hidden)
                    for j in range(aligned, end, lanes):
                        scores = only_lanes(load(weights, at + j), seen - j, unseen - j, hidden)
                        store(weights, at + j, scores)
                        tops = larger(tops, scores)
                    top = largest_lane(tops)
                    if sinks.size and sinks[h] > top:
                        top = sinks[h]
                    pivot = none if top == hidden else top
                    all_weights = repeat(none)
                    for j in range(aligned, end, lanes):
                        weight = exp(minus(load(weights, at + j), repeat(pivot)))
                        store(weights, at + j, weight)
                        all_weights = plus(all_weights, weight)
                    weight_sum = sum_of_lanes(all_weights)
                    if sinks.size:
                        weight_sum += math.exp(sinks[h] - pivot)
                    if seen >= unseen:
                        weight_sum = none
                    lse[t, h] = pivot + math.log(weight_sum)
                    inverse = one / weight_sum if weight_sum != none else none
                    for j in range(aligned, end, lanes):
                        store(weights, at + j, times(load(weights, at + j), repeat(inverse)))
                depth = end - begin
                for d in range(0, head_dim_v, lanes):
                    place = begin * width_v + d
                    _product(weights, begin, across, 1, values, place, width_v, sums, d, width_v, depth, one, False)
                for i in range(first, last + 1):
                    t, h, at = row + i // group, n * group + i % group, (i - first) * width_v
                    for d in range(head_dim_v):
                        out[t, h, d] = sums[at + d]


@compiled
def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, documents: Any, start: Any, stop: Any,
    scale: Any, dq: Any, dk: Any, dv: Any,
) -> None:  # fmt: skip
    """Write the rows of the documents in dq, and add to those of dk and dv."""
    group, head_dim, head_dim_v = q.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    none, one = q.dtype.type(0), q.dtype.type(1)
    lanes = VECTOR_BYTES // q.itemsize
    unit = max(lanes, ROWS)
    across, width, width_v = (
        _round_up(_most_keys(documents), unit), _round_up(head_dim, lanes), _round_up(head_dim_v, lanes)
    )  # fmt: skip
    columns, values = np.zeros(head_dim * across, q.dtype), np.zeros(head_dim_v * across, q.dtype)  # transposed
    keys = np.zeros(across * width, q.dtype)
    rows = np.zeros(STRIPE * width, q.dtype)
    douts, outs = np.zeros(STRIPE * width_v, q.dtype), np.zeros(width_v, q.dtype)  # what fills up a vector stays 0
    delta = np.zeros(STRIPE, q.dtype)
    weights, dscores = np.zeros(STRIPE * across, q.dtype), np.zeros(STRIPE * across, q.dtype)
    dqs = np.zeros(ROWS * width, q.dtype)
    dks, dvs = np.zeros(across * width, q.dtype), np.zeros(across * width_v, q.dtype)
    for document in range(len(documents)):
        row, row_end, key, key_end = documents[document]
        for n in range(k.shape[1]):
            _transpose(k, key, key_end, n, columns, across)
            _transpose(v, key, key_end, n, values, across)
            _copy(k, key, key_end, n, keys, width)
            dks[:] = none
            dvs[:] = none
            total = (row_end - row) * group
            for stripe in range(0, total, STRIPE):
                count = min(STRIPE, total - stripe)
                for i in range(count):
                    t, h = row + (stripe + i) // group, n * group + (stripe + i) % group
                    _fetch(q, t + AHEAD, h)
                    _fetch(dout, t + AHEAD, h)
                    _fetch(out, t + AHEAD, h)
                    _fetch_to_write(dq, t + AHEAD, h)
                    for d in range(head_dim):
                        rows[i * width + d] = q[t, h, d]
                    for d in range(head_dim_v):
                        douts[i * width_v + d] = dout[t, h, d]
                        outs[d] = out[t, h, d]
                    products = repeat(none)
                    for d in range(0, head_dim_v, lanes):
                        products = plus(products, times(load(douts, i * width_v + d), load(outs, d)))
                    delta[i] = sum_of_lanes(products)
                    if dlse.size:
                        delta[i] -= dlse[t, h]
                first_seen = start[row + stripe // group] - key
                aligned_first = first_seen - first_seen % unit
                last_end = _round_up(stop[row + (stripe + count - 1) // group] - key, unit)
                for first in range(0, count, ROWS):
                    last = min(first + ROWS, count) - 1
                    begin = start[row + (stripe + first) // group] - key
                    end = stop[row + (stripe + last) // group] - key
                    for j in range(begin - begin % lanes, end, lanes):
                        at = first * across + j
                        place = first * width
                        _product(rows, place, width, 1, columns, j, across, weights, at, across, head_dim, scale, False)
                        place = first * width_v
                        _product(
                            douts, place, width_v, 1, values, j, across, dscores, at, across, head_dim_v, one, False
                        )
                    for i in range(first, last + 1):
                        t, h, at = row + (stripe + i) // group, n * group + (stripe + i) % group, i * across
                        seen, unseen = start[t] - key, stop[t] - key
                        of_row = lse[t, h] if lse[t, h] != -np.inf else q.dtype.type(np.inf)
                        for j in range(aligned_first, last_end, lanes):
                            weight = dscore = repeat(none)
                            if j < unseen and j + lanes > seen:
                                weight = exp(minus(load(weights, at + j), repeat(of_row)))
                                weight = only_lanes(weight, seen - j, unseen - j, none)
                                dscore = times(weight, minus(load(dscores, at + j), repeat(delta[i])))
                                dscore = only_lanes(dscore, seen - j, unseen - j, none)
                            store(weights, at + j, weight)
                            store(dscores, at + j, dscore)
                    at, depth = first * across + begin, end - begin
                    for d in range(0, head_dim, lanes):
                        place = begin * width + d
                        _product(dscores, at, across, 1, keys, place, width, dqs, d, width, depth, scale, False)
                    for i in range(first, last + 1):
                        t, h, at = row + (stripe + i) // group, n * group + (stripe + i) % group, (i - first) * width
                        for d in range(head_dim):
                            dq[t, h, d] = dqs[at + d]
                for j in range(aligned_first, last_end, ROWS):
                    for d in range(0, head_dim, lanes):
                        place = j * width + d
                        _product(dscores, j, 1, across, rows, d, width, dks, place, width, count, scale, True)
                    for d in range(0, head_dim_v, lanes):
                        place = j * width_v + d
                        _product(weights, j, 1, across, douts, d, width_v, dvs, place, width_v, count, one, True)
            for i in range(key_end - key):
                for d in range(head_dim):
                    dk[key + i, n, d] += dks[i * width + d]
                for d in range(head_dim_v):
                    dv[key + i, n, d] += dvs[i * width_v + d]
