"""The functions under their names: forms that must agree, return values, names and order of parameters.

tests/flash_attn/test_conformance.py compares their results with float64.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tritonpack.flash_attn import fa2, fa3, fa4, torch_varlen_attn

INF, NAN = float("inf"), float("nan")
VARLEN_FUNCTIONS = {"fa2": fa2.flash_attn_varlen_func, "fa3": fa3.flash_attn_varlen_func,
                    "fa4": fa4.flash_attn_varlen_func}  # fmt: skip
ROW_FUNCTIONS = {"fa2": fa2.flash_attn_func, "fa3": fa3.flash_attn_func, "fa4": fa4.flash_attn_func}
WITH_LSE: dict[str, dict[str, Any]] = {
    "fa2": {"return_attn_probs": True},
    "fa3": {"return_attn_probs": True},
    "fa4": {},
}


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def rows(*totals: int, heads: tuple[int, ...] = (4, 2, 2), width: int = 16) -> tuple[Tensor, ...]:
    shapes = zip(totals * (3 if len(totals) == 1 else 1), heads, strict=True)
    return tuple(torch.randn(*shape, width, dtype=torch.float64, requires_grad=True) for shape in shapes)


def assert_same(actual: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """The outputs, and the gradients of all leaves."""
    torch.testing.assert_close(actual, expected)
    dout = torch.randn_like(expected)
    got, want = (torch.autograd.grad(x, leaves, dout, retain_graph=True) for x in (actual, expected))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("peer", ROW_FUNCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window_size": (4, 7)}, {"softcap": 2.0, "softmax_scale": 0.7}], ids=str
)
def test_rows_of_one_length_are_documents(peer: str, options: dict[str, Any]) -> None:
    q, k, v = rows(21, 27, 27)
    cu_q, cu_k = offsets((7, 7, 7)), offsets((9, 9, 9))
    shared = options | WITH_LSE[peer]
    expected, lse, *_ = VARLEN_FUNCTIONS[peer](q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **shared)
    found = [ROW_FUNCTIONS[peer](*(x.unflatten(0, (3, -1)) for x in (q, k, v)), **shared)]
    if peer == "fa4":
        found.append(fa4.flash_attn_varlen_func(*(x.unflatten(0, (3, -1)) for x in (q, k, v)), **options))
    for out, lse_of_rows, *_ in found:
        assert out.shape[:2] == (3, 7)
        assert_same(out.flatten(0, 1), expected, (q, k, v))
        assert_same(lse_of_rows.transpose(0, 1).flatten(1), lse, (q, k))


def test_packed_forms_are_the_same() -> None:
    q, k, v = (torch.randn(2, 3, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu, same = offsets((2, 0, 1, 3)), {"causal": True, "softcap": 3.0, "window_size": (3, 0)}
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    in_rows, of_documents = fa2.flash_attn_func(q, k, v, **same), fa2.flash_attn_varlen_func(*flat, cu, cu, **same)
    end = 0.0, None, True, (3, 0), 3.0  # dropout_p, softmax_scale, causal, window_size, softcap
    for expected, packed in (
        (in_rows, fa2.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *end)),
        (in_rows, fa2.flash_attn_kvpacked_func(q, kv=torch.stack([k, v], 2), **same)),
        (in_rows, fa2.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *end)),
        (in_rows, fa3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **same)),
        (in_rows, fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), num_heads_q=3, **same)),
        (of_documents, fa2.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), cu, 9, *end)),
        (of_documents, fa2.flash_attn_varlen_kvpacked_func(flat[0], torch.stack(flat[1:], 1), cu, cu, 9, 9, *end)),
    ):
        assert_same(packed, expected, (q, k, v))


@pytest.mark.parametrize("peer", ["fa3", "fa4"])
@pytest.mark.parametrize("causal", [False, True])
def test_used_lengths(causal: bool, peer: str) -> None:
    """Rows that don't count, NaN here, change nothing and get zeros."""
    lens_q, lens_k, used_q, used_k = (6, 4, 0, 5), (9, 4, 2, 7), (4, 4, 0, 0), (7, 0, 2, 6)
    q, k, v = rows(sum(used_q), sum(used_k), sum(used_k))
    rows_q, rows_k = (
        torch.cat([torch.arange(u) + start for u, start in zip(used, offsets(lens).tolist(), strict=False)])
        for used, lens in ((used_q, lens_q), (used_k, lens_k))
    )
    slack = 3  # rows past the last offset
    wide = [
        torch.full((sum(lens) + slack, *x.shape[1:]), NAN, dtype=x.dtype).index_copy(0, place, x)
        for x, place, lens in ((q, rows_q, lens_q), (k, rows_k, lens_k), (v, rows_k, lens_k))
    ]
    used = {"seqused_q": torch.tensor(used_q, dtype=torch.int32), "seqused_k": torch.tensor(used_k)}
    options: dict[str, Any] = {"causal": causal, "window_size": (3, 2)}
    function = VARLEN_FUNCTIONS[peer]
    out = function(*wide, cu_seqlens_q=offsets(lens_q), cu_seqlens_k=offsets(lens_k), **used, **options)
    expected = function(q, k, v, cu_seqlens_q=offsets(used_q), cu_seqlens_k=offsets(used_k), **options)
    out, expected = (x[0] if isinstance(x, tuple) else x for x in (out, expected))
    assert_same(out[rows_q], expected, (q, k, v))
    rest = torch.ones(out.shape[0], dtype=torch.bool)
    rest[rows_q] = False
    assert not out[rest].any()


