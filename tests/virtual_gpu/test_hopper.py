"""The kernels for Hopper on the virtual GPU: programs of several tiles, buffers that are used again, and every mask."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.gpu.test_hopper import SMALL
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import virtual_gpu
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import gluon
from tritonpack.kernels.hopper import HOPPER_TILES, HopperTileShape
from tritonpack.kernels.hopper_dkdv import HOPPER_DKDV_TILES, HopperDkdvTileShape
from tritonpack.kernels.hopper_dq import HOPPER_DQ_TILES, HopperDqTileShape
from tritonpack.testing import Case, Inputs, make_inputs
from tritonpack.testing.tolerance import check_outputs, run

pytestmark = NEEDS

NAN = float("nan")
# Documents that use each buffer several times, with little work
LONG = tuple(
    replace(case, heads=2, kv_heads=1, head_dim=64)
    for case in (
        Case("causal", (1, 90, 0, 17, 450), slack=13),
        Case("bidirectional", (130, 400), causal=False, slack=40),
        Case("window-left", (33, 460), window=(200, 0)),
        Case("window-both", (33, 460), window=(150, 40), causal=False),
        Case("cross", (100, 0, 70), (300, 20, 420), slack=9),
        Case("cross-more-queries", (300, 40), (100, 30)),
        Case("short-documents", (20,) * 20),
    )
)
PARTS = Case("parts", (37, 0, 170, 60), heads=2, kv_heads=1, head_dim=64)


def launch(inputs: Inputs, *, programs: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """Outputs and gradients on a GPU of that many multiprocessors. With few a program of forward has several tiles."""
    with virtual_gpu("sm_90", seed=seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon, "_multiprocessors", lambda device: programs)
        return run(inputs, "gluon")


@pytest.mark.parametrize("head_dim", HOPPER_TILES)
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.fast("cross-64")
def test_long_documents(case: Case, head_dim: int) -> None:
    inputs = make_inputs(replace(case, head_dim=head_dim), torch.bfloat16, slack_value=NAN)
    check_outputs(inputs, launch(inputs))


@pytest.mark.parametrize(
    "case", [*SMALL, *(replace(LONG[0], name=f"{n} heads", heads=n) for n in (1, 3, 4, 8))], ids=str
)
@pytest.mark.slow
def test_small_cases_and_groups(case: Case) -> None:
    """Query heads of a key head share tiles of forward if their number allows it."""
    inputs = make_inputs(replace(case, head_dim=64), torch.float16, slack_value=NAN)
    check_outputs(inputs, launch(inputs))


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "no-turns"])
@pytest.mark.slow
def test_another_tile_shape(turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks use each buffer many times."""
    monkeypatch.setitem(HOPPER_TILES, 64, HopperTileShape(32, 2, turns=turns))
    monkeypatch.setitem(HOPPER_DQ_TILES, 64, HopperDqTileShape(32, 2))
    monkeypatch.setitem(HOPPER_DKDV_TILES, 64, HopperDkdvTileShape(32, 3))
    for case in LONG:
        inputs = make_inputs(case, torch.bfloat16, slack_value=NAN)
        check_outputs(inputs, launch(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_do_not_depend_on_orders_and_programs(head_dim: int) -> None:
    inputs = make_inputs(replace(LONG[0], head_dim=head_dim), torch.bfloat16, slack_value=NAN)
    first = launch(inputs)
    for seed, programs in ((2, 1), (3, 2), (4, 3), (5, 1000)):
        again = launch(inputs, programs=programs, seed=seed)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.slow
def test_padding_between_documents_is_inert() -> None:
    mask = BlockDiagonalMask.from_padding_mask(torch.tensor([[0] * 9 + [1] * 131, [1] * 25 + [0] * 115, [1] * 140]))
    dead = mask.key_start == mask.key_stop
    results = []
    for value in (0.0, NAN):
        inputs = replace(make_inputs(replace(PARTS, seqlens=(420,)), torch.bfloat16), mask=mask)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
            x[dead] = value
        results.append(launch(inputs))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[0][name], results[1][name])
        assert not results[0][name][dead].any()


def test_a_change_in_a_document_changes_no_other_bit() -> None:
    inputs, results = make_inputs(PARTS, torch.bfloat16), []
    for change in (0.0, 1.5):
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
            x[37:207] += change
        results.append(launch(inputs))
    for name in ("out", "dq", "dk", "dv"):
        same = (results[0][name] == results[1][name]).flatten(1).all(1)
        assert same[:37].all()
        assert same[207:].all()
        assert not same[37:207].any()


def test_without_a_gradient_of_lse() -> None:
    inputs = make_inputs(PARTS, torch.bfloat16)
    zero = launch(replace(inputs, dlse=torch.zeros_like(inputs.dlse)))
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with virtual_gpu("sm_90"):
        out = varlen_attention(*leaves, inputs.mask, backend="gluon")
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
    for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert torch.equal(zero[name], x)
