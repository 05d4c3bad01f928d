"""The kernels that build intervals from offsets, from ids or by transposing other intervals.

From offsets and ids they also store the intervals of the transpose. All assert that their input is valid.
tritonpack/masks/intervals.py and, for transposing, bounds.py compute the same in torch.

Legend: `begin` and `end` bound the keys of a row's document, `diagonal` is the key at the row's own place; `left`,
`right` and `chunk` say how far a row sees (docs/math.md, section 1). No length is a compile-time constant.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonpack.kernels.compilation import announce_compilation

announce_compilation()  # here: launches on a GPU take masks or tile tables from kernels, which import this file

OFFSET_ROWS = 256  # rows per program; few, because the search waits for one load after another
RUN_ROWS = 1024
RUN_WARPS = 16
LOOK = 512  # rows that are read at once to find where a run began, or ends
# Launch options of kernels with assertions. Triton compiles these under `debug` alone, which would also add checks of
# integer overflow. On AMD GPUs torch's compiler leaves its assertions out, too.
ASSERTIONS = {"debug": torch.version.hip is None, "sanitize_overflow": False}


@triton.jit
def store_interval(start_ptr, stop_ptr, offs, diagonal, begin, end, origin, inside, left, right, chunk):
    """Store the keys that rows see of the keys [begin, end): `visible_keys` of tritonpack/masks/intervals.py.

    Chunks count from `origin`. For a transpose, exchange queries and keys, and `left` and `right`.
    """
    place = diagonal - origin
    number = tl.where(place < 0, -((-place - 1) // chunk) - 1, place // chunk)  # rounded down, also below zero
    # 2**31 - 1 in `left`, `right` or `chunk` means no limit: sums take 64 bits, and there is one chunk.
    chunk_begin = tl.where(chunk == 2**31 - 1, begin, origin + number * chunk)
    start = tl.maximum(diagonal.to(tl.int64) - left, chunk_begin)
    stop = tl.minimum(diagonal.to(tl.int64) + right + 1, chunk_begin.to(tl.int64) + chunk)
    start = tl.minimum(tl.maximum(start, begin), end)
    stop = tl.minimum(tl.maximum(stop, begin), end)
    tl.store(start_ptr + offs, start.to(tl.int32), mask=inside)
    tl.store(stop_ptr + offs, stop.to(tl.int32), mask=inside)


@triton.jit
def check_offsets(cu_ptr, first, num_documents, total, ROWS: tl.constexpr):
    """1 if this program's offsets, from `first` on, begin with 0, never decrease and are at most the total."""
    sound = tl.full([ROWS], 1, tl.int32)
    while first <= num_documents:
        offs = first + tl.arange(0, ROWS)
        inside = offs <= num_documents
        offset = tl.load(cu_ptr + offs, mask=inside, other=0).to(tl.int64)
        before = tl.load(cu_ptr + offs - 1, mask=inside & (offs > 0), other=0).to(tl.int64)
        good = (offset >= before) & (offset <= total) & ((offs > 0) | (offset == 0))
        sound &= (good | ~inside).to(tl.int32)
        first += tl.num_programs(0) * ROWS
    return tl.min(sound, 0)


