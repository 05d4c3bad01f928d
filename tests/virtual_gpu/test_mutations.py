"""The virtual GPU finds what is broken in the package's kernels; what it doesn't find changes no bit."""

from __future__ import annotations

import random
from functools import cache

import pytest

pytest.importorskip("triton")

from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.mutations import TARGETS, WITHIN_TOLERANCE, Target, drawn

pytestmark = NEEDS


@cache
def target(arch: str, backend: str) -> Target:
    return Target(arch, backend)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "backend"), TARGETS, ids=["-".join(target) for target in TARGETS])
def test_mutations_are_found(arch: str, backend: str) -> None:
    """Or have no effect: the results keep their bits."""
    broken, outcomes = target(arch, backend), []
    for mutation in drawn(broken, 1, 0):
        found = bool(broken.found_by(mutation))
        outcomes.append(found)
        assert found or mutation.operator in WITHIN_TOLERANCE or broken.has_no_effect(mutation), mutation
    assert sum(outcomes) > len(outcomes) / 3


@pytest.mark.slow
def test_a_mutation_changes_one_line() -> None:
    broken = target("sm_80", "triton")
    ptx = {executable.name: executable.ptx.split("\n") for executable in broken.executables}
    for mutation in random.Random(0).sample(list(drawn(broken, 2, 0)), 10):
        lines = mutation(mutation.kernel, "\n".join(ptx[mutation.kernel])).split("\n")
        changed = [k + 1 for k, (a, b) in enumerate(zip(lines, ptx[mutation.kernel], strict=True)) if a != b]
        assert changed == [mutation.line]
        assert mutation("another_kernel", "x") == "x"
