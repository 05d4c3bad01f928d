"""Every function against a dense float64 reference that shares no code with the package, and its conventions."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tritonpack.flash_attn import fa2, fa3, fa4, torch_varlen_attn

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Call:
    """The arguments of a call; lengths per document."""

    name: str
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16

    def __str__(self) -> str:
        return self.name

    def keywords(self) -> dict[str, Any]:
        return {
            "causal": self.causal, "window_size": self.window, "softcap": self.softcap, "softmax_scale": self.scale,
        }  # fmt: skip


CALLS = (
    Call("bidirectional", (5, 0, 12, 1)),
    Call("causal", (5, 0, 12, 1), causal=True),
    Call("causal-more-keys", (5, 0, 7), (9, 3, 7), causal=True),
    Call("causal-more-queries", (9, 4, 7), (5, 0, 7), causal=True),
    Call("window", (11, 3, 20), window=(4, 2)),
    Call("window-left", (11, 3, 20), window=(4, -1)),
    Call("window-right", (11, 3, 20), (14, 9, 6), window=(-1, 2)),
    Call("window-causal", (11, 3, 20), causal=True, window=(4, 7)),
    Call("softcap-scale", (11, 3), causal=True, softcap=2.0, scale=0.7),
    Call("odd-head-dim", (6, 9), causal=True, head_dim=59, heads=3, kv_heads=1),
    Call("wide-head-dim", (6, 9), causal=True, head_dim=512, heads=1, kv_heads=1),
)
EACH_CALL = pytest.mark.parametrize("call", CALLS, ids=str)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(call: Call, dtype: torch.dtype = torch.float64, slack: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    total_q, total_k = sum(call.lens_q) + slack, sum(call.lens_k or call.lens_q) + slack
    shapes = ((total_q, call.heads), (total_k, call.kv_heads), (total_k, call.kv_heads))
    return tuple(torch.randn(*s, call.head_dim, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)  # type: ignore[return-value]


def dense(q: Tensor, k: Tensor, v: Tensor, call: Call, slopes: Tensor | None = None, sinks: Tensor | None = None):
    """out and lse, document by document, after FlashAttention's documentation; -inf for empty rows."""
    outs, lses = [], []
    first_q = first_k = 0
    for b, (len_q, len_k) in enumerate(zip(call.lens_q, call.lens_k or call.lens_q, strict=True)):
        qs = q[first_q : first_q + len_q].transpose(0, 1)
        ks, vs = (
            x[first_k : first_k + len_k].transpose(0, 1).repeat_interleave(call.heads // call.kv_heads, 0)
            for x in (k, v)
        )
        first_q, first_k = first_q + len_q, first_k + len_k
        scores = qs @ ks.mT * (call.head_dim**-0.5 if call.scale is None else call.scale)
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        place = torch.arange(len_q)[:, None] + len_k - len_q
        keys = torch.arange(len_k)
        if slopes is not None:
            of_document = slopes if slopes.ndim == 1 else slopes[b]
            scores = scores - of_document[:, None, None].double() * (place - keys).abs()
        left, right = call.window
        right = 0 if call.causal else right
        hidden = torch.zeros(len_q, len_k, dtype=torch.bool)
        if left >= 0:
            hidden |= keys < place - left
        if right >= 0:
            hidden |= keys > place + right
        scores = scores.masked_fill(hidden, -INF)
        empty = hidden.all(1) if len_k else torch.ones(len_q, dtype=torch.bool)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len_q, 1)], -1)
        lse = scores.logsumexp(-1).masked_fill(empty, -INF)
        p = torch.softmax(scores.masked_fill(empty[:, None], 0.0), -1).masked_fill(empty[:, None], 0.0)
        outs.append((p[..., :len_k] @ vs).transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def assert_same(actual: Tensor, q: Tensor, others: tuple[Tensor, ...], expected: Tensor) -> None:
    """The outputs, and the gradients of all leaves."""
    torch.testing.assert_close(actual, expected)
    leaves, dout = (q, *others), torch.randn_like(expected)
    got = torch.autograd.grad(actual, leaves, dout, retain_graph=True)
    want = torch.autograd.grad(expected, leaves, dout, retain_graph=True)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


class Aux:
    lse = True


def sides(window: tuple[int, int]) -> tuple[int | None, ...]:
    """A window as FlashAttention-4 spells it."""
    return tuple(None if side < 0 else side for side in window)


def run(peer: str, call: Call, q: Tensor, k: Tensor, v: Tensor, *cu: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """out, and lse with the peer's number for empty rows, of documents or without offsets of a batch."""
    keywords = call.keywords() | more
    if peer == "fa4":
        offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=bool(cu)))
        return fa4.flash_attn_varlen_func(q, k, v, **offsets, **keywords | {"window_size": sides(call.window)})
    if peer == "fa4-batch":
        return fa4.flash_attn_func(q, k, v, **keywords | {"window_size": sides(call.window)})
    if peer == "torch":
        more |= {"window_size": (call.window[0], 0) if call.causal else call.window, "scale": call.scale}
        return torch_varlen_attn(q, k, v, *cu, 99, 99, **more, return_aux=Aux())
    module = {"fa2": fa2, "fa3": fa3}[peer]
    function = module.flash_attn_varlen_func if cu else module.flash_attn_func
    return function(q, k, v, *cu, **keywords, return_attn_probs=True)[:2]


