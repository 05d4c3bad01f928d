"""The model that ranks kernels by their machine code: how it reads listings, counts instructions, estimates times."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.instruction_model import (
    PRODUCTS,
    HopperModel,
    Model,
    Range,
    batches,
    examine,
    residents,
    row,
    save,
    seconds,
    tflops,
)
from tests.kernels.aot import Configuration, HopperConfiguration, Resources, disassemble, hopper_configurations
from tests.kernels.sass import Instruction, Work, count, cycles_in_order, loops, parse
from tritonpack import BlockDiagonalMask
from tritonpack.kernels.tile_shapes import TileShape

# Two loops that multiply, one of them inside another loop that does, and after the end one that waits for a load.
LISTING = """
	.headerflags	@"EF_CUDA_SM90"
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR9+0x18400], R4 ;
        /*0020*/              @!P2 BRA `(.L_x_7) ;
.L_x_2:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   FFMA R5, R5, UR4, -R6 ;
        /*0060*/                   MUFU.EX2 R5, R5 ;
        /*0070*/                   SHFL.BFLY PT, R5, R122, 0x2, 0x1f ;
        /*0080*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0090*/                   UIADD3 UR33, UR33, 0x1, URZ ;
.L_x_4:
        /*00a0*/                   ISETP.GE.AND P3, PT, R5, R6, PT ;
        /*00b0*/                   LDS.128 R8, [R4] ;
        /*00c0*/                   LDS.U16 R8, [R4] ;
        /*00d0*/                   LDSM.16.M88.4 R8, [R4] ;
        /*00e0*/                   STS [R4], R8 ;
        /*00f0*/                   HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR24].tnspB, R24, gsb0 ;
        /*0100*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0110*/               @P1 BRA `(.L_x_4) ;
        /*0120*/              @!P0 BRA `(.L_x_3) ;
        /*0130*/                   EXIT ;
.L_x_7:
        /*0140*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR9+0x18400], R4 ;
        /*0150*/              @!P2 BRA `(.L_x_7) ;
        /*0160*/                   BRA `(.L_x_2) ;
.L_x_8:
        /*0170*/                   BRA `(.L_x_8);
