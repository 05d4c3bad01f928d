"""The virtual GPU finds what is broken in the package's kernels; what it doesn't find changes no bit, for a reason."""

from __future__ import annotations

import random
from functools import cache

import pytest

pytest.importorskip("triton")

from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.mutations import TARGETS, Target, drawn

pytestmark = NEEDS
WITHIN_TOLERANCE = {"bound off by one"}  # by a key with a small weight
targets = pytest.mark.parametrize(("arch", "backend"), TARGETS, ids=["-".join(target) for target in TARGETS])


@cache
def target(arch: str, backend: str) -> Target:
    return Target(arch, backend)


def check(target: Target, places: int, name: str = "") -> None:
    """Every mutation is found, or it is known why it has no effect, and the results keep their bits."""
    outcomes = []
    for mutation in drawn(target, places, 0, name):
        found = bool(target.found_by(mutation))
        outcomes.append(found)
        assert found or target.why(mutation), mutation
        assert found or mutation.operator in WITHIN_TOLERANCE or target.has_no_effect(mutation), mutation
    assert sum(outcomes) > len(outcomes) / 3


@pytest.mark.slow
@targets
def test_removed(arch: str, backend: str) -> None:
    check(target(arch, backend), 1, "removed")


@targets
@pytest.mark.slow
def test_all_operators(arch: str, backend: str) -> None:
    check(target(arch, backend), 1)


@pytest.mark.slow
def test_a_mutation_changes_one_line() -> None:
    broken = target("sm_80", "triton")
    ptx = {executable.name: executable.ptx.split("\n") for executable in broken.executables}
    for mutation in random.Random(0).sample(list(drawn(broken, 2, 0)), 10):
        lines = mutation(mutation.kernel, "\n".join(ptx[mutation.kernel])).split("\n")
        changed = [k + 1 for k, (a, b) in enumerate(zip(lines, ptx[mutation.kernel], strict=True)) if a != b]
        assert changed == [mutation.line]
        assert mutation("another_kernel", "x") == "x"
