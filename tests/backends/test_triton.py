"""The Triton kernels in Triton's interpreter: errors, tiles, layouts and addresses of tensors.

tests/test_attention.py asks this backend, too, for what all backends promise.
"""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.recorded import Recorded
from tritonpack import BlockDiagonalMask
from tritonpack.backends import triton as triton_backend
from tritonpack.errors import BackendUnavailableError
from tritonpack.kernels.tile_shapes import INTERPRETER_TILE, TileShape
from tritonpack.options import make_options
from tritonpack.testing import CASES, Case, check_backend, make_inputs
from tritonpack.testing.tolerance import run

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NAN = float("nan")
# Sizes and mixtures of features that other cases have singly; `make nightly` runs them.
RARE = (
    "window-right-open", "cross-window-slack", "head-dim-80", "head-dim-96", "head-dim-111",
    "head-dim-160", "head-dim-224", "head-dim-256", "head-dim-320", "head-dim-512-64", "head-dim-64-512",
    "sinks-window", "alibi-cross", "alibi-window-slack", "dropout-bidirectional", "tree-bushes", "tree-group-of-three",
    "tree-head-dim-96-16", "tree-head-dim-512", "head-dim-512", "tree-dropout", "tree-alibi",
)  # fmt: skip
# In half precision only conversions are new. They depend on features, not on lengths or windows.
HALF = (
    "causal", "slack", "cross", "group-of-three", "head-dim-20", "head-dim-64", "head-dim-192-128", "head-dim-512",
    "softcap-window", "sinks", "alibi-documents", "dropout", "everything",
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
RUNS = [
    *((name, torch.float32, name in RARE) for name in BY_NAME),
    *((name, torch.float16, name not in ("slack", "everything")) for name in HALF),
    *((name, torch.bfloat16, name != "everything") for name in ("slack", "cross", "everything")),
]


def _param(*values: Any, slow: bool) -> ParameterSet:
    return pytest.param(*values, id="-".join(map(str, values)), marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "dtype"), [_param(name, dtype, slow=slow) for name, dtype, slow in RUNS])
@pytest.mark.usefixtures("poisoned_memory")
def test_error_within_tolerance(name: str, dtype: torch.dtype) -> None:
    """The interpreter can't multiply bfloat16, so the kernels widen it, only there."""
    # In bfloat16 dsinks are 4 numbers, which plain attention gets right by chance with the seeds 0 and 10, of 0 to 71.
    seed = int(dtype == torch.bfloat16)
    check_backend(make_inputs(BY_NAME[name], dtype, seed=seed, slack_value=NAN), "triton")


