"""The readers of machine code and of Triton's intermediate form, on short listings."""

import re

import pytest

pytest.importorskip("triton")

from tests.kernels import amdgcn, sass
from tests.kernels.sass import Loop
from tests.kernels.stages import Stage, read_loads

# Two loops; the second one branches back from two places and waits in an inner loop. Then code after the kernel's end.
SASS = """
.text.kernel:
        /*0000*/                   LDL R1, [R2] ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R24, R4, R8, R24 ;
        /*0020*/                   LDL.LU R5, [R1+0x4] ;
        /*0030*/                   STL.64 [R1+0x8], R6 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR4], tmem[UR10], idesc[UR11], UP1 ;
.L_x_3:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR9], R4 ;
        /*0090*/              @!P2 BRA `(.L_x_3) ;
        /*00a0*/               @P3 BRA `(.L_x_2) ;
        /*00b0*/                   EXIT ;
        /*00b8*/                   STL.64 [R1], RZ &rd=0x2 ?trans1;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_1) ;
"""

# The second loop has a block before its first one, and inside it is a loop that multiplies nothing.
AMDGCN = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
kernel:
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	scratch_store_dword off, v1, off offset:4 ; 4-byte Folded Spill
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	scratch_load_dword v1, off, off offset:4 ; 4-byte Folded Reload
	scratch_load_dwordx4 v[4:7], off, off offset:8
	s_waitcnt vmcnt(0)
	s_barrier
	s_cbranch_scc0 .LBB0_1
; %bb.2:
	s_nop 0
.LBB0_3:                                ;   in Loop: Header=BB0_4 Depth=1
	s_waitcnt_depctr 0xfffe
	s_wait_loadcnt 0x0
	s_barrier_signal -1
	s_barrier_wait -1
.LBB0_4:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_5 Depth 2
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:11], v[12:15], v[0:7]
.LBB0_5:                                ;   Parent Loop BB0_4 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	buffer_load_dword v40, off, s[96:99], 0 offset:8 ; 4-byte Folded Reload
	buffer_load_dwordx4 v[4:7], v9, s[8:11], 0 offen
	v_accvgpr_read_b32 v3, a31              ;  Reload Reuse
	s_cbranch_vccnz .LBB0_5
; %bb.6:                                ;   in Loop: Header=BB0_4 Depth=1
	s_cbranch_scc1 .LBB0_3
; %bb.7:
	s_endpgm
	.end_amdhsa_kernel
	v_not_an_instruction
