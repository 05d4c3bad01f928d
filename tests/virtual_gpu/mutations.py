"""Breaks the PTX of the package's kernels in known ways, and asks whether the virtual GPU finds it.

    python -m tests.virtual_gpu.mutations sm_90 gluon --places 3

A mutation is found by a report or an exception of the virtual GPU, by a result beyond the tolerance, or by bits that
differ between two seeds. Places are drawn among the lines of the PTX that ran. Of a mutation that isn't found it says
why: a run shows that no lane's operands make a difference there, or `EXPLAINED` has a reason for the line of the
kernel's source. The exit status is 1 if there is neither.
"""

from __future__ import annotations

import argparse
import linecache
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tests.virtual_gpu.device import virtual_gpu
from tritonpack import kernels
from tritonpack.backends import gluon
from tritonpack.testing import Case, Inputs, make_inputs
from tritonpack.testing.tolerance import check_outputs, run


class Operator(NamedTuple):
    """A kind of mutation.

    Attributes:
        name: what it does.
        pattern: of a part of one line.
        replacement: of that part, as `re.sub` takes it.
        traps: another replacement of that part, which leaves the instruction as it is and traps where the mutated one
            would do something else; "" if that can't be said of a lane alone.
    """

    name: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]
    traps: str | Callable[[re.Match[str]], str] = ""


def _more(by: int) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{int(found[2]) + by}"


def _flipped(found: re.Match[str]) -> str:
    return f"{found[1]}{1 - int(found[2])}"


def _other_bound(found: re.Match[str]) -> str:
    return f"setp.{_OTHER_BOUND[found[1]]}.{found[2]}"


def _traps(condition: str) -> str:
    return f".reg .pred differs; setp.{condition}; @differs trap; "


