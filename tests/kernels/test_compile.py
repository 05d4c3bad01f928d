"""What the lint finds in binaries. tests/benchmarks/test_compile_matrix.py has the kernels that can be launched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.compiler import ASTSource

from tests.kernels import sass
from tests.kernels.aot import (
    TARGETS,
    Configuration,
    HopperConfiguration,
    Resources,
    compile_configuration,
    disassemble,
    hopper_configurations,
    read_binary,
)
from tests.kernels.lint import Finding, findings
from tests.kernels.sass import Loop
from tests.kernels.stages import Stage
from tritonpack.kernels.tile_shapes import TileShape

CONFIGURATION = Configuration("dkdv", "sm_90", 64, torch.bfloat16, another_tile=TileShape(16, 64, 4, 3))
GOOD: dict[str, Any] = {
    "registers": 255, "spills": 0, "shared_bytes": 227 * 1024, "matrix_instructions": 8, "instructions": 500,
    "loops": (Loop(200, 4), Loop(200, 4)), "stages": (Stage(3, 256, True), Stage(3, 64, False), Stage(1, 64, True)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        ({"instructions": 20}, ["no code"]),
        ({"matrix_instructions": 0}, ["no matrix instructions"]),
        ({"loops": ()}, ["no loop that multiplies"]),
        ({"shared_bytes": 228 * 1024}, ["228 of 227 KiB"]),
        ({"stages": (Stage(2, 64, True), Stage(3, 320, True), Stage(2, 64, True))}, ["stages of 64, 320 bytes"]),
        ({"unstaged_loads": 2}, ["2 loads without stages"]),
        ({"spills": 133, "loops": (Loop(300, 4, spills=1), Loop(300, 4, spills=12))},
         ["13 spills in loops", "120 spills outside"]),
        ({"spills": 12, "loops": (Loop(300, 4, spills=12),)}, ["12 spills in loops"]),
    ],
)  # fmt: skip
def test_findings(facts: dict[str, Any], expected: list[str]) -> None:
    found = findings(CONFIGURATION, Resources(**GOOD | facts))
    assert [finding.text for finding in found] == expected
    assert [finding.is_minor for finding in found] == [text.endswith("outside") for text in expected]


def test_float32_needs_no_matrix_instructions() -> None:
    configuration = Configuration("dq", "sm_80", 64, torch.float32)
    assert findings(configuration, Resources(**GOOD | {"matrix_instructions": 0, "shared_bytes": 0})) == []
    assert findings(configuration, "RuntimeError: no") == [Finding("doesn't compile")]


@pytest.mark.compile
def test_tiles_of_ampere_spill_in_loops_on_consumer_blackwell() -> None:
    ampere = TileShape(64, 32, 8, 2, heads=4)
    configuration = Configuration("dq", "sm_120", 128, torch.bfloat16, another_tile=ampere)
    resources = compile_configuration(configuration)
    assert min(loop.spills for loop in resources.loops) > 10
    assert f"{resources.spills_in_loops} spills in loops" in [f.text for f in findings(configuration, resources)]


@triton.jit
def described_statistics_kernel(q_desc, lse_desc, out_ptr, steps, BLOCK: tl.constexpr):  # noqa: N803
    """A loop that multiplies and reads a number per row by TMA."""
    keys = q_desc.load([0, 0])  # [BLOCK, 64]
    acc = tl.zeros([BLOCK, 64], dtype=tl.float32)
    for step in tl.range(0, steps):
        q = q_desc.load([step * BLOCK, 0])  # [BLOCK, 64]
        lse = lse_desc.load([step * BLOCK])  # [BLOCK]
        p = tl.exp2(tl.dot(keys, q.T) - lse[None, :])  # [BLOCK, 64] @ [64, BLOCK] -> [BLOCK, BLOCK]
        acc = tl.dot(p.to(q.dtype), q, acc)
    offs = tl.arange(0, BLOCK)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + offs, acc)


@pytest.mark.fast("16")
@pytest.mark.compile
@pytest.mark.parametrize("block", [16, 64])
def test_described_statistics(block: int) -> None:
    """16 numbers are 64 bytes. Before Triton 3.9 they are stages that TMA can't fill; since 3.9 they have no stages."""
    signature = {
        "q_desc": f"tensordesc<bf16[{block},64]>",
        "lse_desc": f"tensordesc<fp32[{block}]>",
        "out_ptr": "*fp32",
        "steps": "i32",
        "BLOCK": "constexpr",
    }
    source = ASTSource(described_statistics_kernel, signature, {(4,): block})
    compiled = triton.compile(
        source, target=TARGETS["sm_90"], options={"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    )
    found = [finding.text for finding in findings(CONFIGURATION, read_binary(compiled)[0])]
    before = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    assert found == ([] if block == 64 else ["stages of 64 bytes" if before else "1 loads without stages"])


@pytest.mark.compile
def test_softmax_overlaps_with_the_deferred_output() -> None:
    """Between a wait for products and the exponentials another product is requested."""
    configuration = Configuration("forward", "sm_90", 128, torch.bfloat16)
    assert configuration.tile.deferred
    code = sass.parse(disassemble(configuration)[1])
    for loop in sass.loops(code):
        assert re.match(r"[wb]+H+\|b*H+e", sass.events(code.instructions[loop.start : loop.stop]))


HOPPER = [
    pytest.param(c, id=str(c), marks=() if str(c).endswith("d128-bf16") else pytest.mark.slow)
    for c in hopper_configurations()
]


@pytest.mark.compile
@pytest.mark.parametrize("configuration", [p for p in HOPPER if "forward" in str(p.id)])
def test_hopper_kernel(configuration: HopperConfiguration) -> None:
    """TMA loads, more registers for the computing warps, a softmax between a product's request and its wait."""
    loops = _hopper_loops(configuration)
    assert len(loops) == 6  # three phases in each half
    for loop in loops:
        events = sass.events(loop)
        requested, overlapped, after = events.split("|")  # one product at a time would need more waits
        assert requested.count("H") == events.count("H")
        assert overlapped.count("e") >= configuration.tile.block_n // 2
        assert "e" not in requested + after
        # Spills elsewhere are scalars between tiles, and those of the loading warp, which has 24 registers.
        assert _spills(loop) == 0


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("configuration", [p for p in HOPPER if "forward" not in str(p.id)])
def test_hopper_backward_kernel(configuration: HopperConfiguration) -> None:
    """As the forward kernel, and P and dS stay in registers."""
    loops = _hopper_loops(configuration)
    assert len(loops) == 4  # two phases in each half
    exponentials = (
        32 * (configuration.tile.block_n if configuration.kernel == "dq" else configuration.tile.block_m) // 64
    )
    for loop in loops:
        events = sass.events(loop)
        # First the block's dP, then the sums and the scores of the next block. One product at a time would need more.
        first, *rest = events.split("|")
        assert len(rest) == (3 if configuration.kernel == "dq" else 2)
        assert "H" in first
        assert events.count("e") == exponentials
        of_sums = [i for i in loop if i.stem == "HGMMA" and i.operands.split(",")[1].strip().startswith("R")]
        assert of_sums
        assert _spills(loop) == 0
        overlapped = first[first.index("H") :]  # between the request of dP and the wait for it
        assert overlapped.count("e") >= 0.8 * exponentials


def _hopper_loops(configuration: HopperConfiguration) -> list[list[sass.Instruction]]:
    """The loops with products of a kernel for Hopper that uses TMA and moves registers between warps."""
    resources, listing = disassemble(configuration)
    assert resources.shared_bytes <= 227 * 1024
    assert "UTMALDG" in listing
    assert "USETMAXREG" in listing
    code = sass.parse(listing)
    return [code.instructions[loop.start : loop.stop] for loop in sass.loops(code)]


def _spills(loop: list[sass.Instruction]) -> int:
    return sum(instruction.stem in ("LDL", "STL") for instruction in loop)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_alibi_over_a_part_of_the_keys(kernel: Any) -> None:
    """Ranks that share a batch compute parts of the keys, whose places the kernels load."""
    features = ("alibi", "places")
    configuration = Configuration(kernel, "sm_90", 64, torch.bfloat16, group=1, features=features)
    assert findings(configuration, compile_configuration(configuration)) == []