@triton.jit(do_not_specialize=["num_documents", "top", "total_q", "total_k", "left", "right", "chunk"])
def offsets_kernel(
    cu_q_ptr,
    cu_k_ptr,
    start_ptr,
    stop_ptr,
    diagonal_ptr,
    document_ptr,
    query_start_ptr,
    query_stop_ptr,
    num_documents,
    top,
    total_q,
    total_k,
    left,
    right,
    chunk,
    ROWS: tl.constexpr,
):
    """Four numbers per query [T_q], and the queries that see each key [T_k]; grid (blocks of ROWS,).

    A binary search finds the documents of queries and keys: its first step is `top`, the largest power of two up to
    `num_documents`.
    """
    program = tl.program_id(0)
    offs = program * ROWS + tl.arange(0, ROWS)
    document = tl.zeros([ROWS], dtype=tl.int32)
    key_document = tl.zeros([ROWS], dtype=tl.int32)
    step = top
    while step > 0:
        # offsets after the last one count as infinite
        ahead = document + step
        offset = tl.load(cu_q_ptr + ahead, mask=ahead <= num_documents, other=2**31 - 1)
        document = tl.where(offset <= offs, ahead, document)
        ahead = key_document + step
        offset = tl.load(cu_k_ptr + ahead, mask=ahead <= num_documents, other=2**31 - 1)
        key_document = tl.where(offset <= offs, ahead, key_document)
        step //= 2
    inside = offs < total_q
    following = tl.minimum(document + 1, num_documents)  # slack gets the end of the last document as both bounds
    query_end = tl.load(cu_q_ptr + following).to(tl.int32)
    begin = tl.load(cu_k_ptr + document).to(tl.int32)
    end = tl.load(cu_k_ptr + following).to(tl.int32)
    diagonal = offs - query_end + end
    store_interval(start_ptr, stop_ptr, offs, diagonal, begin, end, begin, inside, left, right, chunk)
    tl.store(diagonal_ptr + offs, diagonal, mask=inside)
    tl.store(document_ptr + offs, tl.minimum(document, tl.maximum(num_documents - 1, 0)), mask=inside)

    following = tl.minimum(key_document + 1, num_documents)
    key_begin = tl.load(cu_k_ptr + key_document).to(tl.int32)
    key_end = tl.load(cu_k_ptr + following).to(tl.int32)
    begin = tl.load(cu_q_ptr + key_document).to(tl.int32)
    end = tl.load(cu_q_ptr + following).to(tl.int32)
    shift = end - key_end  # from a key to the query at its place
    slack = key_document == num_documents  # which no query sees
    begin = tl.where(slack, total_q, begin)
    end = tl.where(slack, total_q, end)
    inside = offs < total_k
    store_interval(
        query_start_ptr, query_stop_ptr, offs, offs + shift, begin, end, key_begin + shift, inside, right, left, chunk
    )
    sound_q = check_offsets(cu_q_ptr, program * ROWS, num_documents, total_q, ROWS)
    tl.device_assert(sound_q > 0, "cu_seqlens must begin with 0, never decrease, and end at most at total_q")
    sound_k = check_offsets(cu_k_ptr, program * ROWS, num_documents, total_k, ROWS)
    tl.device_assert(sound_k > 0, "cu_seqlens_k must begin with 0, never decrease, and end at most at total_k")


@triton.jit
def larger(a, b):
    """The operator of a running maximum."""
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    """The operator of a running minimum."""
    return tl.minimum(a, b)


@triton.jit
def load_runs(ids_ptr, offs, num_rows, row_length, RULE: tl.constexpr):
    """(starts, live, ids) of rows `offs`: a run begins at the row (or at `num_rows`), the row is part of a document."""
    current = tl.load(ids_ptr + offs, mask=(offs >= 0) & (offs < num_rows), other=0).to(tl.int64)
    if RULE == "padding":
        current = (current != 0).to(tl.int64)
    if RULE == "codes":
        starts = (current & 1) != 0
        live = (current & 2) != 0
    else:
        before = tl.load(ids_ptr + offs - 1, mask=(offs > 0) & (offs < num_rows), other=0).to(tl.int64)
        if RULE == "padding":
            before = (before != 0).to(tl.int64)
        starts = (current - before != (1 if RULE == "positions" else 0)) | (offs % row_length == 0)
        live = (current != 0) | (RULE == "positions")
    return starts | (offs >= num_rows), live, current


