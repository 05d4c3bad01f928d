"""Errors for arguments that aren't supported or don't fit; the message names them and what is supported."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack.flash_attn import fa2, fa3, fa4, torch_varlen_attn
from tritonpack.flash_attn.adapter import REMEDIES
from tritonpack.flash_attn.bert_padding import unpad_input

T = torch.zeros(1)
FUNCTIONS = {
    "fa2": fa2.flash_attn_varlen_func, "fa2-batch": fa2.flash_attn_func, "fa3": fa3.flash_attn_varlen_func,
    "fa3-batch": fa3.flash_attn_func, "fa4": fa4.flash_attn_varlen_func, "fa4-batch": fa4.flash_attn_func,
    "torch": torch_varlen_attn,
}  # fmt: skip


def call(name: str, **changes: Any) -> Tensor:
    """A valid call, with some arguments changed."""
    batch = name.endswith("batch")
    right = {name: torch.randn(*([1] if batch else []), 5, 2, 16) for name in "qkv"}
    if not batch:
        right |= {name: torch.tensor([0, 2, 5], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if name == "torch":
        right = dict(zip(("query", "key", "value", "cu_seq_q", "cu_seq_k"), right.values(), strict=True))
    return FUNCTIONS[name](**(right | changes))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unsupported(name: str) -> None:
    call(name)
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.keys() & REMEDIES.keys():
        with pytest.raises(ValueError, match=f"^{parameter} isn't supported by tritonpack.flash_attn; .*Supported: "):
            call(name, **{parameter: T})


WINDOW = r"two integers \(left, right\) of at least -1, .*got "


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fa2", {"q": torch.zeros(1, 5, 2, 16)}, r"q must be \(total, heads, headdim\)"),
        ("fa2-batch", {"k": torch.zeros(5, 2, 16)}, r"k must be \(batch, seqlen, heads, headdim\)"),
        ("fa2", {"q": 3}, "q must be .*got int 3"),
        ("torch", {"enable_gqa": False, "key": T}, "k must be "),
        ("fa2", {"window_size": 4}, WINDOW + "4"),
        ("fa2", {"window_size": (True, False)}, WINDOW),
        ("fa2-batch", {"window_size": (-2, 0)}, WINDOW + r"\(-2, 0\)"),
        ("fa3", {"window_size": (3, -2)}, WINDOW + r"\(3, -2\)"),
        ("fa4", {"window_size": (-1, 3)}, "or None for no limit; got"),
        ("fa4", {"window_size": (-2, 3)}, "or None for no limit; got"),
        ("fa2-batch", {"softcap": -1.0}, "softcap must be a finite .* above 0, or 0.0 .*-1.0"),
        ("fa2", {"cu_seqlens_q": torch.tensor([0, 5])}, "queries have 1 documents and keys 2"),
        ("fa2", {"cu_seqlens_k": torch.tensor([0, 2, 6])}, "end at most at total_k = 5"),
        ("fa2", {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="meta")},
         "cu_seqlens_q must be .* on q.s device; got .* on meta"),
        ("fa2", {"cu_seqlens_q": [0, 2, 5]}, "cu_seqlens_q must be a .* tensor on q's device; got list"),
        ("fa2", {"alibi_slopes": torch.zeros(3, 2)}, r"\(2 documents, heads\); got"),
        ("fa2", {"softmax_scale": -1.0}, "scale must be a positive"),
        ("fa2", {"dropout_p": 1.0}, "dropout_p must be"),
        ("fa2", {"dropout_p": 0.1, "return_attn_probs": True}, "can't be used with dropout_p above 0"),
        ("fa2", {"backend": "cuda"}, "backend must be one of"),
        ("fa3", {"seqused_q": torch.tensor([1])}, "seqused_q must hold a number for each document"),
        ("fa3", {"seqused_k": torch.tensor([1, 4])}, "seqused_k must hold .* from 0 to the document's length"),
        ("fa3", {"seqused_k": torch.tensor([-1, 2])}, "seqused_k must hold"),
        ("fa2-batch", {"causal": None}, "causal must be True or False; got NoneType"),
        ("fa2-batch", {"return_attn_probs": 1}, "return_attn_probs must be True or False; got int 1"),
        ("fa3-batch", {"attention_chunk": -1}, "chunk_size must be an integer of at least 1, or None .*; got -1"),
        ("torch", {"key": torch.zeros(5, 1, 16), "value": torch.zeros(5, 1, 16), "enable_gqa": False},
         "query has 2 heads and key 1; pass enable_gqa=True"),
        ("torch", {"is_causal": 1}, "causal must be True or False"),
        ("torch", {"return_aux": True}, "return_aux must be torch's AuxRequest, or None; got True"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(name, **changes)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fa2.flash_attn_qkvpacked_func, [torch.zeros(2, 5, 2, 4, 8)], r"qkv must be \(..., 3, heads"),
        (fa2.flash_attn_kvpacked_func, [T, torch.zeros(2, 5, 3, 4, 8)], r"kv must be \(..., 2, heads"),
        (fa2.flash_attn_varlen_qkvpacked_func, [torch.zeros(5, 2, 4, 8), T], r"qkv must be \(..., 3, heads"),
        (fa2.flash_attn_with_kvcache, [T, T, T], "flash_attn_with_kvcache isn't supported.*flash_attn_varlen_func"),
        (fa3.flash_attn_qkvpacked_func, [torch.zeros(2, 5, 6, 8)], "num_heads_q=None"),
        (unpad_input, [None, torch.ones(2, 3)], r"hidden_states must be a tensor \(batch, seqlen, ...\); got NoneType"),
        (unpad_input, [torch.zeros(2, 3), torch.ones(3, 2)], r"attention_mask and unused_mask must be .*got \(3, 2\)"),
        (unpad_input, [torch.zeros(2, 3), torch.ones(2, 3).bool(), torch.ones(2)], r"unused_mask must be .*and \(2,\)"),
        (unpad_input, [torch.zeros(1, 2), torch.tensor([[1, 2]])], "attention_mask must hold 0 and 1, .*Other numbers"),
        (unpad_input, [torch.zeros(1, 2), torch.tensor([[1, 1]]), torch.tensor([[0, 1]])], "unused_mask may be 1"),
    ],
)  # fmt: skip
def test_packed_and_padded_shapes(function: Any, arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)