_OTHER_BOUND = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_BOUND = r"setp\.(lt|le|gt|ge)\.([su]\d+\s+(%p\d+), (\S+), (\S+);)"
_WAIT = r"(mbarrier\.try_wait\.parity\S* complete, \[[^]]*\], )(%r\d+)"
OPERATORS = (
    Operator("barrier removed", r"^\s*(bar|barrier)\.sync\b.*;", ""),
    Operator("cp.async wait laxer", r"(cp\.async\.wait_group\s+)(\d+)", _more(1)),
    Operator("cp.async wait removed", r"cp\.async\.wait_group.*;", ""),
    Operator("cp.async fills no zeros", r"(cp\.async\.c[ag]\..*), %r\d+;", r"\1;"),
    Operator("wgmma wait laxer", r"(wgmma\.wait_group\S*\s+)(\d+)", _more(1)),
    Operator("wgmma wait removed", r"wgmma\.wait_group.*;", ""),
    Operator("wgmma.fence removed", r"wgmma\.fence.*;", ""),
    Operator("proxy fence removed", r"fence\.proxy\.async.*;", ""),
    Operator("arrival removed", r"^.*mbarrier\.arrive\.shared.*;", ""),
    Operator("expected bytes removed", r"^.*mbarrier\.arrive\.expect_tx.*;", ""),
    Operator("phase always 0", _WAIT, r"\g<1>0", _traps(r"ne.b32 differs, \2, 0") + r"\g<0>"),
    Operator("phase always 1", _WAIT, r"\g<1>1", _traps(r"ne.b32 differs, \2, 1") + r"\g<0>"),
    Operator("phase flipped", _WAIT, r".reg .b32 flipped; xor.b32 flipped, \2, 1; \1flipped"),
    *(
        Operator(
            f"predicate of a {name} dropped",
            rf"@(!?)(%p\d+) ({instruction})",
            r"\3",
            lambda found: f"@{'' if found[1] else '!'}{found[2]} trap; {found[0]}",
        )
        for name, instruction in (("load", r"ld\.global"), ("store", r"st\."))
    ),
    Operator("first TMA coordinates swapped", r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\2, \1, \3}"),
    Operator("last TMA coordinates swapped", r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\1, \3, \2}"),
    Operator(
        "bound off by one",
        _BOUND,
        _other_bound,
        lambda found: f"{_traps(f'eq.{found[2].split()[0]} differs, {found[4]}, {found[5]}')}{found[0]}",
    ),
    Operator(
        "stride halved",
        r"shl\.b(\d+)(\s+\S+, (\S+), )([1-9]\d*)(?=;)",
        lambda found: f"shl.b{found[1]}{found[2]}{int(found[4]) - 1}",
        _traps(r"ne.b\1 differs, \3, 0") + r"\g<0>",
    ),
    Operator("ldmatrix transposition flipped", r"(ldmatrix\S*)\.trans", r"\1"),
    Operator("ldmatrix transposed", r"(ldmatrix\S*x4)(?=\.shared)", r"\1.trans"),
    Operator("wgmma transposition of B flipped", r"(wgmma\.mma.*, )([01])(?=;)", _flipped),
    Operator("wgmma transposition of A flipped", r"(wgmma\.mma\S* \{[^}]*\}, %rd.*, )([01])(?=, [01];)", _flipped),
)
# Architecture and backend -> the longest document and its window. A tile visits blocks that either end of the window
# cuts and full ones, enough that buffers are used again.
TARGETS = {
    ("sm_80", "triton"): (400, (200, 70)),
    ("sm_90", "triton"): (400, (200, 70)),
    ("sm_90", "gluon"): (500, (400, 70)),
}
# Why a mutation has no effect -> where: kernels, how the operator's name begins, and the line of the kernel's source
EXPLAINED = {
    "a barrier follows the last block, and nothing touches shared memory between the two": (
        "dq_kernel: barrier: tl.store(dq_ptr + offs",
    ),
    "between the barriers around it shared memory is only read": ("dq_kernel: barrier: dp = tl.dot(dout",),
    "a barrier follows before the arrival that frees what was read": (
        "hopper_dkdv_kernel: barrier: mbarrier.wait(filled.index(following)",
    ),
    "in a tile's last blocks: the arrival for q follows a barrier, and is waited for before the buffer is used again": (
        "hopper_forward_kernel: barrier: mbarrier.arrive(k_free.index(slot))",
    ),
    "the arrival for the keys follows a barrier and is waited for first; behind the last block nothing waits": (
        "hopper_dq_kernel: barrier: mbarrier.arrive(values_free)",
    ),
    "one more block is requested behind the loop, and nothing uses it": (
        "forward_kernel: bound: for step in tl.range(step_begin",
        "forward_kernel: bound: v = load_rows(v_desc",
    ),
    "in flight are the zeros of the block behind the loop, and nothing uses their bytes again": (
        "forward_kernel dq_kernel: cp.async wait: for step in tl.range(step_begin",
        "dkdv_kernel: cp.async wait: for _ in tl.range(0",
        "dkdv_kernel: cp.async wait: if TREE:",
    ),
    "the rows lie in the tensors, and the mask drops what is computed of them": (
        "forward_kernel dq_kernel: cp.async fills: k = load_rows(k_desc",
        "forward_kernel dq_kernel: cp.async fills: v = load_rows(v_desc",
        "forward_kernel dq_kernel: cp.async fills: query_start, query_stop = load_bounds(query_start_ptr",
    ),
    "zeros are those of the block behind the loop, which lies in the tensor too and isn't used": (
        "dkdv_kernel: cp.async fills: lse2_m = tl.load(lse2_ptr + statistics)  # [M]",
        "dkdv_kernel: cp.async fills: delta_m = tl.load(delta_ptr + statistics)  # [M]",
    ),
    "nothing was stored in shared memory since the fence before": (
        "dkdv_kernel: proxy: dp = tl.dot(v",
        "dkdv_kernel: proxy: dk = dot(ds",
    ),
    "it orders initialisations of mbarriers before TMA; Triton's kernels lack it in places, so it isn't asked for": (
        "forward_kernel: proxy: k = load_rows(k_desc",
        "hopper_forward_kernel hopper_dq_kernel hopper_dkdv_kernel: proxy: fence_async_shared()",
    ),
    "no instruction touched the product's registers since the fence before, and its operands lie in shared memory": (
        "dkdv_kernel: wgmma.fence: dp = tl.dot(v",
        "hopper_dkdv_kernel: wgmma.fence: dp = request_product(v_rows",
        "hopper_dq_kernel: wgmma.fence: dp = request_product(dout_rows",
    ),
    "`where` drops what it loads in rows that see nothing": (
        "dq_kernel: predicate of a load: delta -= tl.load(dlse_ptr + head * stride_dlh + rows * stride_dlt",
    ),
    "the rows that it leaves out are finite in this run, and their weight is 0": (
        "hopper_forward_kernel: predicate of a load: copy_seen((copy",
        "hopper_dq_kernel hopper_dkdv_kernel: predicate of a load: copy_seen(copies",
        "hopper_dq_kernel hopper_dkdv_kernel: predicate of a load: start, stop = load_bounds(start_ptr",
    ),
    "a key at an edge of the window counts less than the tolerance": (
        "forward_kernel dq_kernel: bound: visible = within(offs_n[None",
        "dkdv_kernel: bound: visible = within(offs_m[None",
    ),
}
SEEDS = (1, 2)
KERNELS = Path(kernels.__file__).parent


