"""Errors for arguments that aren't supported or don't fit; the message names them and what is supported."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tritonpack.flash_attn import core, fa2, fa3, fa4, torch_varlen_attn
from tritonpack.flash_attn.bert_padding import pad_input, unpad_input

T = torch.zeros(1)


def call(function: Any, **changes: Any) -> Tensor:
    """A valid call, with some arguments changed."""
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


def test_kvcache_is_refused() -> None:
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
        (fa2.flash_attn_func, {"window_size": (-2, 0)}, r"two integers .* of at least -1, .*got \(-2, 0\)"),
        (fa3.flash_attn_varlen_func, {"window_size": (3, -2)}, r"two integers .* of at least -1, .*got \(3, -2\)"),
        (torch_varlen_attn, {"window_size": (-2, -2)}, r"two integers .* of at least -1, .*got \(-2, -2\)"),
        (fa4.flash_attn_varlen_func, {"window_size": (-1, 3)}, "or None for a side without limit; got"),
        (fa2.flash_attn_func, {"softcap": -1.0}, "softcap must be a finite .* above 0, or 0.0 for none; got -1.0"),
        (fa3.flash_attn_varlen_func, {"softcap": -1}, "softcap must be a finite .* above 0, or 0.0 for none; got -1"),
        (fa4.flash_attn_func, {"softcap": -0.5}, "softcap must be a finite .* above 0, or 0.0 for none; got -0.5"),
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
def test_arguments_that_do_not_fit(function: Any, changes: dict[str, Any], message: str) -> None:
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


CLUMSY = [
    (
        fa2.flash_attn_varlen_func,
        {"cu_seqlens_q": [0, 2, 5]},
        r"cu_seqlens_q must be a .* tensor on q's device; got list",
    ),
    (
        fa2.flash_attn_varlen_func,
        {"cu_seqlens_k": (0, 2, 5)},
        r"torch.tensor\(..., dtype=torch.int32, device=q.device\)",
    ),
    (fa2.flash_attn_varlen_func, {"seqused_k": [2, 3]}, "seqused_k must be a one-dimensional int32 or int64 tensor"),
    (fa3.flash_attn_varlen_func, {"cu_seqlens_q": np.array([0, 2, 5])}, "cu_seqlens_q must be a .*got ndarray"),
    (fa4.flash_attn_varlen_func, {"cu_seqlens_q": [0, 2, 5]}, "cu_seqlens_q must be a"),
    (torch_varlen_attn, {"cu_seq_q": [0, 2, 5]}, "cu_seqlens_q must be a"),
    (torch_varlen_attn, {"query": None}, "q must be .*got NoneType"),
    (torch_varlen_attn, {"enable_gqa": False, "key": T}, "k must be "),
    (torch_varlen_attn, {"enable_gqa": "no"}, "enable_gqa must be True or False"),
    (torch_varlen_attn, {"return_aux": True}, "return_aux must be torch's AuxRequest, or None; got True"),
    (torch_varlen_attn, {"num_splits": 1.0}, "num_splits must be an integer, or None; got 1.0"),
    (fa2.flash_attn_func, {"q": None}, "q must be .*got NoneType"),
    (fa4.flash_attn_func, {"q": [1]}, "q must be .*got list"),
    (fa2.flash_attn_func, {"causal": None}, "causal must be True or False; got NoneType"),
    (fa2.flash_attn_func, {"causal": T}, "causal must be True or False"),
    (fa2.flash_attn_func, {"return_attn_probs": 1}, "return_attn_probs must be True or False; got int 1"),
    (fa3.flash_attn_func, {"return_attn_probs": 1}, "return_attn_probs must be True or False; got int 1"),
    (fa2.flash_attn_func, {"softcap": "30"}, "softcap must be a finite .*; got '30'"),
    (fa2.flash_attn_func, {"softcap": float("nan")}, "softcap must be a finite"),
    (fa2.flash_attn_func, {"dropout_p": None}, "dropout_p must be .*; got None"),
    (fa2.flash_attn_func, {"dropout_p": "0.1", "return_attn_probs": True}, "dropout_p must be .*; got '0.1'"),
    (fa2.flash_attn_func, {"window_size": b"ab"}, "window_size must be two integers"),
    (fa2.flash_attn_func, {"window_size": (True, False)}, "window_size must be two integers"),
    (fa2.flash_attn_varlen_func, {"max_seqlen_q": "3"}, "max_seqlen_q must be an integer of at least 0, .*; got '3'"),
    (fa2.flash_attn_varlen_func, {"max_seqlen_k": 3.0}, "max_seqlen_k must be an integer .*; got 3.0"),
    (
        fa2.flash_attn_varlen_func,
        {"max_seqlen_q": 3.0, "seqused_q": torch.tensor([1, 1])},
        "max_seqlen_q must be .* 3.0",
    ),
    (fa3.flash_attn_func, {"attention_chunk": -1}, "attention_chunk must be a positive integer, or 0 .*; got -1"),
    (fa3.flash_attn_func, {"attention_chunk": 2.0}, "attention_chunk must be .*; got 2.0"),
    (fa3.flash_attn_func, {"attention_chunk": []}, r"attention_chunk must be .*; got \[\]"),
]


@pytest.mark.parametrize(("function", "changes", "message"), CLUMSY)
def test_values_of_the_wrong_type(function: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(function, **changes)


def test_numpy_integers_are_accepted() -> None:
    call(fa2.flash_attn_varlen_func, max_seqlen_q=np.int64(3), window_size=(np.int64(1), np.int32(0)))
    call(fa3.flash_attn_varlen_func, attention_chunk=np.int64(2))


@pytest.mark.parametrize("qkv", [None, [1, 2], torch.zeros(3)])
def test_packed_by_heads_of_the_wrong_type(qkv: Any) -> None:
    with pytest.raises(ValueError, match="qkv must be"):
        fa3.flash_attn_qkvpacked_func(qkv)
    with pytest.raises(ValueError, match="num_heads_q='2'"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 5, 6, 16), num_heads_q="2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (unpad_input, (None, torch.ones(2, 3)), r"hidden_states must be a tensor \(batch, seqlen, ...\); got NoneType"),
        (unpad_input, (torch.zeros(6), torch.ones(2, 3)), "hidden_states must be"),
        (unpad_input, (torch.zeros(2, 3), [[1, 1, 1]] * 2), r"attention_mask must be a bool or integer .* \(2, 3\)"),
        (unpad_input, (torch.zeros(2, 3), torch.ones(3, 2)), r"attention_mask must be .*got \(3, 2\)"),
        (unpad_input, (torch.zeros(2, 3), torch.ones(2, 3).bool(), torch.ones(2)), "unused_mask must be .*got"),
        (pad_input, (torch.zeros(4, 2), None, 2, 3), r"indices must be an int64 tensor \(4,\)"),
        (pad_input, (torch.zeros(4, 2), torch.arange(3), 2, 3), r"indices must be an int64 tensor \(4,\); got \(3,\)"),
        (pad_input, (torch.zeros(4, 2), torch.arange(4), 1, 3), "indices must lie in 0..2, the places of 1 x 3"),
        (pad_input, (torch.zeros(4, 2), torch.arange(4), "2", 3), "batch must be an integer of at least 0; got '2'"),
        (pad_input, (torch.zeros(4, 2), torch.arange(4), 2, -3), "seqlen must be an integer of at least 0; got -3"),
        (pad_input, (None, torch.arange(4), 2, 3), "hidden_states must be a tensor"),
    ],
)  # fmt: skip
def test_padding_of_the_wrong_type(function: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)