"""


def test_parse_instructions_and_labels() -> None:
    code = parse(LISTING)
    assert len(code.instructions) == 24
    assert code.instructions[2].opcode == "BRA"  # without its predicate
    assert code.instructions[5].operands == "R5, R5, UR4, -R6"
    assert code.labels == {".L_x_1": 1, ".L_x_2": 3, ".L_x_3": 9, ".L_x_4": 10, ".L_x_7": 20, ".L_x_8": 23}


def test_loops_are_the_innermost_with_products() -> None:
    assert loops(parse(LISTING)) == [range(1, 9), range(10, 18)]


def test_counts_of_a_loop() -> None:
    code = parse(LISTING)
    first, second = (count(code.instructions[body.start : body.stop]) for body in loops(code))
    assert first == Work(
        instructions=8, full_rate=1, special=1, products=2 * 64 * 128 * 16, operand_bytes=32 * (64 + 128),
        shared_bytes=128, waits=3, branches=2,
    )  # fmt: skip
    assert second == Work(
        instructions=8, half_rate=1, products=2 * 64 * 64 * 16, operand_bytes=32 * 64,
        shared_bytes=32 * 16 + 32 * 2 + 4 * 128 + 32 * 4, barriers=1, waits=1, branches=1,
    )  # fmt: skip


def test_cycles_of_the_units() -> None:
    work = Work(instructions=100, full_rate=40, half_rate=30, special=10, products=2 * 64 * 64 * 16, shared_bytes=128)
    assert work.cycles(8) == {"tensor": 64, "issue": 200, "float": 80, "integer": 120, "special": 160, "shared": 8}


@pytest.mark.parametrize(
    ("registers", "shared_kib", "warps", "expected"),
    [
        (255, 0, 8, 1),  # 65,280 registers
        (168, 0, 4, 3),
        (128, 0, 8, 2),
        (129, 0, 8, 1),  # rounded up to 136
        (32, 0, 8, 8),  # 64 warps
        (32, 0, 1, 32),  # 32 programs
        (32, 113, 4, 2),
        (32, 114, 4, 1),
        (32, 227, 4, 1),
        (32, 228, 4, 0),
        (255, 0, 16, 0),
    ],
)
def test_number_of_programs_that_fit(registers: int, shared_kib: int, warps: int, expected: int) -> None:
    assert residents(registers, shared_kib * 1024, warps) == expected


def model(registers: int = 200, heads: int = 1, kernel: Any = "forward") -> Model:
    """Blocks take 1,000 cycles of the tensor cores and 600 slots, 1,200 with a mask; tiles 1,000, a second loop 100."""
    configuration = Configuration(
        kernel, "sm_90", 128, torch.bfloat16, another_tile=TileShape(128, 64, 8, 2, heads=heads)
    )
    full = Work(instructions=300, products=2048000, waits=10)
    masked = Work(instructions=600, products=2048000, waits=10)
    return Model(
        configuration, Resources(registers, 0, 0, 1, 1000), masked, full, Work(instructions=500), Work(instructions=50)
    )


def test_products_overlap_with_what_comes_before_their_wait() -> None:
    product = Instruction("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR20], R24, gsb0")  # 64 cycles
    wait = Instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    others = [Instruction("FADD", "R5, R5, R6")] * 10
    assert cycles_in_order([product, *others, wait]) == 64 + 1
    assert cycles_in_order([product, wait, *others]) == 64 + 11
    assert cycles_in_order([*others, product, wait]) == 64 + 11
    late = Instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x1")  # the product of the iteration before may run until here
    assert cycles_in_order([product, late, *others]) == 64


def test_fast_bound_is_the_busiest_unit_slow_bound_the_sum() -> None:
    alone, shared = model(200), model(128)
    assert alone.iteration(alone.full) == Range(1000, 1000 + 600 + 300)
    assert shared.residents == 2
    loads = 2 * 64 * 256 / (5.5e12 / 1.755e9 / 132)  # the loads take longest: two programs overlap
    assert 1250 < loads < 1900
    assert shared.iteration(shared.full) == Range(1000, loads)
    assert shared.iteration(shared.masked) == Range(1200, loads)


def test_seconds_of_a_batch() -> None:
    kernel = model()
    mask = BlockDiagonalMask.from_seqlens([256])  # tiles of 0 and 2 full blocks and 2 masked ones each
    expected = 1000 + 100 + 2 * 1000 + 2 * 1200
    assert seconds(kernel, mask, 1, 1).fast == pytest.approx(expected / 1.755e9)
    assert seconds(kernel, mask, 66, 66).fast == pytest.approx(expected / 1.755e9)  # 132 tiles at a time
    assert seconds(kernel, mask, 67, 67).fast > expected / 1.755e9
    slow, fast = tflops(kernel, [256], 1, 1)
    assert fast == pytest.approx(4 * 128 * 256 * 257 / 2 / (expected / 1.755e9) / 1e12)
    assert slow < fast


def test_grouped_heads_share_a_tile() -> None:
    mask = BlockDiagonalMask.from_seqlens([128])
    together, apart = (seconds(model(heads=heads), mask, 4, 1).fast for heads in (4, 1))
    assert apart == pytest.approx((1000 + 2 * 1200) / 1.755e9)
    assert together == pytest.approx((1000 + 100 + 1000 + 1200) / 1.755e9)  # the last of four tiles of 32 tokens


def test_key_gradients_read_the_queries_of_every_head() -> None:
    mask = BlockDiagonalMask.from_seqlens([64])
    kernel = model(kernel="dkdv")
    assert seconds(kernel, mask, 4, 1).fast == pytest.approx((1000 + 4 * 1200) / 1.755e9)


def test_csv_keeps_rows_of_other_versions(tmp_path: Any) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("triton,kernel\n0.1,forward\n")
    save(path, [{"triton": "now", "kernel": "dq"}])
    assert path.read_text().split() == ["triton,kernel", "0.1,forward", "now,dq"]


def hopper_model(kernel: Any = "dkdv") -> HopperModel:
    """A half's loops take 300 slots and 500 cycles in order, 600 and 800 with a mask."""
    configuration = HopperConfiguration(kernel, 128, torch.bfloat16)
    full, masked = (Work(instructions=slots, products=1024000, waits=10) for slots in (300, 600))
    rest = Work(instructions=4000)
    return HopperModel(
        configuration, Resources(168, 0, 0, 1, 1000), masked, full, rest, Work(), 500, masked_in_order=800
    )


