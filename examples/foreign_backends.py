"""Two implementations of torch in the shape of flash_attn_varlen_func, for `tritonpack check-backend`.

tritonpack check-backend examples.foreign_backends:sdpa
tritonpack check-backend examples.foreign_backends:flex_attention
"""

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """torch's scaled_dot_product_attention with a dense mask, (T_q, T_k) bool."""
    queries, keys = _places(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    mask = _sees([x[:, None] for x in queries], [x[None] for x in keys], causal, window_size)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """torch's FlexAttention, uncompiled: what it computes is the same, and a CPU has no compiled backward."""
    queries, keys = _places(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])

    def mask(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _sees([x[i] for x in queries], [x[j] for x in keys], causal, window_size)

    def capped(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    block_mask = flex.create_block_mask(mask, None, None, q.shape[0], k.shape[0], device=q.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    score_mod = capped if softcap else None
    out = flex.flex_attention(q, k, v, score_mod, block_mask, softmax_scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _places(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> list[list[Tensor]]:
    """The document of each row and its place from the document's end, for queries (T_q,) and for keys (T_k,).

    Rows past the last offset are in documents that have no row on the other side.
    """
    sides = []
    for offsets, total, slack in ((cu_seqlens_q, total_q, -1), (cu_seqlens_k, total_k, -2)):
        rows = torch.arange(total, device=offsets.device)
        document = torch.bucketize(rows, offsets[1:], right=True)
        ends = offsets[1:][document.clamp(max=offsets.shape[0] - 2)]
        sides.append([torch.where(rows < offsets[-1], document, slack), rows - ends])
    return sides


def _sees(query: list[Tensor], key: list[Tensor], causal: bool, window: tuple[int, int]) -> Tensor:
    (document, place), (document_k, place_k) = query, key
    left, right = window[0], 0 if causal else window[1]
    seen = document == document_k
    if left >= 0:
        seen = seen & (place_k >= place - left)
    return seen & (place_k <= place + right) if right >= 0 else seen
