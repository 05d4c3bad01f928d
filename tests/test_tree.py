"""Attention over trees: equal to every path alone, no bit moves outside of a branch, and one graph for all sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.masks.forests import forests, leaves_of, path_of, visible
from tests.trees import mask_of_ends
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.masks.tree import SLACK
from tritonpack.testing import CASES, make_inputs
from tritonpack.testing.tolerance import ROW_OUTPUTS, run

BACKENDS = pytest.mark.parametrize("backend", ["blocked", "reference"])
IN_THE_INTERPRETER = pytest.param("triton", marks=pytest.mark.interpreter)
AND_TRITON = pytest.mark.parametrize("backend", ["blocked", "reference", IN_THE_INTERPRETER])
TREES = {case.name: case for case in CASES if case.parents is not None}


@pytest.mark.fast("reference")
@BACKENDS
@settings(max_examples=25)
@given(
    parents=forests(),
    window=st.sampled_from([(-1, -1), (0, 0), (4, 0), (11, 0)]),
    heads=st.sampled_from([(2, 2), (4, 1), (6, 2)]),
)
def test_a_tree_equals_every_path_alone(
    backend: Any, parents: tuple[int, ...], window: Any, heads: tuple[int, int]
) -> None:
    """Outputs are equal, and the gradients of a shared token are the sums over its paths."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    paths = [path_of(parents, leaf) for leaf in leaves_of(parents)]
    rows, total = torch.cat([torch.tensor(path) for path in paths]), len(parents)
    leaves = draw(total, heads[0], 8), draw(total, heads[1], 8), draw(total, heads[1], 4)
    dout, dlse = draw(len(rows), heads[0], 4), draw(heads[0], len(rows))
    tree = BlockDiagonalMask.from_tree(parents, window=window)
    alone = BlockDiagonalMask.from_seqlens([len(path) for path in paths], window=window)
    results = []
    for mask, inputs, outputs in ((tree, slice(None), rows), (alone, rows, slice(None))):
        out, lse = varlen_attention(*(x[inputs] for x in leaves), mask, return_lse=True, backend=backend)
        out, lse = out[outputs], lse[:, outputs]
        results.append((out, lse, *torch.autograd.grad((out * dout).sum() + (lse * dlse).sum(), leaves)))
    for name, actual, expected in zip(ROW_OUTPUTS, *results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@AND_TRITON
@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("tree-window-sinks", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("tree-forest", 75), ("tree-dropout", 75))),
    ],
)
def test_a_change_in_a_branch_moves_no_bit_outside(name: str, token: int, backend: str) -> None:
    """Outputs change in the token's subtree alone; gradients of keys and values also among its ancestors."""
    case = TREES[name]
    assert case.parents is not None
    family = visible(case.parents + (SLACK,) * case.slack)
    inputs = make_inputs(case, torch.float32)
    before = run(inputs, backend)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[token] += 1.5
    after = run(inputs, backend)
    below = family[:, token]
    above = family[below].any(0)  # the ancestors of the subtree, and the subtree
    for output in ROW_OUTPUTS:
        may_move = above if output in ("dk", "dv") else below
        old, new = (x[output].T if output == "lse" else x[output] for x in (before, after))
        assert torch.equal(old[~may_move], new[~may_move]), output
        assert not torch.equal(old[may_move], new[may_move]), output


@AND_TRITON
def test_a_part_of_a_tree_whose_rows_see_no_key(backend: str) -> None:
    """A restricted row may have an interval of keys of which none is its ancestor: it sees nothing, sinks neither."""
    mask = BlockDiagonalMask.from_tree([-1, 0, 1, 0]).restrict(None, torch.tensor([1, 2]))
    assert mask.key_start.tolist()[3] < mask.key_stop.tolist()[3]
    q, k, sinks = torch.randn(4, 2, 16), torch.randn(2, 2, 16), torch.ones(2)
    out, lse = varlen_attention(q, k, k, mask, sinks=sinks, return_lse=True, backend=backend)
    assert not out[[0, 3]].any()
    assert bool((lse[:, [0, 3]] == float("-inf")).all())
    assert bool(lse[:, 1:3].isfinite().all())
    q, none = torch.zeros(0, 2, 16, requires_grad=True), torch.tensor([], dtype=torch.int64)
    for without_tokens in (BlockDiagonalMask.from_tree([]), mask.restrict(none, none)):
        varlen_attention(q, q, q, without_tokens, backend=backend).sum().backward()


@AND_TRITON
@pytest.mark.parametrize("name", ["tree", pytest.param("causal", marks=pytest.mark.slow)])
def test_a_mask_may_be_used_in_inference_mode_before_training(name: str, backend: str) -> None:
    """As in reinforcement learning, where the same batch is scored and then learned from."""
    inputs = make_inputs({case.name: case for case in CASES}[name])
    with torch.inference_mode():
        varlen_attention(inputs.q, inputs.k, inputs.v, inputs.mask, backend=backend)
    expected = run(make_inputs({case.name: case for case in CASES}[name]), backend)
    assert torch.equal(run(inputs, backend)["dk"], expected["dk"])


def test_compiled_without_breaks_for_all_lengths() -> None:
    """One graph for trees of different sizes, as for other masks."""
    torch.compiler.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def attend(q: Tensor, mask: BlockDiagonalMask) -> Tensor:
        return varlen_attention(q, q, q, mask) * 2

    for case in list(TREES.values())[:3]:
        inputs = make_inputs(replace(case, kv_heads=case.heads))
        expected = varlen_attention(inputs.q, inputs.q, inputs.q, inputs.mask) * 2
        assert torch.equal(attend(inputs.q, inputs.mask), expected)
    assert counter.frame_count == 1


@pytest.mark.fast("{'window': (3, 0)}")
@pytest.mark.parametrize("reach", [{}, {"window": (3, 0)}, {"chunk_size": 4}], ids=str)
def test_a_graph_that_makes_masks_of_ends_fits_all_sizes(reach: dict[str, Any]) -> None:
    torch.compiler.reset()
    counter = CompileCounter()

    def bounds(ends: Tensor) -> tuple[Tensor, ...]:
        mask = mask_of_ends(ends, **reach)
        return mask.key_start + 0, mask.key_stop + 0, mask.query_stop + 0, mask.diagonal + 0

    compiled = torch.compile(bounds, backend=counter, fullgraph=True, dynamic=True)
    for size in (5, 9, 17, 40, 130):
        ends = torch.full((size,), size)  # a path, with a leaf in the middle
        ends[size // 2] = size // 2 + 1
        for want, got in zip(bounds(ends), compiled(ends), strict=True):
            assert torch.equal(want, got)
    assert counter.frame_count == 1
