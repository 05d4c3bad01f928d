"""The blocked backend on CPUs: which documents go to calls of torch's fused kernel, which to blocks; results are exact,
isolated and deterministic."""

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import blocked, fused
from tritonpack.options import make_options
from tritonpack.testing import Case, Inputs, check_outputs, make_inputs
from tritonpack.testing.tolerance import ROW_OUTPUTS, run

NAN = float("nan")
EQUAL, MIXED = (20,) * 6, (33, 1, 20, 0, 17, 192, 7, 20, 193, 1, 1)
SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16}

CASES = (
    Case("one-document", (20,)),
    Case("equal", EQUAL),
    Case("shortest", (15, 16, 16, 17)),
    Case("mixed", MIXED, slack=9),
    Case("mixed-full", MIXED, causal=False, slack=9),
    Case("pieces", (193, 300, 500), **SMALL),
    Case("longer-than-pieces", (fused.MAX_PIECE_KEYS + 1,), **SMALL),
    Case("long-full", (200, 800), causal=False, **SMALL),
    Case("multi-head", MIXED, kv_heads=4),
    Case("rows-of-60-bytes", MIXED, heads=3, kv_heads=3, head_dim=5),
    Case("narrowest", MIXED, head_dim=1),
    Case("more-queries", (25, 192, 30), (16, 9, 20)),  # the first see nothing
    Case("wider-values", MIXED, head_dim=16, head_dim_v=40),
    Case("cross-full", (5, 0, 30, 64, 7, 7), (10, 70, 33, 1, 12, 12), causal=False, slack=3),
    Case("cross", (5, 200, 7, 7, 40), (25, 300, 22, 22, 30), slack=3),
    Case("sinks", MIXED, sinks=True, slack=9),
    Case("beside-windows", (7, 150, 20, 40, 30), window=(30, 0), slack=9),
)
BY_NAME = {case.name: case for case in CASES}
ISOLATED = (
    *(BY_NAME[name] for name in ("equal", "pieces", "long-full")),
    Case("short", (33, 16, 20, 17, 16, 40, 30, 31)),
    Case("short-multi-head", (33, 16, 20, 17), kv_heads=4),
    Case("cross-long", (40, 200, 20, 20), (50, 300, 22, 22)),
    Case("sinks-long", (40, 200, 20, 20), sinks=True),
)


def plan_of(inputs: Inputs, **options: Any) -> blocked.Plan:
    given = make_options(inputs.q, inputs.mask, sinks=inputs.sinks, **(inputs.keywords | options))
    return blocked.plan_tiles(inputs.q, inputs.k, inputs.v, inputs.mask, given, backward=True).plan


