"""The kernel that writes a dense mask, an element per pair of a query and a key, in one pass of 16-byte stores.

It writes words of 32 bits: 32 bits, 4 bytes, 2 half-precision numbers or 1 single-precision number. A word
is computed from the numbers of its elements before the interval's start and before its stop.

Legend: M query rows of a tile, N words of a row in a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 8
BLOCK_N = 512


@triton.jit
def bits_below(end, key, PER_WORD: tl.constexpr):
    """2 ** n, where n is the number of bits of the elements before `end` in words that begin at `key`; 2 ** 32 is 0."""
    bits = tl.minimum(tl.maximum(end - key, 0), PER_WORD) * (32 // PER_WORD)
    one = tl.full(bits.shape, 1, tl.uint32)
    return tl.where(bits < 32, one << bits.to(tl.uint32), 0)


@triton.jit(do_not_specialize=["num_queries", "quads", "seen", "hidden"])
def dense_mask_kernel(
    out_ptr,
    key_start_ptr,
    key_stop_ptr,
    num_queries,
    quads,
    seen,
    hidden,
    PER_WORD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [T_q, 4 * quads] words; grid (tiles of BLOCK_M rows by BLOCK_N words, along the rows first,).

    Most tiles lie wholly outside or inside the intervals; four loads show this.

    Args:
        seen, hidden: the words of which all elements, or no elements, are visible.
    """
    words = quads * 4  # a multiple of 4, so rows begin and end at 16 bytes and stores are 16 bytes wide
    tiles_n = tl.cdiv(words, BLOCK_N)
    first = tl.program_id(0) // tiles_n * BLOCK_M
    last = tl.minimum(first + BLOCK_M, num_queries) - 1
    word = tl.program_id(0) % tiles_n * BLOCK_N
    key, key_end = word * PER_WORD, (word + BLOCK_N) * PER_WORD
    outside = (tl.load(key_stop_ptr + last) <= key) | (tl.load(key_start_ptr + first) >= key_end)
    inside = (tl.load(key_start_ptr + last) <= key) & (tl.load(key_stop_ptr + first) >= key_end)

    offs_m = first + tl.arange(0, BLOCK_M)
    offs_n = word + tl.arange(0, BLOCK_N)
    if outside | inside:
        values = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32) + tl.where(inside, seen, hidden)
    else:
        start = tl.load(key_start_ptr + offs_m, mask=offs_m < num_queries, other=0)[:, None]
        stop = tl.load(key_stop_ptr + offs_m, mask=offs_m < num_queries, other=0)[:, None]
        keys = (offs_n * PER_WORD)[None, :]
        visible = (bits_below(stop, keys, PER_WORD) - bits_below(start, keys, PER_WORD)).to(tl.int32, bitcast=True)
        values = hidden ^ (visible & (seen ^ hidden))  # [M, N]
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * words + offs_n[None, :]
    tl.store(out_ptrs, values, mask=(offs_m < num_queries)[:, None] & (offs_n < words)[None, :])


def write_words(key_start: Tensor, key_stop: Tensor, words: int, per_word: int, seen: int, hidden: int) -> Tensor:
    """(T_q, words) int32: in each word, the bits of `seen` for visible elements and the bits of `hidden` for others.

    Args:
        words: a multiple of 4.
        per_word: 1, 2, 4 or 32.
    """
    num_queries = key_start.shape[0]
    out = key_start.new_empty((num_queries, words))
    if out.numel():
        with torch.cuda.device_of(out):
            dense_mask_kernel[(triton.cdiv(num_queries, BLOCK_M) * triton.cdiv(words, BLOCK_N),)](
                out_ptr=out,
                key_start_ptr=key_start,
                key_stop_ptr=key_stop,
                num_queries=num_queries,
                quads=words // 4,
                seen=seen,
                hidden=hidden,
                PER_WORD=per_word,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
            )
    return out