@triton.jit
def check_pieces(ids_ptr, table_ptr, offs, ids, begins, row_length, slots, RULE: tl.constexpr):
    """1 if no id begins two runs of a row, in this program and the earlier ones.

    Each run's begin takes an entry of a hash table, which all programs share: its row's number plus 1, where 0 is free.
    Of two runs with the same id in the same row, the later one finds the entry of the other, whatever their order.
    """
    row = offs // row_length
    mixed = (ids ^ (ids >> 32)).to(tl.uint32) * 2654435761 ^ row.to(tl.uint32) * 2246822519
    slot = (mixed ^ (mixed >> 15)).to(tl.int64) & (slots - 1)
    searching = begins
    sound = tl.full(offs.shape, 1, tl.int32)
    while tl.max(searching.to(tl.int32), 0) > 0:
        # Rows that don't search compare with -1, which equals no entry, each at its own address.
        place = tl.where(searching, slot, offs & (slots - 1))
        found = tl.atomic_cas(table_ptr + place, tl.where(searching, 0, -1), offs + 1, sem="relaxed")
        searching = searching & (found != 0)
        other = found - 1
        same = searching & (other // row_length == row)
        other_id = tl.load(ids_ptr + other, mask=searching, other=0).to(tl.int64)
        if RULE == "padding":
            other_id = (other_id != 0).to(tl.int64)
        same = same & (other_id == ids)
        sound = tl.where(same, 0, sound)
        searching = searching & ~same
        slot = (slot + 1) & (slots - 1)
    return tl.min(sound, 0)


@triton.jit(do_not_specialize=["num_rows", "row_length", "slots", "left", "right", "chunk"])
def runs_kernel(
    ids_ptr,
    table_ptr,
    start_ptr,
    stop_ptr,
    diagonal_ptr,
    begin_ptr,
    query_start_ptr,
    query_stop_ptr,
    num_rows,
    row_length,
    slots,
    left,
    right,
    chunk,
    RULE: tl.constexpr,
    ROWS: tl.constexpr,
    LOOK: tl.constexpr,
):
    """Six numbers per row [T], one of them the first row of the row's document, -1 in padding; grid (blocks of ROWS,).

    A program finds the runs within its rows by two scans. The rows around it tell where the run of its first row began,
    and where that of its last row ends. `table` [slots] holds zeros, or is None if ids aren't checked; `slots` is a
    power of two of at least 2 T.
    """
    first_row = tl.program_id(0) * ROWS
    offs = first_row + tl.arange(0, ROWS)
    none = 2**31 - 1
    starts, live, ids = load_runs(ids_ptr, offs, num_rows, row_length, RULE)
    begin = tl.associative_scan(tl.where(starts, offs, -1), 0, larger)
    before = tl.min(begin, 0)
    look = first_row
    while (before < 0) & (look > 0):
        look -= LOOK
        others = look + tl.arange(0, LOOK)
        begins = load_runs(ids_ptr, others, num_rows, row_length, RULE)[0] & (others >= 0)
        before = tl.max(tl.where(begins, others, -1), 0)
    begin = tl.maximum(begin, before)

    ends = load_runs(ids_ptr, offs + 1, num_rows, row_length, RULE)[0]
    end = tl.associative_scan(tl.where(ends, offs + 1, none), 0, smaller, reverse=True)
    after = tl.max(end, 0)
    look = first_row + ROWS + 1
    while after == none:  # the row behind the last one counts as a begin
        others = look + tl.arange(0, LOOK)
        begins = load_runs(ids_ptr, others, num_rows, row_length, RULE)[0]
        after = tl.min(tl.where(begins, others, none), 0)
        look += LOOK
    end = tl.minimum(end, after)

    inside = offs < num_rows
    sees = tl.where(live, end, begin)
    store_interval(start_ptr, stop_ptr, offs, offs, begin, sees, begin, inside, left, right, chunk)
    # Padding is seen by nothing: the first query that sees a later key comes after it.
    seen = tl.where(live, begin, end)
    store_interval(query_start_ptr, query_stop_ptr, offs, offs, seen, end, begin, inside, right, left, chunk)
    tl.store(diagonal_ptr + offs, offs, mask=inside)
    tl.store(begin_ptr + offs, tl.where(live, begin, -1), mask=inside)
    if table_ptr is not None:
        sound = check_pieces(ids_ptr, table_ptr, offs, ids, starts & live & inside, row_length, slots, RULE)
        if RULE == "segments":
            sound = tl.minimum(sound, tl.min(((ids >= 0) | ~inside).to(tl.int32), 0))
            tl.device_assert(
                sound > 0,
                "segment_ids must not be negative, and the tokens of a document must be contiguous within their row (0 "
                "is padding)",
            )
        else:
            tl.device_assert(sound > 0, "attention_mask has padding between the tokens of a row")


@triton.jit
def check_bounds(start_ptr, stop_ptr, offs, num_rows, size, ASCENDING: tl.constexpr):
    """1 if the intervals of rows `offs` lie within [0, size), end at or after their begin and, if ASCENDING, neither
    begin nor end before the interval of the row above."""
    inside = offs < num_rows
    start = tl.load(start_ptr + offs, mask=inside, other=0)
    stop = tl.load(stop_ptr + offs, mask=inside, other=0)
    good = (start >= 0) & (start <= stop) & (stop <= size)
    if ASCENDING:
        above = inside & (offs > 0)
        good &= start >= tl.load(start_ptr + offs - 1, mask=above, other=0)
        good &= stop >= tl.load(stop_ptr + offs - 1, mask=above, other=0)
    return tl.min((good | ~inside).to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "top"])
