"""Stand-ins for attention functions of other libraries: their signatures, computed by tritonpack."""

import sys
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.flash_attn import fa4
from tritonpack.flash_attn.torch_varlen import torch_varlen_attn


def put(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Put a module, and the packages above it, into `sys.modules` until the test ends."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        if above not in sys.modules:
            monkeypatch.setitem(sys.modules, above, ModuleType(above))
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


# torch.nn.attention.varlen.varlen_attn of two versions.


def varlen_attn_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, return_aux: Any = None,
) -> Any:  # fmt: skip
    return torch_varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, return_aux=return_aux, enable_gqa=False
    )


def varlen_attn_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:  # fmt: skip
    assert cu_seq_k is not None
    return torch_varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=enable_gqa
    )


TORCH_VERSIONS = {"2.10": varlen_attn_2_10, "2.12": varlen_attn_2_12}

# FlashAttention-4: tritonpack has its signature, but also accepts -1.


@wraps(fa4.flash_attn_varlen_func)
def flash_attn_varlen_func(*args: Any, **keywords: Any) -> Any:
    assert all(side is None or side >= 0 for side in keywords["window_size"])
    return fa4.flash_attn_varlen_func(*args, **keywords)


# xformers 0.0.35.


@dataclass(frozen=True)
class BlockDiagonalBias:
    """BlockDiagonalMask and its variants; a window of 1 is the query's own key."""

    lengths: tuple[int, ...]
    causal: bool = False
    window: int | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: list[int], kv_seqlen: list[int] | None = None, *, device: torch.device | None = None
    ) -> "BlockDiagonalBias":
        assert kv_seqlen is None
        assert device == torch.device("cpu")
        return cls(tuple(q_seqlen))

    def make_causal(self) -> "BlockDiagonalBias":
        return BlockDiagonalBias(self.lengths, causal=True)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalBias":
        return BlockDiagonalBias(self.lengths, causal=True, window=window_size)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: BlockDiagonalBias | None = None, p: float = 0.0,
    scale: float | None = None, *, op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    assert attn_bias is not None
    assert query.shape == key.shape == value.shape, "heads are not broadcast"
    left = -1 if attn_bias.window is None else attn_bias.window - 1
    mask = BlockDiagonalMask.from_seqlens(attn_bias.lengths, causal=attn_bias.causal, window=(left, -1))
    return varlen_attention(query[0], key[0], value[0], mask)[None]


def put_xformers(monkeypatch: pytest.MonkeyPatch, bias: type = BlockDiagonalBias) -> None:
    put(monkeypatch, "xformers.ops", memory_efficient_attention=memory_efficient_attention)
    put(monkeypatch, "xformers.ops.fmha.attn_bias", BlockDiagonalMask=bias)
