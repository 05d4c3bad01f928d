"""The backward kernels for Hopper in the emulator: their gradients, and that broken copies of them are found."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gluon_emulator import Emulated, HazardError
from tests.kernels.test_hopper import CHOSEN, LONG, PLAIN, broken_copy
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends import gluon
from tritonpack.kernels import hopper_dkdv, hopper_dq, hopper_primitives
from tritonpack.kernels.hopper_dkdv import HOPPER_DKDV_TILES, HopperDkdvTileShape, hopper_dkdv_kernel
from tritonpack.kernels.hopper_dq import HOPPER_DQ_TILES, HopperDqTileShape, hopper_dq_kernel
from tritonpack.options import make_options
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.cases import Inputs
from tritonpack.testing.tolerance import check_outputs


def gradients(
    inputs: Inputs, dq: Any = hopper_dq_kernel, dkdv: Any = hopper_dkdv_kernel, seed: int = 0, **keywords: Any
) -> dict[str, Tensor]:
    """The gradients by the kernels, with the backend's launches; keywords as in `make_options`."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    options = make_options(q, mask, **PLAIN | keywords)
    out, lse = varlen_attention(q, k, v, mask, return_lse=True, backend="blocked", **keywords)
    tiles = gluon.plan_tiles(q, k, v, mask, options, backward=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon, "hopper_dq_kernel", Emulated(dq, seed))
        patch.setattr(gluon, "hopper_dkdv_kernel", Emulated(dkdv, seed))
        found = gluon.backward(inputs.dout, inputs.dlse, q, k, v, out, lse, mask, options, tiles)
    return dict(zip(("dq", "dk", "dv"), found, strict=False))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks use each buffer many times, with little arithmetic."""
    monkeypatch.setitem(HOPPER_DQ_TILES, 64, HopperDqTileShape(32, 2))
    monkeypatch.setitem(HOPPER_DKDV_TILES, 64, HopperDkdvTileShape(32, 3))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.usefixtures("poisoned_memory", "small")
@pytest.mark.sampled(every=2)
def test_error_within_tolerance(case: Case) -> None:
    inputs = make_inputs(case, torch.float16, slack_value=float("nan"))
    check_outputs(inputs, gradients(inputs))


@pytest.mark.parametrize("head_dim", HOPPER_DQ_TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.usefixtures("poisoned_memory")
def test_shipped_tiles(head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(replace(LONG, head_dim=head_dim), dtype, slack_value=float("nan"))
    check_outputs(inputs, gradients(inputs))


@pytest.mark.usefixtures("poisoned_memory", "small")
def test_without_a_gradient_of_lse() -> None:
    inputs = make_inputs(replace(LONG, heads=2), torch.float16)
    zero = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    absent = gradients(replace(inputs, dlse=None))  # type: ignore[arg-type]
    assert all(torch.equal(absent[name], x) for name, x in gradients(zero).items())


@pytest.mark.usefixtures("poisoned_memory", "small")
@pytest.mark.heavy
def test_results_do_not_depend_on_the_order_of_events() -> None:
    inputs = make_inputs(LONG, torch.float16, slack_value=float("nan"))
    first = gradients(inputs)
    for seed in range(1, 8):
        again = gradients(inputs, seed=seed)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.usefixtures("poisoned_memory", "small")
def test_padding_between_documents_is_inert() -> None:
    mask = BlockDiagonalMask.from_padding_mask(torch.tensor([[0] * 9 + [1] * 31, [1] * 25 + [0] * 15, [1] * 40]))
    dead = mask.key_start == mask.key_stop
    results = []
    for value in (0.0, float("nan")):
        inputs = replace(make_inputs(Case("rows", (120,), head_dim=64, heads=2, kv_heads=1), torch.float16), mask=mask)
        for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
            x[dead] = value
        results.append(gradients(inputs))
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name])
        assert not x[dead].any()


@pytest.mark.usefixtures("poisoned_memory", "small")
def test_pack_invariant_contains_nan() -> None:
    inputs = make_inputs(Case("isolation", (37, 0, 70, 60), head_dim=64, heads=2, kv_heads=1), torch.float16)
    before = gradients(inputs, pack_invariant=True)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[:37] = x[107:] = float("nan")
    after = gradients(inputs, pack_invariant=True)
    for name, x in before.items():
        assert torch.equal(x[37:107], after[name][37:107])
        assert after[name][:37].isnan().all()


@pytest.mark.usefixtures("small")
def test_strided_inputs() -> None:
    """Views of a joint projection of q, k and v, as in models."""
    case = Case("strided", (40, 33), head_dim=64, heads=2, kv_heads=2, slack=5)
    inputs = make_inputs(case, torch.float16, slack_value=float("nan"))
    q, k, v = torch.stack([inputs.q, inputs.k, inputs.v], 1).unbind(1)
    check_outputs(inputs, gradients(replace(inputs, q=q, k=k, v=v)))


WAIT = "                dk, dv, p, ds, scores = warpgroup_mma_wait(0, deps=[dk, dv, p, ds, scores])\n"
ARRIVE = "                mbarrier.arrive(free.index(slot))\n"

# Name -> (the kernel's module, text of it, its replacement, the expected error)
MUTATIONS = {
    "dq-keys-not-waited-for": (hopper_dq, "mbarrier.wait(k_filled.index(following), (step + 1) // STAGES & 1)", "pass",
                               "overwritten|not where|too many"),
    "dq-first-values-not-waited-for": (hopper_dq, "        mbarrier.wait(v_filled.index(0), 0)\n", "",
                                       "overwritten|not where|nobody"),
    "dq-values-not-waited-for": (hopper_dq, "mbarrier.wait(v_filled.index(following), (step + 1) // STAGES & 1)",
                                 "pass", "overwritten|not where|nobody"),
    "dq-tile-not-waited-for": (hopper_dq, "    mbarrier.wait(filled, 0)\n", "", "overwritten|not where|nobody"),
    "dq-keys-freed-early": (hopper_dq, "                dq, ds = warpgroup_mma_wait(1, deps=[dq, ds])\n"
                                       "                mbarrier.arrive(k_free.index(slot))\n",
                            "                mbarrier.arrive(k_free.index(slot))\n"
                            "                dq, ds = warpgroup_mma_wait(1, deps=[dq, ds])\n", "overwritten"),
    "dq-values-never-freed": (hopper_dq, "mbarrier.arrive(values_free)", "pass",
                              r"nobody can go on: .*_load_keys for v_free\[0\] \(0 phases over, 2 arrivals"),
    "dq-without-the-sum": (hopper_dq, "warpgroup_mma(ds, keys.reshape", "warpgroup_mma(as_operand(p, keys.dtype, "
                           "O_LAYOUT), keys.reshape", "dq beyond"),
    "dq-no-fence": (hopper_dq, "            fence_async_shared()\n", "", "without a fence"),
    "dq-padding-not-zeroed": (hopper_dq, "if unseen > 0:", "if unseen > 1000:", "not where"),
    "dq-mask-left-out": (hopper_dq, "phase == 0,\n", "False,\n", "dq beyond|not where"),
    "dkdv-block-not-waited-for": (hopper_dkdv, "mbarrier.wait(filled.index(following), (number + 1) // STAGES & 1)",
                                  "pass", "overwritten|not where|nobody can go on"),
    "dkdv-wrong-parity": (hopper_dkdv, "(filled.index(following), (number + 1) // STAGES & 1)",
                          "(filled.index(following), number // STAGES & 1)", "overwritten|not where|nobody|too many"),
    "dkdv-freed-early": (hopper_dkdv, f"{WAIT}{ARRIVE}", f"{ARRIVE}{WAIT}", "overwritten"),
    "dkdv-never-freed": (hopper_dkdv, "mbarrier.arrive(free.index(slot))", "pass",
                         r"nobody can go on: .*_load_queries for free\[0\] \(0 phases over, 2 arrivals"),
    "dkdv-half-the-bytes": (hopper_dkdv, "filled.index(slot), 2 * BLOCK_M", "filled.index(slot), BLOCK_M",
                            "nobody can go on"),
    "dkdv-statistics-too-late": (hopper_dkdv, "        lse2.index(slot).store(lse2_m)\n"
                                              "        delta.index(slot).store(delta_m)\n"
                                              "        mbarrier.arrive(filled.index(slot))\n",
                                 "        mbarrier.arrive(filled.index(slot))\n"
                                 "        lse2.index(slot).store(lse2_m)\n"
                                 "        delta.index(slot).store(delta_m)\n", "beyond|not where"),
    "dkdv-operands-swapped": (hopper_dkdv, "warpgroup_mma(ds, q.reshape", "warpgroup_mma(ds, dout.reshape",
                              "dk beyond"),
    "dkdv-no-fence": (hopper_dkdv, "            fence_async_shared()\n", "", "without a fence"),
    "dkdv-padding-not-zeroed": (hopper_dkdv, "if unseen > 0:", "if unseen > 1000:", "not where"),
    "dkdv-mask-left-out": (hopper_dkdv, "phase == 0,\n", "False,\n", "beyond|not where"),
}  # fmt: skip

# The same for `between`, which both kernels call
COLUMNS = {
    "of-a-thread-counted-twice": ("(columns & ~6)", "columns"),
    "of-a-thread-left-out": ("(columns & 6)", "(columns & 4)"),
    "below-the-interval": ("(constant < low[:, None] - of_thread) ^ ", ""),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.usefixtures("poisoned_memory", "small")
@pytest.mark.sampled(every=2)
def test_broken_copies_are_found(name: str, tmp_path: Path) -> None:
    """With one line of a kernel broken, some order of events must raise the expected error."""
    module, old, new, seen = MUTATIONS[name]
    mutant = broken_copy(module, old, new, tmp_path)
    kernels = {"dq": mutant.hopper_dq_kernel} if module is hopper_dq else {"dkdv": mutant.hopper_dkdv_kernel}
    inputs = make_inputs(LONG, torch.float16, slack_value=float("nan"))

    def run() -> None:
        for seed in range(5):
            check_outputs(inputs, gradients(inputs, seed=seed, **kernels))

    with pytest.raises((HazardError, AssertionError, AttributeError, TypeError), match=seen):
        run()


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize(("module", "wrong"), [(hopper_dq, "dq"), (hopper_dkdv, "dk, dv")], ids=["dq", "dkdv"])
@pytest.mark.usefixtures("poisoned_memory", "small")
@pytest.mark.sampled(every=2)
def test_broken_columns_are_found(
    name: str, module: ModuleType, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "between", broken_copy(hopper_primitives, *COLUMNS[name], tmp_path).between)
    inputs = make_inputs(replace(LONG, window=(40, 0)), torch.float16)  # both bounds hide pairs
    with pytest.raises(AssertionError, match=f"{wrong} beyond"):
        check_outputs(inputs, gradients(inputs))
