"""The kernels for Hopper on the hardware: results and gradients."""

from dataclasses import replace

import pytest
import torch

from tests import invariance
from tests.gpu.cases import HOPPER_HEAD_DIMS, LARGE, is_plain
from tritonpack import varlen_attention
from tritonpack.testing import CASES, Case, check_backend, make_inputs
from tritonpack.testing.tolerance import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(torch.version.hip) or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels are for Hopper GPUs",
    ),
]

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SMALL = [case for case in CASES if is_plain(case) and case.head_dim == 32]
WHOLE = [case for case in LARGE if is_plain(case) and case.head_dim in HOPPER_HEAD_DIMS]


@HALF
@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_small_cases(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(replace(case, head_dim=head_dim), dtype, "cuda", slack_value=float("nan"))
    check_backend(inputs, "gluon")


@HALF
@pytest.mark.parametrize("case", WHOLE, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_large_cases(case: Case, dtype: torch.dtype) -> None:
    check_backend(make_inputs(case, dtype, "cuda", slack_value=float("nan")), "gluon")


@HALF
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_repeats_are_equal_to_the_bit(case: Case, dtype: torch.dtype) -> None:
    """A race would change results or gradients between runs; many programs of many lengths run at a time."""
    inputs = make_inputs(replace(case, heads=4 * case.heads, kv_heads=4 * case.kv_heads), dtype, "cuda")
    first = run(inputs, "gluon")
    for _ in range(200):
        again = run(inputs, "gluon")
        assert all(torch.equal(first[name], again[name]) for name in first)


@HALF
@pytest.mark.parametrize("case", invariance.CASES, ids=str)
def test_pack_invariant_documents_have_the_same_bits_in_every_pack(case: Case, dtype: torch.dtype) -> None:
    longer = replace(case, seqlens=(37, 5, 450, 1, 128, 129, 33), head_dim=128, head_dim_v=None, softcap=0.0,
                     sinks=False, alibi=None)  # fmt: skip
    assert not invariance.moved_outputs(longer, dtype, "gluon", pack_invariant=True, device="cuda")


def test_one_graph_for_every_length() -> None:
    """torch.compile makes one graph for this backend, too."""
    compiled = torch.compile(varlen_attention, fullgraph=True)
    for lengths in ((100, 28), (5, 700), (300,)):
        inputs = make_inputs(Case("compiled", lengths, head_dim=128), torch.bfloat16, "cuda")
        out = compiled(inputs.q, inputs.k, inputs.v, inputs.mask, backend="gluon")
        assert torch.equal(out, varlen_attention(inputs.q, inputs.k, inputs.v, inputs.mask, backend="gluon"))
