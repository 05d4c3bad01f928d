"""FlashAttention's functions, computed by tritonpack, for training code that calls them.

The functions here are FlashAttention-2's, and `fa2` describes their parameters. `fa3` and `fa4` have the functions of
FlashAttention-3 and FlashAttention-4, `torch_varlen_attn` is torch's function, and `install()` lets packages that
import `flash_attn` use tritonpack. docs/features.md says where conventions differ.

>>> import torch
>>> q = k = v = torch.ones(5, 2, 16)
>>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
>>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, None, None, causal=True).shape
torch.Size([5, 2, 16])
"""

from tritonpack.flash_attn import bert_padding, fa2, fa3, fa4
from tritonpack.flash_attn.fa2 import *  # noqa: F403
from tritonpack.flash_attn.shim import Installation, install
from tritonpack.flash_attn.torch_varlen import torch_varlen_attn

__all__ = ["Installation", "bert_padding", "fa3", "fa4", "install", "torch_varlen_attn", *fa2.__all__]