"""

# The statistics' stages hold 16 numbers; in the second loop they have none.
TTGIR = """
    %rows = ttg.local_alloc : () -> !ttg.memdesc<64x128xbf16, #shared2, #smem, mutable> loc(#loc1)
    %q = ttg.local_alloc : () -> !ttg.memdesc<3x16x128xbf16, #shared2, #smem, mutable> loc(#loc2)
    %lse = ttg.local_alloc : () -> !ttg.memdesc<2x16xf32, #shared1, #smem, mutable> loc(#loc3)
    %slopes = ttg.local_alloc : () -> !ttg.memdesc<1x16xf32, #shared3, #smem, mutable> loc(#loc3)
    %step = ttg.local_alloc : () -> !ttg.memdesc<3x1xi64, #shared3, #smem, mutable> loc(#loc4)
    ttng.async_tma_copy_global_to_local %k[%0] %rows, %b, %true : !tt.tensordesc<1x64x128xbf16, #shared>, !ttg.memdesc<1xi64, #shared3, #smem, mutable> -> !ttg.memdesc<64x128xbf16, #shared2, #smem, mutable> loc(#loc1)
    %5:2 = scf.for %i = %c0 to %n step %c1 iter_args(%a = %cst) -> (f32)  : i32 {
      %6 = ttg.memdesc_index %q[%i] : !ttg.memdesc<3x16x128xbf16, #shared2, #smem, mutable> -> !ttg.memdesc<16x128xbf16, #shared2, #smem, mutable> loc(#loc2)
      %7 = ttg.memdesc_index %lse[%i] : !ttg.memdesc<2x16xf32, #shared1, #smem, mutable> -> !ttg.memdesc<16xf32, #shared1, #smem, mutable> loc(#loc3)
      %8 = ttg.memdesc_index %slopes[%i] : !ttg.memdesc<1x16xf32, #shared3, #smem, mutable> -> !ttg.memdesc<16xf32, #shared3, #smem, mutable> loc(#loc3)
      %9 = ttg.memdesc_index %step[%i] : !ttg.memdesc<3x1xi64, #shared3, #smem, mutable> -> !ttg.memdesc<1xi64, #shared3, #smem, mutable> loc(#loc4)
      scf.if %live {
        ttng.async_tma_copy_global_to_local %q_desc[%0] %6, %9, %true : !tt.tensordesc<1x16x128xbf16, #shared>, !ttg.memdesc<1xi64, #shared3, #smem, mutable> -> !ttg.memdesc<16x128xbf16, #shared2, #smem, mutable> loc(#loc2)
        ttng.async_tma_copy_global_to_local %l[%0] %7, %9, %true : !tt.tensordesc<16xf32, #shared1>, !ttg.memdesc<1xi64, #shared3, #smem, mutable> -> !ttg.memdesc<16xf32, #shared1, #smem, mutable> loc(#loc3)
      } loc(#loc5)
    } loc(#loc5)
    scf.for %i = %c0 to %n step %c1  : i32 {
      %delta = ttg.local_alloc : () -> !ttg.memdesc<16xf32, #shared4, #smem, mutable> loc(#loc6)
      ttng.async_tma_copy_global_to_local %d[%0] %delta, %b, %true : !tt.tensordesc<16xf32, #shared4>, !ttg.memdesc<1xi64, #shared3, #smem, mutable> -> !ttg.memdesc<16xf32, #shared4, #smem, mutable> loc(#loc6)
    } loc(#loc5)
    ttng.async_tma_copy_global_to_local %d[%0] %after, %b, %true : !tt.tensordesc<16xf32, #shared4>, !ttg.memdesc<1xi64, #shared3, #smem, mutable> -> !ttg.memdesc<32xf32, #shared4, #smem, mutable> loc(#loc6)
"""  # noqa: E501


def test_loops_of_nvidia() -> None:
    code = sass.parse(SASS)
    assert sass.loops(code) == [range(1, 5), range(5, 11)]
    assert sass.count_loops(code) == [
        Loop(instructions=4, matrix_instructions=1, spills=2),
        Loop(instructions=6, matrix_instructions=1, barriers=1, waits=2),
    ]
    assert sass.count_instructions(code.instructions) == Loop(14, 2, spills=3, barriers=1, waits=2)


def test_loops_without_matrix_instructions_are_those_with_multiply_adds() -> None:
    code = sass.parse(re.sub(r"HMMA.16816.F32.BF16|UTCHMMA", "FFMA", SASS))
    assert sass.loops(code) == []
    assert [loop.instructions for loop in sass.count_loops(code)] == [4, 6]


def test_loops_of_amd() -> None:
    code = amdgcn.parse(AMDGCN)
    assert amdgcn.loops(code) == [
        Loop(instructions=6, matrix_instructions=1, spills=2, barriers=1, waits=1),
        Loop(instructions=10, matrix_instructions=1, spills=2, barriers=1, waits=1),
    ]
    assert amdgcn.count(code.instructions) == Loop(20, 2, spills=5, barriers=2, waits=2)
    code = amdgcn.parse(re.sub(r"v_mfma\w*|v_wmma\w*", "v_fma_f32", AMDGCN))
    assert [loop.instructions for loop in amdgcn.loops(code)] == [6, 10]


def test_stages() -> None:
    stages, unstaged = read_loads(TTGIR)
    assert stages == (Stage(3, 4096, True), Stage(2, 64, True), Stage(1, 64, False))
    assert [stage.is_misaligned for stage in stages] == [False, True, False]
    assert unstaged == 1