SHARED = (
    Case("group-of-eight", (5, 0, 47), heads=8, kv_heads=1, slack=3),
    Case("group-of-six", (5, 0, 77), heads=6, kv_heads=1, window=(16, 0)),
    Case("features", (5, 0, 47), heads=4, kv_heads=1, sinks=True, alibi="heads", dropout_p=0.2),
    Case("dropout-window", (5, 0, 67, 30), heads=4, kv_heads=2, dropout_p=0.2, window=(30, 4), slack=3),
    # Keys are zeroed in blocks on both sides of the full ones.
    Case("wide", (3, 200), window=(100, 0), slack=7, heads=2, kv_heads=1, head_dim=16),
)
SOME = [case for case in CASES if case.name in ("cross-window-slack", "window-both", "everything", "tree")]
# Rows of one or several heads in a tile; an output that is summed at once, as on most GPUs; queries on the left.
TILES = {
    "one-head": (TileShape(64, 32, 4, 1), SHARED),
    "eight-heads": (TileShape(64, 32, 4, 1, heads=8), SHARED),
    "at-once": (TileShape(64, 32, 4, 1, heads=4), SOME),
    "left": (TileShape(64, 32, 4, 1, queries_left=True), SOME[:3]),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, cases) in TILES.items() for case in cases], ids=str
)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.fast(
    "eight-heads-group-of-six", "eight-heads-features", "one-head-dropout-window", "one-head-wide",
    "at-once-everything", "left-cross-window-slack", "left-window-both", "left-everything",
)  # fmt: skip
def test_other_tiles(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritonpack.kernels.tile_shapes.INTERPRETER_TILE", TILES[name][0])
    check_backend(make_inputs(case, torch.float32, slack_value=NAN), "triton")


def _strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> torch.Tensor:
    room = begin + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return torch.randn(room).to(dtype).as_strided(shape, strides, begin)


# Name -> shape, strides and first element in storage, and whether descriptors take such a tensor without a copy.
LAYOUTS = {
    "one-row-and-head": ((1, 1, 24), (61, 7, 1), 0, True),
    "one-row": ((1, 3, 24), (75, 24, 1), 0, True),
    "one-row-odd-heads": ((1, 3, 24), (72, 25, 1), 0, False),
    "one-head": ((5, 1, 24), (48, 1, 1), 0, True),
    "one-head-odd-rows": ((5, 1, 24), (31, 24, 1), 0, False),
    "expanded-ones": ((1, 1, 24), (0, 0, 1), 0, True),
    "expanded-heads": ((5, 2, 24), (24, 0, 1), 0, False),
    "heads-first": ((5, 2, 24), (24, 120, 1), 0, True),
    "one-column": ((5, 2, 1), (16, 8, 99), 0, True),
    "one-column-packed": ((5, 2, 1), (2, 1, 1), 0, False),
    "columns-apart": ((5, 2, 24), (96, 48, 2), 0, False),
    "odd-address": ((1, 1, 24), (24, 24, 1), 1, False),
    "odd-address-and-strides": ((1, 1, 24), (61, 7, 1), 1, False),
    "odd-width": ((5, 2, 20), (42, 21, 1), 0, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("poisoned_memory")
def test_descriptors_obey_the_rules_of_the_hardware(layout: str, dtype: torch.dtype) -> None:
    shape, strides, begin, is_aligned = LAYOUTS[layout]
    x = _strided(shape, strides, dtype, begin)
    descriptor = triton_backend.descriptor(triton_backend.aligned(x), 16)
    assert not isinstance(descriptor, tuple)
    TensorDescriptor.__post_init__(descriptor)  # Triton's own checks, which a launch leaves out
    base, size = descriptor.base, x.element_size()
    assert base.data_ptr() % 16 == 0
    assert all(stride > 0 and stride * size % 16 == 0 and stride * size < 2**40 for stride in descriptor.strides[:-1])
    assert descriptor.strides[-1] == 1
    seen = base.as_strided(descriptor.shape, descriptor.strides)  # [H, T, D]
    assert torch.equal(seen.transpose(0, 1), x)
    assert (base.data_ptr() == x.data_ptr()) == is_aligned


COPIES = ("aten::copy_", "aten::clone", "aten::constant_pad_nd", "aten::_to_copy")


def copies(recorded: Recorded) -> Counter[tuple[int, ...]]:
    """How many tensors of rows, heads and columns were copied, by their heads and columns."""
    given = [args[0] for operator, args, _ in recorded.calls if operator.name().split(".")[0] in COPIES]
    return Counter(tuple(x.shape[1:]) for x in given if x.ndim == 3)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("size", [16, pytest.param(320, marks=pytest.mark.slow)], ids=str)
def test_each_operator_copies_an_input_once_at_most(odd: int, size: int) -> None:
    """Also where gradients of keys take two kernels, with head dimension 320."""
    mask = BlockDiagonalMask.from_seqlens([3, 2])
    q, k, v, dout = (
        torch.randn(5, heads, width + odd)[..., :width]
        for heads, width in ((4, size), (2, size), (2, size + 8), (4, size + 8))
    )
    options = make_options(q, mask)
    tiles = triton_backend.plan_tiles(q, k, v, mask, options, backward=True)
    with Recorded() as forward:
        out, lse = triton_backend.forward(q, k, v, mask, options, tiles)
    with Recorded() as backward:
        triton_backend.backward(dout, None, q, k, v, out, lse, mask, options, tiles)
    inputs = {(4, size): odd, (2, size): odd, (2, size + 8): odd}
    assert copies(forward) == Counter(inputs)
    assert copies(backward) == Counter(inputs | {(4, size + 8): odd})


FITS = (
    "dimension {} .* needs {} KiB of shared memory in {}, .*has {} KiB, .* up to {}. Use backend='blocked', or a 16-bit"
)


@pytest.mark.parametrize(
    ("kib", "head_dim", "backward", "needs"),
    [(99, 300, True, (512, 160, "backward", 99, 256)), (99, 300, False, None), (99, 256, True, None),
     (64, 80, True, (128, 80, "backward", 64, 64)), (64, 300, False, (512, 96, "forward", 64, 256)),
     (None, 512, True, None)],
)  # fmt: skip
def test_float32_is_refused_where_it_does_not_fit(
    kib: int | None, head_dim: int, backward: bool, needs: tuple[Any, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is launched, with the remedy."""
    monkeypatch.setattr(triton_backend, "small_shared_kib", lambda device: kib)
    q = torch.empty(5, 1, head_dim, requires_grad=backward)
    mask = BlockDiagonalMask.from_seqlens([5])
    plan = partial(triton_backend.plan_tiles, mask=mask, options=make_options(q, mask), backward=backward)
    with pytest.raises(BackendUnavailableError, match=FITS.format(*needs)) if needs else nullcontext():
        plan(q, q, q)
    plan(*[q.to(torch.float16)] * 3)


def test_backward_allocates_two_numbers_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the gradients, backward allocates delta and the log-sum-exp: 8 bytes per query row and head."""
    inputs = make_inputs(Case("memory", (100, 28), heads=8))
    allocated: list[int] = []
    original = torch.empty

    def counting(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        allocated.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    run(inputs, "triton")
    assert sum(allocated) == 2 * 4 * (8 * 128 + INTERPRETER_TILE.block_m)