def same_rows(lse: Tensor, expected: Tensor, peer: str) -> None:
    """lse is +inf in empty rows in FlashAttention-2's functions and -inf in the others."""
    torch.testing.assert_close(lse, expected.masked_fill(expected == -INF, INF) if peer == "fa2" else expected)


@pytest.mark.fast(
    "bidirectional-fa2",
    "causal-more-keys-fa3",
    "causal-more-queries-fa4",
    "window-fa4",
    "window-right-fa4",
    "window-causal-fa4",
    "odd-head-dim-fa2",
    "wide-head-dim-fa3",
)
@pytest.mark.parametrize("peer", ["fa2", "fa2-reference", "fa3", "fa4", "torch"])
@EACH_CALL
def test_documents(call: Call, peer: str) -> None:
    peer, _, backend = peer.partition("-")
    if peer == "torch" and call.softcap:
        pytest.skip("torch has no softcap")
    q, k, v = inputs(call)
    cu = offsets(call.lens_q), offsets(call.lens_k or call.lens_q)
    out, lse = run(peer, call, q, k, v, *cu, backend=backend or "blocked")
    expected, expected_lse = dense(q, k, v, call)
    same_rows(lse, expected_lse, peer)
    assert_same(out, q, (k, v), expected)
    rows = lse.isfinite()
    assert_same(lse[rows], q, (k,), expected_lse[rows])


@pytest.mark.parametrize("peer", ["fa2", "fa3", "fa4", "fa4-batch"])
@EACH_CALL
def test_rows_of_one_length(call: Call, peer: str) -> None:
    many = replace(call, lens_q=call.lens_q[:1] * 3, lens_k=(call.lens_k or call.lens_q)[:1] * 3)
    q, k, v = inputs(many)
    expected, expected_lse = dense(q, k, v, many)
    out, lse = run(peer, many, *(x.unflatten(0, (3, -1)) for x in (q, k, v)))
    assert (out.shape[:2], lse.shape[0]) == ((3, many.lens_q[0]), 3)
    same_rows(lse.transpose(0, 1).flatten(1), expected_lse, peer)
    assert_same(out.flatten(0, 1), q, (k, v), expected)


def test_packed_forms_are_the_same() -> None:
    q, k, v = (torch.randn(2, 7, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu, same = offsets((5, 0, 2, 7)), {"causal": True, "softcap": 3.0, "window_size": (3, 0)}
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    in_rows, of_documents = fa2.flash_attn_func(q, k, v, **same), fa2.flash_attn_varlen_func(*rows, cu, cu, **same)
    for expected, packed in (
        (in_rows, fa2.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **same)),
        (in_rows, fa2.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **same)),
        (in_rows, fa3.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **same)),
        (in_rows, fa3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), num_heads_q=3, **same)),
        (of_documents, fa2.flash_attn_varlen_qkvpacked_func(torch.stack(rows, 1), cu, 9, **same)),
        (of_documents, fa2.flash_attn_varlen_kvpacked_func(rows[0], torch.stack(rows[1:], 1), cu, cu, 9, 9, **same)),
    ):
        assert_same(packed, q, (k, v), expected)


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_alibi(shape: tuple[int, ...]) -> None:
    call, slopes = Call("alibi", (5, 0, 9), (7, 3, 4), causal=True), torch.rand(shape)
    q, k, v = inputs(call)
    out, _ = run("fa2", call, q, k, v, offsets(call.lens_q), offsets(call.lens_k or ()), alibi_slopes=slopes)
    assert_same(out, q, (k, v), dense(q, k, v, call, slopes=slopes)[0])


