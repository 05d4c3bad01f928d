"""varlen_attention on the backends that run on a CPU, and of the kernels in Triton's interpreter what all backends
promise: isolation of documents, rows that see nothing, the same bits in every pack."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from tests import invariance
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import BACKENDS as REGISTRY
from tritonpack.backends import blocked
from tritonpack.testing import CASES, Case, Inputs, check_backend, make_inputs
from tritonpack.testing.tolerance import ROW_OUTPUTS, run, run_plain

NAN, INF = float("nan"), float("inf")


def slow(value: Any) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.slow)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16), torch.float32, torch.float64], ids=str)


ON_CPU = [name for name in REGISTRY if name not in ("auto", "triton", "gluon")]
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = pytest.mark.parametrize("backend", ON_CPU)
AND_TRITON = pytest.mark.parametrize("backend", [*ON_CPU, TRITON])
IN_DTYPES = [
    *(pytest.param(dtype, name, marks=pytest.mark.slow if dtype == torch.float16 else ())
      for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64) for name in ON_CPU),
    pytest.param(torch.float32, "triton", marks=pytest.mark.interpreter),
]  # fmt: skip

# Lengths around the sizes of the blocked backend's tiles, and short documents that share a tile.
BLOCK, KEYS = blocked.BLOCK_ROWS, blocked.BLOCK_KEYS
SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16}
EDGES = (
    *(Case(f"block{extra:+}", (BLOCK + extra, 0, 3), **SMALL) for extra in (-1, 0, 1)),
    Case("blocks-and-window", (5, 2 * BLOCK + 7, 0, 9), window=(BLOCK + 3, 0), **SMALL),
    Case("key-block", (3, KEYS, 1), **SMALL),
    Case("key-blocks", (9, KEYS + 90), softcap=5.0, sinks=True, alibi="heads", **SMALL),
    Case("key-blocks-cross", (5, 40), (KEYS + 1, 2 * KEYS + 60), dropout_p=0.2, **SMALL),
)
ISOLATION = Case("isolation", (37, 0, BLOCK + 5, 30), slack=11)
TREES = {case.name: case for case in CASES if case.parents is not None}


def rows_first(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.T if name == "lse" else x for name, x in outputs.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in ROW_OUTPUTS:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


class TestExactness:
    @BACKENDS
    @pytest.mark.parametrize(
        "dtype", [torch.float32, *map(slow, (torch.bfloat16, torch.float16, torch.float64))], ids=str
    )
    @pytest.mark.parametrize("case", CASES + EDGES, ids=str)
    def test_error_within_tolerance(self, case: Case, dtype: torch.dtype, backend: str) -> None:
        check_backend(make_inputs(case, dtype, slack_value=NAN), backend)

    @BACKENDS
    def test_another_scale_and_large_scores(self, backend: str) -> None:
        check_backend(make_inputs(Case("scaled", (40, 0, 23), scale=0.71)), backend)
        inputs = make_inputs(Case("large", (40, 0, 23)))
        check_backend(replace(inputs, q=inputs.q * 100), backend)

    @AND_TRITON
    def test_two_keys_by_hand(self, backend: str) -> None:
        """Two keys with scores 0 and ln 3 weigh 1/4 and 3/4; their log-sum-exp is ln 4."""
        q, k, v = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
        q[1, 0, 0], k[1, 0, 0] = 1.0, math.log(3)
        v[0], v[1] = 4.0, 8.0
        mask = BlockDiagonalMask.from_seqlens([2])
        out, lse = varlen_attention(q, k, v, mask, scale=1.0, return_lse=True, backend=backend)
        torch.testing.assert_close(out[:, 0, 0], torch.tensor([4.0, 7.0]))
        torch.testing.assert_close(lse, torch.tensor([[0.0, math.log(4)]]))

    @pytest.mark.fast(
        "slack", "window-right-open", "head-dim-16", "head-dim-160", "head-dim-320", "softcap-window", "alibi-cross",
        "tree-head-dim-96-16",
    )  # fmt: skip
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_reference_gradients_equal_autograd(self, case: Case) -> None:
        """The formulas of the backward pass against autograd through the forward pass, in float64."""
        inputs = make_inputs(case, torch.float64)
        by_formula, by_autograd = run(inputs, "reference"), run_plain(inputs)
        assert_close(by_formula, by_autograd)

    @BACKENDS
    @pytest.mark.parametrize("case", [ISOLATION, TREES["tree"]], ids=str)
    def test_fifty_backward_passes_give_the_same_bits(self, case: Case, backend: str) -> None:
        """And change no input."""
        inputs, copy = make_inputs(case), make_inputs(case)
        first = run(inputs, backend)
        for _ in range(50):
            again = run(inputs, backend)
            assert all(torch.equal(first[name], again[name]) for name in first)
        assert all(torch.equal(getattr(inputs, x), getattr(copy, x)) for x in ("q", "k", "v", "dout", "dlse"))

    def test_other_derivatives_are_refused(self) -> None:
        """Second derivatives, transforms of torch.func, and tangents."""
        tensors = {name: torch.randn(4, 2, 16) for name in "qkv"}

        def loss(q: Tensor, **others: Tensor) -> Tensor:
            return varlen_attention(**tensors | {"q": q} | others, mask=of_four()).sum()

        (dq,) = torch.autograd.grad(loss(q := tensors["q"].clone().requires_grad_()) ** 2, q, create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            dq.sum().backward()
        with pytest.raises(ValueError, match=r"transform of torch.func.*torch.autograd.grad"):
            torch.func.grad(loss)(tensors["q"])
        with torch.autograd.forward_ad.dual_level():
            loss(tensors["q"])
            for name, x in tensors.items():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                with pytest.raises(ValueError, match=r"tangents of torch.autograd.forward_ad.*torch.autograd.grad"):
                    loss(**{"q": tensors["q"], name: dual})


class TestReturns:
    @BACKENDS
    @DTYPES
    def test_shapes_and_dtypes(self, dtype: torch.dtype, backend: str) -> None:
        case = Case("shapes", (5, 0, 4), (2, 3, 7), slack=2, heads=6, kv_heads=3, head_dim=24)
        inputs = make_inputs(case, dtype)
        outputs = run(inputs, backend)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert (outputs["out"].shape, outputs["out"].dtype) == ((11, 6, 24), dtype)
        assert (outputs["lse"].shape, outputs["lse"].dtype) == ((6, 11), wide)
        for name, like in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
            assert (outputs[name].shape, outputs[name].dtype) == (like.shape, dtype)

    @AND_TRITON
    @pytest.mark.parametrize(("queries", "keys"), [([0], [5]), ([5], [0]), ([0], [0]), ([3, 2], [0, 2])])
    def test_rows_that_see_nothing(self, queries: list[int], keys: list[int], backend: str) -> None:
        q, k = (torch.randn(sum(lengths), 2, 16, requires_grad=True) for lengths in (queries, keys))
        mask = BlockDiagonalMask.from_seqlens(queries, keys)
        out, lse = varlen_attention(q, k, k, mask, return_lse=True, backend=backend)
        dq, dk = torch.autograd.grad(out, (q, k), torch.ones_like(out))
        assert (out.shape, lse.shape, dk.shape) == (q.shape, (2, sum(queries)), k.shape)
        seeing = mask.key_start < mask.key_stop
        assert not any(x[~seeing].any() for x in (out, dq))
        assert torch.equal(lse.isfinite(), seeing.expand(2, -1))
        assert bool((lse[:, ~seeing] == -INF).all())
        assert bool(out[seeing].all())
        assert bool(dk.any()) == bool(seeing.any())


class TestIsolation:
    @pytest.mark.parametrize(("dtype", "backend"), IN_DTYPES)
    def test_a_change_in_a_document_changes_no_other_bit(self, dtype: torch.dtype, backend: str) -> None:
        case = replace(ISOLATION, heads=2, kv_heads=1)
        before, begin = rows_first(run(make_inputs(case, dtype), backend)), 0
        for length in case.seqlens:
            inputs, rows = make_inputs(case, dtype), slice(begin, begin + length)
            for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse.T):
                x[rows] += 1.5 * torch.randn_like(x[rows])
            after = rows_first(run(inputs, backend))
            for name in ROW_OUTPUTS:
                others = torch.ones(before[name].shape[0], dtype=torch.bool)
                others[rows] = False
                assert torch.equal(before[name][others], after[name][others]), name
                assert not length or not torch.equal(before[name][rows], after[name][rows]), name
            begin += length

    @pytest.mark.parametrize(
        ("case", "backend"),
        [*((case, name) for case in (ISOLATION, TREES["tree-forest"]) for name in ON_CPU),
         pytest.param(ISOLATION, "triton", marks=pytest.mark.interpreter)],
    )  # fmt: skip
    @pytest.mark.usefixtures("poisoned_memory")
    def test_slack_is_inert(self, case: Case, backend: str) -> None:
        clean = run(make_inputs(case, slack_value=0.0), backend)
        for value in (NAN,) if backend == "triton" else (NAN, INF, -INF):
            poisoned = run(make_inputs(case, slack_value=value), backend)
            assert all(torch.equal(clean[name], poisoned[name]) for name in ROW_OUTPUTS)
        slack = {name: x[-case.slack :] for name, x in rows_first(clean).items() if name in ROW_OUTPUTS}
        assert bool((slack.pop("lse") == -INF).all())
        assert not any(rows.any() for rows in slack.values())

    @AND_TRITON
    @pytest.mark.parametrize(
        ("padding", "dropout"),
        [([[0] * 9 + [1] * 31, [1] * 25 + [0] * 15, [1] * 40], {}),
         ([[0] * 33 + [1] * 64 + [0] * 31], {"dropout_p": 0.3, "dropout_seed": 1})],
        ids=["in-tiles", "around-tiles-dropout"],
    )  # fmt: skip
    @pytest.mark.usefixtures("poisoned_memory")
    def test_padding_between_documents_is_inert(
        self, padding: list[list[int]], dropout: dict[str, Any], backend: str
    ) -> None:
        """Padding in the middle of the stream, in tiles that also have rows of documents, and around tiles.

        With dropout Triton's blocks of keys begin at even numbers, so they read the key before a document that begins
        at an odd one.
        """
        mask = BlockDiagonalMask.from_padding_mask(torch.tensor(padding))
        rows = make_inputs(Case("rows", (mask.num_queries,)))
        clean, poisoned = (
            replace(rows, **{x: getattr(rows, x).clone() for x in ("q", "k", "v", "dout", "dlse")}, mask=mask,
                    keywords=dropout) for _ in range(2)
        )  # fmt: skip
        dead = mask.key_start == mask.key_stop
        for inputs, value in ((clean, 0.0), (poisoned, NAN)):
            for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse.T):
                x[dead] = value
        expected, actual = rows_first(run(clean, backend)), rows_first(run(poisoned, backend))
        for name in ROW_OUTPUTS:
            assert torch.equal(expected[name], actual[name]), name
            if name != "lse":
                assert not actual[name][dead].any(), name

    @BACKENDS
    def test_packed_equals_alone(self, backend: str) -> None:
        """Each document alone has the same results as in the batch, up to the order of sums."""
        inputs = make_inputs(ISOLATION, torch.float64)
        packed, sizes = rows_first(run(inputs, backend)), [*ISOLATION.seqlens, ISOLATION.slack]
        given = (x.split(sizes) for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse.T))
        for number, (q, k, v, dout, dlse) in enumerate(list(zip(*given, strict=True))[:-1]):
            mask = BlockDiagonalMask.from_seqlens([len(q)])
            alone = rows_first(run(Inputs(q, k, v, dout, dlse.T, mask), backend))
            assert_close({name: packed[name].split(sizes)[number] for name in ROW_OUTPUTS}, alone)


class TestPackInvariance:
    @DTYPES
    @pytest.mark.parametrize("case", invariance.CASES, ids=str)
    def test_pack_invariant_documents_have_the_same_bits_in_every_pack(self, case: Case, dtype: torch.dtype) -> None:
        longer = replace(case, seqlens=(37, 5, 150, 1, BLOCK, BLOCK + 1, 33))
        assert not invariance.moved_outputs(longer, dtype, "blocked", pack_invariant=True)
        for poison in invariance.POISONS if dtype == torch.float32 else ():
            assert not invariance.moved_outputs(longer, dtype, "blocked", pack_invariant=True, poison=poison)

    @pytest.mark.parametrize("value", [NAN, INF])
    @AND_TRITON
    def test_what_is_not_finite_reaches_neighbours_without_pack_invariant(self, backend: Any, value: float) -> None:
        """docs/backends.md promises containment for pack_invariant alone. With softcap "blocked" uses tiles, too."""
        q, k, v = torch.randn(3, 40, 1, 16)
        v[25] = value
        mask = BlockDiagonalMask.from_seqlens([20, 20])
        for contained in (False, True) if backend != "reference" else (False,):
            out = varlen_attention(q, k, v, mask, softcap=5.0, backend=backend, pack_invariant=contained)
            assert bool(out[:20].isfinite().all()) == contained

    def test_bits_differ_without_pack_invariant(self) -> None:
        assert invariance.moved_outputs(invariance.CASES[-1], torch.float32, "blocked", pack_invariant=False)


class TestAutocast:
    @BACKENDS
    @pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_equals_inputs_cast_before(self, backend: Any, given: torch.dtype) -> None:
        """float32 queries and keys, as after rotary embeddings, with bfloat16 values; no product loses precision."""
        inputs = make_inputs(ISOLATION, torch.bfloat16)
        expected = run(inputs, backend)
        q, k = (x.to(given).requires_grad_() for x in (inputs.q, inputs.k))
        v = inputs.v.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = varlen_attention(q, k, v, inputs.mask, return_lse=True, backend=backend)
            grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
        assert [x.dtype for x in (out, lse, *grads)] == [torch.bfloat16, torch.float32, given, given, torch.bfloat16]
        for name, got in zip(ROW_OUTPUTS, (out, lse, *grads), strict=True):
            assert torch.equal(got.to(expected[name].dtype), expected[name]), name
        inputs = make_inputs(ISOLATION, torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check_backend(inputs, backend)  # float64 stays


class TestLayouts:
    @BACKENDS
    def test_strided_and_expanded_inputs(self, backend: str) -> None:
        inputs = make_inputs(Case("strided", (30, 21), head_dim=24))
        expected = run(inputs, backend)
        wide = torch.zeros(51, 4, 31)
        wide[..., 5:29] = inputs.q
        strided = replace(
            inputs,
            q=wide[..., 5:29],
            k=inputs.k.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            v=inputs.v.transpose(0, 1).contiguous().transpose(0, 1),
            dout=inputs.dout.flip(0).contiguous().flip(0),
            dlse=inputs.dlse.T.contiguous().T,
        )
        assert not any(x.is_contiguous() for x in (strided.q, strided.k, strided.v, strided.dlse))
        assert_close(run(strided, backend), expected)

    @BACKENDS
    def test_only_v_requires_a_gradient(self, backend: str) -> None:
        """Given in full, and by `out.sum()`, whose gradient is a tensor of stride 0."""
        inputs = make_inputs(Case("frozen", (30, 21)))
        v = inputs.v.requires_grad_()
        out = varlen_attention(inputs.q, inputs.k, v, inputs.mask, backend=backend)
        for dout, outputs in ((inputs.dout, out), (torch.ones_like(out), out.sum())):
            (dv,) = torch.autograd.grad(outputs, v, dout if outputs is out else None, retain_graph=True)
            expected = run(replace(inputs, dout=dout, dlse=torch.zeros_like(inputs.dlse)), backend)
            assert torch.equal(dv, expected["dv"])


def call(**changes: Any) -> Tensor:
    """Attention of 4 queries and keys in 2 heads of 16, with some arguments replaced, or made by a function."""
    arguments = {name: torch.randn(4, 2, 16) for name in "qkv"} | {"mask": of_four, "backend": "blocked"} | changes
    return varlen_attention(**{name: x() if callable(x) else x for name, x in arguments.items()})


def of_four() -> BlockDiagonalMask:
    return BlockDiagonalMask.from_seqlens([4])


def all_three(*shape: int, **options: Any) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, **options) for name in "qkv"}


SIZES = "the mask is for 4 queries and 4 keys, but q has"
# Changed arguments, and words of the refusal
BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 2, 4, 16)},
     r"q must be a tensor of shape \(tokens, heads, head_dim\); got shape \(1, 2, 4, 16\). Flatten a batch"),
    ({"k": [1.0]}, r"k must be a torch tensor of shape .*; got list. Convert it"),
    ({"q": torch.zeros(4, 2, 16).to_sparse()}, r"q must be a dense tensor; got torch.spar"),
    ({"k": torch.zeros(4, 2, 16).half()}, "q, k and v must share .*; got float32, float16, float32. Cast them first"),
    (all_three(4, 2, 16, dtype=torch.int32), "one dtype of bfloat16, float16, float32, float64; got int32, int32, int"),
    ({"mask": torch.ones(4, 4)}, "mask must be a tritonpack.BlockDiagonalMask; got Tensor. Build one with"),
    ({"v": torch.zeros(4, 2, 16, device="meta")}, "q, k, v and mask must be on one device; got cpu, cpu, meta, cpu"),
    ({"mask": lambda: of_four().to("meta")}, "on one device; got cpu, cpu, cpu, meta"),
    ({"v": torch.zeros(5, 2, 16)}, r"k and v must have the same .* heads; got \(4, 2, 16\) and \(5, 2, 16\)"),
    ({"q": torch.zeros(4, 3, 16)}, "query heads must be a multiple of the number of key heads; got 3 and 2"),
    ({"q": torch.zeros(4, 2, 32)}, "q and k must have the same head dim.* each from 1 to 512; got 32, 16 and 16"),
    (all_three(4, 2, 513), "from 1 to 512; got 513, 513 and 513"),
    ({"q": torch.zeros(6, 2, 16)}, f"{SIZES} 6 rows and k 4. Pass total_q and total_k"),
    ({"k": torch.zeros(5, 2, 16), "v": torch.zeros(5, 2, 16)}, f"{SIZES} 4 rows and k 5"),
    *(({"scale": x}, f"scale must be a positive finite int or float, .*; got {x}") for x in (0.0, -1.0, INF, NAN)),
    ({"softcap": -1.0}, "softcap must be .* above 0, or 0.0 for none; got -1.0"),
    *(({"dropout_p": x}, f"dropout_p must be .* from 0 to below 1; got {x}") for x in (1.0, NAN)),
    *(({"dropout_p": p, "dropout_seed": x}, f"dropout_seed must be an integer .* got {x!r}")
      for p in (0.0, 0.1) for x in (-1, True, "x")),
    ({"dropout_p": 0.1, "dropout_seed": torch.tensor(1.0)}, r"be an int64 scalar on cpu; got \(\) float32 on cpu"),
    ({"dropout_p": 0.1, "pack_invariant": True}, "exclude each other.* Set dropout_p=0.0 or pack_invariant=False"),
    ({"sinks": torch.zeros(3)}, r"sinks must be .* shape \(heads,\) = \(2,\); got \(3,\) float32"),
    ({"sinks": torch.zeros(2).double()}, "sinks of float64 don't fit float32 inputs; cast them"),
    ({"alibi_slopes": torch.zeros(2).double()}, "alibi_slopes of float64 don't fit float32 inputs; cast them"),
    ({"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must be .* with 2 heads; got \(3,\) float32"),
    ({"alibi_slopes": torch.zeros(2).half()}, "must be float32; got .*float16"),
    ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, r"no gradient; pass alibi_slopes.detach\(\)"),
    ({"alibi_slopes": torch.zeros(2), "mask": lambda: of_four().transpose()}, "this mask has no diagonal"),
    ({"alibi_slopes": torch.zeros(0, 2)}, "alibi_slopes are for 0 documents, but the mask has more"),
    ({"alibi_slopes": torch.zeros(2, 2)}, "alibi_slopes are for 2 documents, but the mask has 1"),
    ({"backend": "flash"}, "backend must be one of 'auto', 'triton', 'gluon', 'blocked', 'reference'; got 'flash'"),
    ({"backend": "reference", "pack_invariant": True},
     "can't be pack_invariant; use backend='blocked' or 'triton'"),
    ({"mask": lambda: BlockDiagonalMask.from_tree([-1, 0, 0, 0]), "pack_invariant": True}, "in a mask of trees"),
    ({"mask": lambda: BlockDiagonalMask.from_tree([-1]), "q": torch.zeros(1, 2, 16)}, "trees supports neither a cache"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_raises_with_its_reason(changes: dict[str, Any], message: str) -> None:
    call()
    with pytest.raises(ValueError, match=message):
        call(**changes)