def transpose_kernel(
    key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys, top, CHECKED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The first query that sees each key and one past the last, [T_k]; grid (blocks of ROWS keys,).

    A binary search finds them: its first step is `top`, the largest power of two up to `num_queries`. With CHECKED the
    grid covers the queries, too, and the kernel asserts that their intervals are valid.
    """
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.zeros([ROWS], dtype=tl.int32)
    stop = tl.zeros([ROWS], dtype=tl.int32)
    step = top
    while step > 0:
        # queries after the last one see no key
        bound = tl.load(key_stop_ptr + start + step - 1, mask=start + step <= num_queries, other=2**31 - 1)
        start = tl.where(bound <= offs, start + step, start)
        bound = tl.load(key_start_ptr + stop + step - 1, mask=stop + step <= num_queries, other=2**31 - 1)
        stop = tl.where(bound <= offs, stop + step, stop)
        step //= 2
    tl.store(query_start_ptr + offs, start, mask=offs < num_keys)
    tl.store(query_stop_ptr + offs, stop, mask=offs < num_keys)
    if CHECKED:
        sound = check_bounds(key_start_ptr, key_stop_ptr, offs, num_queries, num_keys, True)
        tl.device_assert(
            sound > 0,
            "a mask's intervals must lie within its keys and end at or after their begin, and neither their begins nor "
            "their ends may decrease. mask.validate() names the first wrong one, on a copy of the bounds in host "
            "memory",
        )


def intervals_of_offsets(
    cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, left: int, right: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(start, stop, diagonal, document) of queries, (total_q,) int32, and (start, stop) of keys, (total_k,) int32.

    The kernel asserts that each side's offsets begin with 0, never decrease and end at most at the side's total.

    Args:
        cu_q, cu_k: (documents + 1,) int32 or int64.
        left, right, chunk: from 0 (chunk: from 1) to 2**31 - 1, which means no limit.
    """
    num_documents = cu_q.shape[0] - 1
    start, stop, diagonal, document = (cu_q.new_empty(total_q, dtype=torch.int32) for _ in range(4))
    query_start, query_stop = (cu_q.new_empty(total_k, dtype=torch.int32) for _ in range(2))
    with torch.cuda.device_of(cu_q):
        offsets_kernel[(max(triton.cdiv(max(total_q, total_k), OFFSET_ROWS), 1),)](
            cu_q_ptr=cu_q.contiguous(),
            cu_k_ptr=cu_k.contiguous(),
            start_ptr=start,
            stop_ptr=stop,
            diagonal_ptr=diagonal,
            document_ptr=document,
            query_start_ptr=query_start,
            query_stop_ptr=query_stop,
            num_documents=num_documents,
            top=1 << num_documents.bit_length() >> 1,
            total_q=total_q,
            total_k=total_k,
            left=left,
            right=right,
            chunk=chunk,
            ROWS=OFFSET_ROWS,
            **ASSERTIONS,
        )
    return start, stop, diagonal, document, (query_start, query_stop)


def intervals_of_ids(
    ids: Tensor, rule: str, left: int, right: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(start, stop, diagonal, begin) of queries, and (start, stop) of keys, each (B * T,) int32.

    `begin` is the first row of each row's document, -1 in padding. For "segments" and "padding" the kernel asserts what
    `BlockDiagonalMask.from_segment_ids` and `from_padding_mask` ask for.

    Args:
        ids: (B, T) integers or bool.
        rule: where a run begins. "positions": where the ids don't increase by 1. "segments": where the ids change; runs
            of 0 are padding. "padding": as "segments", with all ids other than 0 taken as 1. "codes": where the lowest
            bit is 1; the next bit is 0 in padding.
        left, right, chunk: see `intervals_of_offsets`.
    """
    total = ids.numel()
    start, stop, diagonal, begin, query_start, query_stop = (ids.new_empty(total, dtype=torch.int32) for _ in range(6))
    if total:
        ids = ids.contiguous()
        is_checked = ASSERTIONS["debug"] and rule in ("segments", "padding")
        slots = triton.next_power_of_2(2 * total) if is_checked else 0
        with torch.cuda.device_of(ids):
            runs_kernel[(triton.cdiv(total, RUN_ROWS),)](
                ids_ptr=ids.view(torch.uint8) if ids.dtype == torch.bool else ids,
                table_ptr=ids.new_zeros(slots, dtype=torch.int32) if slots else None,
                start_ptr=start,
                stop_ptr=stop,
                diagonal_ptr=diagonal,
                begin_ptr=begin,
                query_start_ptr=query_start,
                query_stop_ptr=query_stop,
                num_rows=total,
                row_length=ids.shape[1],
                slots=slots,
                left=left,
                right=right,
                chunk=chunk,
                RULE=rule,
                ROWS=RUN_ROWS,
                LOOK=LOOK,
                num_warps=RUN_WARPS,
                **ASSERTIONS,
            )
    return start, stop, diagonal, begin, (query_start, query_stop)


def transposed_intervals(
    key_start: Tensor, key_stop: Tensor, num_keys: int, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """(start, stop), each (num_keys,) int32, of the queries that see each key; both bounds of the queries must ascend.

    With `checked` the kernel asserts the conditions of `Bounds.validate`.
    """
    num_queries = key_start.shape[0]
    start, stop = key_start.new_empty(num_keys), key_start.new_empty(num_keys)
    if rows := max(num_keys, num_queries if checked else 0):
        with torch.cuda.device_of(key_start):
            transpose_kernel[(triton.cdiv(rows, OFFSET_ROWS),)](
                key_start_ptr=key_start.contiguous(),
                key_stop_ptr=key_stop.contiguous(),
                query_start_ptr=start,
                query_stop_ptr=stop,
                num_queries=num_queries,
                num_keys=num_keys,
                top=1 << num_queries.bit_length() >> 1,
                CHECKED=checked,
                ROWS=OFFSET_ROWS,
                **ASSERTIONS,
            )
    return start, stop
