"""Breaks the PTX of the package's kernels in known ways, and asks whether the virtual GPU finds it.

    python -m tests.virtual_gpu.mutations sm_90 gluon --places 3

A mutation is found by a report or an exception of the virtual GPU, by a result beyond the tolerance, or by bits that
differ between two seeds. Places are drawn among the lines of the PTX that ran.
"""

from __future__ import annotations

import argparse
import linecache
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
        harmless: where it has no effect on any result; "" if it has one wherever the line runs.
    """

    name: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str]
    harmless: str = ""


def _more(by: int) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{int(found[2]) + by}"


def _flipped(found: re.Match[str]) -> str:
    return f"{found[1]}{1 - int(found[2])}"


_OTHER_BOUND = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_WAIT = r"(mbarrier\.try_wait\.parity\S* complete, \[[^]]*\], )(%r\d+)"

_BARRIER = """Other barriers or mbarriers order the same accesses. Vector clocks don't depend on the schedule: without a
report, no two conflicting accesses of the run are unordered, in whatever order warps run."""
_COPY = "Nothing uses the bytes of the copies that are still in flight; each use of them would be reported."
_ZEROS = "The rows lie in the tensors, and what is computed from them is masked."
_FENCE = "No other instruction has used the registers since the fence before."
_PROXY = """No thread has written the bytes that TMA or wgmma uses since the fence before. The initialisation of an
mbarrier needs none: Triton's own kernels have none between it and a copy by TMA."""
_ARRIVAL = "Nothing waits for the phase: a tile's last block in a buffer that isn't used again."
_PHASE = "The place waits for this phase alone, because its mbarrier is used once, or twice in each tile."
_BOUND = """No element of the run lies on the bound, or one more copy is requested that nothing uses. One more key at
the edge of a window may change results by less than the tolerance."""
_STRIDE = "The value is 0 in the run, such as the number of the first buffer, or it is masked."
_PRODUCT = "The mask drops the whole product."
OPERATORS = (
    Operator("barrier removed", r"^\s*(bar|barrier)\.sync\b.*;", "", _BARRIER),
    Operator("cp.async wait laxer", r"(cp\.async\.wait_group\s+)(\d+)", _more(1), _COPY),
    Operator("cp.async wait removed", r"cp\.async\.wait_group.*;", "", _COPY),
    Operator("cp.async fills no zeros", r"(cp\.async\.c[ag]\..*), %r\d+;", r"\1;", _ZEROS),
    Operator("wgmma wait laxer", r"(wgmma\.wait_group\S*\s+)(\d+)", _more(1)),
    Operator("wgmma wait removed", r"wgmma\.wait_group.*;", ""),
    Operator("wgmma.fence removed", r"wgmma\.fence.*;", "", _FENCE),
    Operator("proxy fence removed", r"fence\.proxy\.async.*;", "", _PROXY),
    Operator("arrival removed", r"^.*mbarrier\.arrive\.shared.*;", "", _ARRIVAL),
    Operator("expected bytes removed", r"^.*mbarrier\.arrive\.expect_tx.*;", ""),
    Operator("phase always 0", _WAIT, r"\g<1>0", _PHASE),
    Operator("phase always 1", _WAIT, r"\g<1>1", _PHASE),
    Operator("phase flipped", _WAIT, r".reg .b32 flipped; xor.b32 flipped, \2, 1; \1flipped"),
    Operator("predicate of a load dropped", r"@!?%p\d+ (ld\.global)", r"\1", _ZEROS),
    Operator("predicate of a store dropped", r"@!?%p\d+ (st\.)", r"\1"),
    Operator("first TMA coordinates swapped", r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\2, \1, \3}"),
    Operator("last TMA coordinates swapped", r"\{(%r\d+), (%r\d+), (%r\d+)\}", r"{\1, \3, \2}"),
    Operator("bound off by one", r"(?<=setp\.)(lt|le|gt|ge)(?=\.[su])", lambda m: _OTHER_BOUND[m[0]], _BOUND),
    Operator("stride halved", r"(shl\.b\d+ .*, )([1-9]\d*)(?=;)", _more(-1), _STRIDE),
    Operator("ldmatrix transposition flipped", r"(ldmatrix\S*)\.trans", r"\1", _PRODUCT),
    Operator("ldmatrix transposed", r"(ldmatrix\S*x4)(?=\.shared)", r"\1.trans", _PRODUCT),
    Operator("wgmma transposition of B flipped", r"(wgmma\.mma.*, )([01])(?=;)", _flipped, _PRODUCT),
    Operator(
        "wgmma transposition of A flipped",
        r"(wgmma\.mma\S* \{[^}]*\}, %rd.*, )([01])(?=, [01];)",
        _flipped,
        _PRODUCT,
    ),
)
# Architecture and backend -> heads, longest document, window, slack. A tile visits blocks that the window cuts, full
# ones and those of the diagonal, enough that buffers are used again.
TARGETS = {
    ("sm_80", "triton"): (2, 400, 200, 40),
    ("sm_90", "triton"): (2, 400, 200, 40),
    ("sm_90", "gluon"): (1, 900, 700, 40),
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
        place: the line of the kernel's source that the PTX comes from.
    """

    operator: str
    kernel: str
    line: int
    text: str
    place: str

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
        heads, longest, window, slack = TARGETS[arch, backend]
        lengths = (1, 90, 0, 17, longest)
        case = Case("mutated", lengths, slack=slack, heads=heads, kv_heads=1, head_dim=64, window=(window, 0))
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
                text = re.sub(operator.pattern, operator.replacement, texts[number - 1], count=1)
                if text != texts[number - 1] and kernel in executable.name:
                    found.append(Mutation(operator.name, executable.name, number, text, source_of(texts, number)))
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


def source_of(texts: Sequence[str], number: int) -> str:
    """The line of a kernel's source that a line of its PTX comes from, of a helper the line that calls it; else ""."""
    files = dict(re.findall(r'\.file\s+(\d+) "(.*)"', "\n".join(texts)))
    for text in reversed(texts[:number]):
        if found := re.search(r"\.loc\s+(\d+) (\d+) \d+(?:, function_name \S+, inlined_at (\d+) (\d+))?", text):
            for file, line in ((found[3], found[4]), (found[1], found[2])):
                path = KERNELS / Path(files.get(file, "")).name
                if path.is_file() and line != "0":
                    return linecache.getline(str(path), int(line)).strip()
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
    target, counts = Target(options.arch, options.backend), Counter[tuple[str, str]]()
    for mutation in drawn(target, options.places, options.seed, options.operator):
        how = target.found_by(mutation) or f"NOT FOUND{', no effect' * target.has_no_effect(mutation)}"
        counts[mutation.operator, how.partition(":")[0]] += 1
        print(f"{mutation.operator} | {mutation.kernel} | {mutation.line} | {mutation.place} | {how[:200]}", flush=True)
    for (operator, how), count in counts.items():
        print(f"{operator}: {count} {how}")


if __name__ == "__main__":
    main()
