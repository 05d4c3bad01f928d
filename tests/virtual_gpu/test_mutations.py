"""The virtual GPU finds what is broken in the package's kernels; what it doesn't find changes no bit, for a reason."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.mutations import TARGETS, Target, drawn

pytestmark = NEEDS


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "backend"), TARGETS, ids=map("-".join, TARGETS))
def test_every_mutation_is_found_or_has_no_effect_for_a_known_reason(arch: str, backend: str) -> None:
    """Then results keep their bits; a bound that is off by one adds a key with a small weight."""
    target, outcomes = Target(arch, backend), []
    for mutation in drawn(target, 1, 0):
        found = bool(target.found_by(mutation))
        outcomes.append(found)
        assert found or target.why(mutation), mutation
        assert found or mutation.operator == "bound off by one" or target.has_no_effect(mutation), mutation
    assert sum(outcomes) > len(outcomes) / 3
