"""torch.compile: one graph, no recompilation when lengths change, and operators that pass torch's opcheck."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import Backend
from tritonpack.ops import plan
from tritonpack.options import make_options
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.cases import tree_case

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's warnings


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def attention_with_lse(cu_seqlens: Tensor, *leaves: Tensor, backend: Backend) -> tuple[Tensor, Tensor]:
    *inputs, sinks = leaves
    mask = BlockDiagonalMask.from_cu_seqlens(cu_seqlens, total_q=inputs[0].shape[0])
    return varlen_attention(*inputs, mask, sinks=sinks, softcap=20.0, return_lse=True, backend=backend)


def outputs(function: Any, lengths: list[int]) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    leaves.append(torch.randn(4, requires_grad=True))
    out, lse = function(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), *leaves)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]


@pytest.mark.parametrize(
    ("compiler", "backend"),
    [("aot_eager", "blocked"), pytest.param("inductor", "blocked", marks=pytest.mark.slow),
     pytest.param("aot_eager", "triton", marks=(pytest.mark.interpreter, pytest.mark.slow))],
)  # fmt: skip
def test_one_graph_for_all_lengths(compiler: str, backend: Backend) -> None:
    """Sizes are symbols in forward and backward. Backends are imported, and tiles are planned, while torch.compile
    traces."""
    counter, counts = CompileCounterWithBackend(compiler), set()
    function = partial(attention_with_lse, backend=backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([30, 5, 0, 21], [7, 90, 4], [3, 3, 3], [64, 64, 1]):
        for expected, got in zip(outputs(function, lengths), outputs(compiled, lengths), strict=True):
            torch.testing.assert_close(got, expected)
        counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.parametrize(
    "case",
    [
        Case("plain", (9, 0, 5)),
        Case("everything", (9, 4, 5), softcap=5.0, sinks=True, alibi="documents", dropout_p=0.2, head_dim_v=8),
        tree_case("tree", [(-1, 5), (0, 3), (0, 4)], alibi="heads", window=(6, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.fast("reference-plain")
def test_operators_pass_opcheck(case: Case, backend: str) -> None:
    inputs = make_inputs(case)
    options = make_options(inputs.q, inputs.mask, sinks=inputs.sinks, **inputs.keywords)
    arguments = plan(inputs.q, inputs.k, inputs.v, inputs.mask, options, backend, backward=True)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    if options.sinks is not None:
        options.sinks.requires_grad_()
    torch.library.opcheck(torch.ops.tritonpack.attention.default, (q, k, v, *arguments))
    with torch.no_grad():
        out, lse = torch.ops.tritonpack.attention.default(q, k, v, *arguments)
    given = (inputs.dout, inputs.dlse, q, k, v, out, lse, *arguments)
    detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
    torch.library.opcheck(torch.ops.tritonpack.attention_backward.default, detached)