class Mutation(NamedTuple):
    """A mutation of one line.

    Attributes:
        operator: its name.
        kernel: whose PTX it changes.
        line: of the PTX, from 1.
        text: of the changed line.
        place: the line of the kernel's source that the PTX comes from, up to a comma.
        traps: the unchanged line with a trap, as in `Operator`; "" if there is none.
    """

    operator: str
    kernel: str
    line: int
    text: str
    place: str
    traps: str

    def __call__(self, kernel: str, ptx: str) -> str:
        """The PTX with the line changed, as `virtual_gpu` takes it."""
        if kernel != self.kernel:
            return ptx
        lines = ptx.split("\n")
        lines[self.line - 1] = self.text
        return "\n".join(lines)


class Target:
    """The kernels of a backend on an architecture, and one call of them.

    Attributes:
        outputs: of the unmutated kernels.
        executables: the unmutated kernels of attention.
        gpu: of the last launch.
    """

    def __init__(self, arch: str, backend: str) -> None:
        self.arch, self.backend = arch, backend
        longest, window = TARGETS[arch, backend]
        lengths = (1, 90, 0, 17, longest)
        case = Case("mutated", lengths, slack=40, heads=2, kv_heads=1, head_dim=64, causal=False, window=window)
        self._inputs: Inputs = make_inputs(case, torch.float16, "cpu")  # whose tolerance is the smallest
        for rows in (self._inputs.q, self._inputs.k, self._inputs.v, self._inputs.dout):
            rows[-case.slack :] = float("nan")
        self.launch(SEEDS[0])  # which builds the masks' tables
        self.outputs = self.launch(SEEDS[0])
        gpu = self.gpu
        assert gpu.reports == [], gpu.reports
        check_outputs(self._inputs, self.outputs)
        self.executables = gpu.executables

    def launch(self, seed: int, mutation: Mutation | None = None) -> dict[str, Tensor]:
        """Forward and backward."""
        with virtual_gpu(self.arch, seed=seed, rewrite=mutation, check=False) as self.gpu:
            gluon._multiprocessors = lambda device: 2  # so that a program has several tiles; restored by the block
            return run(self._inputs, self.backend)

    def mutations(self, operator: Operator, kernel: str = "") -> list[Mutation]:
        """All mutations by an operator of lines that ran, of one kernel or of each."""
        found = []
        for executable in self.executables:
            texts = executable.ptx.split("\n")
            for number in sorted({line.number for line in executable.lines() if line.lanes}):
                text = texts[number - 1]
                broken = re.sub(operator.pattern, operator.replacement, text, count=1)
                if broken != text and kernel in executable.name:
                    traps = re.sub(operator.pattern, operator.traps, text, count=1) if operator.traps else ""
                    place = re.match(r"(?:[^=(]*=)?[^,]*", source_of(texts, number))[0]
                    found.append(Mutation(operator.name, executable.name, number, broken, place, traps))
        return found

    def found_by(self, mutation: Mutation) -> str:
        """The evidence that finds a mutation: a report, an error or a difference; "" if there is none."""
        first: dict[str, Tensor] | None = None
        for seed in SEEDS:
            try:
                outputs = self.launch(seed, mutation)
            except RuntimeError as error:
                return f"report: {self.gpu.reports[0]}" if self.gpu.reports else f"exception: {error}"
            if self.gpu.reports:
                return f"report: {self.gpu.reports[0]}"
            try:
                check_outputs(self._inputs, outputs)
            except AssertionError as error:
                return f"result: {error}"
            if first is not None and not same_bits(first, outputs):
                return "bits: they differ between two seeds"
            first = outputs
        return ""

    def has_no_effect(self, mutation: Mutation) -> bool:
        """True if the results have the same bits with the mutation."""
        return same_bits(self.launch(SEEDS[0], mutation), self.outputs)

    def why(self, mutation: Mutation) -> str:
        """Why a mutation wasn't found; "" if that isn't known."""
        if mutation.traps:
            with suppress(RuntimeError):  # it stops at the trap
                self.launch(SEEDS[0], mutation._replace(text=mutation.traps))
            if not self.gpu.reports:
                return "in this run no lane's operands make a difference here"
        if mutation.operator == "barrier removed":
            (ptx,) = (executable.ptx for executable in self.executables if executable.name == mutation.kernel)
            if stands_beside_another(ptx.split("\n"), mutation.line):
                return "the barrier beside it orders the same"
        for reason, places in EXPLAINED.items():
            for kernels_there, operator, place in (text.split(": ", 2) for text in places):
                is_there = mutation.kernel in kernels_there.split() and mutation.place == place
                if is_there and mutation.operator.startswith(operator):
                    return reason
        return ""


