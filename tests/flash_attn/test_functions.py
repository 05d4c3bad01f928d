"""The functions under their names: exactness, forms that must agree, return values, names and order of parameters."""

from fnmatch import fnmatch
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tritonpack.flash_attn import fa2, fa3, fa4, torch_varlen_attn
from tritonpack.testing import conformance

INF, NAN = float("inf"), float("nan")
ROW_FUNCTIONS = {"fa2": fa2.flash_attn_func, "fa3": fa3.flash_attn_func, "fa4": fa4.flash_attn_func}
VARLEN: dict[str, Any] = {"fa2": fa2.flash_attn_varlen_func, "fa3": fa3.flash_attn_varlen_func,
                          "fa4": fa4.flash_attn_varlen_func, "torch": torch_varlen_attn}  # fmt: skip
WITH_LSE: dict[str, dict[str, Any]] = {
    "fa2": {"return_attn_probs": True}, "fa3": {"return_attn_probs": True}, "fa4": {},
    "torch": {"return_aux": type("Aux", (), {"lse": True})},
}  # fmt: skip
LACKING = {"fa2": (), "fa3": ("dropout/*", "*/alibi*"), "fa4": ("dropout/*", "*/alibi*"),
           "torch": ("dropout/*", "*/alibi*", "*/softcap*", "*/sinks*")}  # fmt: skip


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def rows(*totals: int) -> tuple[Tensor, ...]:
    shapes = zip(totals * (3 if len(totals) == 1 else 1), (4, 2, 2), strict=True)
    return tuple(torch.randn(*shape, 16, dtype=torch.float64, requires_grad=True) for shape in shapes)


