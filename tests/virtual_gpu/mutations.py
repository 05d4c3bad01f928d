"""Breaks the PTX of the package's kernels in known ways, and asks whether the virtual GPU finds it.

    python -m tests.virtual_gpu.mutations sm_90 gluon --places 3

A mutation is found by a report or an exception of the virtual GPU, by a result beyond the tolerance, or by bits that
differ between two seeds. Places are drawn among the lines of the PTX that ran. The exit status is 1 if a mutation that
isn't found changes a bit of the results, unless the tolerance allows it.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tests.virtual_gpu.device import virtual_gpu
from tritonpack.backends import gluon
from tritonpack.testing import Case, Inputs, make_inputs
from tritonpack.testing.tolerance import check_outputs, run


class Operator(NamedTuple):
    """A kind of mutation.

    Attributes:
        name: what it does.
        pattern: of a part of one line.
        replacement: of that part, as `re.sub` takes it.
    """

    name: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]


def _more(by: int) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{int(found[2]) + by}"


def _flipped(found: re.Match[str]) -> str:
    return f"{found[1]}{1 - int(found[2])}"


def _other_bound(found: re.Match[str]) -> str:
    return f"setp.{_OTHER_BOUND[found[1]]}.{found[2]}"


_OTHER_BOUND = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_BOUND = r"setp\.(lt|le|gt|ge)\.([su]\d+\s+%p\d+, \S+, \S+;)"
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
    Operator("phase always 0", _WAIT, r"\g<1>0"),
    Operator("phase always 1", _WAIT, r"\g<1>1"),
    Operator("phase flipped", _WAIT, r".reg .b32 flipped; xor.b32 flipped, \2, 1; \1flipped"),
    Operator("predicate of a load dropped", r"@(!?)(%p\d+) (ld\.global)", r"\3"),
    Operator("predicate of a store dropped", r"@(!?)(%p\d+) (st\.)", r"\3"),
    Operator("first TMA coordinates swapped", r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\2, \1, \3}"),
    Operator("last TMA coordinates swapped", r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\1, \3, \2}"),
    Operator("bound off by one", _BOUND, _other_bound),
    Operator("stride halved", r"(shl\.b\d+\s+\S+, \S+, )([1-9]\d*)(?=;)", _more(-1)),
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
WITHIN_TOLERANCE = {"bound off by one"}  # by a key at an edge of the window, whose weight is small
SEEDS = (1, 2)


class Mutation(NamedTuple):
    """A mutation of one line.

    Attributes:
        operator: its name.
        kernel: whose PTX it changes.
        line: of the PTX, from 1.
        text: of the changed line.
    """

    operator: str
    kernel: str
    line: int
    text: str

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
                    found.append(Mutation(operator.name, executable.name, number, broken))
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
    unsound = 0
    for mutation in drawn(target, options.places, options.seed, options.operator):
        how = target.found_by(mutation)
        if not how:
            equal = target.has_no_effect(mutation)
            how = "not found, and every bit stays equal" if equal else "not found"
            unsound += not equal and mutation.operator not in WITHIN_TOLERANCE
        counts[how.partition(":")[0]] += 1
        print(f"{mutation.operator} | {mutation.kernel} | {mutation.line} | {how[:200]}", flush=True)
    print(f"\n{dict(counts)}")
    if unsound:
        raise SystemExit("mutations that change results weren't found")


if __name__ == "__main__":
    main()
