"""The Hopper kernel in the emulator: its results, and that the emulator finds broken synchronisation."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gluon_emulator import Emulated, HazardError
from tritonpack import BlockDiagonalMask
from tritonpack.backends import gluon
from tritonpack.errors import BackendUnavailableError
from tritonpack.kernels import hopper as kernels
from tritonpack.kernels.hopper import HOPPER_TILES, HopperTileShape, hopper_forward_kernel
from tritonpack.options import make_options
from tritonpack.testing import CASES, Case, make_inputs
from tritonpack.testing.cases import Inputs
from tritonpack.testing.tolerance import check_outputs

NAMES = (
    "causal", "bidirectional", "slack", "one-token-documents", "one-document", "multi-head", "group-of-three",
    "window-left-16", "window-self", "window-both", "cross", "cross-bidirectional", "cross-more-queries",
    "cross-window-slack", "nothing-visible",
)  # fmt: skip
# Small blocks use each buffer many times, with little arithmetic.
SMALL = [HopperTileShape(32, 2), HopperTileShape(16, 3, heads=2, turns=False)]
CHOSEN = [replace(case, head_dim=64, heads=case.heads // 2, kv_heads=max(case.kv_heads // 2, 1))
          for case in CASES if case.name in NAMES]  # fmt: skip
CHOSEN += [Case(f"group-of-{heads}", (37, 0, 150, 1, 20), heads=heads, kv_heads=1, head_dim=64, slack=7)
           for heads in (2, 4, 8)]  # fmt: skip
PLAIN: dict[str, Any] = {
    "scale": None, "softcap": 0.0, "sinks": None, "alibi_slopes": None, "dropout_p": 0.0, "dropout_seed": None,
    "pack_invariant": False,
}  # fmt: skip
LONG = Case("long", (0, 300, 40), heads=1, kv_heads=1, head_dim=64, slack=30)


def forward(
    inputs: Inputs, kernel: Any = hopper_forward_kernel, seed: int = 0, programs: int = 2, **keywords: Any
) -> dict[str, Tensor]:
    """out and lse of the kernel with the backend's launch on `programs` multiprocessors; keywords as in `make_options`.

    With few programs each computes several tiles.
    """
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    options = make_options(q, mask, **PLAIN | keywords)
    tiles = gluon.plan_tiles(q, k, v, mask, options, backward=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gluon, "hopper_forward_kernel", Emulated(kernel, seed))
        patch.setattr(gluon, "_multiprocessors", lambda device: programs)
        out, lse = gluon.forward(q, k, v, mask, options, tiles)
    return {"out": out, "lse": lse}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setitem(HOPPER_TILES, 64, getattr(request, "param", SMALL[0]))


@pytest.mark.parametrize("small", SMALL, indirect=True, ids=["2-stages-turns", "3-stages"])
@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.usefixtures("poisoned_memory", "small")
@pytest.mark.sampled(every=2)
def test_error_within_tolerance(case: Case) -> None:
    inputs = make_inputs(case, torch.float16, slack_value=float("nan"))
    check_outputs(inputs, forward(inputs))


@pytest.mark.parametrize("head_dim", HOPPER_TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.usefixtures("poisoned_memory")
def test_shipped_tiles(head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(replace(LONG, head_dim=head_dim, heads=4), dtype, slack_value=float("nan"))
    check_outputs(inputs, forward(inputs))


@pytest.mark.usefixtures("small")
def test_results_do_not_depend_on_the_order_of_events() -> None:
    inputs = make_inputs(LONG, torch.float16, slack_value=float("nan"))
    first = forward(inputs)
    for seed in range(1, 8):
        again = forward(inputs, seed=seed)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.usefixtures("small")
@pytest.mark.heavy
def test_results_do_not_depend_on_the_number_of_programs() -> None:
    inputs = make_inputs(replace(LONG, heads=4, kv_heads=2), torch.float16, slack_value=float("nan"))
    alone = forward(inputs, programs=1)
    for programs in (2, 3, 1000):
        others = forward(inputs, programs=programs)
        assert all(torch.equal(alone[name], others[name]) for name in alone)


@pytest.mark.usefixtures("small")
def test_padding_between_documents_is_inert() -> None:
    mask = BlockDiagonalMask.from_padding_mask(torch.tensor([[0] * 9 + [1] * 31, [1] * 25 + [0] * 15, [1] * 40]))
    dead = mask.key_start == mask.key_stop
    results = []
    for value in (0.0, float("nan")):
        inputs = replace(make_inputs(Case("rows", (120,), head_dim=64, heads=2, kv_heads=1), torch.float16), mask=mask)
        for x in (inputs.q, inputs.k, inputs.v):
            x[dead] = value
        results.append(forward(inputs)["out"])
    assert torch.equal(*results)
    assert not results[0][dead].any()


@pytest.mark.usefixtures("small")
def test_a_change_in_a_document_changes_no_other_bit() -> None:
    inputs = make_inputs(Case("isolation", (37, 0, 70, 60), head_dim=64, heads=2, kv_heads=1), torch.float16)
    before = forward(inputs)["out"]
    for x in (inputs.q, inputs.k, inputs.v):
        x[37:107] += 1.5
    after = forward(inputs)["out"]
    same = (before == after).flatten(1).all(1)
    assert same[:37].all()
    assert same[107:].all()
    assert not same[37:107].any()


@pytest.mark.usefixtures("small")
def test_pack_invariant_contains_nan() -> None:
    inputs = make_inputs(Case("isolation", (37, 0, 70, 60), head_dim=64, heads=2, kv_heads=1), torch.float16)
    before = forward(inputs, pack_invariant=True)["out"]
    for x in (inputs.q, inputs.k, inputs.v):
        x[:37] = x[107:] = float("nan")
    after = forward(inputs, pack_invariant=True)["out"]
    assert torch.equal(before[37:107], after[37:107])
    assert after[:37].isnan().all()


def test_strided_inputs() -> None:
    """Views of a joint projection of q, k and v, as in models, aren't copied."""
    case = Case("strided", (40, 33), head_dim=64, heads=2, kv_heads=2, slack=5)
    inputs = make_inputs(case, torch.float16, slack_value=float("nan"))
    joint = torch.stack([inputs.q, inputs.k, inputs.v], 1)
    q, k, v = joint.unbind(1)
    check_outputs(inputs, forward(replace(inputs, q=q, k=k, v=v)))


