"""BlockDiagonalMask: which keys each query of a packed batch sees, as two integers per query.

All rows of a batch form one stream of queries and one stream of keys. Query `i` sees exactly the keys
`key_start[i] <= j < key_stop[i]`, and neither array ever decreases. Causal and bidirectional packing, sliding windows,
padding, cross-attention and the shards of sequence parallelism all have this form (docs/math.md, section 1). A mask of
trees has two more integers per key, the interval of queries that may see it (section 8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tritonpack import checks
from tritonpack.checks import Lengths, Reach, Window
from tritonpack.masks import dense as dense_mask
from tritonpack.masks import flex as block_mask
from tritonpack.masks import intervals, tree
from tritonpack.masks.bounds import Bounds, outside_inference_mode
from tritonpack.masks.intervals import WHOLE_DOCUMENT, Intervals, changes, document_starts

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BlockDiagonalMask", "changes", "document_starts", "mask_from_intervals", "tree_mask"]


class BlockDiagonalMask(Bounds):
    """An attention mask in which every query sees one contiguous interval of keys.

    Two documents of 3 and 2 tokens, causal, and one row of slack after them:

    >>> mask = BlockDiagonalMask.from_cu_seqlens([0, 3, 5], total_q=6)
    >>> mask.key_start.tolist()
    [0, 0, 0, 3, 3, 5]
    >>> mask.key_stop.tolist()
    [1, 2, 3, 4, 5, 5]
    >>> mask.to_dense().int()[3].tolist()  # the first token of the second document sees only itself
    [0, 0, 0, 1, 0, 0]
    >>> mask.transpose().key_stop.tolist()  # key 0 is seen by queries 0, 1, 2
    [3, 3, 3, 5, 5, 6]

    The constructors never wait for an accelerator. They check values in host memory at once and raise ValueError, and
    values on an accelerator by a device-side assertion, except on AMD GPUs, which assert nothing: there, make a mask
    from copies in host memory to check its ids or offsets. `validate()` checks the bounds of any mask, waiting.

    The constructor copies the tensors that it is given. A mask's own tensors must not be overwritten, because the
    transpose and the tile tables are kept and belong to the old values: calls raise ValueError if torch counted a
    write to one of them. It counts none through `.data`, NumPy, a collective in place or another library's kernel. In a
    CUDA graph make the mask within the capture; a graph of an older mask keeps that mask's documents.

    Attributes:
        key_start: (num_queries,) int32, the first key that each query sees; never decreases.
        key_stop: (num_queries,) int32, one past the last key that each query sees; never decreases. It equals
            `key_start` in rows that see nothing (padding and slack).
        num_keys: the length of the key stream.
        diagonal: (num_queries,) int32, the key at each query's own place, from which ALiBi counts distances; None if
            there is no such key, as in a transpose. It may lie outside the keys. In a tree it is the token's depth.
        document_source: the tensor `document`, or a function that computes it at its first use.
        max_documents: an upper bound of the number of documents; None if the host doesn't know one.
        query_start, query_stop: (num_keys,) int32, the first query that may see each key, and one past the last one;
            None in a mask without trees. With them a query sees those keys of its interval whose interval of queries
            holds the query, and bounds may decrease.
        key_places: (num_keys,) int32, the place of each key, counted as `diagonal` is; None if these are 0, 1, 2, ...,
            or in a tree `diagonal`. A mask restricted to some keys keeps their places.
        trusted: whether to skip all checks and the copies of the tensors.
    """

    @classmethod
    def from_seqlens(
        cls, seqlens: Lengths, seqlens_k: Lengths | None = None, *, causal: bool = True, window: Window = (-1, -1),
        chunk_size: int | None = None, spans: Tensor | None = None, device: torch.device | str | None = None,
    ) -> BlockDiagonalMask:  # fmt: skip
        """The mask of documents laid end to end.

        Args:
            seqlens: tokens per document on the query side, integers >= 0, in host memory.
            seqlens_k: the same on the key side, for cross-attention; None means the same lengths.
            causal: whether a query sees no later key. With unequal lengths the diagonal ends in the bottom right
                corner.
            window: (left, right) keys around the diagonal, both inclusive, -1 for no limit, as in FlashAttention;
                `causal` sets right to 0.
            chunk_size: keys per chunk, counted from the first key of each document. A query sees only the chunk of its
                own place (Llama 4). None means no chunks.
            spans: (T,) or (B, T) int32 or int64, >= 0, one per token. Neighbours in one document with the same
                id other than 0 form a span, such as an image in a causal text (Gemma 3). Its tokens see the whole span,
                too, also beyond windows and chunks. Only for self-attention.
            device: where the mask lies; None means the CPU. `spans` must lie there, too. Offsets are copied to an
                accelerator, once, without waiting.

        Raises:
            ValueError: negative or non-integer lengths, lengths on an accelerator, a different number of documents,
                more than 2**31 - 1 tokens; a window, chunk size or spans that aren't as above.

        >>> BlockDiagonalMask.from_seqlens([2, 1], [3, 2]).key_stop.tolist()
        [2, 3, 5]
        """
        cu_seqlens = checks.offsets_from_lengths(seqlens, "seqlens")
        cu_seqlens_k = cu_seqlens if seqlens_k is None else checks.offsets_from_lengths(seqlens_k, "seqlens_k")
        target = checks.check_device("cpu" if device is None else device)
        cu_q, cu_k = (cu.to(target, non_blocking=True) for cu in (cu_seqlens, cu_seqlens_k))
        return cls.from_cu_seqlens(
            cu_q, None if seqlens_k is None else cu_k, causal=causal, window=window, chunk_size=chunk_size,
            spans=spans, total_q=int(cu_seqlens[-1]), total_k=int(cu_seqlens_k[-1]),
        )  # fmt: skip

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Lengths, cu_seqlens_k: Lengths | None = None, *, causal: bool = True,
        window: Window = (-1, -1), chunk_size: int | None = None, spans: Tensor | None = None,
        total_q: int | None = None, total_k: int | None = None,
    ) -> BlockDiagonalMask:  # fmt: skip
        """The mask of documents given by cumulative offsets, as FlashAttention's varlen functions take them.

        Args:
            cu_seqlens: (documents + 1,) int32 or int64, starts with 0, never decreases. A repeated offset is an empty
                document, so a tensor of fixed capacity may repeat its last offset.
            cu_seqlens_k: the same on the key side; None means the same offsets.
            causal, window, chunk_size, spans: see `from_seqlens`.
            total_q: rows of the query stream. Rows past the last offset are slack: they see nothing and nothing sees
                them. None means the last offset and needs offsets in host memory.
            total_k: the same on the key side.

        Raises:
            ValueError: wrong dtype or shape; spans with `cu_seqlens_k`; a missing total for offsets on an accelerator;
                and, for offsets in host memory, offsets that decrease, don't begin with 0 or exceed the total.
        """
        reach = checks.check_reach(window, causal, chunk_size)
        if spans is not None and cu_seqlens_k is not None:
            raise ValueError(
                "spans need self-attention, in which queries and keys are the same tokens; leave out the lengths or "
                "offsets of the keys, or leave out spans."
            )
        cu_q = checks.as_offsets(cu_seqlens, "cu_seqlens")
        cu_k = cu_q if cu_seqlens_k is None else checks.as_offsets(cu_seqlens_k, "cu_seqlens_k")
        if cu_seqlens_k is None and total_k is None:
            total_k = total_q
        if cu_q.device != cu_k.device:
            raise ValueError(f"cu_seqlens is on {cu_q.device} and cu_seqlens_k on {cu_k.device}; move them together.")
        checks.check_documents(cu_q, cu_k)
        total_q = checks.check_total(cu_q, total_q, "total_q", "cu_seqlens")
        total_k = checks.check_total(cu_k, total_k, "total_k", "cu_seqlens" if cu_k is cu_q else "cu_seqlens_k")
        build = partial(intervals.from_offsets, cu_q, cu_k, total_q, total_k)
        return mask_from_intervals(build, reach, spans, total_k, max_documents=cu_q.shape[0] - 1)

    @classmethod
    def from_position_ids(
        cls, position_ids: Tensor, *, causal: bool = True, window: Window = (-1, -1), chunk_size: int | None = None,
        spans: Tensor | None = None,
    ) -> BlockDiagonalMask:  # fmt: skip
        """The mask of a packed batch, given by its position ids.

        A document begins at the start of every row and wherever the step from the token before isn't +1; positions
        may start at any number. Position ids don't show padding: pass segment ids or a padding mask for that.

        Args:
            position_ids: int32 or int64, (T,), (B, T), or the multimodal forms (3, B, T) (time, height, width, in which
                the patches of an image ascend in this order: see `document_starts`) and (4, B, T) (text positions
                first, which tell the documents).
            causal, window, chunk_size, spans: see `from_seqlens`.

        Raises:
            ValueError: wrong dtype or shape.

        >>> ids = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 0, 1, 2]])
        >>> BlockDiagonalMask.from_position_ids(ids).key_start.tolist()
        [0, 0, 0, 3, 3, 5, 5, 7, 7, 7]
        """
        reach = checks.check_reach(window, causal, chunk_size)
        return mask_from_intervals(partial(intervals.from_position_ids, position_ids), reach, spans)

    @classmethod
    def from_segment_ids(
        cls, segment_ids: Tensor, *, causal: bool = True, window: Window = (-1, -1), chunk_size: int | None = None,
        spans: Tensor | None = None,
    ) -> BlockDiagonalMask:  # fmt: skip
        """The mask of rows with the number of each token's document, 0 for padding.

        Args:
            segment_ids: (T,) or (B, T) int32 or int64, >= 0. Within a row the tokens of a document are contiguous.
            causal, window, chunk_size, spans: see `from_seqlens`.

        Raises:
            ValueError: wrong dtype or shape; and, for ids in host memory, negative ids, or a document in several
                pieces.
        """
        reach = checks.check_reach(window, causal, chunk_size)
        ids = checks.check_rows(segment_ids, "segment_ids")
        return mask_from_intervals(partial(intervals.from_rows, ids, "segments"), reach, spans)

    @classmethod
    def from_padding_mask(
        cls, attention_mask: Tensor, *, causal: bool = True, window: Window = (-1, -1), chunk_size: int | None = None,
        spans: Tensor | None = None,
    ) -> BlockDiagonalMask:  # fmt: skip
        """The mask of a padded batch that is flattened row after row; no token is moved.

        Args:
            attention_mask: (B, T) or (T,) bool or integers, nonzero for tokens and 0 for padding on the left, the
                right or both sides; the tokens of a row are contiguous.
            causal, window, chunk_size, spans: see `from_seqlens`.

        Raises:
            ValueError: wrong dtype or shape; and, for a mask in host memory, a row with padding between its tokens.
        """
        reach = checks.check_reach(window, causal, chunk_size)
        rows = checks.check_rows(attention_mask, "attention_mask", mask=True)
        return mask_from_intervals(partial(intervals.from_rows, rows, "padding"), reach, spans)

    @classmethod
    def from_tree(
        cls, parents: Lengths, *, window: Window = (-1, -1), chunk_size: int | None = None
    ) -> BlockDiagonalMask:
        """The mask of trees of tokens, such as prompts with several completions: a token sees itself and its ancestors.

        Several trees, and documents (trees without branches), may lie in one row. ALiBi, windows and chunks count
        along the path from a token to its root.

        Args:
            parents: the place of each token's parent in its row, (T,) or (B, T) int32 or int64, or a flat list, in
                depth-first order; -1 for the first token of a tree, -2 for a token outside every tree (padding, slack).
            window, chunk_size: see `from_seqlens`; `window` reaches `left` ancestors up, its right side means nothing.

        Raises:
            ValueError: wrong dtype or shape; and, for parents in host memory, a parent that isn't an earlier token, or
                whose subtree has ended before; the message names the token.

        A prompt of two tokens with two completions, of two tokens and of one:

        >>> mask = BlockDiagonalMask.from_tree([-1, 0, 1, 2, 1])
        >>> mask.to_dense().int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
        >>> mask.diagonal.tolist()  # depths, which are the position ids
        [0, 1, 2, 3, 2]

        Source: FlashMask (arXiv:2410.01359), whose masks by columns hold this one.
        """
        return tree_mask(parents, "parents", checks.check_reach(window, True, chunk_size))

    @classmethod
    def from_tree_ends(
        cls, ends: Lengths, *, window: Window = (-1, -1), chunk_size: int | None = None
    ) -> BlockDiagonalMask:
        """The mask of trees of tokens, given by where the subtree of each token ends.

        Args:
            ends: one past the place of each token's last descendant in its row, (T,) or (B, T) int32 or int64, or a
                flat list; the token's own place for a token outside every tree.
            window, chunk_size: see `from_tree`.

        Raises:
            ValueError: wrong dtype or shape; and, for ends in host memory, an end before its token or outside its row,
                or subtrees that cross; the message names the token.

        >>> BlockDiagonalMask.from_tree_ends([5, 5, 4, 4, 5]).to_dense().int()[4].tolist()
        [1, 1, 0, 0, 1]
        """
        return tree_mask(ends, "ends", checks.check_reach(window, True, chunk_size))

    def to_dense(self, dtype: torch.dtype = torch.bool, *, additive: bool = False) -> Tensor:
        """The mask as (num_queries, num_keys), one number per pair: O(T^2) memory.

        Args:
            dtype: bool, bfloat16, float16 or float32.
            additive: whether the mask is to be added to scores, as in eager attention: 0 where a query sees a key,
                `torch.finfo(dtype).min` elsewhere. With -inf a softmax over a row that sees nothing would be NaN; with
                this minimum it gives numbers without meaning there, and the same weights as -inf in all other rows.

        Returns:
            True or 1 where a query sees a key, or the values of `additive`. Rows begin at multiples of 16 bytes, so the
            tensor may not be contiguous.

        Raises:
            ValueError: another dtype, or an additive mask of bool.
        """
        return dense_mask.dense(self, dtype, additive)

    def to_bits(self) -> Tensor:
        """The mask as (num_queries, ceil(num_keys / 32)) int32, one bit per pair.

        Key j is bit j % 32 of word j // 32, counted from the lowest; bits past the last key are 0. Rows begin at
        multiples of 16 bytes, so the tensor may not be contiguous.

        >>> BlockDiagonalMask.from_seqlens([2, 1]).to_bits().tolist()
        [[1], [3], [4]]
        """
        return dense_mask.bits(self)

    def to_block_mask(self, BLOCK_SIZE: int | tuple[int, int] = 128) -> BlockMask:  # noqa: N803 (flex_attention's name)
        """The mask for `torch.nn.attention.flex_attention`, for one batch of one row, all heads.

        It has the same blocks as with `create_block_mask`, computed from the ends of the intervals: no mask function is
        evaluated on pairs. In a mask of trees with windows or padding it may have more partial blocks.

        Args:
            BLOCK_SIZE: queries and keys per block, or (queries, keys).

        Raises:
            ValueError: block sizes that aren't positive integers, or a mask without queries or keys.
        """
        return block_mask.block_mask(self, BLOCK_SIZE)


def mask_from_intervals(
    build: Callable[[Reach], Intervals], reach: Reach, spans: Tensor | None = None, num_keys: int | None = None,
    max_documents: int | None = None,
) -> BlockDiagonalMask:  # fmt: skip
    """The mask of the intervals that `build` makes for a reach, with spans; `num_keys` None means one key per query."""
    seen = outside_inference_mode(partial(build, reach))
    if spans is not None:
        flat = checks.check_spans(spans, seen.start.shape[0], seen.start.device)
        seen = outside_inference_mode(lambda: intervals.widen_to_spans(seen, build(WHOLE_DOCUMENT), flat))
    num_keys = seen.start.shape[0] if num_keys is None else num_keys
    mask = BlockDiagonalMask(*seen[:2], num_keys, seen.diagonal, seen.document, max_documents, trusted=True)
    if seen.seen_by is not None:
        mask.cached("seen by", lambda: seen.seen_by)
    return mask


def tree_mask(values: Lengths, kind: Literal["parents", "ends"], reach: Reach) -> BlockDiagonalMask:
    """The mask of `BlockDiagonalMask.from_tree` or `from_tree_ends`, for a reach."""
    found = outside_inference_mode(partial(tree.forest_bounds, values, kind, reach))
    start, stop, query_start, query_stop, depth, first = found
    source = partial(intervals.number_documents, first)
    return BlockDiagonalMask(start, stop, start.shape[0], depth, source, None, query_start, query_stop, trusted=True)