def run_without_lse(inputs: Inputs) -> dict[str, Tensor]:
    """out, dq, dk and dv of a loss that doesn't depend on lse, as in training."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = varlen_attention(*leaves, inputs.mask, sinks=inputs.sinks, backend="blocked")
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


class TestExactness:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"])
    @pytest.mark.parametrize(
        "case", [pytest.param(x, marks=pytest.mark.slow if sum(x.seqlens) > 900 else (), id=x.name) for x in CASES]
    )
    @pytest.mark.fast("equal-bf16", "one-document-bf16", "rows-of-60-bytes-bf16", "cross-full-fp32", "sinks-fp32")
    @pytest.mark.usefixtures("poisoned_memory")
    def test_error_within_tolerance(self, case: Case, dtype: torch.dtype) -> None:
        inputs = make_inputs(case, dtype, slack_value=NAN)
        assert plan_of(inputs).runs
        check_outputs(inputs, run(inputs, "blocked"))
        check_outputs(replace(inputs, dlse=torch.zeros_like(inputs.dlse)), run_without_lse(inputs))

    @pytest.mark.parametrize("lengths", [(1,), (20,)])
    def test_rows_that_overlap_in_memory(self, lengths: tuple[int, ...]) -> None:
        """Strides that no matrix product takes; `contiguous` doesn't change those of a single row."""
        inputs = make_inputs(Case("overlapping", lengths, **SMALL))
        q = torch.randn(2, 40).as_strided((lengths[0], 2, 16), (1, 40, 1))
        expected = run(replace(inputs, q=q.clone(memory_format=torch.contiguous_format)), "blocked")
        actual = run(replace(inputs, q=q), "blocked")
        assert all(torch.equal(actual[name], expected[name]) for name in ROW_OUTPUTS)

    @pytest.mark.parametrize("name", ["equal", "mixed", "multi-head"])
    def test_heads_before_tokens_in_memory(self, name: str) -> None:
        """As models keep keys and values, and often queries, too."""
        inputs = make_inputs(BY_NAME[name])
        names = ("q", "k", "v", "dout")
        other = {x: getattr(inputs, x).transpose(0, 1).contiguous().transpose(0, 1) for x in names}
        check_outputs(inputs, run(replace(inputs, **other), "blocked"))

    @pytest.mark.parametrize(("head_dim", "heads"), [(256, 4), (300, 2), (512, 16)])
    def test_forward_and_backward_agree_on_the_scores(self, head_dim: int, heads: int) -> None:
        """The weight of a document's only key is 1 in both, also if the gradient of lse takes a further column."""
        k, v = torch.randn(2, 6, 2, head_dim)
        q, dout = torch.randn(2, 6, heads, head_dim)
        mask = BlockDiagonalMask.from_seqlens([1] * 6)
        v.requires_grad_()
        out, lse = varlen_attention(q * 30, (k * 30).requires_grad_(), v, mask, return_lse=True, backend="blocked")
        (dv,) = torch.autograd.grad((out * dout).sum() + lse.sum(), v)
        torch.testing.assert_close(dv, dout.unflatten(1, (2, -1)).sum(2), rtol=1e-5, atol=1e-6 * heads)

    def test_two_threads_give_the_same_bits_again(self) -> None:
        inputs = make_inputs(replace(BY_NAME["mixed"], seqlens=(300, *MIXED)))
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            first = run(inputs, "blocked")
            again = [run(inputs, "blocked") for _ in range(3)]
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(one[name], first[name]) for one in again for name in first)


class TestIsolation:
    @pytest.mark.parametrize("case", ISOLATED, ids=str)
    def test_a_document_of_nan_changes_no_bit_of_others(self, case: Case) -> None:
        """Each document in turn. A call reads no other document, so NaN is contained without `pack_invariant`."""
        inputs = make_inputs(case)
        assert not plan_of(inputs).blocks
        clean = run(inputs, "blocked")
        ends = [accumulate(lengths, initial=0) for lengths in (case.seqlens, case.seqlens_k or case.seqlens)]
        for of_q, of_k in zip(*([slice(*x) for x in pairwise(one)] for one in ends), strict=True):
            changed = {x: getattr(inputs, x).clone() for x in ("q", "k", "v", "dout", "dlse")}
            for x in (changed["q"], changed["dout"], changed["dlse"].T):
                x[of_q] = NAN
            for x in (changed["k"], changed["v"]):
                x[of_k] = NAN
            outputs = run(replace(inputs, **changed), "blocked")
            for output in ROW_OUTPUTS:
                got, want = ((x.T if output == "lse" else x) for x in (outputs[output], clean[output]))
                own = torch.zeros(got.shape[0], dtype=torch.bool)
                own[of_k if output in ("dk", "dv") else of_q] = True
                assert torch.equal(got[~own], want[~own]), output
                assert got[own].isnan().all(), output

    @pytest.mark.parametrize("keys", [1, 7, 15, 16, 17, 33, 512, 515, 600])
    @pytest.mark.parametrize("poisoned", ["q", "k"])
    def test_nan_is_never_lost(self, poisoned: str, keys: int) -> None:
        """The kernel turns rows of NaN into zeros if they have fewer keys than a vector has numbers."""
        inputs = make_inputs(Case("nan", (3,), (keys,), causal=False, **SMALL))
        getattr(inputs, poisoned).fill_(NAN)
        out, lse = varlen_attention(inputs.q, inputs.k, inputs.v, inputs.mask, return_lse=True, backend="blocked")
        assert out.isnan().all()
        assert lse.isnan().all()


def sizes(case: Case | Inputs, **options: Any) -> tuple[int, int]:
    plan = plan_of(make_inputs(case) if isinstance(case, Case) else case, **options)
    return len(plan.runs), len(plan.blocks)


