"""Every rule of the virtual GPU: PTX that breaks it is found, and PTX that keeps it isn't reported."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import virtual_gpu
from tests.virtual_gpu.known_kernels import matmul_kernel, probe_kernel

pytestmark = NEEDS

# x and out have 1,024 words, and shared memory has 4,096 bytes; there are 128 threads.
PROLOGUE = """{
  .reg .pred %p<8>;
  .reg .b32 %r<32>;
  .reg .b64 %rd<16>;
  ld.param.b64 %rd1, [probe_kernel_param_0];
  ld.param.b64 %rd2, [probe_kernel_param_1];
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  cvt.u64.u32 %rd3, %r2;
  add.s64 %rd4, %rd1, %rd3;  // this thread's word of x
  add.s64 %rd5, %rd2, %rd3;  // and of out
  mov.b32 %r3, global_smem;
  add.s32 %r4, %r3, %r2;     // and of shared memory
  xor.b32 %r5, %r4, 128;     // a thread's place in the next warp, or in the warp before
  setp.eq.u32 %p1, %r1, 0;
  setp.lt.u32 %p2, %r1, 5;
"""


class Rule(NamedTuple):
    """A rule.

    Attributes:
        name: for test ids.
        text: PTX; of "<a|b>" a breaks the rule and b doesn't.
        report: a pattern of the report of the broken PTX.
        programs: of the launch.
    """

    name: str
    text: str
    report: str
    programs: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def ptx(self) -> tuple[str, str]:
        """Return PTX that breaks the rule, and PTX that keeps it."""
        broken, kept = (re.sub(r"<(.*?)\|(.*?)>", which, self.text) for which in (r"\1", r"\2"))
        return broken, kept


INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r3],"
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 16;"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], {}; @!%p3 bra.uni W;"
COPY = "cp.async.ca.shared.global [%r4], [%rd4], 0x4; cp.async.commit_group;"
RACE = r"race: {} of shared byte \d+ after a {} by warp"
UNWRITTEN = r"read of shared byte \d+, which the program hasn't"
RULES = (
    Rule("global-end", "ld.global.b32 %r6, [%rd4+<4000|3584>];",
         "global read of 4 bytes at [0-9a-f]+, 4 bytes past the end of tensor . of the arguments"),
    Rule("global-begin", "st.global.b32 [%rd5+<-8|8>], %r1;", "global write of 4 bytes at .* bytes (before|past)"),
    Rule("global-alignment", "ld.global.<b32|b16> %r6, [%rd4+2];", "a multiple of 4"),
    Rule("vector-alignment", "ld.global.v2.b32 {%r6, %r7}, [<%rd4|%rd1>];", "isn't a multiple of 8"),
    Rule("shared-end", "st.shared.b32 [%r4+<3588|3584>], %r1;",
         "shared address 4096 of 4 bytes is outside the program's 4096 bytes"),
    Rule("shared-alignment", "st.shared.<b32|b16> [%r3+2], <%r3|7>;", "shared address 2 isn't a"),
    Rule("shared-before-writing", "<|st.shared.b32 [%r4], %r1;> ld.shared.b32 %r6, [%r4];", f"{UNWRITTEN} written"),
    Rule("shared-read-after-write", "st.shared.b32 [%r4], %r1; <|bar.sync 0;> ld.shared.b32 %r6, [%r5];",
         f"{RACE.format('read', 'write')}|{UNWRITTEN}"),
    Rule("shared-write-after-read",
         "st.shared.b32 [%r4], %r1; bar.sync 0; ld.shared.b32 %r6, [%r5]; <|bar.sync 0;> st.shared.b32 [%r4], 1;",
         f"{RACE.format('write', 'read')}|{RACE.format('read', 'write')}"),
    Rule("shared-write-after-write",
         "xor.b32 %r6, %r1, 32; st.shared.b32 [%r4], %r1; st.shared.b32 [%r5], <1|%r6>;",
         RACE.format("write", "write")),
    Rule("global-between-warps",
         "st.global.b32 [%rd5], %r1; and.b32 %r6, %r2, 127; cvt.u64.u32 %rd6, %r6; add.s64 %rd7, %rd2, %rd6;"
         "<|bar.sync 0;> ld.global.b32 %r7, [%rd7];",
         "race: global (read|write) at .* by another warp, without a barrier between"),
    Rule("global-between-programs", "mov.u32 %r6, %ctaid.x; st.global.b32 [%rd5], <%r6|%r1>;",
         "race: global write at .* after a write by another program of the launch", 2),
    Rule("values-of-lanes", "st.global.b32 [%rd2], <%r1|1>;", r"lanes \d+ and \d+ store different values to one addr"),
    Rule("shared-values-of-lanes", "@<%p2|%p1> st.shared.b32 [%r3], %r1;", r"lanes \d+ and \d+ store different values"),
    Rule("cp.async-wait", f"{COPY} <|cp.async.wait_group 0;> ld.shared.b32 %r6, [%r4];", RACE.format("read", "copy")),
    Rule("cp.async-groups",
         f"{COPY} {COPY.replace('%r4', '%r4+1024')} cp.async.wait_group 1; ld.shared.b32 %r6, [<%r4+1024|%r4>];",
         RACE.format("read", "copy")),
    Rule("cp.async-of-another-warp",
         f"{COPY} <bar.sync 0;|> cp.async.wait_group 0; <|bar.sync 0;> ld.shared.b32 %r6, [%r5];",
         RACE.format("read", "(copy|write)")),
    Rule("barrier-in-a-branch", "<@%p2 bra L; bar.sync 0;|bar.sync 0; @%p2 bra L;> L: ret;", "in divergent code"),
    # Lanes come by two ways to a place that lies before them.
    Rule("lanes-that-meet-at-no-barrier", """st.shared.b32 [%r4], %r1; bar.sync 0; bra START;
MEET: <|bar.warp.sync -1;> ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r3]; bra END;
START: @%p2 bra OTHER; bra MEET; OTHER: mov.b32 %r10, 1; bra MEET; END: ret;""", "ldmatrix in divergent code"),
    Rule("barrier-of-some-lanes", "<@%p2|> bar.sync 0;", "in divergent code"),
    Rule("barrier-of-too-many", "bar.sync 1, <160|128>;", "deadlock: waits at barrier 1 for 160 threads"),
    Rule("barrier-of-different-sizes",
         "setp.lt.u32 %p3, %r1, 32; selp.b32 %r6, <64|128>, 128, %p3; bar.sync 1, %r6;",
         "warps wait at barrier 1 for different numbers of threads"),
    Rule("barrier-that-some-skip", "setp.lt.u32 %p3, %r1, 32; <@%p3 bra L;|> bar.sync 0; L: ret;", "deadlock"),
    Rule("shuffle", "@%p2 shfl.sync.idx.b32 %r6, %r1, <9|4>, 31, -1;",
         "shuffle from lane 9, which doesn't take part"),
    Rule("arrivals", f"{INIT} <2|1>; bar.sync 0; {ARRIVE} {WAIT.format(0)}", "deadlock: waits for the mbarrier at 0"),
    Rule("too-many-arrivals", f"{INIT} <1|2>; {EXPECT} {ARRIVE}", "more arrivals at the mbarrier at 0 than its count"),
    Rule("wrong-phase",
         f"{INIT} 1; bar.sync 0; @%p1 st.shared.b32 [%r3+64], %r1; {ARRIVE} {WAIT.format('<1|0>')}"
         "ld.shared.b32 %r6, [%r3+64];", r"(race: )?read of shared byte 64\b|deadlock"),
    Rule("mbarrier-without-initialisation", f"<|{INIT} 1;> {ARRIVE}", "the mbarrier at 0 isn't initialised"),
    Rule("mbarrier-initialised-by-another-warp", f"{INIT} 1; <|bar.sync 0;> {ARRIVE} {WAIT.format(0)}",
         "was initialised by warp 0, and nothing waited for it|isn't initialised"),
    Rule("mbarrier-invalidated-in-use",
         f"{INIT} 1; bar.sync 0; {ARRIVE} {WAIT.format(0)} <|bar.sync 0;> @%p1 mbarrier.inval.shared::cta.b64 [%r3];",
         r"invalidation of an mbarrier after a use by warp \d|isn't initialised"),
    Rule("mbarrier-in-memory", f"{INIT} 1; <|bar.sync 0;> ld.shared.b32 %r6, [%r3];",
         f"{RACE.format('read', 'write')}|{UNWRITTEN}"),
    Rule("trap", "<@%p1 trap;|ret;>", "trap"),
)  # fmt: skip


def probe(body: str, seed: int, programs: int = 1) -> tuple[list[str], torch.Tensor]:
    """The reports of PTX of our own, and what it stored."""

    def rewrite(name: str, ptx: str) -> str:
        return re.sub(
            r"(\.reqntid 128\s*)\{.*\n\}", lambda found: f"{found[1]}{PROLOGUE}{body}\nret;\n}}", ptx, flags=re.S
        )

    out = torch.empty(32, 32)
    with (
        virtual_gpu("sm_90", seed=seed, rewrite=rewrite, check=False) as gpu,
        suppress(RuntimeError),
    ):  # it stops at a deadlock
        probe_kernel[(programs,)](torch.randn(32, 32), out)
    return gpu.reports, out


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule(rule: Rule) -> None:
    broken, kept = rule.ptx
    for seed in (1, 2, 3):
        reports, _ = probe(broken, seed, rule.programs)
        assert any(re.search(rule.report, report) for report in reports), reports
        assert probe(kept, seed, rule.programs)[0] == []


@pytest.mark.slow
def test_a_program_without_an_end() -> None:
    (report,) = probe("L: bra L;", 1)[0]
    assert report.endswith("the program doesn't end within 2**25 instructions")


def test_an_undefined_register_has_other_bits_under_other_seeds() -> None:
    outs = [probe("add.s32 %r7, %r6, 1; st.global.b32 [%rd5], %r7;", seed)[1] for seed in (1, 2, 3)]
    assert len({bytes(out.view(torch.uint8).flatten()[:512]) for out in outs}) > 1


def test_wgmma_reads_what_threads_wrote_after_a_proxy_fence() -> None:
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    for pattern, expected in ((r"fence\.proxy\.async.*;", True), ("$", False)):
        with (
            virtual_gpu("sm_90", rewrite=lambda name, ptx, p=pattern: re.sub(p, "", ptx), check=False) as gpu,
            suppress(RuntimeError),
        ):  # too many reports
            matmul_kernel[(1, 1)](a, b, torch.empty(64, 64), 64, 64, 64, 64, 64, 32, "ieee", num_warps=4)
        assert any("without a proxy fence since" in report for report in gpu.reports) == expected
