"""FlashAttention's functions in the form in which transformers and the `kernels` library look for attention kernels.

The folder is a kernel that `kernels` loads from disk, for programs that can't be made to import tritonpack:

    export LOCAL_KERNELS="tritonpack/flash-attn=$(python -m tritonpack.hub)"
    program --attn_implementation tritonpack/flash-attn
"""

from typing import Any

from tritonpack.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def __getattr__(name: str) -> Any:
    """transformers asks for `flash_attn_func` when it has registered its own use of `flash_attn_varlen_func` under our
    name, which tells documents apart in a single row alone; ours, which does in any batch, takes its place again."""
    if name != "flash_attn_func":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    from tritonpack.flash_attn import flash_attn_func
    from tritonpack.patches.interface import register

    register()
    return flash_attn_func