class TestPlan:
    @pytest.mark.parametrize(
        ("case", "runs", "blocks"),
        [
            (Case("one", (2000,)), 1, 0),
            (Case("one in pieces", (900,)), 7, 0),
            (Case("one, full", (900,), causal=False), 1, 0),
            (Case("short and long", (20, 192, 193, 1)), 5, 1),
            (Case("short, full", (15, 3, 16, 2), causal=False), 1, 2),
            (Case("short, window", (20, 30), window=(5, 0)), 0, 1),
            (Case("window", (20, 30, 31, 200), window=(29, 0)), 2, 3),
            (Case("short, sinks", (20, 30), sinks=True), 2, 0),
            (Case("few queries, many keys", (40, 40, 200), (50, 200, fused.MAX_PIECE_KEYS + 1)), 2, 5),
            (Case("few keys", (200,), (5,), causal=False), 0, 2),
            (Case("wide", (20, 200), head_dim=256, head_dim_v=300), 3, 0),
            (Case("too wide", (20, 200), head_dim=257), 0, 3),
            (Case("softcap", (20, 30), softcap=5.0), 0, 1),
            (Case("alibi", (20, 30), alibi="heads"), 0, 1),
            (Case("dropout", (20, 30), dropout_p=0.1), 0, 1),
            (Case("tree", (20,), parents=(-1, *range(19))), 0, 1),
            (Case("nothing", (0,), slack=7), 0, 0),
        ],
        ids=str,
    )
    def test_what_computes_which(self, case: Case, runs: int, blocks: int) -> None:
        assert sizes(case) == (runs, blocks)
        if not case.dropout_p and not case.parents:
            assert sizes(case, pack_invariant=True)[0] == runs

    def test_pieces_have_whole_vectors_of_keys_and_chunks_are_documents(self) -> None:
        runs = plan_of(make_inputs(Case("pieces", (300, 200), (300, 210)))).runs
        assert [run[:4] for run in runs] == [(0, 160, 0, 160), (160, 300, 0, 300), (300, 402, 300, 412),
                                             (402, 500, 300, 510)]  # fmt: skip
        chunked = BlockDiagonalMask.from_seqlens([512], chunk_size=32)
        assert sizes(replace(make_inputs(Case("chunked", (512,))), mask=chunked)) == (16, 0)

    @pytest.mark.parametrize(
        ("name", "value"), [("_operators", tuple), ("SHARES_KEY_HEADS", False)], ids=["no kernel", "torch 2.8"]
    )
    def test_without_the_kernel_blocks_compute_all(
        self, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fused, name, value)
        inputs = make_inputs(BY_NAME["mixed"])
        assert sizes(inputs) == (0, 5)
        check_outputs(inputs, run(inputs, "blocked"))

    def test_the_plan_is_made_once_per_mask(self) -> None:
        inputs = make_inputs(BY_NAME["mixed"])
        assert plan_of(inputs) is plan_of(inputs)


@pytest.mark.parametrize("softcap", [0.0, 50.0], ids=["fused", "blocks"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(7, torch.float32), (33, torch.float32), (7, torch.float64)])
def test_pack_invariant_at_any_address(head_dim: int, dtype: torch.dtype, softcap: float) -> None:
    """Rows of these head dimensions begin at any multiple of the type's size; products take other sums there."""
    torch.manual_seed(0)
    packed = [torch.randn(17 + 200, 1, head_dim, dtype=dtype).requires_grad_() for _ in range(3)]
    alone = [x.detach()[17:].clone().requires_grad_() for x in packed]
    results = []
    for inputs, lengths in ((packed, [17, 200]), (alone, [200])):
        mask = BlockDiagonalMask.from_seqlens(lengths)
        out = varlen_attention(*inputs, mask, softcap=softcap, pack_invariant=True, backend="blocked")
        out.sum().backward()
        results.append([x[-200:] for x in (out, *(y.grad for y in inputs))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("score", [3e38, -3e38])
def test_scores_that_overflow_in_blocks(score: float) -> None:
    """All scores of -inf: no weight and no gradient; of inf: NaN, as in plain attention."""
    q, k, v = torch.full((1, 1, 4), 3e38), torch.full((3, 1, 4), math.copysign(3e38, score)), torch.ones(3, 1, 4)
    mask = BlockDiagonalMask.from_seqlens([1], [3], causal=False)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = varlen_attention(*inputs, mask, return_lse=True, backend="blocked")
    gradients = torch.autograd.grad(out.sum(), inputs)
    if score < 0:
        assert lse.item() == -math.inf
        assert all((x == 0).all() for x in (out, *gradients))
    else:
        assert all(x.isnan().all() for x in (lse, out, *gradients))