@pytest.mark.parametrize("peer", ["fa2", "fa3", "fa4"])
def test_sinks(peer: str) -> None:
    call = Call("sinks", (5, 0, 9), causal=True)
    q, k, v = inputs(call)
    cu, sinks = offsets(call.lens_q), torch.randn(call.heads, dtype=torch.float64, requires_grad=True)
    out, _ = run(peer, call, q, k, v, cu, cu, **{"learnable_sink" if peer == "fa4" else "s_aux": sinks})
    assert_same(out, q, (k, v, sinks), dense(q, k, v, call, sinks=sinks)[0])


def test_dropout_keeps_lse_and_the_mean() -> None:
    q, cu = torch.randn(64, 2, 16), offsets((64,))
    torch.manual_seed(0)
    ones = torch.ones(64, 2, 16)
    out = fa2.flash_attn_varlen_func(q, q, ones, cu, cu, None, None, 0.3)
    assert out.std() > 0.02
    assert out.mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("peer", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 2)])
def test_used_lengths(causal: bool, window: tuple[int, int], peer: str) -> None:
    """Rows that don't count, NaN here, change nothing and get zeros."""
    lens_q, lens_k, used_q, used_k = (6, 4, 0, 5), (9, 4, 2, 7), (4, 4, 0, 0), (7, 0, 2, 6)
    call = Call("used", used_q, used_k, causal=causal, window=window)
    q, k, v = inputs(call)
    rows_q, rows_k = (
        torch.cat([torch.arange(u) + start for u, start in zip(used, offsets(lens).tolist(), strict=False)])
        for used, lens in ((used_q, lens_q), (used_k, lens_k))
    )
    slack = 3  # rows past the last offset
    wide = [
        torch.full((sum(lens) + slack, *x.shape[1:]), NAN, dtype=x.dtype).index_copy(0, rows, x)
        for x, rows, lens in ((q, rows_q, lens_q), (k, rows_k, lens_k), (v, rows_k, lens_k))
    ]
    used = {"seqused_q": torch.tensor(used_q, dtype=torch.int32), "seqused_k": torch.tensor(used_k)}
    slopes = {"alibi_slopes": torch.rand(4, call.heads)} if peer == "fa2" else {}
    out, _ = run(peer, call, *wide, offsets(lens_q), offsets(lens_k), **used, **slopes)
    assert_same(out[rows_q], q, (k, v), dense(q, k, v, call, slopes=slopes.get("alibi_slopes"))[0])
    rest = torch.ones(out.shape[0], dtype=torch.bool)
    rest[rows_q] = False
    assert not out[rest].any()


def test_used_keys_of_a_batch() -> None:
    """FlashAttention-4 accepts used lengths of a batch."""
    q, k = torch.randn(2, 3, 2, 16, dtype=torch.float64), torch.randn(2, 8, 2, 16, dtype=torch.float64)
    out, _ = fa4.flash_attn_varlen_func(q, k, k, seqused_k=torch.tensor([8, 5]), causal=True)
    keys = torch.cat([k[0], k[1, :5]])
    expected = dense(q.flatten(0, 1), keys, keys, Call("batch", (3, 3), (8, 5), causal=True, heads=2))[0]
    torch.testing.assert_close(out.flatten(0, 1), expected)


def test_qv_as_one_product() -> None:
    """The remedy in the error about qv works."""
    q, k, qv, v = (torch.randn(100, 1, width, dtype=torch.float64) for width in (8, 8, 32, 32))
    cu = offsets((100,))
    out, _ = fa4.flash_attn_varlen_func(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, None, cu, cu)
    scores = (q[:, 0] @ k[:, 0].T + qv[:, 0] @ v[:, 0].T) / math.sqrt(40)
    torch.testing.assert_close(out[:, 0], torch.softmax(scores, -1) @ v[:, 0])