def test_windows_chunks_and_one_split() -> None:
    """Forms of a window agree; chunks equal documents of their own; one split gives a document the same bits alone."""
    q, k, v = rows(30)
    cu, pieces = offsets((17, 13)), offsets((8, 8, 1, 8, 5))
    first, *others = (
        fa2.flash_attn_varlen_func(q, k, v, cu, cu, window_size=w) for w in ((3, 1), (np.int64(3), np.int32(1)), [3, 1])
    )
    assert all(torch.equal(first, other) for other in others)
    (of_none, _), (of_minus, _) = (
        fa4.flash_attn_varlen_func(q, k, v, None, cu, cu, window_size=w) for w in ((None, None), (-1, -1))
    )
    assert torch.equal(of_none, of_minus)
    chunked = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 17, 17, causal=True, attention_chunk=np.int64(8))
    torch.testing.assert_close(chunked, fa3.flash_attn_varlen_func(q, k, v, pieces, pieces, 8, 8, causal=True))
    packed = torch_varlen_attn(q, k, v, *[offsets((3, 20, 7))] * 2, is_causal=True, num_splits=1)
    alone = torch_varlen_attn(*(x[3:23] for x in (q, k, v)), *[offsets((20,))] * 2, window_size=(-1, 0), num_splits=1)
    assert torch.equal(packed[3:23], alone)


def test_return_values() -> None:
    """The log-sum-exp of rows that see nothing is +inf in FlashAttention-2's functions and -inf in the others."""
    q = torch.randn(9, 2, 16, dtype=torch.bfloat16)
    cu = offsets((4, 5)), offsets((0, 9))
    out, lse, none = fa2.flash_attn_varlen_func(q, q, q, *cu, return_attn_probs=True)
    assert (out.dtype, lse.dtype, lse.shape, none.numel()) == (torch.bfloat16, torch.float32, (2, 9), 0)
    assert (lse[:, :4] == INF).all()
    for found in (
        fa3.flash_attn_varlen_func(q, q, q, *cu, return_attn_probs=True),
        fa4.flash_attn_varlen_func(q, q, q, None, *cu),
        torch_varlen_attn(q, q, q, *cu, return_aux=type("Aux", (), {"lse": True})),
    ):
        assert len(found) == 2
        assert torch.equal(found[1], lse.masked_fill(lse == INF, -INF))
    assert all(isinstance(f(q, q, q, *cu), Tensor) for f in (VARLEN_FUNCTIONS["fa3"], torch_varlen_attn))


# FlashAttention's parameters in the order of its source; tritonpack's own may follow as keywords.
FA2_END = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
VARLEN = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
FA3_END = (
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs"
)
FA4_MIDDLE = (
    "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd "
    "mask_mod"
)
ORDERS: list[tuple[Callable[..., Any], str]] = [
    (fa2.flash_attn_func, f"q k v {FA2_END}"),
    (fa2.flash_attn_varlen_func, f"q k v {VARLEN} {FA2_END} block_table"),
    (fa3.flash_attn_func, f"q k v {FA3_END}"),
    (fa3.flash_attn_varlen_func, f"q k v {VARLEN} seqused_q seqused_k {FA3_END}"),
    (fa4.flash_attn_func, f"q k v qv gather_kv_indices {FA4_MIDDLE} aux_tensors aux_scalars block_sparse_tensors "
     "block_sparse_tensors_bwd return_lse"),
    (fa4.flash_attn_varlen_func, f"q k v qv {VARLEN} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table "
     f"{FA4_MIDDLE} block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split "
     "disable_scheduler_metadata"),
    (torch_varlen_attn, "query key value cu_seq_q cu_seq_k max_q max_k is_causal"),
]  # fmt: skip


DEFAULTS = {
    **dict.fromkeys(("causal", "is_causal", "deterministic", "return_attn_probs", "return_lse"), False),
    "disable_scheduler_metadata": False, "dropout_p": 0.0, "softcap": 0.0, "attention_chunk": 0, "sm_margin": 0,
    "num_splits": 1, "window_size": (-1, -1),
}  # of others None  # fmt: skip


@pytest.mark.parametrize(("function", "order"), ORDERS, ids=lambda x: getattr(x, "__name__", ""))
def test_names_order_and_defaults(function: Callable[..., Any], order: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == order.split()
    of_fa4 = {"window_size": (None, None)} if function.__module__.endswith("fa4") else {}
    assert all(p.default in (p.empty, (DEFAULTS | of_fa4).get(p.name)) for p in positional)


def test_torch_signature_is_the_installed_one() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert set(inspect.signature(varlen.varlen_attn).parameters) <= set(inspect.signature(torch_varlen_attn).parameters)


@pytest.mark.slow
def test_compiles_to_one_graph() -> None:
    q = torch.randn(9, 2, 16)

    def layers(q: Tensor, cu: Tensor) -> Tensor:
        for _ in range(2):
            q = fa2.flash_attn_varlen_func(q, q, q, cu, cu, 6, 6, causal=True, window_size=(4, 0))
        return q + fa2.flash_attn_func(q[None], q[None], q[None])[0]

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for lengths in ((3, 6), (5, 4)):
        torch.testing.assert_close(compiled(q, offsets(lengths)), layers(q, offsets(lengths)))
