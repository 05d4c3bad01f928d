"""BlockDiagonalMask: which keys each query of a packed batch sees, as two integers per query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonpack import checks, removed
from tritonpack.checks import Lengths, Reach, Window
from tritonpack.masks import intervals
from tritonpack.masks.bounds import OF_KEYS, Bounds, outside_inference_mode
from tritonpack.masks.forms import block_mask, dense
from tritonpack.masks.intervals import WHOLE_DOCUMENT, Intervals
from tritonpack.masks.tree import forest_intervals

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@removed.refuse_attributes
class BlockDiagonalMask(Bounds):
    """An attention mask in which every query sees one contiguous interval of keys.

    All rows of a batch form one stream of queries and one stream of keys. Query `i` sees exactly the keys
    `key_start[i] <= j < key_stop[i]`, and neither array ever decreases (docs/math.md, section 1). A mask of trees has
    two more integers per key, the interval of queries that may see it (section 8).

    >>> mask = BlockDiagonalMask.from_cu_seqlens([0, 3, 5], total_q=6)  # 3 and 2 tokens, causal, and a row of slack
    >>> mask.key_start.tolist(), mask.key_stop.tolist()
    ([0, 0, 0, 3, 3, 5], [1, 2, 3, 4, 5, 5])
    >>> mask.transpose().key_stop.tolist()  # key 0 is seen by queries 0, 1, 2
    [3, 3, 3, 5, 5, 6]

    Constructors raise ValueError for arguments other than described, and never wait for an accelerator: values there
    are checked by an assertion on the device (none on AMD GPUs). `validate()` checks the bounds of any mask, waiting.

    A mask copies the tensors that it is given. Its own tensors must not be overwritten, because the transpose and the
    tile tables belong to the old values: calls raise ValueError if torch counted a write (it counts none through
    `.data`, NumPy, a collective in place or another library's kernel). In a CUDA graph make the mask within the
    capture; a graph of an older mask keeps that mask's documents.

    Attributes:
        key_start, key_stop: (num_queries,) int32, the first key that each query sees, and one past the last one. They
            are equal in rows that see nothing (padding and slack).
        num_keys: the length of the key stream.
        diagonal: (num_queries,) int32, the key at each query's own place, from which ALiBi counts distances; it may lie
            outside the keys. In a tree it is the token's depth. None in a transpose.
        document_source: the tensor `document`, or a function that computes it at its first use.
        max_documents: an upper bound of the number of documents; None if the host doesn't know one.
        query_start, query_stop: (num_keys,) int32, in a mask of trees the first query that may see each key, and one
            past the last one. A pair must lie in both intervals, and bounds may decrease.
        key_places: (num_keys,) int32, the place of each key, counted as `diagonal` is; None if these are 0, 1, 2, ...
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
            causal: whether a query sees no later key. With unequal lengths the diagonal ends in the bottom right.
            window: (left, right) keys around the diagonal, both inclusive, -1 for no limit, as in FlashAttention;
                `causal` sets right to 0.
            chunk_size: keys per chunk, counted from the first key of each document. A query sees only the chunk of its
                own place (Llama 4).
            spans: (T,) or (B, T) int32 or int64, >= 0, on the mask's device. Neighbours in one document with the same
                id other than 0 form a span, such as an image in a causal text (Gemma 3). Its tokens see the whole span,
                too, also beyond windows and chunks. Only for self-attention.
            device: where the mask lies; None means the CPU. Offsets are copied there once, without waiting.

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
            total_q: rows of the query stream, at least the last offset. Rows past that are slack: they see nothing and
                nothing sees them. None means the last offset and needs offsets in host memory.
            total_k: the same on the key side.
        """
        reach = checks.check_reach(window, causal, chunk_size)
        if spans is not None and cu_seqlens_k is not None:
            raise ValueError("spans need self-attention; leave out the lengths or offsets of the keys, or the spans.")
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
            position_ids: int32 or int64, (T,), (B, T), or multimodal: (3, B, T), time, height and width, in which the
                patches of an image ascend in this order, or (4, B, T), in which the text positions come first.
            causal, window, chunk_size, spans: see `from_seqlens`.

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
        """
        reach, ids = checks.check_reach(window, causal, chunk_size), checks.check_rows(segment_ids, "segment_ids")
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
        along the path from a token to its root. Source: FlashMask (arXiv:2410.01359).

        Args:
            parents: the place of each token's parent in its row, (T,) or (B, T) int32 or int64, or a flat list, in
                depth-first order; -1 for the first token of a tree, -2 for a token outside every tree (padding, slack).
            window, chunk_size: see `from_seqlens`; `window` reaches `left` ancestors up, its right side means nothing.

        >>> mask = BlockDiagonalMask.from_tree([-1, 0, 1, 2, 1])  # a prompt of two tokens, answers of two and of one
        >>> mask.to_dense().int().tolist()
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
        >>> mask.diagonal.tolist()  # depths, which are the position ids
        [0, 1, 2, 3, 2]
        """
        reach = checks.check_reach(window, True, chunk_size)
        return mask_from_intervals(partial(forest_intervals, parents, "parents"), reach)

    def to_dense(self, dtype: torch.dtype = torch.bool, *, additive: bool = False) -> Tensor:
        """The mask as (num_queries, num_keys), one number per pair: O(T^2) memory. It may not be contiguous, because
        rows begin at multiples of 16 bytes.

        Args:
            dtype: bool, bfloat16, float16 or float32 (else ValueError): True or 1 where a query sees a key.
            additive: whether the mask is to be added to scores: 0 where a query sees a key, `torch.finfo(dtype).min`
                elsewhere, whose softmax isn't NaN in a row that sees nothing.
        """
        return dense(self, dtype, additive)

    def to_block_mask(self, BLOCK_SIZE: int | tuple[int, int] = 128) -> BlockMask:  # noqa: N803 (flex_attention's name)
        """The mask for `torch.nn.attention.flex_attention`, for one batch of one row, all heads.

        It has the blocks of `create_block_mask`, but no mask function is evaluated on pairs. A mask of trees with
        windows or padding may have more partial blocks, one without queries or keys raises ValueError. `BLOCK_SIZE` is
        the number of queries and keys per block, or (queries, keys).
        """
        return block_mask(self, BLOCK_SIZE)


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
    bounds = zip(OF_KEYS, (*seen.seen_by, seen.diagonal), strict=True) if seen.is_tree and seen.seen_by else ()
    mask = BlockDiagonalMask(*seen[:2], num_keys, *seen[2:4], max_documents, **dict(bounds), trusted=True)
    if seen.seen_by is not None:
        mask.cached("seen by", lambda: seen.seen_by)
    return mask