def test_bounds_of_two_halves() -> None:
    """Fast: 1,024,000 operations of each half, or its issue slots; slow: one half after the other, with 30 a wait."""
    loads = 2 * 64 * 256 / (5.5e12 / 1.755e9 / 132)
    assert hopper_model().blocks() == (Range(600, max(2 * (500 + 300), loads)), Range(1200, 2 * (800 + 300)))
    assert hopper_model().tile() == Range(0, 4000 + 5 * 700)
    assert hopper_model("forward").tile() == Range(0, 4000)  # the next tile's loads come during the last blocks


def test_heads_share_a_tile_of_the_persistent_kernel() -> None:
    mask = BlockDiagonalMask.from_seqlens([16])  # 16 tokens of 8 heads are a tile
    kernel = hopper_model("forward")
    loads = 2 * 128 * 256 / 64
    assert seconds(kernel, mask, 8, 1).fast == pytest.approx(max(1200, loads) / 1.755e9)
    assert seconds(kernel, mask, 133 * 8, 133).fast == pytest.approx(2 * max(1200, loads) / 1.755e9)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("configuration", [c for c in hopper_configurations() if c.dtype == torch.bfloat16], ids=str)
def test_rows_of_the_kernels_for_hopper(configuration: HopperConfiguration) -> None:
    facts = row(configuration)
    assert facts is not None
    tile, products = configuration.tile, PRODUCTS[configuration.kernel]
    assert facts["kernel"] == f"gluon {configuration.kernel}"
    assert facts["full_tensor"] == 2 * products * tile.block_m * tile.block_n * configuration.head_dim / 4096
    assert facts["full_tensor"] < facts["full_in_order"] < facts["full_slow"]
    assert facts["one 16k slow"] < facts["one 16k fast"] < 949


@pytest.mark.slow
@pytest.mark.compile
def test_counts_of_the_shipped_kernel() -> None:
    """At head dimension 128 the products of a block of 128 x 64 take 1,024 cycles, with any compiler."""
    configuration = Configuration("forward", "sm_90", 128, torch.bfloat16)
    assert len(loops(parse(disassemble(configuration)[1]))) == 4  # LEFT_MASKED, UNMASKED, RIGHT_MASKED, ZEROED_KEYS
    found = examine(configuration)
    rows, columns = found.configuration.tile.block_m, found.configuration.tile.block_n
    for work in (found.full, found.masked):
        assert work.cycles(found.warps)["tensor"] == 2 * 2 * rows * columns * 128 / 4096
        assert work.special >= rows * columns / (32 * found.warps)  # an exponential per score
    assert found.full.instructions < found.masked.instructions
    assert found.full.cycles(4)["tensor"] < found.full_in_order < found.iteration(found.full).slow / 2
    slow, fast = tflops(found, batches()["one 16k"])
    assert 200 < slow < fast < 949


@pytest.mark.compile
def test_configurations_that_the_model_refuses() -> None:
    with pytest.raises(ValueError, match=r"forward-sm_90.* no loop with warpgroup products"):
        examine(Configuration("forward", "sm_90", 16, torch.float32))
