"""What isn't supported, or doesn't fit, is refused by name, and the message says what is supported."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack.flash_attn import core, fa2, fa3, fa4, torch_varlen_attn

T = torch.zeros(1)


def call(function: Any, **changes: Any) -> Tensor:
    """A call that would be right without the changes."""
    names = {"q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k"}
    batch = function.__name__ == "flash_attn_func"
    right = {name: torch.randn(*([1] if batch else []), 5, 2, 16) for name in "qkv"}
    if not batch:
        right |= {name: torch.tensor([0, 2, 5], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if function is torch_varlen_attn:
        right = {names[name]: value for name, value in right.items()}
    return function(**(right | changes))


UNSUPPORTED = [
    (fa2.flash_attn_varlen_func, "block_table", T),
    (torch_varlen_attn, "block_table", T),
    *(
        (function, name, value)
        for function in (fa3.flash_attn_func, fa3.flash_attn_varlen_func)
        for name, value in {"qv": T, "q_descale": T, "k_descale": T, "v_descale": T}.items()
    ),
    *(
        (function, name, T)
        for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func)
        for name in (
            "qv",
            "gather_kv_indices",
            "score_mod",
            "score_mod_bwd",
            "mask_mod",
            "aux_tensors",
            "aux_scalars",
            "block_sparse_tensors",
        )
    ),
    (fa4.flash_attn_func, "block_sparse_tensors_bwd", T),
    (fa4.flash_attn_varlen_func, "page_table", T),
]


@pytest.mark.parametrize(
    ("function", "name", "value"), UNSUPPORTED, ids=[f"{f.__module__[-3:]}-{f.__name__}-{n}" for f, n, _ in UNSUPPORTED]
)
def test_unsupported(function: Any, name: str, value: Any) -> None:
    call(function)
    with pytest.raises(ValueError, match=rf"^{name} isn't supported by tritonpack.flash_attn; got .*Supported: "):
        call(function, **{name: value})


def test_every_refusal_is_tested() -> None:
    assert set(core.REMEDIES) == {name for _, name, _ in UNSUPPORTED}


def test_caches_that_are_written_in_place() -> None:
    with pytest.raises(ValueError, match=r"flash_attn_with_kvcache isn't supported.*flash_attn_varlen_func"):
        fa2.flash_attn_with_kvcache(T, T, T)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (fa2.flash_attn_varlen_func, {"q": torch.zeros(1, 5, 2, 16)}, r"q must be \(total, heads, headdim\)"),
        (fa2.flash_attn_func, {"k": torch.zeros(5, 2, 16)}, r"k must be \(batch, seqlen, heads, headdim\)"),
        (fa2.flash_attn_varlen_func, {"q": 3}, r"q must be .*got int 3"),
        (fa2.flash_attn_varlen_func, {"window_size": (1, 2, 3)}, r"window_size must be two integers .*\(1, 2, 3\)"),
        (fa2.flash_attn_varlen_func, {"window_size": 4}, "window_size must be two integers .*got 4"),
        (fa2.flash_attn_varlen_func, {"window_size": (1.5, 0)}, "window_size must be two integers"),
        (fa4.flash_attn_varlen_func, {"window_size": (-2, 3)}, "or None for a side without limit; got"),
        (fa2.flash_attn_varlen_func, {"max_seqlen_q": 2}, "max_seqlen_q is 2, but a document has 3 tokens"),
        (fa2.flash_attn_varlen_func, {"max_seqlen_k": 1}, "max_seqlen_k is 1, but a document has 3 tokens"),
        (fa2.flash_attn_varlen_func, {"cu_seqlens_q": torch.tensor([0, 5])}, "queries have 1 documents and keys 2"),
        (fa2.flash_attn_varlen_func, {"cu_seqlens_k": torch.tensor([0, 2, 6])}, "end at most at total_k = 5"),
        (fa2.flash_attn_varlen_func, {"cu_seqlens_q": torch.tensor([0.0, 5.0])}, "int32 or int64"),
        (fa2.flash_attn_varlen_func, {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="meta")},
         "cu_seqlens_q is on meta and q on cpu"),
        (fa2.flash_attn_varlen_func, {"alibi_slopes": torch.zeros(3, 2)}, r"\(documents, heads\) with 2 documents"),
        (fa2.flash_attn_varlen_func, {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must be"),
        (fa2.flash_attn_varlen_func, {"softmax_scale": -1.0}, "scale must be a positive"),
        (fa2.flash_attn_varlen_func, {"dropout_p": 1.0}, "dropout_p must be"),
        (fa2.flash_attn_varlen_func, {"backend": "cuda"}, "backend must be one of"),
        (fa2.flash_attn_varlen_func, {"seqused_q": torch.tensor([1])}, "a length for each of the 2 documents"),
        (fa2.flash_attn_varlen_func, {"seqused_k": torch.tensor([1, 4])}, "seqused_k must lie between 0 and"),
        (fa3.flash_attn_varlen_func, {"seqused_k": torch.tensor([-1, 2])}, "seqused_k must lie between"),
        (fa3.flash_attn_varlen_func, {"seqused_q": torch.tensor([0.5, 2])}, "seqused_q must be .* int32 or int64"),
        (torch_varlen_attn, {"key": torch.zeros(5, 1, 16), "value": torch.zeros(5, 1, 16), "enable_gqa": False},
         "query has 2 heads and key 1; pass enable_gqa=True"),
    ],
)  # fmt: skip
def test_what_does_not_fit(function: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(function, **changes)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fa2.flash_attn_qkvpacked_func, [torch.zeros(2, 5, 2, 4, 8)], r"qkv must be \(batch, seqlen, 3, heads"),
        (fa2.flash_attn_kvpacked_func, [T, torch.zeros(2, 5, 3, 4, 8)], r"kv must be \(batch, seqlen, 2"),
        (fa2.flash_attn_varlen_qkvpacked_func, [torch.zeros(5, 2, 4, 8), T], r"qkv must be \(total, 3"),
        (fa2.flash_attn_varlen_kvpacked_func, [T, None, T, T], r"kv must be \(total, 2.*got NoneType"),
        (fa3.flash_attn_qkvpacked_func, [torch.zeros(2, 5, 6, 8)], "num_heads_q=None"),
    ],
)  # fmt: skip
def test_packed_shapes(function: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)