def assert_same(actual: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """The outputs, and the gradients of all leaves."""
    dout = torch.randn_like(expected)
    got, want = ([x, *torch.autograd.grad(x, leaves, dout, retain_graph=True)] for x in (actual, expected))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", VARLEN)
def test_conforms(name: str) -> None:
    skip = ("*/head-dim-[12345]??*", "inputs/many-*")  # which take long
    for result in conformance.run(VARLEN[name], dtypes=[torch.float32], device="cpu", skip=skip).results:
        lacks = any(fnmatch(result.check, one) for one in LACKING[name])
        assert result.outcome == ("not offered" if lacks else "pass"), result


@pytest.mark.parametrize("peer", ROW_FUNCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window_size": (4, 7)}, {"softcap": 2.0, "softmax_scale": 0.7}], ids=str
)
def test_rows_of_one_length_are_documents(peer: str, options: dict[str, Any]) -> None:
    q, k, v = rows(21, 27, 27)
    shared = options | WITH_LSE[peer]
    cu_q, cu_k = offsets(7, 7, 7), offsets(9, 9, 9)
    expected, lse, *_ = VARLEN[peer](q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **shared)
    batch = [x.unflatten(0, (3, -1)) for x in (q, k, v)]
    found = [ROW_FUNCTIONS[peer](*batch, **shared), *([VARLEN[peer](*batch, **shared)] if peer == "fa4" else [])]
    for out, lse_of_rows, *_ in found:
        assert out.shape[:2] == (3, 7)
        assert_same(out.flatten(0, 1), expected, (q, k, v))
        assert_same(lse_of_rows.transpose(0, 1).flatten(1), lse, (q, k))


def test_packed_forms_are_the_same() -> None:
    q, k, v = (torch.randn(2, 3, 3, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu, same = offsets(2, 0, 1, 3), {"causal": True, "softcap": 3.0, "window_size": (3, 0)}
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
    places = {"q": ((6, 4, 0, 5), (4, 4, 0, 0)), "k": ((9, 4, 2, 7), (7, 0, 2, 6))}  # lengths, and used lengths
    used = {
        side: torch.cat([torch.arange(n) + begin for n, begin in zip(use, offsets(*lens).tolist(), strict=False)])
        for side, (lens, use) in places.items()
    }
    q, k, v = rows(len(used["q"]), len(used["k"]), len(used["k"]))
    wide = [
        torch.full((sum(places[side][0]) + 3, *x.shape[1:]), NAN, dtype=x.dtype).index_copy(0, used[side], x)
        for side, x in (("q", q), ("k", k), ("k", v))  # 3 rows past the last offset
    ]
    options = {"causal": causal, "window_size": (3, 2), **WITH_LSE[peer]}
    of_all = {f"cu_seqlens_{side}": offsets(*lens) for side, (lens, _) in places.items()}
    counts = {f"seqused_{side}": torch.tensor(use) for side, (_, use) in places.items()}
    of_used = {f"cu_seqlens_{side}": offsets(*use) for side, (_, use) in places.items()}
    out, _ = VARLEN[peer](*wide, **of_all, **counts, **options)
    expected, _ = VARLEN[peer](q, k, v, **of_used, **options)
    assert_same(out[used["q"]], expected, (q, k, v))
    assert out.count_nonzero() == expected.count_nonzero()


def test_windows_chunks_and_one_split() -> None:
    """Forms of a window agree; chunks equal documents of their own; one split gives a document the same bits alone."""
    q, k, v = rows(30)
    cu, pieces = offsets(17, 13), offsets(8, 8, 1, 8, 5)
    windows = (3, 1), (np.int64(3), np.int32(1)), [3, 1]
    first, *others = (fa2.flash_attn_varlen_func(q, k, v, cu, cu, window_size=window) for window in windows)
    assert all(torch.equal(first, other) for other in others)
    none, minus = (
        fa4.flash_attn_varlen_func(q, k, v, None, cu, cu, window_size=w)[0] for w in ((None, None), (-1, -1))
    )
    assert torch.equal(none, minus)
    chunked = fa3.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, attention_chunk=np.int64(8))
    torch.testing.assert_close(chunked, fa3.flash_attn_varlen_func(q, k, v, pieces, pieces, causal=True))
    packed = torch_varlen_attn(q, k, v, *[offsets(3, 20, 7)] * 2, is_causal=True, num_splits=1)
    alone = torch_varlen_attn(*(x[3:23] for x in (q, k, v)), *[offsets(20)] * 2, window_size=(-1, 0), num_splits=1)
    assert torch.equal(packed[3:23], alone)


def test_return_values() -> None:
    """The log-sum-exp of rows that see nothing is +inf in FlashAttention-2's functions and -inf in the others."""
    q = torch.randn(9, 2, 16, dtype=torch.bfloat16)
    cu = {"cu_seqlens_q": offsets(4, 5), "cu_seqlens_k": offsets(0, 9)}
    out, lse, none = fa2.flash_attn_varlen_func(q, q, q, **cu, return_attn_probs=True)
    assert (out.dtype, lse.dtype, lse.shape, none.numel()) == (torch.bfloat16, torch.float32, (2, 9), 0)
    assert (lse[:, :4] == INF).all()
    for name in ("fa3", "fa4", "torch"):
        found = VARLEN[name](q, q, q, *([None] if name == "fa4" else []), *cu.values(), **WITH_LSE[name])
        assert len(found) == 2
        assert torch.equal(found[1], lse.masked_fill(lse == INF, -INF))
    assert all(isinstance(VARLEN[name](q, q, q, *cu.values()), Tensor) for name in ("fa2", "fa3", "torch"))


# FlashAttention's and torch's positional parameters, in the order of their sources; tritonpack's own are keywords.
FA2 = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False"
)
CU, LONGEST = "cu_seqlens_q cu_seqlens_k", "max_seqlen_q=None max_seqlen_k=None"
CU_OR_BATCH, USED = "cu_seqlens_q=None cu_seqlens_k=None", "seqused_q=None seqused_k=None"
FA3 = (
    "softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None window_size=(-1,-1) "
    "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
)
FA4 = (
    "softmax_scale=None causal=False window_size=(None,None) learnable_sink=None softcap=0.0 num_splits=1 "
    "pack_gqa=None deterministic=False score_mod=None score_mod_bwd=None mask_mod=None"
)
MORE = "aux_tensors=None aux_scalars=None"


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (fa2.flash_attn_func, f"q k v {FA2}"),
        (fa2.flash_attn_varlen_func, f"q k v {CU} {LONGEST} {FA2} block_table=None"),
        (fa3.flash_attn_func, f"q k v {FA3}"),
        (fa3.flash_attn_varlen_func, f"q k v {CU} {LONGEST} {USED} {FA3}"),
        (fa4.flash_attn_func, f"q k v qv=None gather_kv_indices=None {FA4} {MORE} block_sparse_tensors=None "
         "block_sparse_tensors_bwd=None return_lse=False"),
        (fa4.flash_attn_varlen_func, f"q k v qv=None {CU_OR_BATCH} {LONGEST} min_seqlen_k=None {USED} "
         f"gather_kv_indices=None page_table=None {FA4} block_sparse_tensors=None {MORE} return_lse=False "
         "scheduler_metadata=None seqlen_k_per_split=None disable_scheduler_metadata=False"),
        (torch_varlen_attn, "query key value cu_seq_q cu_seq_k max_q=None max_k=None is_causal=False"),
    ],
)  # fmt: skip
def test_names_order_and_defaults(function: Any, parameters: str) -> None:
    positional = [p for p in signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    written = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in positional]
    assert " ".join(written) == parameters


def test_torch_signature_is_the_installed_one() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert set(signature(varlen.varlen_attn).parameters) <= set(signature(torch_varlen_attn).parameters)


@pytest.mark.slow
def test_compiles_to_one_graph() -> None:
    q = torch.randn(9, 2, 16)

    def layers(q: Tensor, cu: Tensor) -> Tensor:
        for _ in range(2):
            q = fa2.flash_attn_varlen_func(q, q, q, cu, cu, 6, 6, causal=True, window_size=(4, 0))
        return q + fa2.flash_attn_func(q[None], q[None], q[None])[0]

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    for lengths in ((3, 6), (5, 4)):
        torch.testing.assert_close(compiled(q, offsets(*lengths)), layers(q, offsets(*lengths)))