@pytest.mark.parametrize("window", [torch.tensor([3, 1]), (np.int64(3), np.int32(1)), [3, 1]])
def test_forms_of_a_window(window: Any) -> None:
    q, cu = torch.randn(9, 2, 16), offsets((9,))
    first, second = (fa2.flash_attn_varlen_func(q, q, q, cu, cu, window_size=w) for w in (window, (3, 1)))
    assert torch.equal(first, second)


def test_one_split_is_batch_invariance() -> None:
    q = torch.randn(40, 2, 16)
    packed = torch_varlen_attn(q, q, q, *[offsets((3, 30, 7))] * 2, is_causal=True, num_splits=1)
    alone = torch_varlen_attn(*[q[3:33]] * 3, *[offsets((30,))] * 2, window_size=(-1, 0), num_splits=1)
    assert torch.equal(packed[3:33], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lse_is_float32(dtype: torch.dtype) -> None:
    q = torch.randn(1, 3, 2, 16, dtype=dtype)
    out, lse, none = fa2.flash_attn_func(q, q, q, return_attn_probs=True)
    assert (out.dtype, lse.dtype, lse.shape, none.numel()) == (dtype, torch.float32, (1, 2, 3), 0)


def test_attention_chunk() -> None:
    """Chunks equal documents of their own, with the diagonal in the same place."""
    q, k, v = (torch.randn(30, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    cu, pieces = offsets((17, 13)), offsets((8, 8, 1, 8, 5))
    got = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 17, 17, causal=True, attention_chunk=np.int64(8))
    torch.testing.assert_close(got, fa3.flash_attn_varlen_func(q, k, v, pieces, pieces, 8, 8, causal=True))


# FlashAttention's parameters in the order of its source; tritonpack's own may follow as keywords.
FA2_END = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
           "return_attn_probs"]  # fmt: skip
VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
DESCALE = ["q_descale", "k_descale", "v_descale"]
ORDERS: list[tuple[Callable[..., Any], list[str]]] = [
    (fa2.flash_attn_func, ["q", "k", "v", *FA2_END]),
    (fa2.flash_attn_qkvpacked_func, ["qkv", *FA2_END]),
    (fa2.flash_attn_kvpacked_func, ["q", "kv", *FA2_END]),
    (fa2.flash_attn_varlen_func, ["q", "k", "v", *VARLEN, *FA2_END, "block_table"]),
    (fa2.flash_attn_varlen_qkvpacked_func, ["qkv", "cu_seqlens", "max_seqlen", *FA2_END]),
    (fa2.flash_attn_varlen_kvpacked_func, ["q", "kv", *VARLEN, *FA2_END]),
    (fa3.flash_attn_func, ["q", "k", "v", "softmax_scale", "causal", "qv", *DESCALE, "window_size", "attention_chunk",
                           "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs"]),
    (fa3.flash_attn_qkvpacked_func, ["qkv", "softmax_scale", "causal", *DESCALE, "window_size", "attention_chunk",
                                     "softcap", "deterministic", "num_heads_q", "sm_margin", "return_attn_probs"]),
    (fa3.flash_attn_varlen_func, ["q", "k", "v", *VARLEN, "seqused_q", "seqused_k", "softmax_scale", "causal", "qv",
                                  *DESCALE, "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa",
                                  "deterministic", "sm_margin", "return_attn_probs"]),
    (fa4.flash_attn_func, ["q", "k", "v", "qv", "gather_kv_indices", "softmax_scale", "causal", "window_size",
                           "learnable_sink", "softcap", "num_splits", "pack_gqa", "deterministic", "score_mod",
                           "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors",
                           "block_sparse_tensors_bwd", "return_lse"]),
    (fa4.flash_attn_varlen_func, ["q", "k", "v", "qv", *VARLEN, "min_seqlen_k", "seqused_q", "seqused_k",
                                  "gather_kv_indices", "page_table", "softmax_scale", "causal", "window_size",
                                  "learnable_sink", "softcap", "num_splits", "pack_gqa", "deterministic", "score_mod",
                                  "score_mod_bwd", "mask_mod", "block_sparse_tensors", "aux_tensors", "aux_scalars",
                                  "return_lse", "scheduler_metadata", "seqlen_k_per_split",
                                  "disable_scheduler_metadata"]),
    (torch_varlen_attn, ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal"]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "order"), ORDERS, ids=lambda x: getattr(x, "__name__", ""))
def test_names_and_order(function: Callable[..., Any], order: list[str]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == order


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
