"""What the lint finds in binaries, and that kernels are compiled with what Triton's launcher says of their arguments.

tests/benchmarks/test_compile_matrix.py has the kernels that can be launched.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.runtime import driver

from tests.kernels import sass
from tests.kernels.aot import (
    TARGETS,
    Configuration,
    HopperConfiguration,
    Resources,
    compile_configuration,
    disassemble,
    hopper_configurations,
    source,
)
from tests.kernels.lint import findings
from tests.kernels.sass import Loop
from tests.kernels.stages import Stage
from tests.virtual_gpu.driver import questions
from tritonpack.kernels.tile_shapes import Kernel, TileShape
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.tolerance import run

BF16 = torch.bfloat16
HOPPER = Configuration("dkdv", "sm_90", 64, BF16, another_tile=TileShape(16, 64, 4, 3))
FLOAT32 = Configuration("dq", "sm_80", 64, torch.float32)
GOOD: dict[str, Any] = {
    "registers": 255, "spills": 0, "shared_bytes": 227 * 1024, "matrix_instructions": 8, "instructions": 500,
    "loops": (Loop(200, 4), Loop(200, 4)), "stages": (Stage(3, 256, True), Stage(3, 64, False), Stage(1, 64, True)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("configuration", "facts", "expected"),
    [
        (HOPPER, {}, []),
        (HOPPER, {"instructions": 20}, ["no code"]),
        (HOPPER, {"matrix_instructions": 0}, ["no matrix instructions"]),
        (FLOAT32, {"matrix_instructions": 0, "shared_bytes": 0}, []),
        (FLOAT32, "RuntimeError: no", ["doesn't compile"]),
        (HOPPER, {"loops": ()}, ["no loop that multiplies"]),
        (HOPPER, {"shared_bytes": 228 * 1024}, ["228 of 227 KiB"]),
        (HOPPER, {"stages": (Stage(2, 64, True), Stage(3, 320, True))}, ["stages of 64, 320 bytes"]),
        (HOPPER, {"unstaged_loads": 2}, ["2 loads without stages"]),
        (HOPPER, {"spills": 133, "loops": (Loop(300, 4, spills=1), Loop(300, 4, spills=12))},
         ["13 spills in loops", "120 spills outside"]),
        (HOPPER, {"spills": 12, "loops": (Loop(300, 4, spills=12),)}, ["12 spills in loops"]),
    ],
)  # fmt: skip
def test_findings(configuration: Configuration, facts: Any, expected: list[str]) -> None:
    found = findings(configuration, facts if isinstance(facts, str) else Resources(**GOOD | facts))
    assert [finding.text for finding in found] == expected
    assert [finding.is_minor for finding in found] == [text.endswith("outside") for text in expected]


@pytest.mark.compile
def test_tiles_of_ampere_spill_in_loops_on_consumer_blackwell() -> None:
    ampere = TileShape(64, 32, 8, 2, heads=4)
    configuration = Configuration("dq", "sm_120", 128, BF16, another_tile=ampere)
    resources = compile_configuration(configuration)
    assert min(loop.spills for loop in resources.loops) > 10
    assert f"{resources.spills_in_loops} spills in loops" in [f.text for f in findings(configuration, resources)]


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_alibi_over_a_part_of_the_keys(kernel: Any) -> None:
    """Ranks that share a batch compute parts of the keys, whose places the kernels load."""
    configuration = Configuration(kernel, "sm_90", 64, BF16, group=1, features=("alibi", "places"))
    assert findings(configuration, compile_configuration(configuration)) == []


@pytest.mark.compile
@pytest.mark.fast("dq-gfx942")
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_gpus_without_tma_load_16_bytes_at_a_time(kernel: Kernel, arch: str) -> None:
    listing = disassemble(Configuration(kernel, arch, 64, BF16))[1]
    wide, narrow = ("LDGSTS.E.BYPASS.128", "LDG.E.U16") if arch == "sm_80" else ("load_dwordx4", "load_ushort")
    assert wide in listing
    assert narrow not in listing


@pytest.mark.compile
def test_softmax_overlaps_with_the_deferred_output() -> None:
    """Between a wait for products and the exponentials another product is requested."""
    configuration = Configuration("forward", "sm_90", 128, BF16)
    assert configuration.tile.deferred
    code = sass.parse(disassemble(configuration)[1])
    for loop in sass.loops(code):
        assert re.match(r"[wb]+H+\|b*H+e", sass.events(code.instructions[loop.start : loop.stop]))


# Kernel -> loops with products in both halves, waits for products in each, and the share of exponentials between a
# product's request and its wait
OVERLAP = {"forward": (6, 2, 1.0), "dq": (4, 3, 0.8), "dkdv": (4, 2, 0.8)}


@pytest.mark.compile
@pytest.mark.fast("gluon-forward-sm_90-d128-bf16")
@pytest.mark.parametrize("configuration", hopper_configurations(), ids=str)
def test_softmax_overlaps_with_products_of_kernels_for_hopper(configuration: HopperConfiguration) -> None:
    """And nothing spills in loops; a loading warp loads by TMA and gives its registers to the others."""
    resources, listing = disassemble(configuration)
    assert resources.shared_bytes <= 227 * 1024
    assert "UTMALDG" in listing
    assert "USETMAXREG" in listing
    code = sass.parse(listing)
    loops, waits, share = OVERLAP[configuration.kernel]
    found = [code.instructions[loop.start : loop.stop] for loop in sass.loops(code)]
    assert len(found) == loops
    block = configuration.tile.block_m if configuration.kernel == "dkdv" else configuration.tile.block_n
    for loop in found:
        first, *rest = sass.events(loop).split("|")
        assert len(rest) == waits  # one product at a time would need more
        asked = rest[0] if configuration.kernel == "forward" else first[first.index("H") :]
        assert asked.count("e") >= share * block // 2
        assert sass.count_instructions(loop).spills == 0


GPU = "gfx942"
FEATURES: dict[Kernel, tuple[str, ...]] = {"forward": (), "dkdv": (), "dq": ("dlse",)}


@pytest.mark.compile
@pytest.mark.parametrize("large", [False, True])
def test_amd_kernels_are_compiled_as_by_the_launcher(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of storages up to 2 GiB, Triton knows that 32 bits hold every offset."""
    launched: dict[str, dict[str, Any]] = {}

    def record(*, fn: Any, compile: dict[str, Any], **others: Any) -> bool:
        launched[fn.name.split(".")[-1]] = compile
        return True  # don't compile

    inputs = make_inputs(Case("", (333,), heads=32, kv_heads=8, head_dim=64), BF16)
    asked = {"get_current_target": TARGETS[GPU], "get_current_device": 942, "get_current_stream": 0}
    answers = {name: lambda *_, answer=answer: answer for name, answer in asked.items()}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**answers))
    for owner, name, answer in questions(GPU):
        monkeypatch.setattr(owner, name, answer)
    if large:
        monkeypatch.setattr(torch.UntypedStorage, "size", lambda self: 2**31)
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = record
        run(inputs, "triton")
    for kernel, features in FEATURES.items():
        compiled = launched[f"{kernel}_kernel"]
        ours = source(Configuration(kernel, GPU, 64, BF16, features=features, large=large))
        used = {name: kind for name, kind in compiled["signature"].items() if kind != "constexpr"}
        assert used == {name: ours.signature[name] for name in used}
        assert {place: said for place, said in compiled["configs"][0].items() if said} == ours.attrs
        assert (["tt.pointer_range", 32] in ours.attrs[(0, 0)]) is not large