def stands_beside_another(texts: Sequence[str], number: int) -> bool:
    """True if another barrier of these threads, or of all, orders what the barrier at a line orders.

    Between the two a thread may announce copies to an mbarrier, and behind the other one also request them.
    """
    barrier, announced = r"\s*(?:bar|barrier)\.sync\s+\d+(, \d+)?;", r"\s*@%p\d+ mbarrier\.arrive\.expect_tx"
    own = re.match(barrier, texts[number - 1])
    before, behind = (texts[number - 2 :: -1], rf"{announced}|\s*@%p\d+ cp\.async\.bulk"), (texts[number:], announced)
    for between, passed in (before, behind):
        for text in between:
            other = re.match(barrier, text)
            if own and other and other[1] in (None, own[1]):
                return True
            touches = re.search(r"bar\S*\.sync|shared|global|wgmma|matrix|\bbra|^\$L__BB|ret;", text)
            if touches and not re.match(passed, text):
                break
    return False


def source_of(texts: Sequence[str], number: int) -> str:
    """The line of a kernel's source that a line of its PTX comes from, of a helper the line that calls it; else ""."""
    files = dict(re.findall(r'\.file\s+(\d+) "(.*)"', "\n".join(texts)))
    for text in reversed(texts[:number]):
        if found := re.search(r"\.loc\s+(\d+) (\d+) \d+(?:, function_name \S+, inlined_at (\d+) (\d+))?", text):
            pairs = ((KERNELS / Path(files.get(found[k], "")).name, int(found[k + 1] or 0)) for k in (1, 3))
            known = [(path, line) for path, line in pairs if path.is_file() and line]  # its own, the call's
            if known:
                path, line = known[-1 if "primitives" in known[0][0].name else 0]
                return linecache.getline(str(path), line).strip()
    return ""


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """True if outputs have equal bits, NaN included."""
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def drawn(target: Target, places: int, seed: int, name: str = "") -> Iterator[Mutation]:
    """So many mutations by each operator of each kernel, or all if there are fewer; only operators with that name."""
    kernels = [executable.name for executable in target.executables]
    for operator in OPERATORS:
        for kernel in kernels if name in operator.name else ():
            mutations = [one for one in target.mutations(operator) if one.kernel == kernel]
            yield from random.Random(seed).sample(mutations, min(places, len(mutations)))


def main() -> None:
    """Print what finds each mutation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch")
    parser.add_argument("backend")
    parser.add_argument("--places", type=int, default=3, help="of each operator in each kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the places")
    parser.add_argument("--operator", default="", help="only those whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    target, counts = Target(options.arch, options.backend), Counter[str]()
    reasons: dict[tuple[str, str, str, str], list[int]] = {}
    for mutation in drawn(target, options.places, options.seed, options.operator):
        how = target.found_by(mutation) or f"NOT FOUND{', no effect' * target.has_no_effect(mutation)}"
        counts[how.partition(":")[0]] += 1
        print(f"{mutation.operator} | {mutation.kernel} | {mutation.line} | {mutation.place} | {how[:200]}", flush=True)
        if how.startswith("NOT"):
            key = mutation.kernel, mutation.operator, mutation.place, target.why(mutation)
            reasons.setdefault(key, []).append(mutation.line)
    print(f"\n{dict(counts)}\n")
    for (kernel, operator, place, reason), lines in sorted(reasons.items()):
        print(f"{kernel} | {operator} | {place} | lines {lines} | {reason or 'NOT EXPLAINED'}")
    if any(not reason for *_, reason in reasons):
        raise SystemExit("mutations were neither found nor explained")


if __name__ == "__main__":
    main()