@pytest.mark.parametrize(
    ("case", "dtype", "keywords", "message"),
    [
        (Case("fp32", (5,), head_dim=64), torch.float32, {}, "takes bfloat16 and float16; got torch.float32"),
        (Case("dim", (5,), head_dim=80), torch.float16, {}, "head dimensions 64, 128, 256, the same .* got 80 and 80"),
        (Case("dims", (5,), head_dim=128, head_dim_v=64), torch.float16, {}, "got 128 and 64"),
        (Case("softcap", (5,), head_dim=64), torch.float16, {"softcap": 5.0}, "plain softmax attention; got softcap"),
        (Case("sinks", (5,), head_dim=64), torch.float16, {"sinks": torch.zeros(4)}, "got sinks"),
        (Case("alibi", (5,), head_dim=64), torch.float16, {"alibi_slopes": torch.zeros(4)}, "got alibi_slopes"),
        (Case("dropout", (5,), head_dim=64), torch.float16, {"dropout_p": 0.5, "dropout_seed": 1}, "got dropout_p"),
    ],
    ids=str,
)
def test_unsupported_inputs(case: Case, dtype: torch.dtype, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"backend='gluon' .*{message}.*Use backend='triton'"):
        forward(make_inputs(case, dtype), **keywords)


# Name -> (text of the kernel, its replacement, the expected error)
MUTATIONS = {
    "queries-not-waited-for": ("mbarrier.wait(q_filled.index(HALF), number & 1)", "pass",
                               "overwritten|not where|nobody|too many"),
    "wrong-parity-of-queries": ("mbarrier.wait(q_filled.index(HALF), number & 1)",
                                "mbarrier.wait(q_filled.index(HALF), 0)", "overwritten|beyond|not where|nobody"),
    "free-queries-not-waited-for": ("mbarrier.wait(q_free.index(half), (number & 1) ^ 1)", "pass",
                                    "overwritten|not where|nobody|too many"),
    "queries-freed-early": ("            mbarrier.wait(k_filled.index(slot), done // STAGES & 1)\n",
                            "            mbarrier.wait(k_filled.index(slot), done // STAGES & 1)\n"
                            "            mbarrier.arrive(q_free.index(HALF))\n",
                            "overwritten|not where|nobody|too many"),
    "queries-never-freed": ("            mbarrier.arrive(q_free.index(HALF))\n            acc, p", "            acc, p",
                            r"nobody can go on: .*_load for q_free\[0\]"),
    "phases-begin-again-in-each-tile": ("        done += blocks\n        begin", "        begin",
                                        "overwritten|not where|nobody|too many"),
    "rounds-overlap": ("programs - 1 - 2 * gl.program_id(0)", "programs - 2 * gl.program_id(0)", "not where|beyond"),
    "keys-not-waited-for": ("mbarrier.wait(k_filled.index(slot), n // STAGES & 1)", "pass",
                            "overwritten|not where|nobody"),
    "values-not-waited-for": ("mbarrier.wait(v_filled.index(previous), (n - 1) // STAGES & 1)", "pass",
                              "overwritten|not where|too many"),
    "wrong-parity": ("(v_filled.index(previous), (n - 1) // STAGES & 1)", "(v_filled.index(previous), n // STAGES & 1)",
                     "overwritten|nobody can go on|not where"),
    "keys-freed-early": ("                    scores = warpgroup_mma_wait(1, deps=[scores])\n"
                         "                    mbarrier.arrive(k_free.index(slot))\n",
                         "                    mbarrier.arrive(k_free.index(slot))\n"
                         "                    scores = warpgroup_mma_wait(1, deps=[scores])\n", "overwritten"),
    "values-never-freed": ("mbarrier.arrive(v_free.index(previous))", "pass",
                           r"nobody can go on: .*_load for v_free\[0\] \(0 phases over, 2 arrivals"),
    "free-keys-not-waited-for": ("mbarrier.wait(k_free.index(slot), ((done + ahead) // STAGES & 1) ^ 1)", "pass",
                                 "overwritten|not where|nobody can go on"),
    "half-the-bytes-expected": ("expect(v_filled.index(slot), BLOCK_N * BLOCK_D * 2)",
                                "expect(v_filled.index(slot), BLOCK_N * BLOCK_D)", "nobody can go on"),
    "scores-not-waited-for": ("warpgroup_mma_wait(1, deps=[scores])", "warpgroup_mma_wait(2, deps=[scores])",
                              "Product"),
    "output-not-waited-for": ("acc, p = warpgroup_mma_wait(0, deps=[acc, p])\n                    mb",
                              "acc, p = warpgroup_mma_wait(1, deps=[acc, p])\n                    mb", "Product"),
    "no-fence": ("                    fence_async_shared()\n", "", "without a fence"),
    "turn-kept": ("                    if TURNS:\n                        mbarrier.arrive(turn.index(1 - HALF))\n", "",
                  "nobody can go on"),
    "turn-given-twice": ("    if TURNS:\n        mbarrier.arrive(turn.index(0))\n",
                         "    if TURNS:\n        mbarrier.arrive(turn.index(0), count=2)\n", "too many arrivals"),
    "padding-not-zeroed": ("if unseen > 0:", "if unseen > 1000:", "not where the reference"),
    "mask-left-out": ("BLOCK_N, phase != 1\n", "BLOCK_N, False\n", "not where|beyond"),
}  # fmt: skip


def broken_copy(module: ModuleType, old: str, new: str, folder: Path) -> Any:
    """A copy of a module, with a text that occurs once replaced."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(old) == 1
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.usefixtures("small")
def test_emulator_finds_broken_synchronisation(name: str, tmp_path: Path) -> None:
    """With one line of the kernel broken, some order of events must raise the expected error."""
    old, new, seen = MUTATIONS[name]
    mutant = broken_copy(kernels, old, new, tmp_path)
    inputs = make_inputs(LONG, torch.float16, slack_value=float("nan"))

    def run() -> None:
        for seed in range(5):
            check_outputs(inputs, forward(inputs, mutant.hopper_forward_kernel, seed))

    with pytest.raises((HazardError, AssertionError, AttributeError, TypeError), match=seen):
        run()
